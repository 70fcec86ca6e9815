"""A client without HTTP: sends histories to the session logic and looks at what the archive made of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from graphstore.records import ExchangeRow, SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.verify import Finding, verify
from proxy.commands.verify import recut
from proxy.conversations import open_conversations
from proxy.dialects.base import DialectName
from proxy.ports import Arrival, Plan
from proxy.settings import Settings
from tests.archives import lay_out_archive
from tests.clock import VirtualClock

Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "You are a coding agent."}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
LUNCH_S = 4000.0
PATHS: dict[DialectName, str] = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}
FIELDS: dict[DialectName, str] = {"chat": "messages", "responses": "input"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def read(path: str, text: str, call_id: str = "call_0") -> list[Message]:
    """A step that reads a file: the call and its result."""
    arguments = json.dumps({"filePath": path})
    call = {"id": call_id, "type": "function", "function": {"name": "read", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": text},
    ]


def turn(request: str, name: str, size: int = 3000) -> list[Message]:
    """A whole turn: a request, one file read with an identifier of its own, an answer."""
    return [
        user(request),
        *read(f"{name}.py", f"def unique_{name}(): pass\n" + "filler text " * (size // 12)),
        said("ok"),
    ]


@dataclass
class Reply:
    plan: Plan
    original: bytes

    @property
    def sent(self) -> bytes:
        return self.plan.body if self.plan.body is not None else self.original

    @property
    def messages(self) -> list[Message]:
        body = msgspec.json.decode(self.sent)
        found: list[Message] = body.get("messages") or body["input"]
        return found

    @property
    def rewritten(self) -> bool:
        return self.plan.body is not None

    @property
    def text(self) -> str:
        return self.sent.decode()


@dataclass
class Dialogue:
    """One proxy's session logic over one database. `headers` are those of the client under test."""

    folder: Path
    clock: VirtualClock = field(default_factory=VirtualClock)
    changes: dict[str, Any] = field(default_factory=dict)
    dialect: DialectName = "chat"

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"mode": "idle", "upstream": "http://upstream.test/v1", "min_history_tokens": 0}
        self.settings = Settings(**(given | {"db": str(self.folder / "recap.db")} | self.changes))
        lay_out_archive(Path(self.settings.db))
        self.conversations = open_conversations(self.settings, self.clock)

    async def send(
        self,
        history: Sequence[Message],
        *,
        headers: dict[str, str] | None = None,
        system: Message | None = SYSTEM,
        tools: list[dict[str, Any]] | None = TOOLS,
        answer: Message | None = None,
        after_s: float = 5.0,
        finish: bool = True,
        reject: int | None = None,
        status: int = 200,
        model: str = "gpt-test",
        more: dict[str, Any] | None = None,
        usage: dict[str, int] | None = None,
    ) -> Reply:
        """Send one request after a pause and let the upstream answer it at once."""
        self.clock.advance(after_s)
        body: dict[str, Any] = {"model": model, FIELDS[self.dialect]: [*([system] if system else []), *history]}
        body |= {"tools": tools} if tools else {}
        raw = json.dumps(body | (more or {})).encode()
        given = {"authorization": "Bearer canary-key"} | (headers or {})
        pairs = [(name.encode(), value.encode()) for name, value in given.items()]
        plan = await self.conversations.admit(Arrival(self.dialect, PATHS[self.dialect], pairs, raw))
        if finish:
            self.finish(plan, answer or said("ok"), reject=reject, status=status, tokens=usage)
        return Reply(plan, raw)

    def finish(
        self,
        plan: Plan,
        answer: Message,
        *,
        reject: int | None = None,
        status: int = 200,
        tokens: dict[str, int] | None = None,
    ) -> None:
        if plan.exchange is None:
            return
        if reject is not None and plan.body is not None:
            plan.exchange.fall_back(reject, b'{"error":{"message":"no"}}')
        plan.exchange.first_byte()
        counted = {"prompt_tokens": 100, "cached": 0} | (tokens or {})
        cached = {"cached_tokens": counted.pop("cached")}
        usage = {**counted, "completion_tokens": 1, "prompt_tokens_details": cached}
        if self.dialect == "chat":
            body: dict[str, Any] = {
                "id": "c",
                "usage": usage,
                "choices": [{"message": answer, "finish_reason": "stop"}],
            }
        else:
            content = [{"type": "output_text", "text": answer["content"]}]
            body = {"id": "r", "status": "completed", "output": [{"type": "message", "content": content} | answer]}
        plan.exchange.finish(
            "complete", status=status, headers=[(b"content-type", b"application/json")], body=json.dumps(body).encode()
        )

    async def restart(self, **changes: Any) -> None:
        await self.conversations.close()
        self.changes |= changes
        self.__post_init__()

    async def close(self) -> None:
        await self.conversations.close()

    async def outcomes(self) -> list[str]:
        return [row.outcome for row in await self.exchanges()]

    async def exchanges(self) -> list[ExchangeRow]:
        """All exchanges of all sessions in order. Closes the session logic: ask last."""
        await self.close()
        with open_reader(self.settings.db) as reader:
            rows = [row for s in reader.list_sessions() for row in reader.session_exchanges(s.id)]
            return sorted(rows, key=lambda row: row.id)

    async def sessions(self) -> list[SessionRow]:
        await self.close()
        with open_reader(self.settings.db) as reader:
            return sorted(reader.list_sessions(), key=lambda row: row.id)

    async def findings(self) -> list[Finding]:
        await self.close()
        with open_reader(self.settings.db) as reader:
            return verify(reader, recut)
