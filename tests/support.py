"""A real proxy in this process: real sockets, real server, the application as it ships."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette

from proxy.metrics import Meters
from proxy.ports import Conversations
from proxy.server import Server, bind
from proxy.settings import Settings
from proxy.wiring import open_app


@dataclass(frozen=True, slots=True)
class RunningProxy:
    port: int
    settings: Settings
    app: Starlette
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def running_proxy(
    settings: Settings,
    conversations: Conversations | None = None,
    *,
    clock: Callable[[], float] = time.time,
    meters: Meters | None = None,
) -> AsyncIterator[RunningProxy]:
    """Serve on a free port. At the end, open streams get `should_exit`, and whatever is left is cancelled."""
    listener = bind("127.0.0.1", 0)
    settings = msgspec.structs.replace(settings, port=listener.getsockname()[1])
    async with open_app(settings, conversations, clock, meters) as app:
        server = _TestServer(app)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await server.ready.wait()
            yield RunningProxy(settings.port, settings, app, server)
        finally:
            server.stop()
            for left in list(server.server_state.tasks):
                left.cancel()
            await task


class _TestServer(Server):
    def __init__(self, app: Starlette) -> None:
        super().__init__(app)
        self.ready = asyncio.Event()
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = self.force_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """uvicorn looks ten times a second whether it should stop; with a server for each test that adds up."""
        await self.on_tick(0)
        await self._stopped.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # Ctrl-C belongs to pytest
        return nullcontext()
