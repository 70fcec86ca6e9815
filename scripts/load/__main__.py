"""Many sessions at once through `recap serve`, the upstream and the proxy in processes of their own.

    python -m scripts.load [--seconds 300] [--sessions 200] [--beside 32]

Three parts: one session alone and then all, in front of the upstream itself; the same through the proxy; then some
sessions beside a reader of the inspector, `recap forget` and the retention. Prints a table, and everything that went
wrong: with anything at all the exit status is 1.
"""

import argparse
import asyncio
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from proxy.server import bind
from scripts.load.beside import Forgetter, Reader, age, names_of, recap
from scripts.load.clients import Tally, Work, work
from scripts.load.wire import ROOT, corpus

GROWTH_MAX = 1.10  # resident memory, the median of the last quarter by that of the second
JUDGED_S = 120.0  # a shorter run ends while its caches still fill
ALONE_S = 120.0  # that one session works, and that anybody works without the proxy
OLD_SESSIONS = 6  # of each kind
FORGETS_SHARE = 3  # one in so many sessions is forgotten when it has ended
READY_S = 60.0
SAMPLE_S = 1.0
RUSH_S = 10.0  # in which everybody begins: 200 histories of 200 kB that the proxy has never seen
MB = 2**20


@dataclass(frozen=True, slots=True)
class Length:
    """How long the agents work: for a time, or so many requests each."""

    seconds: float | None = None
    requests: int | None = None

    def starting(self) -> Callable[[int], bool]:
        until = time.monotonic() + self.seconds if self.seconds is not None else None
        return lambda asked: time.monotonic() < until if until is not None else asked < (self.requests or 0)


@dataclass(frozen=True, slots=True)
class Model:
    """The upstream's pace, in seconds: to the first event, and from one to the next."""

    think_s: float = 1.0
    piece_s: float = 0.1


@dataclass(slots=True)
class Part:
    """What one part of the test found. `problems` holds everything that must not be."""

    name: str
    tally: Tally = field(default_factory=Tally)
    began: float = 0.0  # by `time.perf_counter`
    seconds: float = 0.0
    resident: list[float] = field(default_factory=list)  # MB, once a second
    waiting_max: int = 0  # batches in the writer's queue
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def judge(self) -> None:
        self.problems += [f"mixed up: {text}" for text in self.tally.mixed]
        self.problems += [f"error: {text}" for text in self.tally.errors]
        growth = self.growth
        if growth is not None and self.seconds >= JUDGED_S and growth > GROWTH_MAX:
            self.problems.append(f"memory grew by {growth:.2f} from the second quarter to the last")

    @property
    def growth(self) -> float | None:
        quarter = len(self.resident) // 4
        if quarter == 0:
            return None
        return statistics.median(self.resident[-quarter:]) / statistics.median(self.resident[quarter : 2 * quarter])


# -- processes ----------------------------------------------------------------------------------------------------


@contextmanager
def process(*command: str, log: Path) -> Iterator[int]:
    """A process of ours; it is asked to end, and must do so."""
    with log.open("wb") as out:
        running = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=out, stderr=out)
        try:
            yield running.pid
        finally:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


async def listening(port: int) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return


@asynccontextmanager
async def upstream(folder: Path, model: Model) -> AsyncIterator[int]:
    port = free_port()
    command = ("-m", "scripts.load.upstream", str(port), str(model.think_s), str(model.piece_s))
    with process(*command, log=folder / "upstream.log"):
        await listening(port)
        yield port


@asynccontextmanager
async def proxy(folder: Path, upstream_port: int, part: Part, *settings: str) -> AsyncIterator[tuple[int, Path]]:
    """A proxy in front of it: its port and its archive. What its log says is a problem, and so is what `recap verify`
    finds when it has ended."""
    port, name = free_port(), part.name.replace(" ", "-")
    db, log = folder / name / "recap.db", folder / f"{name}.log"
    serve: tuple[str, ...] = ("-m", "proxy", "serve", "--port", str(port), "--db", str(db), "--attention", "off")
    serve += ("--mode", "idle")
    serve += ("--upstream", f"http://127.0.0.1:{upstream_port}/v1", "--log-level", "warning", *settings)
    with process(*serve, log=log) as pid:
        await listening(port)
        watching = asyncio.create_task(_watch(pid, port, part))
        try:
            yield port, db
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            part.problems += await _ill(port)
    part.problems += [f"the proxy's log: {line}" for line in log.read_text().splitlines() if line.strip()]
    status, text = await recap("verify", "--db", str(db))
    if status:
        part.problems.append(f"recap verify: {text}")
    part.notes.append(f"archive {sum(p.stat().st_size for p in db.parent.glob('recap.db*')) / MB:.0f} MB")


async def _watch(pid: int, port: int, part: Part) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            part.resident.append(_resident_mb(pid))
            health = await client.get(f"http://127.0.0.1:{port}/recap/health")
            part.waiting_max = max(part.waiting_max, int(health.json()["archive"]["batches_waiting"]))
            await asyncio.sleep(SAMPLE_S)


async def _ill(port: int) -> list[str]:
    """What the proxy's health says at the end."""
    async with httpx.AsyncClient(timeout=60) as client:
        health = (await client.get(f"http://127.0.0.1:{port}/recap/health")).json()["archive"]
    found = [str(health["problem"])] if health["state"] != "ok" else []
    found += [f"{health['batches_lost']} batches lost"] if health["batches_lost"] else []
    return found + ([str(health["retention"]["problem"])] if health["retention"]["problem"] else [])


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB


# -- parts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """How much of everything."""

    sessions: int = 200
    body_bytes: int = 200_000
    length: Length = Length(300.0)
    alone: Length = Length(ALONE_S)
    model: Model = Model()
    pause_s: float = 0.5
    requests: tuple[int, int] = (10, 30)

    def work(self, port: int, seed: int, length: Length, **more: object) -> Work:
        return Work(
            port=port,
            body_bytes=self.body_bytes,
            code=corpus(),
            seed=seed,
            pause_s=self.pause_s,
            goes_on=length.starting(),
            requests=self.requests,
            **({"exact": True} | more),  # type: ignore[arg-type]
        )


async def agents(part: Part, job: Work, count: int) -> None:
    """So many, until all of them have done their work. They begin one after the other within a pause or two."""
    part.began = time.perf_counter()

    async def agent(number: int) -> None:
        await asyncio.sleep(2 * job.pause_s * number / count)
        await work(number, job, part.tally)

    await asyncio.gather(*(agent(number) for number in range(count)))
    part.seconds = time.perf_counter() - part.began


async def direct(load: Load, folder: Path) -> list[Part]:
    """Without the proxy: what the test adds by itself."""
    one, many = Part("one session, direct"), Part(f"{load.sessions} sessions, direct")
    async with upstream(folder, load.model) as port:
        await agents(one, load.work(port, 1, load.alone), 1)
        await agents(many, load.work(port, 2, load.alone), load.sessions)
    return [one, many]


async def alone(load: Load, folder: Path) -> Part:
    part = Part("one session")
    async with upstream(folder, load.model) as up, proxy(folder, up, part) as (port, _):
        await agents(part, load.work(port, 3, load.alone), 1)
    return part


async def crowd(load: Load, folder: Path) -> Part:
    part = Part(f"{load.sessions} sessions")
    async with upstream(folder, load.model) as up, proxy(folder, up, part) as (port, _):
        await agents(part, load.work(port, 4, load.length), load.sessions)
    return part


async def beside(load: Load, folder: Path, *, old: int = OLD_SESSIONS) -> Part:
    """Agents whose sessions are selected anew at every request of the user, a reader, `recap forget`, retention."""
    part = Part(f"{load.sessions} sessions beside readers and removals")
    db = folder / part.name.replace(" ", "-") / "recap.db"
    db.parent.mkdir(mode=0o700)
    lasts = load.length.seconds or 0.0
    overdue = await age(db, old, corpus(), now=time.time(), within_s=lasts / 2)
    settings = ("--mode", "always", "--min-history-tokens", "0", "--keep-days", "1", "--keep-bytes", "1")
    async with upstream(folder, load.model) as up, proxy(folder, up, part, *settings) as (port, _):
        reader, forgetter, count = Reader(port, 5), Forgetter(db), 0

        def ended(tag: str) -> None:
            nonlocal count
            count += 1
            if count % FORGETS_SHARE == 0:
                forgetter.ended.put_nowait(tag)

        tasks = [asyncio.create_task(job) for job in (reader.read(), reader.follow(), forgetter.forget())]
        try:
            job = load.work(port, 6, load.length, exact=False, ended=ended)
            await agents(part, job, load.sessions)
            async with asyncio.timeout(READY_S):
                await forgetter.ended.join()
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        part.problems += [repr(end) for end in ends if not isinstance(end, asyncio.CancelledError)]
    part.problems += reader.errors + forgetter.errors
    part.problems += [f"{tag} was to be removed" for tag in _left(db, [*forgetter.gone, *overdue[:old]])]
    slowest = max(forgetter.seconds, default=0.0)
    part.notes.append(
        f"{part.tally.rewritten} requests rewritten, {reader.answers} answers of the inspector, "
        f"{reader.events} events, "
        f"{len(forgetter.gone)} sessions forgotten (slowest {slowest:.1f} s), "
        f"{sum(not names_of(db, tag) for tag in overdue)} of {len(overdue)} expired"
    )
    return part


def _left(db: Path, gone: Sequence[str]) -> list[str]:
    """Tags of removed sessions that are still in the archive's bytes."""
    held = b"".join(path.read_bytes() for path in db.parent.glob("recap.db*"))
    return [tag for tag in gone if tag.encode() in held]


# -- the table ----------------------------------------------------------------------------------------------------


def table(parts: Sequence[Part]) -> str:
    """One row a part. Added latency is to the first byte of the stream, without what the upstream took; that of the
    rush in which everybody begins stands apart."""
    rows = [
        "| | requests | left early | MB sent | requests/s | streams at once | added p50 | p99 | p99 of the rush "
        "| resident: median of 2nd quarter, of last, peak | batches waiting, most | wrong |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for part in parts:
        tally, quarter = part.tally, len(part.resident) // 4
        added = [
            (at - part.began < RUSH_S, 1000 * seconds) for at, seconds in zip(tally.at, tally.added_s, strict=True)
        ]
        rush, calm = (_cuts([ms for is_rush, ms in added if is_rush is wanted]) for wanted in (True, False))
        memory = "-"
        if quarter:
            second, last = part.resident[quarter : 2 * quarter], part.resident[-quarter:]
            memory = f"{statistics.median(second):.0f}, {statistics.median(last):.0f}, {max(part.resident):.0f} MB"
        rows.append(
            f"| {part.name} | {tally.requests} | {tally.left} | {tally.body_bytes / 1e6:.0f} "
            f"| {tally.requests / part.seconds:.1f} | {tally.streaming_max} "
            f"| {calm[49]:.1f} ms | {calm[98]:.1f} ms | {rush[98]:.1f} ms "
            f"| {memory} | {part.waiting_max if part.resident else '-'} | {len(part.problems)} |"
        )
    return "\n".join(rows)


def _cuts(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [math.nan] * 99


async def main(arguments: argparse.Namespace) -> int:
    length, alone_for = Length(arguments.seconds), Length(min(ALONE_S, arguments.seconds))
    load = Load(sessions=arguments.sessions, length=length, alone=alone_for)
    few = Load(sessions=arguments.beside, length=length)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        parts = await direct(load, folder) if arguments.direct else []
        parts += [await alone(load, folder), await crowd(load, folder), await beside(few, folder)]
    for part in parts:
        part.judge()
    print(table(parts))
    for part in parts:
        for note in part.notes:
            print(f"\n{part.name}: {note}")
    wrong = [f"{part.name}: {problem}" for part in parts for problem in part.problems]
    for line in wrong[:50]:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of each part, the small ones 120 at most")
    parser.add_argument("--sessions", type=int, default=200, help="at once")
    parser.add_argument("--beside", type=int, default=32, help="of them beside readers and removals")
    parser.add_argument("--no-direct", dest="direct", action="store_false", help="leave out the runs without the proxy")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(read_arguments())))
