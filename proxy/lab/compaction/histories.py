"""Histories to test with: made of a seed, recorded, or read from an archive. Pure, but for the seed's generator."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName
from proxy.lab.compaction import wire
from proxy.lab.recordings import Recording

TURNS, STEPS = 12, 6  # of a made history: some 100 blocks, 60,000 characters
RESULT_CHARS = (400, 1200)  # of a tool's result

_THINGS = "basket parcel ledger voucher tariff pallet courier depot stamp crate route manifest".split()
_DEEDS = "collect merge render settle assign weigh label rotate parse trim schedule archive".split()


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

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that were called, in alphabetical order."""
        dialect = DIALECTS[self.dialect]
        lines = (line for raw in self.messages for line in dialect.call_text(raw).splitlines()[:1])
        return tuple(sorted({line.partition(" ")[0] for line in lines if line} | {"read"}))

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
    turn = [wire.user(dialect, f"({name}) Please {deed} every {thing} before its {other} is closed.")]
    for number in range(steps):
        path = f"src/{draw.choice(_THINGS)}/{draw.choice(_DEEDS)}.py"
        tool, arguments = draw.choice(
            [("read", {"filePath": path}), ("grep", {"pattern": thing, "path": path}), ("bash", {"command": "make"})]
        )
        turn += wire.step(dialect, tool, arguments, code(draw), f"call-{name}-{number}")
    if edits:
        change = {"filePath": f"src/{thing}/{deed}.py", "oldString": "pass", "newString": f"{deed}({thing})"}
        turn += wire.step(dialect, "edit", change, "Done.", f"call-{name}-edit")
    return [*turn, wire.said(dialect, f"Each {thing} is now {deed}ed in src/{thing}/{deed}.py.")]


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
