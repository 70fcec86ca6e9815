"""One client connection for the length of one request, over ASGI.

Knows when the client has gone. Only one place may wait for ASGI events at a time: the body while it is read, after that
a listener whose sole job is to notice the end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from proxy.errors import ClientGone
from proxy.ports import Headers


class ClientConnection:
    """`gone`: the client has left, and what is written is lost in silence. `started`: a status has gone out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: Headers = scope["headers"]
        self.gone = False
        self.started = False
        self._receive = receive
        self._send = send
        self._body_read = False
        self._watched: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def body(self) -> AsyncIterator[bytes]:
        """What is still unread of the request's body. Raises ClientGone."""
        while not self._body_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._leave()
                raise ClientGone
            self._body_read = not message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        if self._watched is not None:
            self._listen()

    @asynccontextmanager
    async def watch(self, *, detach: bool) -> AsyncIterator[None]:
        """Cancel what runs inside and raise ClientGone as soon as the client leaves.

        With `detach` the inside runs on: whoever left is only noted. A cancellation from elsewhere passes through.
        """
        task = asyncio.current_task()
        assert task is not None
        self._watched = None if detach else task
        if self._body_read:
            self._listen()
        try:
            yield
        except asyncio.CancelledError:
            if not self.gone or detach or task.uncancel() > 0:
                raise
            raise ClientGone from None
        finally:
            self._watched = None
            if self._listener is not None:
                self._listener.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, chunk: bytes) -> None:
        """Waits while the client reads more slowly than we write."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """A whole JSON answer of our own."""
        framing = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.start(status, [*framing, *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = asyncio.create_task(self._await_end())

    async def _await_end(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.gone = True
        if self._watched is not None:
            self._watched.cancel()
