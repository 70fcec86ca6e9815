"""Histories to test with, as a client would send them: made of a seed, recorded, or read from an archive.

Messages are raw JSON in either dialect, one `bytes` a message or item. Pure, but for the seed's generator.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from graphstore.store.reader import Reader
from graphstore.store.report import find_session
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName
from proxy.lab.recordings import Recording

Json = dict[str, Any]
_TEXT = {"user": "input_text", "developer": "input_text", "assistant": "output_text"}
TURNS, STEPS = 12, 6  # of a made history: some 100 blocks, 60,000 characters
ARCHIVE_SESSIONS = 20  # of the user, the newest
RESULT_CHARS = (400, 1200)  # of a tool's result

_THINGS = "basket parcel ledger voucher tariff pallet courier depot stamp crate route manifest".split()
_DEEDS = "collect merge render settle assign weigh label rotate parse trim schedule archive".split()


def encoded(message: Json) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def user(dialect: DialectName, text: str) -> bytes:
    return _spoken(dialect, "user", text)


def said(dialect: DialectName, text: str) -> bytes:
    return _spoken(dialect, "assistant", text)


def note(dialect: DialectName, text: str) -> bytes:
    """Instructions that a client puts into the middle of its history."""
    return _spoken(dialect, "developer", text)


def _spoken(dialect: DialectName, role: str, text: str) -> bytes:
    if dialect == "chat":
        return encoded({"role": role, "content": text})
    return encoded({"type": "message", "role": role, "content": [{"type": _TEXT[role], "text": text}]})


def step(dialect: DialectName, tool: str, arguments: Json, result: str, call_id: str) -> tuple[bytes, bytes]:
    """A tool call and its result."""
    given = json.dumps(arguments)
    if dialect == "chat":
        call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": given}}
        return (
            encoded({"role": "assistant", "content": None, "tool_calls": [call]}),
            encoded({"role": "tool", "tool_call_id": call_id, "content": result}),
        )
    return (
        encoded({"type": "function_call", "call_id": call_id, "name": tool, "arguments": given}),
        encoded({"type": "function_call_output", "call_id": call_id, "output": result}),
    )


@dataclass(frozen=True)
class History:
    """A conversation without its instructions. `starts` are the indexes of the messages that begin a turn."""

    id: str
    dialect: DialectName
    messages: tuple[bytes, ...]
    starts: tuple[int, ...]

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(DIALECTS[self.dialect].parse_message(raw).role for raw in self.messages)

    def body_of(self, turn: int) -> int:
        """Index of the first message of a turn that is not the user's."""
        index = self.starts[turn]
        while index < len(self.messages) and self.roles[index] == "user":
            index += 1
        return index

    def with_steps(self, steps: Mapping[int, Sequence[bytes]]) -> "History":
        """Messages put in at the beginning of turns, after the user's words. Turns are counted from 0."""
        messages, starts = list(self.messages), list(self.starts)
        for turn in sorted(steps, reverse=True):
            place = self.body_of(turn)
            messages[place:place] = steps[turn]
            starts = [start + len(steps[turn]) * (start > self.starts[turn]) for start in starts]
        return replace(self, messages=tuple(messages), starts=tuple(starts))

    def then(self, *messages: bytes) -> "History":
        """Gone on with; the first of them opens a turn when it is a user's."""
        opens = DIALECTS[self.dialect].parse_message(messages[0]).role == "user"
        starts = (*self.starts, len(self.messages)) if opens else self.starts
        return replace(self, messages=(*self.messages, *messages), starts=starts)

    def upto(self, turn: int) -> "History":
        """What stood before a turn."""
        return replace(self, messages=self.messages[: self.starts[turn]], starts=self.starts[:turn])


def made(seed: int | str, dialect: DialectName = "chat", *, turns: int = TURNS, steps: int = STEPS) -> History:
    """The work of an agent on a shop's code base: requests, tools with results, now and then an edit, an answer."""
    draw = random.Random(f"{seed}")
    messages: list[bytes] = []
    starts = []
    for turn in range(turns):
        starts.append(len(messages))
        messages += made_turn(draw, dialect, f"{seed}-{turn}", steps=steps, edits=turn % 3 == 1)
    return History(f"made {seed}", dialect, tuple(messages), tuple(starts))


def made_turn(
    draw: random.Random, dialect: DialectName, name: str, *, steps: int = STEPS, edits: bool = False
) -> list[bytes]:
    deed, thing, other = draw.choice(_DEEDS), draw.choice(_THINGS), draw.choice(_THINGS)
    turn = [user(dialect, f"({name}) Please {deed} every {thing} before its {other} is closed.")]
    for number in range(steps):
        path = f"src/{draw.choice(_THINGS)}/{draw.choice(_DEEDS)}.py"
        tool, arguments = draw.choice(
            [("read", {"filePath": path}), ("grep", {"pattern": thing, "path": path}), ("bash", {"command": "make"})]
        )
        turn += step(dialect, tool, arguments, code(draw), f"call-{name}-{number}")
    if edits:
        change = {"filePath": f"src/{thing}/{deed}.py", "oldString": "pass", "newString": f"{deed}({thing})"}
        turn += step(dialect, "edit", change, "Done.", f"call-{name}-edit")
    return [*turn, said(dialect, f"Each {thing} is now {deed}ed in src/{thing}/{deed}.py.")]


def code(draw: random.Random, chars: int | None = None) -> str:
    """Lines of a program."""
    size = chars or draw.randint(*RESULT_CHARS)
    lines: list[str] = []
    while sum(map(len, lines)) < size:
        deed, thing, other = draw.choice(_DEEDS), draw.choice(_THINGS), draw.choice(_THINGS)
        lines.append(f"def {deed}_{thing}(items):  # {draw.randrange(1000)}\n    return {deed}({other}s, items)\n")
    return "".join(lines)


def of_recording(recording: Recording) -> History:
    leading = recording.leading
    starts = tuple(start - leading for start in recording.turn_starts if start >= leading)
    return History(recording.id, "chat", recording.messages[leading:], starts)


def of_archive(reader: Reader, names: Sequence[str] = ()) -> list[History]:
    """These sessions, or the newest, as far as they have a history. Raises `UnknownSession`."""
    found = []
    sessions = sorted(reader.list_sessions(), key=lambda session: session.id)
    agents = [session for session in sessions if session.kind == "agent"]
    for session in [find_session(reader, name) for name in names] or agents[-ARCHIVE_SESSIONS:]:
        if session.head_node_id is None:
            continue
        name: DialectName = "chat" if session.dialect == "chat" else "responses"
        history = History(session.name, name, tuple(reader.path_contents(session.head_node_id)), ())
        users = [role == "user" for role in history.roles]
        starts = tuple(i for i, is_user in enumerate(users) if is_user and not (i and users[i - 1]))
        if starts:
            found.append(replace(history, starts=starts))
    return found
