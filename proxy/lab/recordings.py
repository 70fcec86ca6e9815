"""Recorded sessions as a study needs them: messages, turns, and the history that stood before each user request.

Reads JSONL with one session a line: `{"id": ..., "messages": [chat messages], "turn_starts": [indexes]}`. `turn_starts`
may be missing: then each run of user messages begins a turn. Also what `recap export` wrote: a message a line is one
session.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from graphstore.blocks import Block, cut_blocks
from proxy.dialects.base import ParsedRequest
from proxy.dialects.chat import ChatDialect
from proxy.lab.errors import LabError

CHAT = ChatDialect()
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


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
    files = []
    for path in paths:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise LabError(f"{str(path)!r} cannot be read: {error.strerror}; name a JSONL file of sessions") from error
        files.append((path.name, hashlib.sha256(raw).hexdigest()[:16]))
        found += _read(path, raw)
    if not found:
        raise LabError(f"there is no session in {', '.join(repr(str(path)) for path in paths) or 'no file'}")
    return Data(tuple(found), tuple(files))


def _read(path: Path, raw: bytes) -> Iterator[Recording]:
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise LabError(f"{path.name} line {number}: no JSON ({error})") from error
        if not isinstance(value, dict):
            raise LabError(f"{path.name} line {number}: {type(value).__name__} instead of an object")
        rows.append((number, value))
    if rows and all("role" in value and "messages" not in value for _, value in rows):
        yield _recording(path, 1, {"id": path.stem, "messages": [value for _, value in rows]})
        return
    for number, value in rows:
        yield _recording(path, number, value)


def _recording(path: Path, number: int, value: dict[str, Any]) -> Recording:
    where = f"{path.name} line {number}"
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        known = ", ".join(sorted(value)[:8])
        raise LabError(f'{where}: unknown format (keys: {known}); a session is {{"id", "messages", "turn_starts"}}')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise LabError(f"{where}: message {index} has the role {role!r}; known are {', '.join(sorted(ROLES))}")
    _check_pairs(where, messages)
    starts = value.get("turn_starts")
    if starts is None:
        starts = user_turns([message["role"] for message in messages])
    is_ascending = (
        isinstance(starts, list) and all(isinstance(i, int) for i in starts) and starts == sorted(set(starts))
    )
    if not is_ascending or not starts or not 0 <= starts[0] <= starts[-1] < len(messages):
        raise LabError(
            f"{where}: turn_starts {str(starts)[:60]} are no ascending indexes of its {len(messages)} messages"
        )
    encoded = tuple(json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() for message in messages)
    return Recording(str(value.get("id", f"{path.stem}:{number}")), encoded, tuple(starts))


def user_turns(roles: Sequence[str]) -> list[int]:
    """Where each run of user messages begins."""
    return [i for i, role in enumerate(roles) if role == "user" and (i == 0 or roles[i - 1] != "user")]


def _check_pairs(where: str, messages: Sequence[dict[str, Any]]) -> None:
    """Every call has its result before the next turn of the agent, and every result a call."""
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            answered = str(message.get("tool_call_id"))
            if answered not in open_calls:
                raise LabError(f"{where}: message {index} is the result of {answered!r}, which nothing calls before it")
            open_calls.discard(answered)
            continue
        if open_calls:
            raise LabError(f"{where}: message {index} comes before the result of {sorted(open_calls)[0]!r}")
        open_calls = {str(call.get("id")) for call in message.get("tool_calls") or () if isinstance(call, dict)}
    if open_calls:
        raise LabError(f"{where}: it ends without the result of {sorted(open_calls)[0]!r}")
