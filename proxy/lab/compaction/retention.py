"""Constraint retention (10.19.2): what the user said, and instructions inside the history, are sent by every selector.

A promise: one message that is missing is a defect of the product, whatever the selector.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial

from graphstore.selectors import Selector
from proxy.dialects.base import DialectName
from proxy.lab.compaction import checks, wire
from proxy.lab.compaction.bench import Bench, Lab
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import History, made, made_turn

FAMILY = "constraints"
BOUNDARIES = 4  # cold ones, one after the other
RULE = "Never touch the folder legal/, whatever I ask for later."


def _early(dialect: DialectName, draw: random.Random) -> list[bytes]:
    return [wire.user(dialect, RULE)]


def _in_a_row(dialect: DialectName, draw: random.Random) -> list[bytes]:
    return [wire.user(dialect, text) for text in (RULE, "Prices are in cents.", "Ask before you delete a file.")]


def _long(dialect: DialectName, draw: random.Random) -> list[bytes]:
    """Longer than the budget."""
    return [wire.user(dialect, RULE + " Our rules in full: " + "every change needs a test; " * 600)]


def _lifted(dialect: DialectName, draw: random.Random) -> list[bytes]:
    return [
        wire.user(dialect, RULE),
        wire.said(dialect, "Understood."),
        wire.user(dialect, "I take that back: legal/ may be changed, but not legal/terms.md."),
    ]


def _parts(dialect: DialectName, draw: random.Random) -> list[bytes]:
    """A rule beside a picture."""
    image = "data:image/png;base64," + "A" * 20_000
    if dialect == "chat":
        picture: wire.Json = {"type": "image_url", "image_url": {"url": image}}
        return [wire.encoded({"role": "user", "content": [{"type": "text", "text": RULE}, picture]})]
    parts = [{"type": "input_text", "text": RULE}, {"type": "input_image", "image_url": image}]
    return [wire.encoded({"type": "message", "role": "user", "content": parts})]


def _note(dialect: DialectName, draw: random.Random) -> list[bytes]:
    """Instructions that the client puts into the history: plan mode, a reminder."""
    turn = made_turn(draw, dialect, "note", steps=2)
    return [*turn, wire.note(dialect, "Plan mode is on: change nothing."), wire.said(dialect, "I only plan.")]


def _repeated(dialect: DialectName, draw: random.Random) -> list[bytes]:
    """The same words twice are two messages."""
    once = [wire.user(dialect, "Go on."), wire.said(dialect, "Done.")]
    return [*once, *once, wire.user(dialect, RULE)]


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


def cases() -> list[Case]:
    return [
        Case(FAMILY, f"{kind}, {dialect}", partial(run, histories=(scenario(kind, dialect, "rule"),)))
        for kind in KINDS
        for dialect in DIALECTS
    ]


def cases_in(histories: Sequence[History], source: str) -> list[Case]:
    return [Case(FAMILY, f"{source}: what the user wrote", partial(run, histories=tuple(histories)))]


def run(lab: Lab, selector: Selector, *, histories: Sequence[History]) -> Tally:
    tally = Tally()
    for history in histories:
        with lab.place() as folder:
            settings = lab.settings_for(selector.name, folder / "recap.db")
            asyncio.run(_drive(Bench(settings, dialect=history.dialect), history, tally))
    return tally


async def _drive(bench: Bench, history: History, tally: Tally) -> None:
    """Every constraint at every cold boundary is a trial."""
    for end in boundaries(history):
        served = await bench.come_back(history.upto(end), *history.messages[history.starts[end] : history.body_of(end)])
        tally.watch(served)
        missing = checks.missing_constraints(served)
        for raw in checks.constraints(served.client):
            lost = raw in missing
            tally.promise([f"missing at turn {end + 1}: {checks.shown(raw)}"] if lost else [], history.id)
    await bench.close()


def boundaries(history: History, count: int = BOUNDARIES) -> list[int]:
    """The last turns of a history that has something before them, as many as asked for."""
    return list(range(1, len(history.starts)))[-count:]
