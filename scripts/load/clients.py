"""Agents that work: each asks, reads its stream, compares every byte, goes on; some leave in the middle."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.load.wire import PATHS, Ask, DialectName, History, answer, digest, tags

REQUEST_DEADLINE_S = 120.0
LEAVES = 0.05  # of all requests: the client closes its connection in the middle of the stream
RETRIES = 0.5  # of those who left; the others go on with something else
DIALECTS: tuple[DialectName, DialectName] = ("chat", "responses")


@dataclass(slots=True)
class Tally:
    """What became of all requests. `added_s`: to the first byte of the stream, without what the upstream took."""

    requests: int = 0
    left: int = 0
    rewritten: int = 0
    body_bytes: int = 0
    added_s: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)  # when, for each of them, by `time.perf_counter`
    errors: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    streaming: int = 0
    streaming_max: int = 0


class Wrong(Exception):
    """The answer is not what this request gets."""


class Mixed(Wrong):
    """The answer, or what the upstream got, has something of another session."""


@dataclass(frozen=True, slots=True)
class Work:
    """Where agents work and how: `exact`, when the proxy may change no body; `goes_on`, whether there is time for
    another request; `pause_s` between two of them."""

    port: int
    body_bytes: int
    code: str
    seed: int
    pause_s: float
    exact: bool
    goes_on: Callable[[int], bool]
    requests: tuple[int, int] = (10, 30)  # of one session; then another one begins
    leaves: float = LEAVES
    ended: Callable[[str], None] = lambda tag: None  # a session has said all that it had to say


class Connection:
    """Keep-alive, as agents have it; opened anew when it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, data: bytes) -> asyncio.StreamReader:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        self._writer.write(data)
        return self._reader

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


async def work(number: int, job: Work, tally: Tally) -> None:
    """One agent: session after session until `job.goes_on` says no for its count of requests."""
    dice = random.Random(job.seed * 100_003 + number)
    connection, asked = Connection(job.port), 0
    try:
        while job.goes_on(asked):
            tag = f"{dice.getrandbits(48):012x}"
            history = History(DIALECTS[number % 2], tag, dice, job.code)
            history.fill(job.body_bytes)
            has_id = number // 2 % 2 == 0
            for _ in range(dice.randint(*job.requests)):
                if not job.goes_on(asked):
                    break
                asked += 1
                await _turn(history, has_id, connection, dice, job, tally)
                await asyncio.sleep(job.pause_s * dice.uniform(0.5, 1.5))
            job.ended(tag)
    finally:
        connection.close()


async def _turn(
    history: History, has_id: bool, connection: Connection, dice: random.Random, job: Work, tally: Tally
) -> None:
    ask, body = history.ask(), history.body()
    for attempt in range(2):
        leaves_after = dice.randrange(1, 12) if attempt == 0 and dice.random() < job.leaves else None
        tally.requests += 1
        tally.body_bytes += len(body)
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                received = await _ask(history, ask, body, has_id, connection, leaves_after, job, tally)
        except Exception as error:
            (tally.mixed if isinstance(error, Mixed) else tally.errors).append(f"{ask}: {error!r}")
            connection.close()
            return
        if received is not None:
            history.heard(ask, received)
            return
        tally.left += 1
        connection.close()
        if dice.random() >= RETRIES:
            return


async def _ask(
    history: History,
    ask: Ask,
    body: bytes,
    has_id: bool,
    connection: Connection,
    leaves_after: int | None,
    job: Work,
    tally: Tally,
) -> str | None:
    """The digest of the body that the upstream got; None when the client left before the end. Raises `Wrong`."""
    own = digest(body)
    head = f"POST {PATHS[history.dialect]} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer load\r\ncontent-length: {len(body)}\r\n"
    head += f"x-session-id: {history.tag}\r\n" if has_id else ""
    start = time.perf_counter()
    reader = await connection.send(f"{head}\r\n".encode() + body)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if " 200 " not in status:
        text = await reader.readexactly(int(headers.get("content-length", 0)))
        raise (Mixed if b"words of" in text else Wrong)(f"{status} {text[:300]!r}")
    received = headers["x-received"]
    if received != own:
        if job.exact:
            raise Mixed("the upstream got another body")
        tally.rewritten += 1
    expected, got, chunks = b"".join(answer(history.dialect, ask, received, int(headers["x-size"]))), b"", 0
    tally.streaming += 1
    tally.streaming_max = max(tally.streaming_max, tally.streaming)
    try:
        while size := int(await reader.readline(), 16):
            got += (await reader.readexactly(size + 2))[:-2]
            if chunks == 0:
                tally.added_s.append(time.perf_counter() - start - float(headers["x-took-s"]))
                tally.at.append(start)
            chunks += 1
            if chunks == leaves_after:
                _compare(ask, expected[: len(got)], got)
                return None
        await reader.readline()
    finally:
        tally.streaming -= 1
    _compare(ask, expected, got)
    return received


def _compare(ask: Ask, expected: bytes, got: bytes) -> None:
    if got == expected:
        return
    foreign = tags(got) - {ask.tag.encode()}
    shorter = min(len(expected), len(got))
    place = next((i for i in range(shorter) if expected[i] != got[i]), shorter)
    why = f"byte {place} of {len(expected)} ({len(got)} came): {got[max(0, place - 40) : place + 40]!r}"
    raise (Mixed(f"words of {foreign!r}; {why}") if foreign else Wrong(why))
