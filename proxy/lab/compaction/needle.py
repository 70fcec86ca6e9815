"""Needles (10.20.1): is the block with a fact still sent when the user comes back and needs it?

Facts stand in tool results, which every selector may leave out. The request names what it wants, only paraphrases it,
or paraphrases it after the last turn has worked with it. Losing a needle is a result. No word of four letters or more
of a paraphrase stands in its facts.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from graphstore.selectors import Selector
from proxy.lab.compaction import wire
from proxy.lab.compaction.bench import Bench, Lab
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import History, code, made

FAMILY = "needle"
DEPTHS = (0.1, 0.5, 0.9)  # of the history, where the first fact stands
HAYSTACKS = 4
PADDING_CHARS = 250  # of code on either side of a fact


@dataclass(frozen=True, slots=True)
class Fact:
    path: str
    text: str
    term: str  # what the agent calls it when it works with it


@dataclass(frozen=True, slots=True)
class Needle:
    """`facts` stand in the history in this order, evenly from the depth on; `wanted` are those that must be sent."""

    name: str
    facts: tuple[Fact, ...]
    wanted: tuple[int, ...]
    named: str
    paraphrased: str
    answer: str | None  # the value alone; None: nothing in the history says it


NEEDLES = (
    Needle(
        "single",
        (Fact("config/limits.toml", "max_upload_mib = 37", "max_upload_mib"),),
        (0,),
        "Which number does max_upload_mib have?",
        "How big an item may somebody hand in?",
        "37",
    ),
    Needle(
        "several",
        (
            Fact("deploy/blue.env", "BLUE_REPLICAS=11", "BLUE_REPLICAS"),
            Fact("deploy/green.env", "GREEN_REPLICAS=23", "GREEN_REPLICAS"),
            Fact("deploy/amber.env", "AMBER_REPLICAS=5", "AMBER_REPLICAS"),
        ),
        (0, 1, 2),
        "Add up BLUE_REPLICAS, GREEN_REPLICAS and AMBER_REPLICAS: how many are they together?",
        "How many copies run over the three colours, all in all?",
        "39",
    ),
    Needle(
        "negation",
        (
            Fact("docs/tables.md", "The table invoice_lines may be migrated online.", "invoice_lines"),
            Fact("docs/audit.md", "The table audit_events must never be migrated online.", "audit_events"),
            Fact("docs/stock.md", "The table stock_levels may be migrated online.", "stock_levels"),
        ),
        (1,),
        "May audit_events be migrated online? Say yes or no.",
        "Can I change the layout of our trail of who did what while people work? Say yes or no.",
        "no",
    ),
    Needle(
        "update",
        (
            Fact("config/retry.toml", "retry_limit = 3", "retry_limit"),
            Fact("config/retry.toml", "retry_limit = 8  # raised after the outage", "retry_limit"),
        ),
        (1,),
        "Which number does retry_limit have now?",
        "How often do we try again at present?",
        "8",
    ),
    Needle(
        "numbers",
        tuple(
            Fact(f"net/{name}.yaml", f"gateway_{name}: port {port}", f"gateway_{name}")
            for name, port in (("alpha", 17443), ("bravo", 18443), ("delta", 18434), ("gamma", 18344))
        ),
        (1,),
        "On which port does gateway_bravo listen?",
        "Where do I reach the second way into our systems?",
        "18443",
    ),
)
UNANSWERABLE = Needle(
    "no answer", (), (), "Which number does session_ttl_hours have?", "How long until a logout?", None
)  # for models alone: there is nothing to lose
ASKS = ("named", "paraphrased", "paraphrased, used in the turn before")


@dataclass(frozen=True, slots=True)
class Planted:
    """A history with facts in it, and the messages that hold each of them."""

    history: History
    needles: tuple[tuple[bytes, ...], ...]


def plant(history: History, facts: Sequence[Fact], depth: float, *, seed: object = 0) -> Planted:
    """Each fact is what reading a file gave, at the beginning of a turn, between lines of code."""
    draw = random.Random(f"{seed}")
    last = len(history.starts) - 1
    first = min(last, round(depth * last))
    steps: dict[int, list[bytes]] = {}
    needles = []
    for number, fact in enumerate(facts):
        turn = first + (last - first) * number // max(1, len(facts))
        text = f"{code(draw, PADDING_CHARS)}{fact.text}\n{code(draw, PADDING_CHARS)}"
        pair = wire.step(history.dialect, "read", {"filePath": fact.path}, text, f"call-fact-{number}")
        steps.setdefault(turn, []).extend(pair)
        needles.append(pair)
    return Planted(history.with_steps(steps), tuple(needles))


def asked(planted: Planted, needle: Needle, ask: str) -> tuple[History, bytes]:
    """The history and the request of one way to ask."""
    history, dialect = planted.history, planted.history.dialect
    if ask == ASKS[2]:
        terms = " and ".join(needle.facts[i].term for i in needle.wanted)
        history = history.then(wire.user(dialect, "Go on."), wire.said(dialect, f"I worked with {terms}."))
    return history, wire.user(dialect, needle.named if ask == ASKS[0] else needle.paraphrased)


def cases() -> list[Case]:
    stacks = [made(f"hay-{number}") for number in range(HAYSTACKS)]
    return [
        Case(FAMILY, f"{needle.name}, {ask}", partial(run, needle=needle, ask=ask, stacks=stacks, depths=DEPTHS))
        for needle in NEEDLES
        for ask in ASKS
    ]


def cases_in(histories: Sequence[History], source: str) -> list[Case]:
    """The same needles in the user's own histories, at one depth."""
    fit = [history for history in histories if len(history.starts) > 1]
    if not fit:
        return []
    return [Case(FAMILY, f"{source}: {ask}", partial(run_all, ask=ask, stacks=fit, depths=(0.3,))) for ask in ASKS]


def run_all(lab: Lab, selector: Selector, *, ask: str, stacks: Sequence[History], depths: Sequence[float]) -> Tally:
    tally = Tally()
    for needle in NEEDLES:
        run(lab, selector, needle=needle, ask=ask, stacks=stacks, depths=depths, tally=tally)
    return tally


def run(
    lab: Lab,
    selector: Selector,
    *,
    needle: Needle,
    ask: str,
    stacks: Sequence[History],
    depths: Sequence[float],
    tally: Tally | None = None,
) -> Tally:
    return asyncio.run(_run(lab, selector, needle, ask, stacks, depths, tally if tally is not None else Tally()))


async def _run(
    lab: Lab,
    selector: Selector,
    needle: Needle,
    ask: str,
    stacks: Sequence[History],
    depths: Sequence[float],
    tally: Tally,
) -> Tally:
    with lab.place() as folder:
        settings = lab.settings_for(selector.name, folder / "recap.db")
        for dialect in sorted({stack.dialect for stack in stacks}):
            bench = Bench(settings, dialect=dialect)
            for stack in (stack for stack in stacks if stack.dialect == dialect):
                for depth in depths:
                    planted = plant(stack, needle.facts, depth, seed=f"{stack.id}|{depth}")
                    history, request = asked(planted, needle, ask)
                    served = await bench.come_back(history, request, who=f"{stack.id}|{needle.name}|{depth}")
                    where = f"{needle.name} in {stack.id} at {depth:.0%}"
                    tally.watch(served, where)
                    sent = set(served.upstream)
                    lost = [needle.facts[i].text for i in needle.wanted if not sent.issuperset(planted.needles[i])]
                    why = f"{where}: lost {', '.join(map(repr, lost))}"
                    others = [needle.facts[i].text for i in range(len(needle.facts)) if i not in needle.wanted]
                    kept = [text for text, pair in zip(others, _others(planted, needle), strict=True) if pair[1] in sent]
                    tally.result(not lost, why + (f", kept {', '.join(map(repr, kept))}" if kept else ""))
            await bench.close()
    return tally


def _others(planted: Planted, needle: Needle) -> list[tuple[bytes, ...]]:
    return [pair for i, pair in enumerate(planted.needles) if i not in needle.wanted]
