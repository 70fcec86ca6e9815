"""Reuse across turns: how much of what a turn will name do the blocks hold that a signal points to? (B.1, Figure 6)

Before each user request but the first, candidates are ranked by a signal and packed greedily under a share of their
characters. The evidence is what the agent then says, calls and gets back until the next request; the request itself is
not. An identifier that stands in df of n candidates weighs log(n / df); coverage is the share of the evidence's weight
that stands in the packed blocks. Identifiers that no candidate has do not count.

Two settings: `B.1` (the paper: candidates precede the turn that has just been completed) and `product` (the whole
history, which is what the proxy chooses from). Two readings of "identifier": `code` (headline: has a dot, underscore,
a digit or an inner capital) and `any` (every word that `graphstore.identifiers` keeps).

Candidates are blocks, or answers may be cut finer (`units`): what a word weighs is a matter of the blocks all the same,
so that granularities can be compared.

Where the finished turns were observed, a transition knows what past attention says of its candidates, and more ways to
choose can be compared.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import sha256
from math import log
from typing import Literal

from graphstore.blocks import Block
from graphstore.evidence import Rule, derive, past_use
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex, identifiers
from graphstore.parameters import Parameters
from graphstore.scoring import lexical_cue, standardised
from graphstore.selection import OWED, HistoryBlock, protection, select
from proxy.lab.observed import Observed
from proxy.lab.recordings import Recording
from proxy.lab.units import Granularity, units_of

Setting = Literal["B.1", "product"]
Reading = Literal["code", "any"]
SETTINGS: tuple[Setting, ...] = ("B.1", "product")
READINGS: tuple[Reading, ...] = ("code", "any")
BUDGETS = (0.05, 0.10, 0.20, 0.40)
CANDIDATES_MIN = 2  # with one there is nothing to choose
ATTENTION_RULES: tuple[Rule, ...] = ("paper", "hybrid")

_CODE = re.compile(r"[._0-9]|[a-z][A-Z]")


@cache
def _is_code(word: str) -> bool:
    return _CODE.search(word) is not None


def read_identifiers(text: str, reading: Reading) -> frozenset[str]:
    found = identifiers(text)
    return found if reading == "any" else frozenset(word for word in found if _is_code(word))


@dataclass(frozen=True, slots=True)
class Attended:
    """What the finished turns' attention says of the candidates, which the graph knows by their places."""

    density: tuple[float, ...]  # a token's, in the turn that has just been completed; 0: not observed
    mass: tuple[float, ...]  # a block's, in the same turn
    graphs: Mapping[Rule, ContextGraph]
    history: tuple[HistoryBlock, ...]


@dataclass(frozen=True)
class Transition:
    """One user request of a session: what could be chosen from, what was known, what came."""

    session: str
    turn: int  # of the request, counted from 1
    costs: tuple[int, ...]  # characters, by candidate
    words: tuple[frozenset[str], ...]  # identifiers, by candidate
    query: frozenset[str]
    finished: frozenset[str]  # identifiers of what the agent did in the turn before
    future: frozenset[str]
    attended: Attended | None = None
    blocks: tuple[frozenset[str], ...] | None = None  # identifiers of whole blocks; None: the candidates are those

    @cached_property
    def index(self) -> IdentifierIndex:
        return IdentifierIndex(self.words)

    @cached_property
    def weighing(self) -> IdentifierIndex:
        return self.index if self.blocks is None else IdentifierIndex(self.blocks)


def transitions(
    recording: Recording,
    setting: Setting,
    reading: Reading,
    observed: Observed | None = None,
    granularity: Granularity = "block",
) -> Iterator[Transition]:
    """Every request of a session that has candidates and a future that names some of them.

    With `observed` only those whose finished turn was: all signals are then compared on the same requests.
    """
    assert observed is None or granularity == "block", "attention is known of whole blocks"
    turns = recording.turns()
    known: dict[int, frozenset[str]] = {}
    cut: dict[int, list[tuple[int, frozenset[str]]]] = {}
    for number in range(1, len(turns)):
        (before, start), (_, end) = turns[number - 1], turns[number]
        limit = before if setting == "B.1" else start
        candidates = [block for block in recording.blocks if recording.start_of(block) < limit]
        if len(candidates) < CANDIDATES_MIN or (observed is not None and number not in observed.turns):
            continue
        for block in candidates:
            if block.messages[0] not in known:
                known[block.messages[0]] = read_identifiers(recording.text_of(block), reading)
                cut[block.messages[0]] = [
                    (cost, read_identifiers(text, reading)) for cost, text in _units(recording, block, granularity)
                ]
        units = [unit for block in candidates for unit in cut[block.messages[0]]]
        request = start
        while request < end and recording.roles[request] == "user":
            request += 1
        yield Transition(
            session=recording.id,
            turn=number + 1,
            costs=tuple(cost for cost, _ in units),
            words=tuple(words for _, words in units),
            query=read_identifiers("\n".join(recording.texts[start:request]), reading),
            finished=evidence(recording, before, start, reading),
            future=evidence(recording, request, end, reading),
            attended=None if observed is None else _attended(candidates, observed, number),
            blocks=None if granularity == "block" else tuple(known[block.messages[0]] for block in candidates),
        )


def _units(recording: Recording, block: Block, granularity: Granularity) -> list[tuple[int, str]]:
    """Cost and text of what a block is cut into: plain answers alone are cut (paper §5.4)."""
    text = recording.text_of(block)
    if block.kind != "assistant" or granularity == "block":
        return [(block.cost, text)]
    return [(len(unit), unit) for unit in units_of(text, granularity)]


def _attended(candidates: Sequence[Block], observed: Observed, turn: int) -> Attended:
    readings = {block.ordinal: block for block in observed.turns[turn].replay.blocks}
    own = [readings.get(place) for place in range(len(candidates))]
    past = observed.until(turn)
    return Attended(
        tuple(block.density if block else 0.0 for block in own),
        tuple(block.mass if block else 0.0 for block in own),
        {rule: derive(past, rule, Parameters()) for rule in ATTENTION_RULES},
        tuple(HistoryBlock(i, block.kind, block.cost, block.edits) for i, block in enumerate(candidates)),
    )


def evidence(recording: Recording, start: int, end: int, reading: Reading) -> frozenset[str]:
    """Identifiers of what the agent says, calls and gets back in these messages."""
    own = [i for i in range(start, end) if recording.roles[i] != "user"]
    said = "\n".join([*(recording.texts[i] for i in own), *(recording.calls[i] for i in own)])
    return read_identifiers(said, reading)


# -- signals ----------------------------------------------------------------------------------------------------------

Signal = Callable[[Transition], Sequence[float]]


def _query(t: Transition) -> list[float]:
    return lexical_cue(t.index, t.query)


def _past(t: Transition) -> list[float]:
    return past_use(t.index, t.finished, t.costs)


def _recency(t: Transition) -> list[float]:
    return [float(position) for position in range(len(t.costs))]


def _length(t: Transition) -> list[float]:
    return [float(cost) for cost in t.costs]


def _random(t: Transition) -> list[float]:
    """A draw that depends on the transition and the block alone."""
    draws = (sha256(f"{t.session}|{t.turn}|{position}".encode()).digest()[:8] for position in range(len(t.costs)))
    return [int.from_bytes(draw, "big") / 2**64 for draw in draws]


def _oracle(t: Transition) -> list[float]:
    """Overlap with the future (paper B.1). By block, like the paper; packing by density would cover a little more."""
    return lexical_cue(t.index, t.future)


def weighted(*parts: tuple[float, Signal]) -> Signal:
    """Sum of standardised signals."""

    def combined(t: Transition) -> list[float]:
        columns = [(weight, standardised(list(signal(t)))) for weight, signal in parts]
        return [sum(weight * column[i] for weight, column in columns) for i in range(len(t.costs))]

    return combined


LAMBDA = 0.5  # weight of the request's words beside another signal (paper, Table 5)
SIGNALS: Mapping[str, Signal] = {
    "random": _random,
    "recency": _recency,
    "query": _query,
    "past use": _past,
    "past use + query": weighted((1, _past), (LAMBDA, _query)),
    "length": _length,
    "length + recency + query": weighted((1, _length), (1, _recency), (LAMBDA, _query)),
    "past use + length + recency + query": weighted((1, _past), (1, _length), (1, _recency), (LAMBDA, _query)),
    "oracle": _oracle,
}


# -- with attention ---------------------------------------------------------------------------------------------------

Choose = Callable[[float], set[int]]  # share of the characters -> the candidates that are sent


def _density(t: Transition) -> Sequence[float]:
    assert t.attended is not None
    return t.attended.density


def _mass(t: Transition) -> Sequence[float]:
    assert t.attended is not None
    return t.attended.mass


ATTENTION_SIGNALS: Mapping[str, Signal] = {
    "attention": _density,
    "attention + query": weighted((1, _density), (LAMBDA, _query)),
    "mass + query": weighted((1, _mass), (LAMBDA, _query)),
    "past use + mass + query": weighted((1, _past), (1, _mass), (LAMBDA, _query)),
}


def _recap(t: Transition, rule: Rule, budget: float) -> set[int]:
    """The proxy's selection; nothing is protected. Its expansion ends at the budget, so all choices send as much."""
    assert t.attended is not None
    nominal = budget / (1 + Parameters().delta)
    return set(
        select(
            [HistoryBlock(block.ordinal, "tools", block.cost) for block in t.attended.history],
            t.index,
            t.query,
            t.attended.graphs[rule],
            Parameters(beta=nominal, request_cap_chars=2 * sum(t.costs)),
            session=t.session,
            turn=t.turn,
            rule=rule,
            past=_past(t),
        ).chosen
    )


WITH_ATTENTION = (*ATTENTION_SIGNALS, *(f"recap ({rule})" for rule in ATTENTION_RULES))


def rankings(t: Transition) -> Iterator[tuple[str, Choose]]:
    """Every signal that this transition knows enough for, packed by score alone."""
    for name, signal in (SIGNALS if t.attended is None else {**SIGNALS, **ATTENTION_SIGNALS}).items():
        yield name, partial(pack, signal(t), t.costs)


def choices(t: Transition) -> Iterator[tuple[str, Choose]]:
    """Every way to choose that this transition knows enough for."""
    yield from rankings(t)
    if t.attended is not None:
        for rule in ATTENTION_RULES:
            yield f"recap ({rule})", partial(_recap, t, rule)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Counts of a transition's user messages and latest edits, and of those that a choice leaves out (paper B.3)."""

    users: int
    users_lost: int
    edits: int
    edits_lost: int


def lost(t: Transition, choose: Choose, budget: float) -> Skeleton | None:
    """What the choice leaves out though the budget has room for all of it: max(beta c(V), c(P)). None: P is empty."""
    assert t.attended is not None
    protected, total = protection(t.attended.history), sum(t.costs)
    if not protected or not total:
        return None
    chosen = choose(max(budget, sum(t.costs[i] for i in protected) / total))
    users = {i for i in protected if t.attended.history[i].kind in OWED}
    edits = protected.keys() - users
    return Skeleton(len(users), len(users - chosen), len(edits), len(edits - chosen))


# -- coverage ---------------------------------------------------------------------------------------------------------


def pack(scores: Sequence[float], costs: Sequence[int], budget: float) -> set[int]:
    """Candidates in order of score while they fit; one that does not is skipped. Ties: the older first."""
    room, packed = int(budget * sum(costs) + 1e-9), set()
    for position in sorted(range(len(costs)), key=lambda i: -scores[i]):
        if costs[position] <= room:
            packed.add(position)
            room -= costs[position]
    return packed


def coverage(t: Transition, packed: set[int]) -> float | None:
    """Share of the future's weight that the packed candidates hold; None: the future names no candidate."""
    total = covered = 0.0
    count = len(t.weighing)
    for word in t.future:
        blocks = t.weighing.naming(word)
        if not blocks:
            continue
        weight = log(count / len(blocks))
        total += weight
        if not packed.isdisjoint(t.index.naming(word)):
            covered += weight
    return covered / total if total > 0 else None
