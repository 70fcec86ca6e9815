"""A client of the inspector's API, on a real proxy over a copy of the recorded archive, and that archive beside it."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from graphstore.records import ExchangeRow, SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from proxy.conversations import open_conversations
from proxy.ports import Conversations
from proxy.settings import Settings
from tests.clock import VirtualClock
from tests.inspector.conftest import Recorded
from tests.proxy.dialogue import Dialogue
from tests.support import RunningProxy, running_proxy

HOUR_S = 3600.0
UPSTREAM = "http://upstream.test/v1"
Json = dict[str, Any]


@dataclass
class Look:
    """`get` and `post` want 200 and give the JSON; `client` gives whatever comes."""

    proxy: RunningProxy
    conversations: Conversations
    client: httpx.AsyncClient
    reader: Reader
    clock: VirtualClock
    token: str
    names: dict[str, str]

    async def get(self, path: str, **parameters: object) -> Json:
        reply = await self.client.get(f"/recap/api/{path}", params=parameters or None)  # type: ignore[arg-type]
        assert reply.status_code == 200, reply.text
        found: Json = reply.json()
        return found

    async def send(self, path: str, body: object) -> httpx.Response:
        return await self.client.post(f"/recap/api/{path}", json=body, headers={"x-recap-token": self.token})

    async def post(self, path: str, body: object) -> Json:
        reply = await self.send(path, body)
        assert reply.status_code == 200, reply.text
        found: Json = reply.json()
        return found

    async def refusal(self, path: str, **parameters: object) -> tuple[int, str, str]:
        """Status, code and sentence of what is not there or cannot be."""
        return said(await self.client.get(f"/recap/api/{path}", params=parameters or None))  # type: ignore[arg-type]

    def session(self, client_id: str) -> SessionRow:
        return next(row for row in self.reader.list_sessions() if row.client_id == client_id)

    def exchanges(self, client_id: str) -> list[ExchangeRow]:
        return self.reader.session_exchanges(self.session(client_id).id)


def said(reply: httpx.Response) -> tuple[int, str, str]:
    error = reply.json()["error"]
    assert error["type"] == "recap_proxy_error" and error["param"] is None
    return reply.status_code, error["code"], error["message"]


@asynccontextmanager
async def looking(
    recorded: Recorded, folder: Path, *, later_s: float = HOUR_S, upstream: str = UPSTREAM, **changes: Any
) -> AsyncIterator[Look]:
    """So long after the last request of the recorded archive; a proxy that writes to a copy of it."""
    database = folder / "recap.db"
    shutil.copyfile(recorded.path, database)
    async with looking_at(database, VirtualClock(recorded.now + later_s), upstream=upstream, **changes) as look:
        look.names = recorded.names
        yield look


@asynccontextmanager
async def looking_at(
    database: Path | str, clock: VirtualClock, *, upstream: str = UPSTREAM, **changes: Any
) -> AsyncIterator[Look]:
    given: dict[str, Any] = {"mode": "idle", "upstream": upstream, "db": str(database), "min_history_tokens": 0}
    settings = Settings(**(given | changes))
    conversations = open_conversations(settings, clock)
    async with (
        running_proxy(settings, conversations, clock=clock) as proxy,
        httpx.AsyncClient(base_url=proxy.url) as client,
    ):
        token = (await client.get("/recap/api/self")).json()["token"]
        with open_reader(database) as reader:
            yield Look(proxy, conversations, client, reader, clock, token, {})


@asynccontextmanager
async def looking_after(dialogue: Dialogue, **changes: Any) -> AsyncIterator[Look]:
    """At what a dialogue left behind, with its settings. Ends the dialogue."""
    await dialogue.close()
    async with looking_at(dialogue.settings.db, dialogue.clock, **(dialogue.changes | changes)) as look:
        yield look
