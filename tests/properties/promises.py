"""The promises of the design that can be told from bytes alone: what a client wrote, what was sent, what the row says.

They know nothing of how the proxy works inside. What needs a disk to look at stands with those who have one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphstore.blocks import cut_blocks
from graphstore.records import ExchangeRow
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName, ParsedRequest
from proxy.dialects.content import NOTICE

Promise = Literal["never break", "never lose", "never chill", "explain", "never wait", "verify"]
NEWEST_STEPS = 3  # of the current turn, that stay under pressure


class Broken(AssertionError):
    """A promise does not hold."""

    def __init__(self, promise: Promise, problem: str) -> None:
        super().__init__(f"[{promise}] {problem}")
        self.promise = promise


def require(holds: object, promise: Promise, problem: str) -> None:
    if not holds:
        raise Broken(promise, problem)


@dataclass(eq=False, kw_only=True)
class Request:
    """What a client asked, and what became of it: `plan_body` is None when it went out as it came."""

    dialect: DialectName
    body: bytes
    plan_body: bytes | None = None
    row: ExchangeRow | None = None
    own: ParsedRequest = field(init=False)
    raws: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.own = DIALECTS[self.dialect].parse_request(self.body)
        self.raws = [self.own.raw(i) for i in range(len(self.own.messages))]

    @property
    def is_rewritten(self) -> bool:
        return self.plan_body is not None

    @property
    def sent(self) -> bytes:
        return self.plan_body if self.plan_body is not None else self.body

    @property
    def outgoing(self) -> list[bytes]:
        return _messages(self.dialect, self.sent)

    @property
    def gone(self) -> list[bytes]:
        """The client's messages that the outgoing body lacks."""
        if not self.is_rewritten:
            return []
        kept = set(_places(self.outgoing[self.own.leading + 1 :], self.raws))
        return [raw for i, raw in enumerate(self.raws) if i not in kept]

    @property
    def head(self) -> tuple[object, ...]:
        """What stands before the messages."""
        return self.own.instructions, self.own.tools, self.own.model

    @property
    def reaches_back(self) -> bool:
        """A late result made an old call part of the current turn, which is sent whole."""
        start = _turn_start(self.own)
        return any(block.messages[0] < start <= block.messages[-1] for block in cut_blocks(self.own.messages).blocks)


def never_mangles(request: Request, body: bytes, *, under_pressure: bool = False) -> None:
    """Whole old blocks are left out of `body`, and nothing else happened to the client's bytes.

    `under_pressure`: of the current turn only the newest steps have to stay.
    """
    own = request.own
    try:
        json.loads(body)
    except ValueError as error:
        raise Broken("never break", f"the outgoing body is no JSON: {error}") from error
    outgoing, original = _messages(request.dialect, body), _messages(request.dialect, request.body)
    head, notice, tail = outgoing[: own.leading], outgoing[own.leading], outgoing[own.leading + 1 :]
    require(head == original[: own.leading], "never break", "the instructions changed")
    require(NOTICE.encode() in notice, "never break", "the notice is missing")
    gone = set(range(len(own.messages))) - set(_places(tail, request.raws))
    require(gone, "never break", "rewritten, with nothing left out")
    cut = cut_blocks(own.messages)
    require(not cut.open_calls, "never break", "rewritten with a call that has no result yet")
    for block in cut.blocks:
        is_whole = gone.issuperset(block.messages) or gone.isdisjoint(block.messages)
        require(is_whole, "never break", "a block is split")
        stays = block.kind not in ("user", "pinned") or gone.isdisjoint(block.messages)
        require(stays, "never break", f"a {block.kind} block was left out")
    end = _newest_steps(own) if under_pressure else _turn_start(own)
    require(all(i < end for i in gone), "never break", "the current turn lost a message")
    around = [_around(text, messages) for text, messages in ((body, outgoing), (request.body, original))]
    require(around[0] == around[1], "never break", "bytes outside the messages changed")


def never_chills(before: Request, now: Request, *, lost: bool = False, disk_fails: bool = True) -> None:
    """Between two cold boundaries what is sent extends what was sent, as far as the client extends its own.

    `lost`: the proxy died before it had recorded `before`, so it cannot know a retry for one. `disk_fails`: decisions
    cannot be saved, perhaps.
    """
    assert before.row is not None and now.row is not None
    reason, was = now.row.reason, before.row.reason
    if now.body == before.body and not (lost and now.row.boundary == "cold"):
        same = now.outgoing == before.outgoing or "refused with" in reason  # it is refused now
        require(same, "never chill", f"a retry became something else: {reason}")
        return
    extends = now.raws[: len(before.raws)] == before.raws and now.head == before.head
    if not extends or now.row.boundary == "cold" or now.reaches_back:
        return
    if "a tool call has no result yet" in reason or (disk_fails and "decision not saved" in reason):
        return
    if "pass-through" in reason and "pass-through" not in was:
        return
    if lost and "pass-through" in was:  # so is the rejection, perhaps
        return
    kept = now.outgoing[: len(before.outgoing)] == before.outgoing
    require(kept, "never chill", f"{now.row.outcome}, {reason}, after {before.row.outcome}, {was}")


# -- parts ----------------------------------------------------------------------------------------------------------


def _messages(dialect: DialectName, body: bytes) -> list[bytes]:
    return [body[start:end] for start, end in DIALECTS[dialect].parse_request(body).spans]


def _around(body: bytes, messages: Sequence[bytes]) -> tuple[bytes, bytes]:
    return body[: body.index(messages[0])], body[body.rindex(messages[-1]) + len(messages[-1]) :]


def _places(kept: list[bytes], among: list[bytes]) -> list[int]:
    """Where `kept` stands among `among`, in order; from the end, where equal messages are the newest ones."""
    places: list[int] = []
    end = len(among)
    for raw in reversed(kept):
        end = next((i for i in range(end - 1, -1, -1) if among[i] == raw), -1)
        require(end >= 0, "never break", f"not the client's, or out of order: {raw[:100]!r}")
        places.append(end)
    return places[::-1]


def _turn_start(own: ParsedRequest) -> int:
    """Index of the first message of the current turn: the newest run of user messages."""
    users = [i for i, message in enumerate(own.messages) if message.role == "user"]
    start = users[-1] if users else 0
    while start - 1 in users:
        start -= 1
    return start


def _newest_steps(own: ParsedRequest) -> int:
    """Index of the first message of the current turn's newest tool blocks, or of the turn."""
    start = _turn_start(own)
    steps = [b for b in cut_blocks(own.messages).blocks if b.kind == "tools" and b.messages[-1] > start]
    return steps[-NEWEST_STEPS].messages[0] if len(steps) > NEWEST_STEPS else start
