"""An upstream at socket level: records exactly what it received and answers exactly what the test says.

A test gives one script per request, in order; the last one serves all further requests. A script is a coroutine
function that takes the `Call` and writes raw bytes. Nothing here speaks HTTP beyond finding where a request ends.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

DEADLINE_S = 10.0


@dataclass(slots=True)
class Call:
    """One received request and the means to answer it."""

    head: bytes
    writer: asyncio.StreamWriter
    closed: asyncio.Event  # set when the other side closes the connection
    body: bytes = b""

    @property
    def line(self) -> bytes:
        """`POST /v1/x HTTP/1.1`, as received."""
        return self.head.split(b"\r\n", 1)[0]

    @property
    def target(self) -> bytes:
        return self.line.split(b" ")[1]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """In order, case kept, duplicates kept."""
        lines = self.head.split(b"\r\n")[1:]
        return [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines if line)]

    def header(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]

    def unchunked(self) -> bytes:
        """The body without its chunk lines."""
        plain, rest = b"", self.body
        while size := int(rest.partition(b"\r\n")[0], 16):
            rest = rest.partition(b"\r\n")[2]
            plain, rest = plain + rest[:size], rest[size + 2 :]
        return plain

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with suppress(ConnectionError):
            await self.writer.drain()

    def abort(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Call], Awaitable[None]]


def response(body: bytes = b"{}", *, status: bytes = b"200 OK", headers: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    """A whole answer with its length."""
    fields = (*headers, (b"Content-Length", str(len(body)).encode()))
    return b"HTTP/1.1 " + status + b"\r\n" + b"".join(k + b": " + v + b"\r\n" for k, v in fields) + b"\r\n" + body


def answering(data: bytes) -> Script:
    """Send `data` and keep the connection."""

    async def script(call: Call) -> None:
        await call.send(data)

    return script


def cutting(data: bytes) -> Script:
    """Send `data`, then close."""

    async def script(call: Call) -> None:
        await call.send(data)
        call.writer.close()

    return script


async def stalling(call: Call) -> None:
    """Say nothing until the other side gives up."""
    await call.closed.wait()


class RawUpstream:
    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts) or [answering(response())]
        self.calls: list[Call] = []
        self.connections = 0  # so far
        self.open = 0
        self.port = 0
        self._arrived = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def call(self, index: int = 0) -> Call:
        """Request number `index`, as soon as it has come in whole."""
        async with asyncio.timeout(DEADLINE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) > index)
        return self.calls[index]

    async def connected(self, open_count: int) -> None:
        """Until so many connections are open."""
        async with asyncio.timeout(DEADLINE_S), self._arrived:
            await self._arrived.wait_for(lambda: self.open == open_count)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, closed: asyncio.Event) -> None:
        """One connection, request after request, until either side closes it."""
        self.connections += 1
        await self._count(1)
        try:
            while not (closed.is_set() or writer.is_closing()):
                call = Call((await reader.readuntil(b"\r\n\r\n"))[:-4], writer, closed)
                call.body = await _read_body(reader, call)
                script = self.scripts[min(len(self.calls), len(self.scripts) - 1)]
                async with self._arrived:
                    self.calls.append(call)
                    self._arrived.notify_all()
                await script(call)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            await self._count(-1)

    async def _count(self, change: int) -> None:
        async with self._arrived:
            self.open += change
            self._arrived.notify_all()


class _Connection(asyncio.StreamReaderProtocol):
    """A stream pair that also tells at once when the other side closes, read or not."""

    def __init__(self, upstream: RawUpstream) -> None:
        self.gone = asyncio.Event()
        self.transport: asyncio.BaseTransport | None = None
        reader = asyncio.StreamReader(limit=1 << 26)
        super().__init__(reader, lambda r, w: upstream.serve(r, w, self.gone))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        super().connection_made(transport)

    def abort(self) -> None:
        self.gone.set()
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()

    def eof_received(self) -> bool | None:
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


async def _read_body(reader: asyncio.StreamReader, call: Call) -> bytes:
    """Identity or chunked framing; for the latter the bytes as received, chunk lines included."""
    if call.header(b"transfer-encoding"):
        body = b""
        size = -1
        while size != 0:
            line = await reader.readuntil(b"\r\n")
            size = int(line, 16)
            body += line + await reader.readexactly(size + 2)
        return body
    length = call.header(b"content-length")
    return await reader.readexactly(int(length[0])) if length else b""


@asynccontextmanager
async def raw_upstream(*scripts: Script) -> AsyncIterator[RawUpstream]:
    """A listening upstream on a free port. Scripts that still wait at the end are told that the other side has gone."""
    upstream = RawUpstream(*scripts)
    connections: list[_Connection] = []

    def connect() -> _Connection:
        connections.append(_Connection(upstream))
        return connections[-1]

    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
    upstream.port = server.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()
        for connection in connections:
            connection.abort()
