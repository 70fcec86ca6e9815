"""Our proxy beside others, in one run: the same upstream, the same bodies, one machine, each in turn.

All proxies run at once and are asked one after the other, round by round, each round beginning with another one: what
the machine does meanwhile meets everybody. A body is a recorded history of a coding agent of about 200 kB, or a short
one; each session is new (a mark stands in its messages), is opened, and goes on for some requests, which are measured:
first as JSON, then as streams. Then as many as go through over several connections, with an upstream that answers at
once and with one that takes as long as a fast model. At last memory, what selections cost, and where our time goes.

Rows are written to .peers/results.jsonl as they are made: a run that was stopped goes on where it was, a finished one
begins anew. The tables and plots go into a document between marks.

    python scripts/bench_peers.py --into docs/benchmarks.md
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_proxy import MODEL_S, growth
from bench_rig import (
    KEY,
    at_once,
    cpu_seconds,
    free_port,
    grown,
    let_think,
    members,
    one_by_one,
    process,
    reachable,
    resident_mb,
    running_upstream,
)
from peers import ROOT, WAYS, NotMeasured, Place, Way, command_line, ensure_installed, version_of
from peers_page import write_into
from peers_profile import profile

from proxy.lab.errors import LabError
from proxy.lab.recordings import read_recordings
from proxy.lab.results import Results, is_finished, open_results, page_of, read_results

HOMES = ROOT / ".peers"
DATA = ROOT / "tests/data/sessions"
BODIES = {"long": (DATA / "entire_cli.jsonl", 185_000), "short": (DATA / "tau_airline.jsonl", 4_000)}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("Bash", "Read", "Edit")]
THINK_MS = 20  # one by one: recording happens meanwhile, as it does with any model
STEPS = {"long": 24, "short": 12}  # requests of a session that are measured
LOAD_STEPS = 4
LOADS_MS = (0, int(1000 * MODEL_S))
STARTED_S, RECORDED_S = 90.0, 0.5
Message = dict[str, Any]


def history_of(name: str) -> list[Message]:
    """Messages of recorded sessions of one kind, one session after the other, up to the body's size."""
    file, size = BODIES[name]
    found: list[Message] = [{"role": "system", "content": "You are a coding agent."}]
    for recording in read_recordings([file]).recordings:
        for raw in recording.messages[recording.leading :]:
            size -= len(raw)
            message = json.loads(raw)
            if size < 0 and message["role"] == "user":
                return found
            found.append(message)
    return found


def marked(history: Sequence[Message], mark: str) -> list[Message]:
    """The same history as another session's: nothing that was cached or stored of one serves the next."""
    return [
        {**message, "content": f"{mark}.{i}\n{message['content']}"}
        if i and isinstance(message.get("content"), str)
        else message
        for i, message in enumerate(history)
    ]


def session(history: Sequence[Message], mark: str, steps: int, *, stream: bool) -> list[bytes]:
    return list(grown(marked(history, mark), steps + 1, stream=stream, tools=TOOLS))


@dataclass(frozen=True, slots=True)
class Running:
    """A way that can be asked. `leader` is the process that is measured; None: going direct."""

    way: Way
    port: int
    leader: int | None

    def cpu(self) -> float:
        return cpu_seconds(self.leader) if self.leader is not None else 0.0


async def visit(running: Running, history: Sequence[Message], mark: str, steps: int) -> dict[str, Any]:
    """One session as JSON and one as a stream: milliseconds of each request, and CPU of an average one."""
    plain, streamed = (session(history, f"{mark}-{s}", steps, stream=s) for s in (False, True))
    opening = await one_by_one(running.port, [plain[0], streamed[0]])
    await asyncio.sleep(RECORDED_S)
    before = running.cpu()
    times = [await one_by_one(running.port, requests[1:]) for requests in (plain, streamed)]
    await asyncio.sleep(RECORDED_S)
    cpu = (running.cpu() - before) / (2 * steps)
    json_ms, sse_ms, opening_ms = ([round(1000 * s, 3) for s in seconds] for seconds in (*times, opening))
    return {"json_ms": json_ms, "sse_ms": sse_ms, "opening_ms": opening_ms, "cpu_ms": round(1000 * cpu, 3)}


async def load(running: Running, requests: list[list[bytes]]) -> dict[str, Any]:
    """Requests a second of sessions that go on, one a connection."""
    await at_once(running.port, [each[0] for each in requests], len(requests))
    await asyncio.sleep(RECORDED_S)
    later = [body for each in requests for body in each[1:]]
    return {"per_s": round(await at_once(running.port, later, len(requests)), 2)}


async def answers(running: Running, log: Path) -> None:
    """Wait until it answers a request. Raises `NotMeasured` with the last that it printed."""
    assert running.leader is not None
    body = next(grown([{"role": "user", "content": "hello"}], 1, stream=False))
    deadline, why = time.monotonic() + STARTED_S, "it does not listen"
    while time.monotonic() < deadline and members(running.leader):
        try:
            await reachable(running.port, 1)
            await asyncio.wait_for(one_by_one(running.port, [body]), 30)
            return
        except (RuntimeError, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            await asyncio.sleep(0.5)
    raise NotMeasured(f"{why}; it said: {last_line(log)}")


def last_line(log: Path) -> str:
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1][:160] if said else "nothing"


@contextlib.contextmanager
def started(folder: Path, up: int) -> Iterator[tuple[list[Running], dict[str, str]]]:
    """Every way that can be had, and why the others cannot."""
    found, absent = [Running(WAYS[0], up, None)], dict[str, str]()
    with contextlib.ExitStack() as stack:
        begun = []
        for way in WAYS[1:]:
            place = Place(free_port(), up, folder / way.name.replace(", ", "-"), KEY)
            place.folder.mkdir()
            try:
                if way.package:
                    ensure_installed(HOMES / way.home, way.package)
                command, environment = command_line(way, place, HOMES)
                log = stack.enter_context((place.folder / "log").open("wb"))
                leader = stack.enter_context(process(*command, log=log, env=environment, cwd=place.folder))
                begun.append((Running(way, place.port, leader), place.folder / "log"))
            except (NotMeasured, OSError) as error:
                absent[way.name] = str(error)
        for running, log_file in begun:
            try:
                asyncio.run(answers(running, log_file))
                found.append(running)
            except NotMeasured as error:
                absent[running.way.name] = str(error)
        yield found, absent


class Bench:
    def __init__(self, results: Results, ways: list[Running], up: int, connections: int) -> None:
        self._results = results
        self._ways = ways
        self._up = up
        self._connections = connections
        self._histories = {name: history_of(name) for name in BODIES}

    async def one(self, number: int) -> None:
        await let_think(self._up, THINK_MS)
        for name, history in self._histories.items():
            for running in self._in_turn(number):
                item = f"{name} {number} {running.way.name}"
                await self._note(item, running, visit(running, history, f"{name}{number}", STEPS[name]), body=name)

    async def load(self, number: int) -> None:
        for think_ms in LOADS_MS:
            await let_think(self._up, think_ms)
            marks = (f"load{number}-{think_ms}-{i}" for i in range(self._connections))
            requests = [session(self._histories["long"], mark, LOAD_STEPS, stream=False) for mark in marks]
            for running in self._in_turn(number):
                item = f"load {think_ms} {number} {running.way.name}"
                await self._note(item, running, load(running, requests), think_ms=think_ms)

    def memory(self) -> None:
        for running in self._ways:
            if running.leader is not None and f"memory {running.way.name}" not in self._results.done:
                mb = round(resident_mb(running.leader), 1)
                self._results.add(f"memory {running.way.name}", way=running.way.name, mb=mb)

    async def profile(self) -> None:
        await let_think(self._up, 0)
        for running in self._ways:
            item = f"profile {running.way.name}"
            if running.way.package or running.leader is None or item in self._results.done:
                continue
            bodies = [session(self._histories["long"], f"profile-{i}", STEPS["long"], stream=False) for i in range(12)]
            try:
                await one_by_one(running.port, [each[0] for each in bodies])
                await asyncio.sleep(RECORDED_S)
                asked = one_by_one(running.port, [body for each in bodies for body in each[1:]])
                found: dict[str, Any] = {"where": await profile(running.leader, asked, HOMES)}
            except (NotMeasured, RuntimeError) as error:
                found = {"why": str(error)}
            self._results.add(item, way=running.way.name, **found)

    def _in_turn(self, number: int) -> list[Running]:
        first = number % len(self._ways)
        return self._ways[first:] + self._ways[:first]

    async def _note(self, item: str, running: Running, measured: Any, **about: object) -> None:
        if item in self._results.done:
            measured.close()
            return
        print(f"bench-peers: {item}", file=sys.stderr, flush=True)
        try:
            self._results.add(item, way=running.way.name, **about, **await measured)
        except (RuntimeError, OSError, asyncio.IncompleteReadError) as error:
            self._results.add(item, way=running.way.name, **about, why=str(error) or type(error).__name__)


def apart(results: Results) -> None:
    """What needs no proxy beside it: selections, and the archive's growth."""
    if "selection" not in results.done:
        command = (sys.executable, str(ROOT / "scripts/bench_selection.py"))
        said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
        results.add("selection", said=said.splitlines())
    if "growth" not in results.done:
        with tempfile.TemporaryDirectory() as folder:
            sent, unique = asyncio.run(growth(Path(folder)))
            stored = sum(path.stat().st_size for path in Path(folder).glob("growth.db*"))
        results.add("growth", sent=sent, unique=unique, stored=stored)


def machine() -> str:
    """In general words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        f"{platform.machine()}, {cores} cores, {memory:.0f} GB, {platform.system()}, Python {platform.python_version()}"
    )


def about(rounds: int, loads: int, connections: int) -> dict[str, Any]:
    """What this run is. What it depends on must be installed by now, or is absent."""
    packages = {way.home: way.package for way in WAYS if way.package}
    versions = {"ours": version("recap-proxy")}
    for home, package in packages.items():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            name, number = version_of(HOMES / home, package).split()
            versions[name] = number
    sizes = {name: [len(session(history_of(name), "x", 0, stream=False)[0]), len(history_of(name))] for name in BODIES}
    asked = {"rounds": rounds, "loads": loads, "connections": connections, "steps": STEPS, "think_ms": THINK_MS}
    return {"study": "peers", "versions": versions, "machine": machine(), "bodies": sizes, **asked}


def opened(path: Path, said: dict[str, Any]) -> Results:
    """The run to go on with, or a new one."""
    if is_finished(path):
        path.unlink()
    try:
        return open_results(path, said)
    except LabError:  # of other versions or sizes
        path.unlink()
        return open_results(path, said)


def measured(arguments: argparse.Namespace) -> Results:
    with tempfile.TemporaryDirectory() as folder, running_upstream(0) as up:
        asyncio.run(reachable(up))
        with started(Path(folder), up) as (ways, absent):
            results = opened(arguments.results, about(arguments.rounds, arguments.loads, arguments.connections))
            for name, why in absent.items():
                results.add(f"absent {name}", way=name, why=why)
            bench = Bench(results, ways, up, arguments.connections)
            for number in range(arguments.rounds):
                asyncio.run(bench.one(number))
            for number in range(arguments.loads):
                asyncio.run(bench.load(number))
            bench.memory()
            asyncio.run(bench.profile())
    apart(results)
    page_of(arguments.results).touch()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=5, help="sessions of each kind that each way is asked (default 5)"
    )
    parser.add_argument("--loads", type=int, default=1, help="rounds of many connections (default 1)")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--into", type=Path, help="the document whose parts are written")
    parser.add_argument("--results", type=Path, default=HOMES / "results.jsonl")
    parser.add_argument("--written", action="store_true", help="measure nothing: write the last run's rows")
    arguments = parser.parse_args()
    results = read_results(arguments.results) if arguments.written else measured(arguments)
    if arguments.into:
        write_into(arguments.into, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
