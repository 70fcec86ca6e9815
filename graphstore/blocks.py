"""Messages as neutral facts, and the blocks they form.

A dialect turns each wire message into a `Message`: what it is and which calls it opens or answers, never its text. This
module knows no wire format; it only decides which messages stay together (DESIGN: one block is kept or left out whole).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Role = Literal["instruction", "user", "assistant", "call", "output", "reasoning", "other"]
BlockKind = Literal["user", "tools", "assistant", "pinned"]

NEWEST_STEPS = 3  # tool blocks of the running turn that stay whatever happens, as in providers' own clearing of results


@dataclass(frozen=True, slots=True)
class Message:
    """Facts of one wire message (chat) or item (responses).

    `role` is neutral: `call` is an assistant message or item that calls tools, `output` answers one, `reasoning` is a
    separate reasoning item, `instruction` a system or developer message, `other` everything we do not understand.
    `calls` and `answers` are call ids in order of appearance. `cost` is c(v) in characters; `edits` are the files that
    its calls edit or write.
    """

    role: Role
    calls: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    cost: int = 0
    edits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """The atomic unit of history. `messages` are ascending indexes into the history it was cut from."""

    kind: BlockKind
    messages: tuple[int, ...]
    cost: int
    edits: tuple[str, ...] = ()


@dataclass(frozen=True)  # no slots: what is cached is asked for once a block
class Cut:
    """Blocks in chronological order of their first message.

    `open_calls` are the ids of calls without a result: such a request is never rewritten. `is_boundary` is True when
    the newest user message still waits for the agent: no answer, call, result or reasoning stands after it.
    """

    blocks: tuple[Block, ...]
    open_calls: tuple[str, ...]
    is_boundary: bool = False

    @cached_property
    def turn_start(self) -> int:
        """Index of the first block of the current turn: the trailing run of user messages and all after it.

        A block that began before these users and reaches past them, because a result came late, belongs to the turn.
        """
        start = next((i for i in range(len(self.blocks) - 1, -1, -1) if self.blocks[i].kind == "user"), 0)
        while start > 0 and self._adjoining_users(start):
            start -= 1
        request = self.blocks[start].messages[0] if self.blocks else 0
        return next((i for i, block in enumerate(self.blocks[:start]) if block.messages[-1] > request), start)

    @property
    def request(self) -> int | None:
        """Index of the newest user block: what the agent works on."""
        return next((i for i in range(len(self.blocks) - 1, -1, -1) if self.blocks[i].kind == "user"), None)

    @cached_property
    def steps_start(self) -> int:
        """Index of the first of the current turn's newest steps, `turn_start` while it has no older ones.

        What stands between `turn_start` and here is done with: it ends before the newest steps begin.
        """
        steps = [i for i in range(self.turn_start, len(self.blocks)) if self.blocks[i].kind == "tools"]
        if self.request is None or len(steps) <= NEWEST_STEPS:
            return self.turn_start
        start = steps[-NEWEST_STEPS]
        newest = self.blocks[start].messages[0]
        return next((i for i, block in enumerate(self.blocks[:start]) if block.messages[-1] > newest), start)

    def _adjoining_users(self, index: int) -> bool:
        before, block = self.blocks[index - 1], self.blocks[index]
        return before.kind == "user" and before.messages[0] + 1 == block.messages[0]


@dataclass(slots=True)
class _Group:
    kind: BlockKind | Literal["reasoning"]
    members: list[int]
    unanswered: dict[str, None] = field(default_factory=dict)
    has_reasoning: bool = False
    ends_with_call: bool = False


def cut_blocks(messages: Sequence[Message]) -> Cut:
    """Cut a history (without its leading instructions) into blocks.

    Results join the nearest preceding call of their id, wherever it stands. Reasoning is glued to what it led to: a
    reasoning item, the message and the calls of one step are never separated, because providers reject one without the
    other. A result without a call, and reasoning that led to nothing, become `pinned`: we do not know what they mean.
    """
    groups: list[_Group] = []
    owners: dict[str, _Group] = {}
    current: _Group | None = None

    def start(kind: BlockKind | Literal["reasoning"], index: int) -> _Group:
        group = _Group(kind, [index])
        groups.append(group)
        return group

    for index, message in enumerate(messages):
        after_reasoning = index > 0 and messages[index - 1].role == "reasoning"
        match message.role:
            case "user":
                current = None
                start("user", index)
            case "reasoning":
                if current is None or not (after_reasoning or current.unanswered or current.ends_with_call):
                    current = start("reasoning", index)
                else:
                    current.members.append(index)
                current.has_reasoning = True
                current.ends_with_call = False
            case "assistant":
                if current is not None and current.kind == "reasoning":
                    current.kind = "assistant"
                    current.members.append(index)
                elif current is not None and (after_reasoning or current.kind == "assistant" or current.unanswered):
                    current.members.append(index)
                else:
                    start("assistant", index)
                    current = None
            case "call":
                if current is not None and (
                    current.kind == "reasoning" or current.has_reasoning or current.unanswered or current.ends_with_call
                ):
                    current.kind = "tools"
                    current.members.append(index)
                else:
                    current = start("tools", index)
                current.ends_with_call = True
                for call in message.calls:
                    current.unanswered[call] = None
                    owners[call] = current
            case "output":
                owner = next((owners[call] for call in message.answers if call in owners), None)
                if owner is None:
                    current = None
                    start("pinned", index)
                else:
                    owner.members.append(index)
                    owner.ends_with_call = False
                    for call in message.answers:
                        owner.unanswered.pop(call, None)
            case "instruction" | "other":
                current = None
                group = start("pinned", index)
                for call in message.calls:
                    group.unanswered[call] = None
                    owners[call] = group

    blocks = tuple(_finish(group, messages) for group in groups)
    open_calls = tuple(call for group in groups for call in group.unanswered)
    return Cut(blocks, open_calls, _awaits_agent(messages))


def _awaits_agent(messages: Sequence[Message]) -> bool:
    for message in reversed(messages):
        if message.role == "user":
            return True
        if message.role not in ("instruction", "other") or message.calls:
            return False
    return False


def extend_cut(known: Cut, messages: Sequence[Message]) -> Cut:
    """The cut of `messages`, whose beginning has the cut `known`: equal to `cut_blocks(messages)`, and cheaper.

    Everything before the newest user block stands for ever, unless a call there has no result yet or a later result
    names no call after it; then all of it is cut again.
    """
    place = next((i for i in range(len(known.blocks) - 1, -1, -1) if known.blocks[i].kind == "user"), 0)
    if place == 0 or known.open_calls:
        return cut_blocks(messages)
    start = known.blocks[place].messages[0]
    if any(block.messages[-1] >= start for block in known.blocks[:place]):
        return cut_blocks(messages)
    tail = cut_blocks(messages[start:])
    if any(block.kind == "pinned" and messages[start + block.messages[0]].role == "output" for block in tail.blocks):
        return cut_blocks(messages)
    moved = (Block(b.kind, tuple(start + i for i in b.messages), b.cost, b.edits) for b in tail.blocks)
    return Cut((*known.blocks[:place], *moved), tail.open_calls, tail.is_boundary)


def _finish(group: _Group, messages: Sequence[Message]) -> Block:
    return Block(
        kind="pinned" if group.kind == "reasoning" else group.kind,
        messages=tuple(group.members),
        cost=sum(messages[i].cost for i in group.members),
        edits=tuple(dict.fromkeys(path for i in group.members for path in messages[i].edits)),
    )
