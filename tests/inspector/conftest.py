"""The page in a real browser, on a real proxy over an archive of recorded sessions."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from graphstore.records import SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from proxy.conversations import open_conversations
from proxy.settings import Settings
from tests.browser import open_browser, why_absent
from tests.clock import VirtualClock
from tests.inspector.world import build
from tests.support import RunningProxy, running_proxy

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> "AsyncIterator[Browser]":
    if absent := why_absent():
        if os.environ.get("TEST_BROWSER_REQUIRED"):
            pytest.fail(f"a browser is required here, but {absent}")
        pytest.skip(absent)
    async with open_browser() as found:
        yield found


@dataclass
class Recorded:
    """An archive that was made once, for tests that copy it or only look."""

    path: Path
    now: float
    names: dict[str, str]  # client id -> session name

    @contextmanager
    def opened(self, client_id: str) -> Iterator[tuple[Reader, SessionRow]]:
        with open_reader(self.path) as reader:
            session = reader.load_session(self.names[client_id])
            assert session is not None
            yield reader, session


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    clock = VirtualClock()
    dialogue = await build(folder, clock=clock)
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        names = {row.client_id: row.name for row in reader.list_sessions() if row.client_id is not None}
    return Recorded(folder / "recap.db", clock(), names)


@dataclass
class Visit:
    """A page that somebody looks at, with everything that it must not do."""

    page: "Page"
    proxy: RunningProxy
    clock: VirtualClock
    console: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    async def to(self, view: str) -> None:
        await self.page.goto(f"{self.proxy.url}/recap/#/{view}")
        await self.shown(view)

    async def shown(self, view: str) -> None:
        """Wait until this view is the one on the screen."""
        await self.page.wait_for_selector(f"main[data-address={json.dumps('#/' + view)}] h1")

    async def text(self, selector: str = "main") -> str:
        return await self.page.inner_text(selector)


@asynccontextmanager
async def visiting(
    browser: "Browser",
    recorded: Recorded,
    folder: Path,
    *,
    upstream: str = "http://upstream.test/v1",
    changes: dict[str, object] | None = None,
    in_use: bool = False,
    **context: object,
) -> AsyncIterator[Visit]:
    """A proxy over a copy of the recorded archive, an hour after its last request, and a page on it.

    `in_use`: on the archive of a visit in the same folder. At the end: no error on the console, no request beyond the
    proxy.
    """
    database = folder / "recap.db"
    if not in_use:
        shutil.copyfile(recorded.path, database)
    clock = VirtualClock(recorded.now + 3600.0)
    settings = Settings(
        **{"mode": "idle", "upstream": upstream, "db": str(database), "min_history_tokens": 0, **(changes or {})}
    )  # type: ignore[arg-type]
    async with running_proxy(settings, open_conversations(settings, clock), clock=clock) as proxy:
        opened = await browser.new_context(**context)  # type: ignore[arg-type]
        page = await opened.new_page()
        visit = Visit(page, proxy, clock)
        page.on("console", lambda message: visit.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: visit.console.append(f"error: {error}"))
        page.on("request", lambda request: visit.addresses.append(request.url))
        try:
            yield visit
        finally:
            await opened.close()
        assert not visit.console
        assert visit.addresses and all(address.startswith((proxy.url, "blob:")) for address in visit.addresses)
