"""The proxy's own session logic over a scratch archive, with a client and an upstream that are made up.

What plans, selects, rewrites and writes is what serves. The clock is moved by hand; nobody waits and no socket opens.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from graphstore.selectors import SelectorName
from proxy.conversations import ArchivedConversations, open_conversations
from proxy.dialects.base import DialectName
from proxy.lab.compaction import histories
from proxy.lab.compaction.histories import History
from proxy.lab.drive import STEP_S, Clock, laid_out
from proxy.lab.errors import LabError
from proxy.ports import Arrival, Plan
from proxy.settings import Settings

PATHS: dict[DialectName, str] = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}
FIELDS: dict[DialectName, str] = {"chat": "messages", "responses": "input"}
SYSTEM = b'{"role":"system","content":"You are a coding agent."}'
TOOLS = ("read", "grep", "bash", "edit")
_SCANNER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n,:]*")


@dataclass(frozen=True)
class Served:
    """One request: what the client sent and what the upstream was sent."""

    dialect: DialectName
    original: bytes
    sent: bytes
    is_cold: bool = False  # the client had been away for longer than the cache is believed to live

    @cached_property
    def client(self) -> list[bytes]:
        """The client's messages, the instructions first."""
        return self._messages(self.original)

    @cached_property
    def upstream(self) -> list[bytes]:
        return self._messages(self.sent)

    @property
    def is_rewritten(self) -> bool:
        return self.sent != self.original

    def _messages(self, body: bytes) -> list[bytes]:
        return _values(members_of(body)[FIELDS[self.dialect]])


def members_of(body: bytes) -> dict[str, bytes]:
    """Raw members of a JSON object."""
    values = _values(body)
    return {json.loads(name): value for name, value in zip(values[::2], values[1::2], strict=True)}


def _values(container: bytes) -> list[bytes]:
    """Raw values of a JSON array, or names and values of an object. The reader that the proxy uses would be no witness:
    this one also takes what a strict one refuses, as half a surrogate pair.
    """
    text = container.decode().strip()
    found, place = [], _after_space(text, 1)
    while place < len(text) - 1:
        end = _SCANNER.raw_decode(text, place)[1]
        found.append(text[place:end].encode())
        place = _after_space(text, end)
    return found


def _after_space(text: str, place: int) -> int:
    """Past blanks and what stands between two values."""
    match = _SPACE.match(text, place)
    return match.end() if match else place


@dataclass(frozen=True, slots=True)
class Lab:
    """What every case is given: the user's settings, the bytes of an empty archive, a seed."""

    settings: Settings
    archive: bytes
    seed: int

    def settings_for(self, selector: SelectorName, path: Path) -> Settings:
        """The user's own parameters; what belongs to this machine or would keep histories whole is set aside."""
        return msgspec.structs.replace(
            self.settings,
            db=str(path),
            upstream="http://127.0.0.1:9/v1",
            mode="idle",
            selector=selector,
            seed=self.seed,
            min_history_tokens=0,
            context_window_tokens=0,
            attention="off",
            holdout=0.0,
        )

    @contextmanager
    def place(self, selector: SelectorName) -> Iterator[Settings]:
        """Settings with an empty archive of their own, gone afterwards."""
        with laid_out(self.archive, f"compaction|{self.seed}") as path:
            yield self.settings_for(selector, path)

    @asynccontextmanager
    async def bench(self, selector: SelectorName, dialect: DialectName = "chat") -> AsyncIterator["Bench"]:
        with self.place(selector) as settings:
            bench = Bench(settings, dialect=dialect)
            try:
                yield bench
            finally:
                await bench.close()


def gap_of(settings: Settings) -> float:
    return settings.idle_after + 60.0


class Bench:
    """One client's view of a proxy."""

    def __init__(self, settings: Settings, clock: Clock | None = None, *, dialect: DialectName = "chat") -> None:
        self.settings = settings
        self.clock = clock or Clock()
        self.dialect: DialectName = dialect
        self.log: list[Served | None] = []  # None: one that its case has let go
        self._plan: Plan | None = None
        self._tools = json.dumps(_tools_of(dialect)).encode()
        self._open()

    def _open(self) -> None:
        opened = open_conversations(self.settings, self.clock)
        if not isinstance(opened, ArchivedConversations):
            raise LabError(f"the scratch archive {self.settings.db!r} cannot be used: {opened.health()['problem']}")
        self.conversations = opened

    @property
    def gap_s(self) -> float:
        """A pause after which the cache is believed cold."""
        return gap_of(self.settings)

    def body_of(self, messages: Sequence[bytes]) -> bytes:
        """A request with instructions and tools of the lab's own, and these messages."""
        array = b",".join([SYSTEM, *messages])
        return b'{"model":"m","%s":[%s],"tools":%s}' % (FIELDS[self.dialect].encode(), array, self._tools)

    async def plan(self, messages: Sequence[bytes], *, after_s: float = STEP_S, who: str = "client") -> Served:
        """What goes upstream after a pause. `who` is the account: no history is shared between two."""
        self.clock.now += after_s
        body = self.body_of(messages)
        headers = ((b"authorization", f"Bearer {who}".encode()),)
        plan = await self.conversations.admit(Arrival(self.dialect, PATHS[self.dialect], headers, body))
        if plan.exchange is None:
            raise LabError(f"a request was not archived ({self.conversations.health()['problem']})")
        self._plan = plan
        served = Served(self.dialect, body, plan.body or body, after_s >= self.settings.idle_after)
        self.log.append(served)
        return served

    def first_byte(self) -> None:
        """Of the answer to the last request."""
        assert self._plan is not None and self._plan.exchange is not None
        self._plan.exchange.first_byte()

    def finish(self, answer: Sequence[bytes] = ()) -> None:
        """The answer to the last request is complete."""
        assert self._plan is not None and self._plan.exchange is not None
        body = _answer_body(self.dialect, answer or (histories.said(self.dialect, "ok"),))
        self._plan.exchange.finish("complete", status=200, headers=[(b"content-type", b"application/json")], body=body)

    async def send(
        self, messages: Sequence[bytes], *, after_s: float = STEP_S, who: str = "client", answer: Sequence[bytes] = ()
    ) -> Served:
        """One request, answered at once."""
        served = await self.plan(messages, after_s=after_s, who=who)
        self.first_byte()
        self.finish(answer)
        return served

    async def come_back(self, history: History, *request: bytes, who: str = "client") -> Served:
        """The client's last request of a history, and after a long pause what the user then asks."""
        end = len(history.messages) - _trailing_answer(history)
        await self.send(history.messages[:end], who=who, answer=history.messages[end:])
        return await self.send((*history.messages, *request), who=who, after_s=self.gap_s)

    async def restart(self) -> None:
        await self.close()
        self._open()

    async def close(self) -> None:
        await self.conversations.close()


def _trailing_answer(history: History) -> int:
    """Messages at the end of a history that the upstream said last, and no client has sent yet; in chat at most one."""
    count = 0
    for role in reversed(history.roles[-1:] if history.dialect == "chat" else history.roles):
        if role not in ("assistant", "reasoning"):
            break
        count += 1
    return count


def _tools_of(dialect: DialectName) -> list[dict[str, Any]]:
    anything = {"type": "object", "properties": {}, "additionalProperties": True}
    functions = [{"name": name, "description": f"The tool {name}.", "parameters": anything} for name in TOOLS]
    if dialect == "chat":
        return [{"type": "function", "function": function} for function in functions]
    return [{"type": "function", **function} for function in functions]


def _answer_body(dialect: DialectName, answer: Sequence[bytes]) -> bytes:
    """A complete response whose message or items these are."""
    if dialect == "chat":
        choice = b'{"index":0,"finish_reason":"stop","message":' + answer[0] + b"}"
        return b'{"id":"a","object":"chat.completion","choices":[' + choice + b"]}"
    return b'{"id":"a","object":"response","status":"completed","output":[' + b",".join(answer) + b"]}"
