"""Needles (10.20.1): is the block with a fact still sent when the user comes back and needs it?

Facts stand in tool results, which every selector may leave out. The request names what it wants, only paraphrases it,
or paraphrases it after the last turn has worked with it. Losing a needle is a result. No word of four letters or more
of a paraphrase stands in its facts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from graphstore.selectors import Selector
from proxy.lab.compaction.bench import Lab
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import History, code, made, said, step, user

FAMILY = "needle"
DEPTHS = (0.1, 0.5, 0.9)  # of the history, where the first fact stands
OWN_DEPTH = 0.3  # in the user's own histories
HAYSTACKS = 2
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
        pair = step(history.dialect, "read", {"filePath": fact.path}, text, f"call-fact-{number}")
        steps.setdefault(turn, []).extend(pair)
        needles.append(pair)
    return Planted(history.with_steps(steps), tuple(needles))


def asked(planted: Planted, needle: Needle, ask: str) -> tuple[History, bytes]:
    """The history and the request of one way to ask."""
    history, dialect = planted.history, planted.history.dialect
    if ask == ASKS[2]:
        terms = " and ".join(needle.facts[i].term for i in needle.wanted)
        history = history.then(user(dialect, "Go on."), said(dialect, f"I worked with {terms}."))
    return history, user(dialect, needle.named if ask == ASKS[0] else needle.paraphrased)


def cases(seed: int) -> list[Case]:
    stacks = [made(f"hay {seed}.{number}") for number in range(HAYSTACKS)]
    return [
        Case(FAMILY, f"{needle.name}, {ask}", partial(run, needles=(needle,), ask=ask, stacks=stacks, depths=DEPTHS))
        for needle in NEEDLES
        for ask in ASKS
    ]


def cases_in(histories: Sequence[History], source: str) -> list[Case]:
    """The same needles in the user's own histories, at one depth."""
    fit = [history for history in histories if len(history.starts) > 1]
    own = partial(run, needles=NEEDLES, stacks=fit, depths=(OWN_DEPTH,))
    return [Case(FAMILY, f"{source}: {ask}", partial(own, ask=ask)) for ask in ASKS if fit]


async def run(
    lab: Lab,
    selector: Selector,
    *,
    needles: Sequence[Needle],
    ask: str,
    stacks: Sequence[History],
    depths: Sequence[float],
) -> Tally:
    tally = Tally()
    for stack in stacks:
        async with lab.bench(selector.name, stack.dialect) as bench:
            for needle, depth in product(needles, depths):
                planted = plant(stack, needle.facts, depth, seed=f"{lab.seed}|{stack.id}|{depth}")
                history, request = asked(planted, needle, ask)
                served = await bench.come_back(history, request, who=f"{needle.name}|{depth}")
                where = f"{needle.name} in {stack.id} at {depth:.0%}"
                tally.watch(served, where)
                sent = set(served.upstream)
                lost = [needle.facts[i].text for i in needle.wanted if not sent.issuperset(planted.needles[i])]
                tally.result(not lost, f"{where}: lost {', '.join(map(repr, lost))}")
    return tally
