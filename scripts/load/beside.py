"""What happens beside the agents: somebody reads the inspector, somebody forgets sessions, old ones expire."""

import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from graphstore.store.archive import open_reader
from scripts.load.wire import ROOT, History
from tests.clock import VirtualClock
from tests.proxy.dialogue import Dialogue

READ_PAUSE_S = 0.1
FORGET_PAUSE_S = 1.0
OLD_DAYS = 2
HOUR_S = 3600.0
Json = dict[str, object]


class Reader:
    """Somebody who looks at everything, all the time, with the live feed open. Every answer must be a good one."""

    def __init__(self, port: int, seed: int) -> None:
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/recap/api", timeout=60.0)
        self._dice = random.Random(seed)
        self.answers = 0
        self.events = 0
        self.errors: list[str] = []

    async def read(self) -> None:
        """For ever."""
        async with self._client:
            while True:
                sessions = (await self._get("sessions", limit=100)).get("sessions", [])
                for view in ("health", "savings", "search?q=selection"):
                    await self._get(view)
                for session in self._dice.sample(sessions, min(3, len(sessions))):
                    await self._look_at(str(session["name"]))
                await asyncio.sleep(READ_PAUSE_S)

    async def _look_at(self, name: str) -> None:
        for view in ("", "/map", "/graph", "/turns/1", "/blocks/0"):
            await self._get(f"sessions/{name}{view}", may_be_gone=True)

    async def follow(self) -> None:
        """The live feed, for ever; a feed that ends is opened again, as a browser does."""
        while True:
            try:
                async with self._client.stream("GET", "events") as feed:
                    async for line in feed.aiter_lines():
                        self.events += line.startswith("event:")
            except httpx.HTTPError as error:
                self.errors.append(f"the live feed: {error!r}")
                return

    async def _get(self, view: str, *, may_be_gone: bool = False, **query: int) -> dict[str, list[Json]]:
        try:
            answer = await self._client.get(view, params=query or None)
        except httpx.HTTPError as error:
            self.errors.append(f"{view}: {error!r}")
            return {}
        self.answers += 1
        if answer.status_code == 404 and may_be_gone:
            return {}
        if answer.status_code != 200:
            self.errors.append(f"{view}: {answer.status_code} {answer.text[:300]}")
            return {}
        found: dict[str, list[Json]] = answer.json()
        return found


class Forgetter:
    """`recap forget` for sessions that have ended, one after the other."""

    def __init__(self, db: Path) -> None:
        self._db = db
        self.ended: asyncio.Queue[str] = asyncio.Queue()  # tags
        self.gone: list[str] = []
        self.seconds: list[float] = []
        self.errors: list[str] = []

    async def forget(self) -> None:
        """For ever."""
        while True:
            tag = await self.ended.get()
            for name in await asyncio.to_thread(names_of, self._db, tag):
                began = time.perf_counter()
                status, text = await recap("forget", name, "--yes", "--db", str(self._db))
                self.seconds.append(time.perf_counter() - began)
                if status:
                    self.errors.append(f"recap forget {name}: {status} {text}")
            self.gone.append(tag)
            self.ended.task_done()
            await asyncio.sleep(FORGET_PAUSE_S)


def names_of(db: Path, tag: str) -> list[str]:
    """The sessions of an archive that this tag's client has led."""
    with open_reader(db) as reader:
        return [row.name for row in reader.list_sessions() if f"tag:{tag}" in row.title]


async def recap(*arguments: str) -> tuple[int, str]:
    """A command in a process of its own: its status and what it printed."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await running.communicate()
    finally:
        if running.returncode is None:
            with suppress(ProcessLookupError):
                running.kill()
    return running.returncode or 0, out.decode("utf-8", "replace").strip()


async def age(db: Path, count: int, code: str, *, now: float, within_s: float) -> list[str]:
    """Put old sessions into a new archive: `count` that are days old, and as many that are one hour old at a moment
    within the next `within_s` seconds. Returns their tags."""
    found = []
    dice = random.Random(17)
    for i in range(2 * count):
        ago = OLD_DAYS * 24 * HOUR_S if i < count else HOUR_S - within_s * (i - count) / count
        tag = f"{dice.getrandbits(48):012x}"
        history = History("chat", tag, dice, code)
        history.fill(50_000)
        world = Dialogue(db.parent, VirtualClock(now - ago))
        messages = [json.loads(message) for message in history.messages]
        await world.send(messages, headers={"x-session-id": tag}, after_s=0)
        await world.close()
        found.append(tag)
    return found
