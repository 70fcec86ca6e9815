"""What the benchmarks of whole proxies share: an upstream, a load generator, and meters for the processes between.

Everything is a process of its own on the loopback. The upstream answers every request alike, after a time that a
`GET /think/MILLISECONDS` sets: what it adds is the same for everybody.
"""

import argparse
import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

READY_S = 30.0
KEY = "sk-" + secrets.token_hex(32)  # what this run's clients send; nobody checks it but proxies that want a key
TICKS_S = os.sysconf("SC_CLK_TCK")
USAGE = {"prompt_tokens": 50_000, "completion_tokens": 1, "total_tokens": 50_001}
MESSAGE = {"role": "assistant", "content": "ok"}
ANSWER = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "bench",
        "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
        "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 49_920}},
    }
).encode()


def _event(delta: Mapping[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "bench", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


EVENTS = [_event({"content": "word "})] * 20 + [_event({}, "stop"), b"data: [DONE]\n\n"]


async def upstream(port: int, think_s: float) -> None:
    """The least that an upstream can do: read a request, answer it, as a stream when the body asks for one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal think_s
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                body = await reader.readexactly(length_of(head))
                if head.startswith(b"get /think/"):
                    think_s = int(head.split()[1].rpartition(b"/")[2]) / 1000
                elif think_s:
                    await asyncio.sleep(think_s)
                if b'"stream":true' in body or b'"stream": true' in body:  # in a string, the quotes would be escaped
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                    )
                    for event in EVENTS:
                        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                    writer.write(b"0\r\n\r\n")
                else:
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
                        + ANSWER
                    )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, limit=1 << 20)
    async with server:
        await server.serve_forever()


def length_of(head: bytes) -> int:
    """Bytes of the body that a head (in small letters) announces; 0: none."""
    return next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)


def grown(history: Sequence[Any], steps: int, *, stream: bool, **more: object) -> Iterator[bytes]:
    """A session's requests: the history, then every one two messages longer than the one before."""
    messages = list(history)
    for step in range(steps):
        yield json.dumps({"model": "bench", **more, "messages": messages, "stream": stream}).encode()
        messages += [{"role": "assistant", "content": f"step {step}"}, {"role": "user", "content": "go on"}]


class Connection:
    """One kept-alive connection of a client."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> "Connection":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        return self

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def ask(self, body: bytes) -> tuple[float, float]:
        """Seconds to the first body byte and to the end. Raises `RuntimeError`: the answer is not 200."""
        start = time.perf_counter()
        self._writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n" % (KEY.encode(), len(body)) + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the request failed: {head.splitlines()[0].decode('latin-1')}")
        if b"content-length" in head:
            await self._reader.readexactly(length_of(head))
            end = time.perf_counter()
            return end - start, end - start
        first = 0.0
        while True:
            size = int(await self._reader.readline(), 16)
            await self._reader.readexactly(size + 2)
            first = first or time.perf_counter() - start
            if size == 0:
                return first, time.perf_counter() - start


async def one_by_one(port: int, requests: Sequence[bytes]) -> list[float]:
    """Seconds to the first body byte of each request, one after the other."""
    connection = await Connection(port).open()
    try:
        return [(await connection.ask(body))[0] for body in requests]
    finally:
        await connection.close()


async def at_once(port: int, requests: list[bytes], connections: int) -> float:
    """Requests a second over so many connections."""
    length = -(-len(requests) // connections)
    sessions = [requests[i : i + length] for i in range(0, len(requests), length)]

    async def worker(connection: Connection) -> None:
        while sessions:
            for body in sessions.pop():
                await connection.ask(body)

    opened = [await Connection(port).open() for _ in range(connections)]
    start = time.perf_counter()
    await asyncio.gather(*(worker(connection) for connection in opened))
    seconds = time.perf_counter() - start
    for connection in opened:
        await connection.close()
    return len(requests) / seconds


async def let_think(port: int, ms: int) -> None:
    """Tell the upstream how long it takes to its first byte from now on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /think/%d HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % ms)
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()


async def reachable(port: int, deadline_s: float = READY_S) -> None:
    for _ in range(int(10 * deadline_s)):
        try:
            await (await Connection(port).open()).close()
            return
        except OSError:
            await asyncio.sleep(0.1)
    raise RuntimeError(f"nothing listens on port {port} after {deadline_s:.0f} s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def process(
    *command: str, log: IO[bytes] | None = None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[int]:
    """Runs while the block does, in a session of its own; its process id. `log` takes what it prints."""
    out = log or subprocess.DEVNULL
    running = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=cwd, start_new_session=True)
    try:
        yield running.pid
    finally:
        running.terminate()
        try:
            running.wait(20)
        finally:
            for pid in members(running.pid):
                os.kill(pid, 9)


@contextmanager
def running_upstream(think_ms: float) -> Iterator[int]:
    """Its port."""
    port = free_port()
    with process(sys.executable, __file__, str(port), "--think-ms", str(think_ms)):
        yield port


def members(leader: int) -> list[int]:
    """Process ids of the session that `leader` leads: itself and its workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def cpu_seconds(leader: int) -> float:
    """Of all processes of the session, and of those of its children that ended."""
    total = 0
    for pid in members(leader):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += sum(map(int, fields[11:15]))
    return total / TICKS_S


def resident_mb(leader: int) -> float:
    """Of all processes of the session; what they share with each other counts once."""
    own, shared = 0, 0
    for pid in members(leader):
        lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
        sizes = {words[0]: int(words[1]) for words in lines}
        private = sizes["Private_Clean:"] + sizes["Private_Dirty:"]
        own, shared = own + private, max(shared, sizes["Rss:"] - private)
    return (own + shared) / 1024


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return 1000 * cuts[49], 1000 * cuts[98]


def main() -> int:
    parser = argparse.ArgumentParser(description="Be the upstream.")
    parser.add_argument("port", type=int)
    parser.add_argument("--think-ms", type=float, default=0)
    arguments = parser.parse_args()
    asyncio.run(upstream(arguments.port, arguments.think_ms / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
