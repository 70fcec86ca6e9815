"""Constraint retention (10.19.2): what the user said, and instructions inside the history, go out with every selector.

A promise: one message that is missing is a defect of the product, whatever the selector.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

from graphstore.selectors import Selector
from proxy.dialects.base import DialectName
from proxy.lab.compaction import checks
from proxy.lab.compaction.bench import Bench, Lab, Served
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import History, Json, encoded, made, made_turn, note, said, user

FAMILY = "constraints"
BOUNDARIES = 4  # cold ones, one after the other
RULE = "Never touch the folder legal/, whatever I ask for later."


def _early(dialect: DialectName, draw: random.Random) -> list[bytes]:
    return [user(dialect, RULE)]


def _in_a_row(dialect: DialectName, draw: random.Random) -> list[bytes]:
    return [user(dialect, text) for text in (RULE, "Prices are in cents.", "Ask before you delete a file.")]


def _long(dialect: DialectName, draw: random.Random) -> list[bytes]:
    """Longer than the budget."""
    return [user(dialect, RULE + " Our rules in full: " + "every change needs a test; " * 600)]


def _lifted(dialect: DialectName, draw: random.Random) -> list[bytes]:
    return [
        user(dialect, RULE),
        said(dialect, "Understood."),
        user(dialect, "I take that back: legal/ may be changed, but not legal/terms.md."),
    ]


def _parts(dialect: DialectName, draw: random.Random) -> list[bytes]:
    """A rule beside a picture."""
    image = "data:image/png;base64," + "A" * 20_000
    if dialect == "chat":
        picture: Json = {"type": "image_url", "image_url": {"url": image}}
        return [encoded({"role": "user", "content": [{"type": "text", "text": RULE}, picture]})]
    parts = [{"type": "input_text", "text": RULE}, {"type": "input_image", "image_url": image}]
    return [encoded({"type": "message", "role": "user", "content": parts})]


def _note(dialect: DialectName, draw: random.Random) -> list[bytes]:
    """Instructions that the client puts into the history: plan mode, a reminder."""
    turn = made_turn(draw, dialect, "note", steps=2)
    return [*turn, note(dialect, "Plan mode is on: change nothing."), said(dialect, "I only plan.")]


def _repeated(dialect: DialectName, draw: random.Random) -> list[bytes]:
    """The same words twice are two messages."""
    once = [user(dialect, "Go on."), said(dialect, "Done.")]
    return [*once, *once, user(dialect, RULE)]


KINDS: dict[str, Callable[[DialectName, random.Random], list[bytes]]] = {
    "an early rule": _early,
    "rules in a row": _in_a_row,
    "a rule longer than the budget": _long,
    "a rule lifted later": _lifted,
    "a rule beside a picture": _parts,
    "instructions inside the history": _note,
    "the same words twice": _repeated,
}
DIALECTS: tuple[DialectName, ...] = ("chat", "responses")


def scenario(kind: str, dialect: DialectName, seed: object) -> History:
    """The constraint first, then a long history."""
    draw = random.Random(f"{seed}|{kind}")
    beginning = (*KINDS[kind](dialect, draw), *made_turn(draw, dialect, "first"))
    rest = made(f"{seed}|{kind}", dialect)
    starts = tuple(i for i in range(len(beginning)) if _opens(beginning, i))
    return History(kind, dialect, (*beginning, *rest.messages), (*starts, *(len(beginning) + i for i in rest.starts)))


def _opens(messages: Sequence[bytes], index: int) -> bool:
    return checks.role_of(messages[index]) == "user" and (index == 0 or checks.role_of(messages[index - 1]) != "user")


def cases(seed: int) -> list[Case]:
    return [
        Case(FAMILY, f"{kind}, {dialect}", partial(run, histories=(scenario(kind, dialect, seed),)))
        for kind in KINDS
        for dialect in DIALECTS
    ]


def cases_in(histories: Sequence[History], source: str) -> list[Case]:
    return [Case(FAMILY, f"{source}: what the user wrote", partial(run, histories=tuple(histories)))]


async def run(lab: Lab, selector: Selector, *, histories: Sequence[History]) -> Tally:
    """Every constraint at every cold boundary is looked for."""
    tally = Tally()
    for history in histories:
        async with lab.bench(selector.name, history.dialect) as bench:
            for end, served in await come_back_often(bench, history):
                tally.watch(served, history.id)
                missing = checks.missing_constraints(served)
                for raw in checks.constraints(served.client):
                    faults = [f"missing at turn {end + 1}: {checks.shown(raw)}"] if raw in missing else []
                    tally.promise(faults, history.id)
    return tally


async def come_back_often(bench: Bench, history: History) -> list[tuple[int, Served]]:
    """The last turns of a history that have something before them, each asked for after a long pause."""
    return [
        (end, await bench.come_back(history.upto(end), *history.messages[history.starts[end] : history.body_of(end)]))
        for end in list(range(1, len(history.starts)))[-BOUNDARIES:]
    ]
