"""The pictures of the inspector in docs/img: recorded sessions, replayed by a real small model, in a real browser.

Needs what `make test` needs: Chromium, and SmolLM2 in .models (`make models`). Takes some minutes on a CPU.

    python scripts/screenshots.py [--model .models/SmolLM2-135M-Instruct] [--out docs/img]
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from graphstore.store.archive import open_reader
from tests.browser import open_browser, why_absent
from tests.clock import VirtualClock
from tests.end_to_end.test_attention import work_off
from tests.inspector.world import build
from tests.support import running_proxy

if TYPE_CHECKING:
    from playwright.async_api import Page

    from tests.proxy.dialogue import Dialogue

ROOT = Path(__file__).resolve().parents[1]
SIZE = {"width": 1280, "height": 860}
CODING = "entire-3fb30de16616"


async def replay(dialogue: "Dialogue", client_id: str, turn: int) -> None:
    """What the worker does after each turn."""
    await dialogue.conversations.flush()
    await asyncio.to_thread(work_off, dialogue.settings, dialogue.clock)
    print(f"{client_id}: turn {turn} replayed", flush=True)


async def show_map(page: "Page", url: str) -> None:
    await page.goto(url)
    await page.wait_for_selector(".map canvas[data-painted]")
    await page.focus(".map canvas")
    await page.keyboard.press("ArrowDown")
    for _ in range(60):  # to a block that uses another one
        await page.keyboard.press("ArrowRight")
        told = await page.inner_text(".told")
        if " uses " in told and "used by" in told:
            return


async def take(folder: str, model: str, out: Path) -> None:
    clock = VirtualClock(time.time() - 30_000)
    changes = {"attention_model": model, "evidence": "hybrid"}
    dialogue = await build(Path(folder), clock=clock, changes=changes, observer=replay, with_hostile=False)
    await replay(dialogue, "last", 0)
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        name = next(row.name for row in reader.list_sessions() if row.client_id == CODING)
    async with running_proxy(dialogue.settings, None, clock=clock) as proxy, open_browser() as browser:
        for scheme, suffix, views in (("light", "", ("turn", "sessions")), ("dark", "-dark", ())):
            page = await browser.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]
            await show_map(page, f"{proxy.url}/recap/#/session/{name}")
            await page.screenshot(path=out / f"inspector-map{suffix}.png")
            for view in views:
                address = f"session/{name}/turn/5" if view == "turn" else view
                await page.goto(f"{proxy.url}/recap/#/{address}")
                await page.wait_for_selector(f"main[data-address='#/{address}'] h1")
                await page.wait_for_selector("#live:text-is('live')")
                await page.screenshot(path=out / f"inspector-{view}{suffix}.png")
            await page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    given = parser.parse_args()
    if absent := why_absent():
        sys.exit(absent)
    given.out.mkdir(parents=True, exist_ok=True)
    model, out = given.model.absolute(), given.out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the pictures name the model, and not where it lies on this machine
        Path(model.name).symlink_to(model)
        asyncio.run(take(folder, model.name, out))


if __name__ == "__main__":
    main()
