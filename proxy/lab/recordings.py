"""Recorded sessions as a study needs them: messages, turns, and the history that stood before each user request.

Reads JSONL with one session a line: `{"id": ..., "messages": [chat messages], "turn_starts": [indexes]}`. `turn_starts`
may be missing: then each run of user messages begins a turn. Also what `recap export` wrote: a message a line is one
session. What has another form is refused whole: a study that passed over it would say something else than it seems to.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from graphstore.blocks import Block, cut_blocks
from proxy.dialects.base import ParsedRequest
from proxy.dialects.chat import ChatDialect
from proxy.dialects.scan import Malformed, read_value
from proxy.lab.errors import LabError

CHAT = ChatDialect()
FORM = 'a session a line, {"id", "messages", "turn_starts"} with chat completion messages, or what `recap export` wrote'

# -- the form ----------------------------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    type: Literal["text", "image_url", "input_audio", "file", "refusal"]
    text: str | None = None

    def __post_init__(self) -> None:
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type `text` has no text")


class _Named(msgspec.Struct):
    name: str


class _Call(msgspec.Struct):
    id: str
    function: _Named | None = None
    custom: _Named | None = None

    def __post_init__(self) -> None:
        if self.function is None and self.custom is None:
            raise ValueError("a call names no function")


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    function_call: None = None  # of an older form, which has no ids


class _Session(msgspec.Struct):
    messages: list[_Message]
    id: str | int | None = None
    turn_starts: list[int] | None = None


# -- sessions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """One session. `turn_starts` are the indexes of the messages with which a user took the floor."""

    id: str
    messages: tuple[bytes, ...]  # raw JSON, chat completions
    turn_starts: tuple[int, ...]

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """What is said in each message: no call arguments."""
        return tuple(map(CHAT.message_text, self.messages))

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Names and arguments of the calls in each message."""
        return tuple(map(CHAT.call_text, self.messages))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The whole session in blocks; the leading instructions are not among them."""
        return cut_blocks([CHAT.parse_message(raw) for raw in self.messages[self.leading :]]).blocks

    @cached_property
    def leading(self) -> int:
        """Number of instructions before the first other message."""
        return next((i for i, role in enumerate(self.roles) if role != "instruction"), len(self.messages))

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """As the dialect reads them."""
        return tuple(CHAT.parse_message(raw).role for raw in self.messages)

    def text_of(self, block: Block) -> str:
        return "\n".join(self.texts[self.leading + i] for i in block.messages)

    def start_of(self, block: Block) -> int:
        """Index of the block's first message in the session."""
        return self.leading + block.messages[0]

    def turns(self) -> list[tuple[int, int]]:
        """(first message, end) of every turn."""
        return list(zip(self.turn_starts, [*self.turn_starts[1:], len(self.messages)], strict=True))

    def request(self, count: int, *, model: str = "recorded") -> ParsedRequest:
        """The request that a client would send after so many messages."""
        body = b'{"model":' + json.dumps(model).encode() + b',"messages":[' + b",".join(self.messages[:count]) + b"]}"
        return CHAT.parse_request(body)


@dataclass(frozen=True, slots=True)
class Data:
    """Recordings with the name and hash of where they came from."""

    recordings: tuple[Recording, ...]
    files: tuple[tuple[str, str], ...]  # name, SHA-256 (first 16 digits)

    @property
    def digest(self) -> str:
        return hashlib.sha256("".join(digest for _, digest in self.files).encode()).hexdigest()[:16]


def read_recordings(paths: Sequence[Path]) -> Data:
    """Raises `LabError` naming file, line and what is wrong with it."""
    found: list[Recording] = []
    files: dict[str, str] = {}
    for path in paths:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise LabError(f"{str(path)!r} cannot be read: {error.strerror}; name a JSONL file of sessions") from error
        if path.name in files:
            raise LabError(f"two files are named {path.name!r}, and results know them by name: name it once, or rename")
        files[path.name] = hashlib.sha256(raw).hexdigest()[:16]
        found += _read(path, raw)
    if not found:
        raise LabError(f"there is no session in {', '.join(repr(str(path)) for path in paths)}; give {FORM}")
    return Data(tuple(found), tuple(files.items()))


def _read(path: Path, raw: bytes) -> Iterator[Recording]:
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(_text(path, raw).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = read_value(line.encode())
        except Malformed as error:
            raise LabError(f"{path.name} line {number}: no JSON ({error}); give {FORM}") from error
        if not isinstance(value, dict):
            raise LabError(f"{path.name} line {number}: {type(value).__name__} instead of an object; give {FORM}")
        rows.append((number, value))
    if rows and all("role" in value and "messages" not in value for _, value in rows):
        session = {"id": path.stem, "messages": [value for _, value in rows]}
        yield _recording(f"{path.name} (a message a line, the first is 0)", session, path.stem)
        return
    for number, value in rows:
        yield _recording(f"{path.name} line {number}", value, f"{path.stem}:{number}")


def _text(path: Path, raw: bytes) -> str:
    """In UTF-8, or in what a byte order mark or the first bytes say."""
    try:
        return raw.decode(json.detect_encoding(raw))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise LabError(
            f"{path.name} line {line}: no text in UTF-8; unpack it if it is packed, and give {FORM}"
        ) from error


def _recording(where: str, value: dict[str, Any], name: str) -> Recording:
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        known = ", ".join(sorted(value)[:8])
        raise LabError(f"{where}: unknown format (keys: {known}); give {FORM}")
    try:
        session = msgspec.convert(value, _Session)
    except msgspec.ValidationError as error:
        raise LabError(f"{where}: {error}; give {FORM}") from error
    _check_pairs(where, session.messages)
    starts = session.turn_starts
    if starts is None:
        starts = user_turns([message.role for message in session.messages])
        if not starts:
            raise LabError(f"{where}: no message of a user; a session begins with one, after its instructions")
    known_starts = [i for i in starts if 0 <= i < len(messages) and session.messages[i].role == "user"]
    if not starts or known_starts != starts or starts != sorted(set(starts)):
        raise LabError(
            f"{where}: turn_starts {str(starts)[:60]} are no ascending indexes of user messages among its "
            f"{len(messages)}; put them right, or leave them out"
        )
    encoded = tuple(json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() for message in messages)
    return Recording(name if session.id is None else str(session.id), encoded, tuple(starts))


def user_turns(roles: Sequence[str]) -> list[int]:
    """Where each run of user messages begins."""
    return [i for i, role in enumerate(roles) if role == "user" and (i == 0 or roles[i - 1] != "user")]


def _check_pairs(where: str, messages: Sequence[_Message]) -> None:
    """Every call has its result, and every result a call, before anybody but the agent and its tools speaks."""
    open_calls: dict[str, int] = {}  # id -> index of its message

    def refuse(index: int, what: str) -> NoReturn:
        raise LabError(f"{where}: message {index} {what}; complete the pair, or leave both out")

    for index, message in enumerate(messages):
        if message.role == "tool":
            answered = message.tool_call_id
            if answered not in open_calls:
                refuse(index, f"is the result of {answered!r}, which nothing calls before it")
            del open_calls[answered]
            continue
        if open_calls and message.role != "assistant":
            refuse(index, f"comes before the result of {next(iter(open_calls))!r}")
        for call in message.tool_calls or () if message.role == "assistant" else ():
            if call.id in open_calls:
                refuse(index, f"calls {call.id!r}, which waits for its result already")
            open_calls[call.id] = index
    for name, index in open_calls.items():
        refuse(index, f"calls {name!r}, and the session ends without the result")
