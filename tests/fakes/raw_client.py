"""A client at socket level: sends exactly what the test says and can vanish at any moment."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes  # as framed: chunk lines included
    head: bytes

    def header(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


def request(
    path: str,
    body: bytes | None = None,
    *,
    method: str = "POST",
    headers: Sequence[tuple[str, str]] = (),
    host: str | None = "127.0.0.1",
) -> bytes:
    """A request; a body gets its length unless `headers`, which stay as given, frame it already."""
    fields = [*([("Host", host)] if host is not None else []), *headers]
    framed = any(name.lower() in ("content-length", "transfer-encoding") for name, _ in fields)
    if body is not None and not framed:
        fields.append(("Content-Length", str(len(body))))
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields) + "\r\n"
    return head.encode("latin-1") + (body or b"")


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def until(self, mark: bytes) -> bytes:
        """Read up to and including `mark`. Raises IncompleteReadError when the connection ends before."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.readuntil(mark)

    async def exactly(self, size: int) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.readexactly(size)

    async def rest(self) -> bytes:
        """Everything until the connection ends."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.read()

    async def reply(self) -> Reply:
        """One whole answer; its body to the length it names, to its last chunk, or to the end."""
        head = (await self.until(b"\r\n\r\n"))[:-4]
        first, *lines = head.split(b"\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        reply = Reply(int(first.split(b" ")[1]), headers, b"", head)
        async with asyncio.timeout(DEADLINE_S):
            if length := reply.header(b"content-length"):
                body = await self._reader.readexactly(int(length[0]))
            elif reply.header(b"transfer-encoding"):
                body = await self._reader.readuntil(b"0\r\n\r\n")
            else:
                body = b"" if reply.status in (204, 304) else await self._reader.read()
        return Reply(reply.status, headers, body, head)

    def vanish(self) -> None:
        """As a killed process would: the connection is reset."""
        self._writer.transport.abort()


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(port: int, data: bytes) -> Reply:
    """One request on a connection of its own."""
    async with raw_client(port) as client:
        await client.send(data)
        return await client.reply()
