"""The product's own application in this process, on a free port, over an archive that goes when the study ends."""

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from graphstore.records import ExchangeRow
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from proxy.attention import attention_health, why_none
from proxy.commands.serve import worker_environ
from proxy.conversations import ArchivedConversations, WithoutArchive, open_conversations
from proxy.lab.errors import LabError
from proxy.server import Server, bind
from proxy.settings import Settings
from proxy.supervisor import Supervisor, worker_command
from proxy.wiring import open_app

POLL_S = 0.05  # of the archive, while a replay is awaited
STUCK = frozenset({"off", "missing", "dead", "stopped"})  # no replay will come


@dataclass(frozen=True, slots=True)
class OwnProxy:
    url: str
    settings: Settings
    conversations: ArchivedConversations | WithoutArchive
    reader: Reader

    async def exchanges(self, client_id: str) -> list[ExchangeRow]:
        """What became of each request of a conversation, in order, once all have ended."""
        while True:
            await self.conversations.flush()
            sessions = [s for s in self.reader.list_sessions() if s.client_id == client_id]
            rows = sorted((e for s in sessions for e in self.reader.session_exchanges(s.id)), key=lambda e: e.id)
            if all(row.ending != "running" for row in rows):
                return rows
            await asyncio.sleep(POLL_S)

    async def replayed(self, client_id: str) -> None:
        """Wait until every finished turn of a conversation has been replayed. Raises `LabError` when none will be."""
        await self.exchanges(client_id)
        sessions = [s.id for s in self.reader.list_sessions() if s.client_id == client_id]
        while True:
            jobs = [job for session in sessions for job in self.reader.load_jobs(session)]
            if failed := [job for job in jobs if job.state == "failed"]:
                raise LabError(f"a turn could not be replayed: {failed[0].error}")
            if all(job.state == "done" for job in jobs):
                return
            health = attention_health(self.reader, self.settings)
            if health["state"] in STUCK or health["problem"]:
                raise LabError(f"turns cannot be replayed: {health['problem']}; {health['remedy']}")
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def own_proxy(settings: Settings, *, replays: bool) -> AsyncIterator[OwnProxy]:
    """These settings, but for where it listens and what it writes to. `replays`: with a worker for the local model."""
    if replays and (absent := why_none(settings)):
        raise LabError(f"turns cannot be replayed: {absent[0]}; {absent[1]}")
    with tempfile.TemporaryDirectory(prefix="recap-lab-") as folder, bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        changed = msgspec.structs.replace(
            settings,
            host="127.0.0.1",
            port=port,
            proxy_key="",
            db=str(Path(folder) / "recap.db"),
            attention=settings.attention if replays else "off",
        )
        conversations = await asyncio.to_thread(open_conversations, changed, time.time)
        async with open_app(changed, conversations) as app, _served(app, listener):
            with open_reader(changed.db) as reader:
                async with _worker(changed) if replays else contextlib.nullcontext():
                    yield OwnProxy(f"http://127.0.0.1:{port}", changed, conversations, reader)


@asynccontextmanager
async def _served(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    server = _Server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.ready.wait()
        yield
    finally:
        server.should_exit = server.force_exit = True
        await serving


class _Server(Server):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # Ctrl-C ends the study
        return nullcontext()


@asynccontextmanager
async def _worker(settings: Settings) -> AsyncIterator[None]:
    supervisor = Supervisor(worker_command(), worker_environ(settings, os.environ), clock=time.monotonic)
    supervisor.start()
    try:
        yield
    finally:
        await supervisor.stop()
