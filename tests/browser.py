"""A real browser: the machine's Chromium (or what TEST_CHROMIUM names), driven by Playwright.

`TEST_BROWSER_REQUIRED=1` turns its absence into a failure.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.async_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As root there is no sandbox; the rest keeps it from asking for anything that the page does not.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def chromium() -> str | None:
    return os.environ.get("TEST_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


def why_absent() -> str | None:
    if find_spec("playwright") is None:
        return "Playwright is not installed: make test"
    return None if chromium() else "there is no Chromium: apt install chromium, or name one with TEST_CHROMIUM"


@asynccontextmanager
async def open_browser() -> "AsyncIterator[Browser]":
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()
