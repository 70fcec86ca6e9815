"""What the proxy adds to a request: latency, CPU, throughput, memory, disk; side by side with going direct.

One run starts an upstream, a proxy and this load generator as three processes on the loopback, and stops them again.
The request is a chat body of about 200 kB and 100 messages; every request extends its session, as an agent's would. A
session of that length has grown over its last fifty requests, so what a history costs that the proxy sees for the first
time (all of it is tokenised, compressed and stored) is measured by itself.

Throughput is shown as a share of going direct, with two upstreams: one that answers at once, which no model does and
which shows where the proxy's ceiling is, and one that takes as long as a fast model to its first byte, which is what a
user has.

    python scripts/bench_proxy.py [--requests 400] [--connections 32]
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from bench_rig import (
    Connection,
    at_once,
    cpu_seconds,
    free_port,
    grown,
    one_by_one,
    process,
    quantiles,
    reachable,
    resident_mb,
    running_upstream,
)

MESSAGES, BODY_BYTES = 99, 200_000
SETTLE_S = 5
REQUESTS_A_SESSION = 25  # agents make 10 to 100 requests a user turn
MODEL_S = 0.25  # to the first byte of a fast hosted model with a warm cache; most take longer
RECORDED_S = 1.5  # after which what went before has been recorded


def corpus() -> str:
    """Text like that which agents read: this program's own source."""
    root = Path(__file__).resolve().parent.parent
    return "\n".join(
        path.read_text() for name in ("proxy", "graphstore") for path in sorted((root / name).rglob("*.py"))
    )


def bodies(count: int, *, stream: bool, seed: int) -> list[bytes]:
    """Sessions of 25 requests each, every one two messages longer than the one before."""
    dice = random.Random(seed)
    code = corpus()
    length = 2 * BODY_BYTES // MESSAGES - 350  # of each result; the rest is the call and JSON's escapes
    found = []
    for session in range(-(-count // REQUESTS_A_SESSION)):
        history = [{"role": "system", "content": "You are a coding agent."}, {"role": "user", "content": f"{session}"}]
        while len(history) < MESSAGES:
            number = len(history)
            call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
            place = dice.randrange(len(code) - length)
            history += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {
                    "role": "tool",
                    "tool_call_id": f"c{number}",
                    "content": f"{seed} {session} {number}\n{code[place : place + length]}",
                },
            ]
        found += grown(history, REQUESTS_A_SESSION, stream=stream)
    return found[:count]


@contextmanager
def servers(db: Path, think_ms: float) -> Iterator[tuple[int, int, int]]:
    """An upstream and a proxy before it: their ports, and the proxy's process id."""
    port = free_port()
    with running_upstream(think_ms) as up:
        serve = ("-m", "proxy", "serve", "--port", str(port), "--db", str(db), "--log-level", "warning")
        serve += ("--attention", "off")  # the worker has a benchmark of its own
        with process(sys.executable, *serve, "--upstream", f"http://127.0.0.1:{up}/v1") as pid:
            yield up, port, pid


async def added(count: int, think_ms: float, folder: Path) -> None:
    """Latency and CPU of single requests, with an upstream that takes a moment: recording happens meanwhile."""
    with servers(folder / "added.db", think_ms) as (up, port, pid):
        await reachable(up)
        await reachable(port)
        await one_by_one(port, bodies(40, stream=False, seed=1))  # warm: pools, caches, the rank table
        size, longest = len(bodies(1, stream=False, seed=0)[0]), MESSAGES + 2 * REQUESTS_A_SESSION
        print(f"chat bodies of {size // 1000} kB, {MESSAGES} to {longest} messages; {count} requests each")
        print(f"one by one, the upstream thinks for {think_ms:.0f} ms:")
        for name, stream in (("JSON", False), ("first SSE chunk", True)):
            direct = quantiles(await one_by_one(up, bodies(count, stream=stream, seed=2 + stream)))
            opening, running = opened(bodies(count, stream=stream, seed=4 + stream))
            before = cpu_seconds(pid)
            first = quantiles(await one_by_one(port, opening))
            await asyncio.sleep(RECORDED_S)
            first_cpu = 1000 * (cpu_seconds(pid) - before) / len(opening)
            before = cpu_seconds(pid)
            ours = quantiles(await one_by_one(port, running))
            await asyncio.sleep(RECORDED_S)
            cpu = 1000 * (cpu_seconds(pid) - before) / len(running)
            print(
                f"  {name}, a history seen for the first time: added p50 {first[0] - direct[0]:.1f} ms, "
                f"CPU {first_cpu:.1f} ms\n"
                f"  {name}, a session that goes on: direct p50 {direct[0]:.1f} ms, p99 {direct[1]:.1f} ms; "
                f"proxy p50 {ours[0]:.1f} ms, p99 {ours[1]:.1f} ms; "
                f"added p50 {ours[0] - direct[0]:.1f} ms, p99 {ours[1] - direct[1]:.1f} ms; "
                f"CPU {cpu:.1f} ms a request"
            )


# A worker in the middle of a long replay: all cores, at the priority that it gives itself.
BUSY_WORKER = """
from proxy.commands.worker import yield_to_others
yield_to_others()
import torch
square = torch.randn(1024, 1024)
print("busy", flush=True)
while True:
    square @ square
"""


async def beside_a_worker(count: int, think_ms: float, folder: Path) -> None:
    """Latency with the replay worker at rest and at full load, in turns."""
    if find_spec("torch") is None:
        print("beside a busy worker: not measured, torch is not installed")
        return
    with servers(folder / "worker.db", think_ms) as (up, port, _):
        await reachable(up)
        await reachable(port)
        requests = iter(opened(bodies(8 * count + 40, stream=False, seed=20))[1])
        await one_by_one(port, list(islice(requests, 40)))
        quiet: list[float] = []
        busy: list[float] = []
        for _ in range(4):
            quiet += await one_by_one(port, list(islice(requests, count)))
            command = (sys.executable, "-c", BUSY_WORKER)
            worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert worker.stdout is not None
            await worker.stdout.readline()
            busy += await one_by_one(port, list(islice(requests, count)))
            worker.kill()
            await worker.wait()
        (calm, calm_99), (loud, loud_99) = quantiles(quiet), quantiles(busy)
        print(
            f"beside a worker on all cores: p50 {loud:.1f} ms, p99 {loud_99:.1f} ms; "
            f"worker at rest: p50 {calm:.1f} ms, p99 {calm_99:.1f} ms; ratio of p50 {loud / calm:.2f}"
        )


def opened(requests: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The first request of each session, and those that follow."""
    opening = requests[::REQUESTS_A_SESSION]
    return opening, [body for i, body in enumerate(requests) if i % REQUESTS_A_SESSION]


async def throughput(connections: int, think_s: float, folder: Path) -> None:
    """As many requests of running sessions as go through."""
    with servers(folder / f"throughput{think_s:g}.db", 1000 * think_s) as (up, port, pid):
        await reachable(up)
        await reachable(port)
        await one_by_one(port, bodies(40, stream=False, seed=1))
        requests = bodies(connections * REQUESTS_A_SESSION, stream=False, seed=7)
        opening, running = opened(requests)
        direct = await at_once(up, running, connections)
        await at_once(port, opening, connections)
        await asyncio.sleep(RECORDED_S)
        ours = await at_once(port, running, connections)
        print(
            f"{connections} connections, an upstream that takes {1000 * think_s:.0f} ms: direct {direct:.0f}/s, "
            f"proxy {ours:.0f}/s, share {ours / direct:.2f}"
        )
        peak = resident_mb(pid)
        await asyncio.sleep(SETTLE_S)
        print(f"resident at the end of the load {peak:.0f} MB, {SETTLE_S} s later {resident_mb(pid):.0f} MB")


async def growth(folder: Path) -> tuple[int, int]:
    """One session of two hundred turns whose requests are 200 kB and more, each with 2 kB of new text.

    Returns the bytes sent and the unique bytes among them.
    """
    dice = random.Random(11)
    code = corpus()
    (first,) = bodies(1, stream=False, seed=10)
    history = json.loads(first)["messages"]
    unique = sent = 0
    with servers(folder / "growth.db", 0) as (up, port, _):
        await reachable(up)
        await reachable(port)
        connection = await Connection(port).open()
        for turn in range(200):
            place = dice.randrange(len(code) - 2000)
            text = f"{turn}\n{code[place : place + 2000]}"
            history += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": text}]
            body = json.dumps({"model": "bench", "messages": history}).encode()
            await connection.ask(body)
            unique, sent = len(body), sent + len(body)
    return sent, unique


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--think-ms", type=float, default=20, help="what the upstream takes to answer one by one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
        asyncio.run(added(arguments.requests, arguments.think_ms, Path(folder)))
        for think_s in (0, MODEL_S):
            asyncio.run(throughput(arguments.connections, think_s, Path(folder)))
        asyncio.run(beside_a_worker(arguments.requests // 8, arguments.think_ms, Path(folder)))
        sent, unique = asyncio.run(growth(Path(folder)))
        stored = sum(path.stat().st_size for path in Path(folder).glob("growth.db*"))
        print(
            f"200 turns, {sent / 1e6:.0f} MB sent, {unique / 1e6:.2f} MB unique: database {stored / 1e6:.2f} MB, "
            f"{stored / unique:.2f} x unique"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
