"""How long the inspector takes with long sessions: the map in a real browser, from the click to what is painted.

Makes an archive of two sessions, one short and one long, every block observed in every turn, serves it, and opens both
maps in Chromium: until the first paint, and scrolled through from end to end. Also what each route costs the proxy.

    python scripts/bench_inspector.py [--blocks 10000] [--turns 100]
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from graphstore.records import ReplayRequest
from graphstore.store.archive import Archive, open_queue
from proxy.settings import Settings
from tests.browser import open_browser, why_absent
from tests.graphstore.store.history import History
from tests.inspector.world import density
from tests.observed import replay_of
from tests.support import running_proxy

if TYPE_CHECKING:
    from playwright.async_api import Page

SHORT = (100, 10)  # blocks, turns: what the long one is compared with
SMOOTH = (2_000, 100)
RUNS = 3
FRAMES = 120


def make(path: Path, sessions: list[tuple[int, int]]) -> None:
    with Archive.open(path) as archive, open_queue(path) as queue:
        exchange = 0
        for id, (blocks, turns) in enumerate(sessions, 1):
            history, last = History(id), 0
            history.exchanges = exchange  # ids of exchanges and turns are counted through
            for turn in range(1, turns + 1):
                end = blocks * turn // turns
                texts = [f"session {id} block {n} " + "word " * (5 + n * 7919 % 300) for n in range(last, end)]
                archive.writer.submit(history.grow(*texts)).result(60)
                last, exchange = end, history.exchanges
                seen = {v: density(v, turn) for v in range(end)}
                edges = [(v // 2, v, density(v, turn)) for v in range(2, end, 3)] if turn == turns else []
                queue.add(ReplayRequest(id, exchange, exchange, 0.0))
                job = queue.claim()
                assert job is not None
                queue.finish(job, replay_of(seen, edges), {}, "paper")


async def first_paint(page: "Page", url: str) -> float:
    """Seconds from asking for the map until it is painted."""
    await page.goto("about:blank")
    start = time.perf_counter()
    await page.goto(url)
    await page.wait_for_selector(".map canvas[data-painted]")
    return time.perf_counter() - start


async def scrolled(page: "Page") -> list[float]:
    """Milliseconds from frame to frame while the map is scrolled through and zoomed in."""
    found: list[float] = await page.evaluate(
        """frames => new Promise((resolve) => {
            const map = document.querySelector('.map'); const times = []; let last = performance.now(); let i = 0;
            const step = (now) => {
                if (i > 0) times.push(now - last);
                last = now;
                if (i++ === frames) return resolve(times);
                map.scrollTop = (map.scrollHeight - map.clientHeight) * i / frames;
                map.scrollLeft = (map.scrollWidth - map.clientWidth) * i / frames;
                requestAnimationFrame(step);
            };
            requestAnimationFrame(step);
        })""",
        FRAMES,
    )
    return found


async def measure(folder: Path, sizes: list[tuple[int, int]]) -> None:
    path = folder / "recap.db"
    print(f"making {', '.join(f'{b:,} blocks x {t} turns' for b, t in sizes)} …", flush=True)
    make(path, sizes)
    print(f"archive: {path.stat().st_size / 1e6:.1f} MB")
    async with running_proxy(Settings(db=str(path), upstream="http://127.0.0.1:9/v1"), None) as proxy:
        async with httpx.AsyncClient(base_url=f"{proxy.url}/recap/api/", timeout=120) as client:
            for id, (blocks, turns) in enumerate(sizes, 1):
                print(f"\n{blocks:,} blocks x {turns} turns")
                for route in ("", "/map", "/graph", f"/blocks/{blocks // 2}"):
                    times = []
                    for _ in range(RUNS):
                        start = time.perf_counter()
                        answer = await client.get(f"sessions/s-{id:05}{route}")
                        answer.raise_for_status()
                        times.append(time.perf_counter() - start)
                    size = len(answer.content) / 1e6
                    took = 1000 * statistics.median(times)
                    print(f"  GET session{route or ' (turns)':24} {took:8.0f} ms {size:7.2f} MB")
        if absent := why_absent():
            print(f"no browser, so no paint: {absent}")
            return
        async with open_browser() as browser:
            page = await browser.new_page(viewport={"width": 1400, "height": 900})
            paints = {}
            for id, (blocks, turns) in enumerate(sizes, 1):
                url = f"{proxy.url}/recap/#/session/s-{id:05}"
                paints[blocks] = statistics.median([await first_paint(page, url) for _ in range(RUNS)])
                plain = await scrolled(page)
                for _ in range(6):
                    await page.click("button[aria-label='Zoom in']")
                zoomed = await scrolled(page)
                print(f"\nmap of {blocks:,} blocks x {turns} turns: painted after {paints[blocks]:.2f} s")
                for name, times in (("scrolled", plain), ("zoomed in and scrolled", zoomed)):
                    ordered = sorted(times)
                    print(
                        f"  {name}: a frame every {statistics.median(times):.1f} ms, p95 "
                        f"{ordered[int(0.95 * len(ordered))]:.1f} ms, worst {ordered[-1]:.1f} ms"
                    )
            short, long = paints[sizes[0][0]], paints[sizes[-1][0]]
            print(f"\nthe longest takes {long / short:.1f} x as long as the shortest to the first paint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000, help="of the longest session (default 10000)")
    parser.add_argument("--turns", type=int, default=100, help="of the longest session (default 100)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), [SHORT, SMOOTH, (given.blocks, given.turns)]))


if __name__ == "__main__":
    main()
