"""The proxy's own session logic over an archive of its own, with a client and an upstream that are made up.

What plans, selects, rewrites and writes is what serves. The clock is moved by hand; nobody waits and no socket opens.
"""

import json
import logging
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from graphstore.selectors import SelectorName
from graphstore.store.archive import Archive
from proxy.conversations import ArchivedConversations, open_conversations
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName
from proxy.lab.compaction import wire
from proxy.lab.compaction.histories import History
from proxy.lab.errors import LabError
from proxy.ports import Arrival, Plan
from proxy.settings import Settings

STARTS_AT = 1_800_000_000.0  # any time does
STEP_S = 5.0  # between an answer and what the client sends next
FILE = "recap.db"
SYSTEM = "You are a coding agent."
_SCANNER = json.JSONDecoder()


class Clock:
    """Seconds since the epoch; moved by hand."""

    def __init__(self, now: float = STARTS_AT) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Served:
    """One request: what the client sent and what the upstream was sent."""

    dialect: DialectName
    original: bytes
    sent: bytes
    is_cold: bool  # the client had been away for longer than the cache is believed to live

    @cached_property
    def client(self) -> list[bytes]:
        """The client's messages, the instructions first."""
        return messages_in(self.dialect, self.original)

    @cached_property
    def upstream(self) -> list[bytes]:
        return messages_in(self.dialect, self.sent)

    @property
    def is_rewritten(self) -> bool:
        return self.sent != self.original


def messages_in(dialect: DialectName, body: bytes) -> list[bytes]:
    """Raw messages of a body, by a reader that is not the proxy's."""
    text = members_of(body)[wire.FIELDS[dialect]].decode()
    found, place = [], _after_space(text, 1)
    while text[place] != "]":
        end = _SCANNER.raw_decode(text, place)[1]
        found.append(text[place:end].encode())
        place = _after_space(text, end)
        place = _after_space(text, place + 1) if text[place] == "," else place
    return found


def members_of(body: bytes) -> dict[str, bytes]:
    """Raw members of a body."""
    text = body.decode()
    found, place = {}, _after_space(text, 1)
    while text[place] != "}":
        name, end = _SCANNER.raw_decode(text, place)
        start = _after_space(text, _after_space(text, end) + 1)
        end = _SCANNER.raw_decode(text, start)[1]
        found[name] = text[start:end].encode()
        place = _after_space(text, end)
        place = _after_space(text, place + 1) if text[place] == "," else place
    return found


def _after_space(text: str, place: int) -> int:
    while text[place] in " \t\r\n":
        place += 1
    return place


@dataclass(frozen=True, slots=True)
class Lab:
    """What every case is given: the user's settings, an empty archive, a folder that lasts as long as the run."""

    settings: Settings
    archive: bytes
    folder: Path
    seed: int

    def settings_for(self, selector: SelectorName, path: Path) -> Settings:
        """The user's own parameters; what belongs to this machine or would keep histories whole is set aside."""
        return msgspec.structs.replace(
            self.settings,
            db=str(path),
            upstream="http://127.0.0.1:9/v1",
            mode="idle",
            selector=selector,
            min_history_tokens=0,
            context_window_tokens=0,
            attention="off",
        )

    def lay_out(self, folder: Path) -> Path:
        """An empty archive. Its secret, and with it the names of sessions and what is drawn by them, is the seed's."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        path.write_bytes(self.archive)
        database = sqlite3.connect(path)
        with database:
            secret = sha256(f"compaction|{self.seed}".encode()).digest()
            database.execute("UPDATE meta SET value = ? WHERE key = 'secret'", (secret,))
        database.close()
        return path

    @contextmanager
    def place(self) -> Iterator[Path]:
        """A folder with an empty archive, gone afterwards."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            self.lay_out(Path(name))
            yield Path(name)


@contextmanager
def open_lab(settings: Settings, seed: int) -> Iterator[Lab]:
    """What the session logic warns of is part of what is tested, and not for the terminal."""
    logging.getLogger("proxy").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory(prefix="recap-eval-") as name:
        path = Path(name) / "empty.db"
        Archive.open(path).close()
        yield Lab(settings, path.read_bytes(), Path(name), seed)


class Bench:
    """One client's view of a proxy. `more` are further members of every request."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        *,
        dialect: DialectName = "chat",
        tools: Sequence[str] = ("read", "grep", "bash", "edit"),
        more: dict[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock or Clock()
        self.dialect: DialectName = dialect
        self.log: list[Served | None] = []  # None: one that its case has let go
        self.plan: Plan | None = None  # of the last request
        self._tools = json.dumps(wire.tools_of(dialect, tools)).encode()
        self._head = json.dumps({"model": "model", **(more or {})})[:-1].encode()
        self._open()

    def _open(self) -> None:
        opened = open_conversations(self.settings, self.clock)
        if not isinstance(opened, ArchivedConversations):
            raise LabError(f"the scratch archive {self.settings.db!r} cannot be used: {opened.health()['problem']}")
        self.conversations = opened

    @property
    def gap_s(self) -> float:
        """A pause after which the cache is believed cold."""
        return self.settings.idle_after + 60.0

    def body_of(self, messages: Sequence[bytes]) -> bytes:
        """A request with instructions and tools of the lab's own, and these messages."""
        field = wire.FIELDS[self.dialect].encode()
        system = wire.encoded({"role": "system", "content": SYSTEM})
        array = b",".join([system, *messages])
        return self._head + b',"' + field + b'":[' + array + b'],"tools":' + self._tools + b"}"

    async def send(
        self,
        messages: Sequence[bytes],
        *,
        after_s: float = STEP_S,
        who: str = "client",
        answer: Sequence[bytes] = (),
        finish: bool = True,
    ) -> Served:
        """One request after a pause, answered at once. `who` is the account: no history is shared between two."""
        self.clock.now += after_s
        body = self.body_of(messages)
        headers = ((b"authorization", f"Bearer {who}".encode()),)
        plan = await self.conversations.admit(Arrival(self.dialect, wire.PATHS[self.dialect], headers, body))
        if plan.exchange is None:
            raise LabError(f"a request was not archived ({self.conversations.health()['problem']})")
        served = Served(self.dialect, body, plan.body or body, after_s >= self.settings.idle_after)
        self.log.append(served)
        self.plan = plan
        if finish:
            self.finish(answer)
        return served

    def finish(self, answer: Sequence[bytes] = ()) -> None:
        """The upstream answers the last request."""
        assert self.plan is not None and self.plan.exchange is not None
        self.plan.exchange.first_byte()
        body = wire.answer_body(self.dialect, answer or (wire.said(self.dialect, "ok"),))
        headers = [(b"content-type", b"application/json")]
        self.plan.exchange.finish("complete", status=200, headers=headers, body=body)

    async def come_back(self, history: History, *request: bytes, who: str = "client") -> Served:
        """The client's last request of a history, and after a long pause what the user then asks."""
        end = len(history.messages) - trailing_answer(history)
        await self.send(history.messages[:end], who=who, answer=history.messages[end:])
        return await self.send((*history.messages, *request), who=who, after_s=self.gap_s)

    async def restart(self) -> None:
        await self.conversations.close()
        self._open()

    async def close(self) -> None:
        await self.conversations.close()


def trailing_answer(history: History) -> int:
    """Messages at the end of a history that the upstream said last, and no client has sent yet; in chat at most one."""
    count = 0
    for role in reversed(history.roles[-1:] if history.dialect == "chat" else history.roles):
        if role not in ("assistant", "reasoning"):
            break
        count += 1
    return count
