"""Session logic that does what the test says and remembers what the shell told it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from graphstore.records import Ending
from proxy.ports import Arrival, Headers, Plan, Shorter

DEADLINE_S = 10.0


@dataclass(slots=True)
class RecordedExchange:
    """`endings` has one entry per call of `finish`: a correct shell leaves exactly one."""

    endings: list[Ending] = field(default_factory=list)
    status: int | None = None
    headers: Headers = ()
    body: bytes | None = None
    error: str | None = None
    first_bytes: int = 0
    rejections: list[tuple[int, bytes]] = field(default_factory=list)
    shortened: bytes | None = None  # what to send instead of a request that was refused for its length
    failures: list[str] = field(default_factory=list)
    begins: int = 0
    _finished: asyncio.Event = field(default_factory=asyncio.Event)

    def first_byte(self) -> None:
        self.first_bytes += 1

    def may_be_shortened(self) -> bool:
        return self.shortened is not None

    def may_be_too_long(self) -> bool:
        return self.shortened is not None

    def begun(self) -> None:
        self.begins += 1

    async def shorter(self, status: int, headers: Headers, body: bytes) -> Shorter | None:
        return Shorter(self.shortened) if b"context_length_exceeded" in body else None

    def refused_again(self, why: str) -> None:
        self.failures.append(why)

    def fall_back(self, status: int, body: bytes) -> None:
        self.rejections.append((status, body))

    def finish(
        self, ending: Ending, *, status: int | None, headers: Headers, body: bytes | None, error: str | None = None
    ) -> None:
        self.endings.append(ending)
        self.status, self.headers, self.body, self.error = status, headers, body, error
        self._finished.set()

    async def finished(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._finished.wait()


class FakeConversations:
    """`rewrite` gives the body to send instead, or None to leave the request alone."""

    def __init__(self, rewrite: Callable[[Arrival], bytes | None] = lambda _: None, *, detach: bool = False) -> None:
        self.arrivals: list[Arrival] = []
        self.exchanges: list[RecordedExchange] = []
        self.closed = 0
        self._rewrite = rewrite
        self._detach = detach

    @property
    def exchange(self) -> RecordedExchange:
        return self.exchanges[-1]

    async def admit(self, arrival: Arrival) -> Plan:
        self.arrivals.append(arrival)
        self.exchanges.append(RecordedExchange())
        return Plan(self._rewrite(arrival), self.exchange, self._detach)

    def health(self) -> dict[str, object]:
        return {"state": "ok", "queue": 0}

    async def ready(self) -> None:
        """There is no archive to wait for."""

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed += 1
