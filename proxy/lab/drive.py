"""Drives a recorded session through the proxy's own session logic, on a clock that is moved by hand.

`Conversations` is the one that serves (identification, boundary, selection, guard, archive); what stands around it is
made up: the client sends the recorded history, the upstream gives the recorded answer at once, with the usage that a
simulated cache makes of what was sent. No socket is opened and nobody waits.
"""

import json
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from graphstore.records import ExchangeRow, SelectionRow
from graphstore.selectors import oracle
from graphstore.store.archive import Archive, open_reader
from graphstore.store.report import selection_of
from graphstore.store.tokens import count_tokens
from proxy.conversations import open_conversations
from proxy.lab.coverage import evidence, read_identifiers
from proxy.lab.errors import LabError
from proxy.lab.provider_cache import ProviderCache
from proxy.lab.recordings import CHAT, Recording
from proxy.ports import Arrival
from proxy.settings import Settings

STARTS_AT = 1_800_000_000.0  # any time does
STEP_S = 5.0  # between an answer and the result of what it called
FRAME_TOKENS = 4  # what a message costs beside its words, about what chat templates add
OWN_ROLES = frozenset({"assistant", "call"})
PATH = "/v1/chat/completions"
FILE = "recap.db"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a recording: its history, and the agent's messages that answered it."""

    messages: int
    answer: range
    turn: int  # counted from 1
    opens_turn: bool


def requests_of(recording: Recording) -> list[Request]:
    """Every request that has an answer: one before each run of the agent's own messages."""
    found: list[Request] = []
    after_leading = range(recording.leading, len(recording.roles))
    for is_own, members in groupby(after_leading, key=lambda i: recording.roles[i] in OWN_ROLES):
        run = list(members)
        if is_own and run[0] > recording.leading:
            turn = max(1, sum(start < run[0] for start in recording.turn_starts))
            opens = not found or turn > found[-1].turn
            found.append(Request(run[0], range(run[0], run[-1] + 1), turn, opens))
    return found


class Tokens:
    """Counts messages, each once: a history is sent many times."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def prompt(self, body: bytes) -> list[tuple[bytes, int]]:
        """The messages of a request body: digest and tokens."""
        sent = [bytes(raw) for raw in msgspec.json.decode(body, type=_Body).messages]
        return [(sha256(raw).digest(), self.of(raw) + FRAME_TOKENS) for raw in sent]

    def of(self, raw: bytes) -> int:
        """Tokens of what is said and called in a message."""
        if raw not in self._known:
            self._known[raw] = count_tokens(CHAT.message_text(raw)) + count_tokens(CHAT.call_text(raw))
        return self._known[raw]


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]


class Missed(NamedTuple):
    """What an agent would have had to read again for an answer that names what it was not sent. Tokens."""

    read: int  # at this request, which then takes one more
    carried: int  # read again before, and part of the context since


class Rereads:
    """Estimates what is read again, which a recorded agent never has to.

    An answer needs a left-out message when it names a code-like identifier that stands there, the latest such message
    counting, and in nothing that was sent or read again. What was read again stays until the selection changes.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._words: dict[int, frozenset[str]] = {}
        self._left_out: frozenset[int] = frozenset()
        self._read: dict[int, int] = {}

    def note(self, request: Request, left_out: frozenset[int], tokens: "Tokens") -> Missed:
        """`left_out`: message indexes that this request lacks."""
        if left_out != self._left_out:
            self._left_out, self._read = left_out, {}
        carried = sum(self._read.values())
        if not left_out:
            return Missed(0, 0)
        named = frozenset[str]().union(*(self._of(i) for i in request.answer))
        here = (i for i in range(request.messages) if i not in left_out or i in self._read)
        lacking = named.difference(*(self._of(i) for i in here))
        again = {}
        for i in sorted(left_out, reverse=True):
            if found := lacking & self._of(i):
                lacking -= found
                again[i] = tokens.of(self._recording.messages[i])
        self._read |= again
        return Missed(sum(again.values()), carried)

    def _of(self, i: int) -> frozenset[str]:
        if i not in self._words:
            text = f"{self._recording.texts[i]}\n{self._recording.calls[i]}"
            self._words[i] = read_identifiers(text, "code")
        return self._words[i]


class Future:
    """What the agent names from a request on until the user speaks again."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.request: Request | None = None  # the one that is served

    def __call__(self) -> frozenset[str]:
        if self.request is None:
            return frozenset()
        _, end = self._recording.turns()[self.request.turn - 1]
        return evidence(self._recording, self.request.messages, end, "any")


@dataclass(frozen=True, slots=True)
class Driven:
    """What the archive holds of a driven session."""

    exchanges: tuple[ExchangeRow, ...]  # one for each request
    selections: Mapping[int, SelectionRow]  # by exchange
    missed: tuple[Missed, ...]  # by request


class Clock:
    """Seconds since the epoch; moved by hand."""

    def __init__(self, now: float = STARTS_AT) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@contextmanager
def empty_archive() -> Iterator[bytes]:
    """The bytes of an archive without sessions: made once, copied for each drive."""
    with tempfile.TemporaryDirectory(prefix="recap-eval-") as folder:
        path = Path(folder) / FILE
        Archive.open(path).close()
        yield path.read_bytes()


@contextmanager
def laid_out(archive: bytes, secret: str) -> Iterator[Path]:
    """A copy on disk for one session, gone afterwards.

    An archive's secret is random, and with it a session's name and what is drawn by it: here it is made of `secret`.
    """
    with tempfile.TemporaryDirectory(prefix="recap-eval-") as folder:
        path = Path(folder) / FILE
        path.write_bytes(archive)
        database = sqlite3.connect(path)
        with database:
            database.execute("UPDATE meta SET value = ? WHERE key = 'secret'", (sha256(secret.encode()).digest(),))
        database.close()
        yield path


async def drive(
    recording: Recording,
    requests: Sequence[Request],
    pauses: Sequence[float],
    settings: Settings,
    cache: ProviderCache,
    tokens: Tokens,
    *,
    starts_at: float = STARTS_AT,
    foresees: bool = False,
) -> Driven:
    """`pauses`: seconds before each request. The archive is the one that the settings name; what it holds of earlier
    sessions must be over by `starts_at`. `foresees`: by the oracle, which knows what the turn will name, in place of
    the selector of the settings.

    Raises `LabError` when the proxy could not use it.
    """
    clock = Clock(starts_at)
    future = Future(recording)
    conversations = open_conversations(
        msgspec.structs.replace(settings, attention="off", holdout=0.0),
        clock,
        selector=oracle(future) if foresees else None,
    )
    rereads, missed = Rereads(recording), []
    digests = [sha256(raw).digest() for raw in recording.messages]
    try:
        for request, pause in zip(requests, pauses, strict=True):
            clock.now += pause
            future.request = request
            body = recording.request(request.messages).body
            plan = await conversations.admit(Arrival("chat", PATH, (), body))
            if plan.exchange is None:
                raise LabError(f"{recording.id}: a request was not archived ({conversations.health()['problem']})")
            prompt = tokens.prompt(plan.body or body)
            sent = {digest for digest, _ in prompt}
            left_out = frozenset(i for i in range(request.messages) if digests[i] not in sent)
            missed.append(rereads.note(request, left_out, tokens))
            plan.exchange.first_byte()
            plan.exchange.finish(
                "complete",
                status=200,
                headers=((b"content-type", b"application/json"),),
                body=_reply(recording, request, prompt, cache.serve(prompt, clock.now), tokens),
            )
    finally:
        await conversations.close()
    exchanges, selections = _archived(recording.id, settings.db, starts_at)
    return Driven(exchanges, selections, tuple(missed))


def _reply(
    recording: Recording, request: Request, prompt: Sequence[tuple[bytes, int]], cached: int, tokens: Tokens
) -> bytes:
    """A completion has one message: of several that were recorded in a row the last, which is what is gone on from."""
    given = sum(count for _, count in prompt)
    output = sum(tokens.of(recording.messages[i]) for i in request.answer)
    message = recording.messages[request.answer[-1]]
    calls = recording.roles[request.answer[-1]] == "call"
    usage = {
        "prompt_tokens": given,
        "completion_tokens": output,
        "total_tokens": given + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    choice = {"index": 0, "message": json.loads(message), "finish_reason": "tool_calls" if calls else "stop"}
    return json.dumps({"id": "simulated", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def _archived(session: str, path: str, starts_at: float) -> tuple[tuple[ExchangeRow, ...], dict[int, SelectionRow]]:
    with open_reader(path) as reader:
        every = (row for session in reader.list_sessions() for row in reader.session_exchanges(session.id))
        rows = [row for row in every if row.started_at >= starts_at]
        rows.sort(key=lambda row: row.id)
        selections = {row.id: selection for row in rows if (selection := selection_of(reader, row.id)) is not None}
    odd = next((row.outcome for i, row in enumerate(rows) if row.outcome != ("extension" if i else "new")), None)
    if odd is not None:
        raise LabError(f"{session}: its history begins like that of another session ({odd}): leave one of the two away")
    return tuple(rows), selections
