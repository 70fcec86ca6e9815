"""What sessions say and what must come back, to the byte. Pure functions and values.

Every message of a session carries its tag, and the newest one the whole question. Question and digest of the body that
the upstream received determine the answer: a client that knows both knows every byte, and any other answer is wrong.
"""

import hashlib
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.fakes.model_script import Call, Step
from tests.fakes.wire_answers import Reply, ToolForm, write_chat, write_responses

DialectName = Literal["chat", "responses"]
Json = dict[str, Any]

PATHS: dict[DialectName, str] = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}
ROOT = Path(__file__).resolve().parents[2]
PIECE_CHARS = 24  # of one delta, see `wire_answers`
RESULT_CHARS = 4000  # of a file that the model reads
STEPS_MAX = 4  # tool calls of one turn
MODEL = "load"
INSTRUCTIONS = "You are a coding agent under load."
TAG = re.compile(rb"tag:([0-9a-f]{12})")
ASK = re.compile(rb"ask:([0-9a-f]{12})-(\d+)-(\d+)-(call|text)")
_PARAMETERS = {"type": "object", "properties": {"filePath": {"type": "string"}, "note": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Ask:
    """One question: of which session, which one, and what the answer is to be: deltas, and a call or the last word."""

    tag: str
    number: int
    pieces: int
    kind: Literal["call", "text"]

    def __str__(self) -> str:
        return f"ask:{self.tag}-{self.number}-{self.pieces}-{self.kind}"

    @classmethod
    def newest(cls, body: bytes) -> "Ask | None":
        """That of the last message that has one."""
        found = ASK.match(body, max(0, body.rfind(b"ask:")))
        if found is None:
            return None
        tag, number, pieces, kind = (part.decode() for part in found.groups())
        return cls(tag, int(number), int(pieces), "call" if kind == "call" else "text")


def tags(body: bytes) -> set[bytes]:
    """Sessions whose words stand in it: more than one is a mix-up."""
    return set(TAG.findall(body))


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def step(ask: Ask) -> Step:
    """What the model says to it."""
    said = f"tag:{ask.tag} "
    count = -(-(ask.pieces * PIECE_CHARS - len(said)) // 64)
    words = said + "".join(hashlib.sha256(f"{ask} {i}".encode()).hexdigest() for i in range(count))
    words = words[: ask.pieces * PIECE_CHARS]
    if ask.kind == "text":
        return Step(text=words)
    return Step(calls=(Call("read", json.dumps({"filePath": f"src/file{ask.number}.py", "note": words})),))


def answer(dialect: DialectName, ask: Ask, received: str, size: int) -> tuple[bytes, ...]:
    """The events of the stream for a body of this digest and size, in the pieces in which they are written."""
    tokens = size // 4
    reply = Reply(
        seed=seed(ask, received),
        model=MODEL,
        step=step(ask),
        tools={"read": ToolForm()},
        input_tokens=tokens,
        cached_tokens=int(0.9 * tokens) // 128 * 128,
        sealed_reasoning=None,
    )
    written = (
        write_chat(reply, stream=True, include_usage=True) if dialect == "chat" else write_responses(reply, stream=True)
    )
    return written.pieces


def seed(ask: Ask, received: str) -> str:
    """What the ids of an answer are made of."""
    return digest(f"{ask} {received}".encode())[:24]


def corpus() -> str:
    """Text like that which agents read: this program's own source, without marks of ours."""
    names = sorted(path for part in ("proxy", "graphstore") for path in (ROOT / part).rglob("*.py"))
    return "\n".join(path.read_text() for path in names).replace("tag:", "tag ").replace("ask:", "ask ")


@dataclass(slots=True)
class History:
    """A session as its client keeps it: messages as JSON text, so that a longer request costs only what is new."""

    dialect: DialectName
    tag: str
    dice: random.Random
    code: str
    messages: list[bytes] = field(default_factory=list)
    number: int = 0
    steps_left: int = 0
    owed: str = ""  # id of the call whose result the model waits for

    def fill(self, size: int) -> None:
        """A past of about `size` bytes: turns of a few tool calls each."""
        while sum(map(len, self.messages)) < size:
            self._turn()

    def ask(self) -> Ask:
        """Say the next thing: a new request, or the result that the model waits for. Returns what must be answered."""
        if not self.owed:
            self.steps_left = self.dice.randrange(1, STEPS_MAX + 1)
        self.number += 1
        self.steps_left -= 1
        kind: Literal["call", "text"] = "call" if self.steps_left > 0 else "text"
        ask = Ask(self.tag, self.number, self.dice.randrange(16, 49), kind)
        if self.owed:
            self._result(self.owed, f"{ask}\n{self._slice()}")
        else:
            self._user(f"tag:{self.tag} please go on with part {self.number}\n{ask}")
        self.owed = ""
        return ask

    def heard(self, ask: Ask, received: str) -> None:
        """The answer came in whole."""
        said = step(ask)
        if said.calls:
            self.owed = f"call_{seed(ask, received)}_0"
            self._call(self.owed, said.calls[0].arguments)
        else:
            self._said(said.text)

    def body(self) -> bytes:
        if self.dialect == "chat":
            head: Json = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
            tool = {"type": "function", "function": {"name": "read", "parameters": _PARAMETERS}}
            name, first = b"messages", [_json({"role": "system", "content": INSTRUCTIONS})]
        else:
            head = {"model": MODEL, "stream": True, "store": False, "instructions": INSTRUCTIONS}
            tool = {"type": "function", "name": "read", "parameters": _PARAMETERS}
            name, first = b"input", []
        head |= {"tools": [tool]}
        return b'%b, "%b": [%b]}' % (_json(head)[:-1], name, b", ".join([*first, *self.messages]))

    def _turn(self) -> None:
        start = len(self.messages)
        self._user(f"tag:{self.tag} do part {start} of {self.dice.randrange(1000)}")
        for _ in range(self.dice.randrange(1, STEPS_MAX + 1)):
            id = f"call_{self.tag}_{len(self.messages)}"
            self._call(id, json.dumps({"filePath": f"src/file{len(self.messages)}.py"}))
            self._result(id, self._slice())
        self._said(f"tag:{self.tag} part {start} is done")

    def _slice(self) -> str:
        place = self.dice.randrange(len(self.code) - RESULT_CHARS)
        return f"tag:{self.tag}\n{self.code[place : place + RESULT_CHARS]}"

    def _user(self, text: str) -> None:
        self.messages.append(_json({"role": "user", "content": text}))

    def _said(self, text: str) -> None:
        if self.dialect == "chat":
            self.messages.append(_json({"role": "assistant", "content": text}))
            return
        part = {"type": "output_text", "text": text, "annotations": []}
        self.messages.append(_json({"type": "message", "role": "assistant", "content": [part]}))

    def _call(self, id: str, arguments: str) -> None:
        if self.dialect == "chat":
            call = {"id": id, "type": "function", "function": {"name": "read", "arguments": arguments}}
            self.messages.append(_json({"role": "assistant", "content": None, "tool_calls": [call]}))
        else:
            call = {"type": "function_call", "call_id": id, "name": "read", "arguments": arguments}
            self.messages.append(_json(call))

    def _result(self, id: str, text: str) -> None:
        if self.dialect == "chat":
            self.messages.append(_json({"role": "tool", "tool_call_id": id, "content": text}))
        else:
            self.messages.append(_json({"type": "function_call_output", "call_id": id, "output": text}))


def _json(value: Json) -> bytes:
    return json.dumps(value).encode()
