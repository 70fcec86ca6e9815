"""Which blocks of a history to send: protected records first, then by score, then what those depend on.

A pure function of values: it knows no messages, no text and no clock. `select` chooses; a `Selection` holds the choice
and explains it, block by block, when asked.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from graphstore.blocks import BlockKind
from graphstore.evidence import OF_IMPORTANCE, OF_PAST_USE, Rule
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex
from graphstore.parameters import Parameters
from graphstore.records import Mark, SelectionRow, VerdictRow
from graphstore.scoring import exploration, lexical_cue, standardised
from graphstore.selectors import RECAP, Selector, SelectorName

__all__ = ["HistoryBlock", "Parameters", "Scores", "Selection", "select"]

ROUNDING = 1e-9  # beta * cost may fall a hair below the integer that it is on paper

OWED = {"user": "user message", "pinned": "pinned"}  # what is never left out, whatever the cap
PINNED, MUTED = "pinned by hand", "muted by hand"
OVERFULL = "protected blocks alone exceed the budget"
OVERPINNED = "your pins and protected blocks exceed the budget"
CAPPED = "request cap"
UNCAPPABLE = "request cap cannot be met: everything is sent"
AGAIN = "part of the current turn again"
INTO_TURN = "into_turn"  # in the parameters of a selection under pressure


@dataclass(frozen=True, slots=True)
class HistoryBlock:
    """A block that may be left out. `ordinal` names it in the graph; `cost` is in characters.

    `mark` is a person's word: `pin` protects it whatever its score and the cap, `mute` keeps it out of packing and
    expansion; what is protected cannot be muted.
    """

    ordinal: int
    kind: BlockKind
    cost: int
    edits: tuple[str, ...] = ()
    mark: Mark | None = None

    @property
    def is_owed(self) -> bool:
        """Never left out, whatever the cap."""
        return self.kind in OWED or self.mark == "pin"


@dataclass(frozen=True, slots=True)
class Scores:
    """s(v) of Eq. 3 and its channels, aligned with the history. `exploration` is 0 for observed blocks."""

    total: list[float]
    z_u: list[float]  # 0 under a rule without importance
    z_lex: list[float]
    z_past: list[float]  # 0 under a rule without past use
    exploration: list[float]
    stale: list[bool]


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice, all blocks by ordinal. Chronological, but for `expanded`, which is in order of addition.

    `over_cap`: users and pinned blocks alone make the request too long. Everything is then chosen, because the
    original request is the only honest answer.
    """

    chosen: tuple[int, ...]
    protected: tuple[int, ...]  # P
    seeds: tuple[int, ...]  # C0: protected and packed, before expansion
    expanded: tuple[int, ...]
    capped: tuple[int, ...]  # chosen, then dropped to meet the request cap
    budget: int  # B, characters
    allowance: int  # (1 + delta) B, what expansion may reach
    cost: int  # c(C)
    protected_cost: int  # c(P)
    total_cost: int  # c(V)
    over_cap: bool
    rule: Rule
    selector: SelectorName
    scores: Scores
    _history: Sequence[HistoryBlock]
    _ranking: list[int]  # positions of the unprotected, best first
    _reasons: dict[int, str]  # position -> why protected
    _dependents: dict[int, int]  # expanded position -> position of the block that it was added for

    @property
    def overfull(self) -> bool:
        """True when the protected blocks alone exceed even what expansion may reach."""
        return self.protected_cost > self.allowance

    @property
    def marked(self) -> frozenset[int]:
        """Blocks that a person pinned or muted."""
        return frozenset(block.ordinal for block in self._history if block.mark is not None)

    def verdicts(self) -> tuple[VerdictRow, ...]:
        """Why each block was kept or left out, in chronological order."""
        chosen, seeds, capped = set(self.chosen), set(self.seeds), set(self.capped)
        rank = {position: place for place, position in enumerate(self._ranking, 1)}
        ordinals, ranked = [block.ordinal for block in self._history], len(rank)
        stale, overfull = self.scores.stale, self.overfull
        crowded = OVERPINNED if PINNED in self._reasons.values() else OVERFULL
        free = self.budget - self.protected_cost
        last_packed = max((place for position, place in rank.items() if ordinals[position] in seeds), default=0)

        def explain(position: int, ordinal: int) -> tuple[str, str]:
            if ordinal in capped:
                return "left out", CAPPED
            if position in self._reasons:
                return "protected", self._reasons[position]
            if self._history[position].mark == "mute":
                return ("protected", UNCAPPABLE) if ordinal in chosen else ("left out", MUTED)
            aged = ", stale" if stale[position] else ""
            if position not in rank:
                return "left out", f"not packed by {self.selector}"
            place = f"rank {rank[position]} of {ranked}{aged}"
            if ordinal in seeds:
                return "packed", place
            if position in self._dependents:
                return "expanded", f"for block {ordinals[self._dependents[position]]}"
            if ordinal in chosen:
                return "protected", UNCAPPABLE
            if overfull:
                return "left out", crowded
            cost = self._history[position].cost
            if rank[position] > last_packed and cost <= free:
                return "left out", place
            room = "the whole budget" if cost > self.budget else "protected blocks leave" if cost > free else "was left"
            return "left out", f"did not fit{aged}: {cost:,} characters, more than {room}"

        scores = self.scores
        channels = zip(scores.total, scores.z_u, scores.z_lex, scores.z_past, scores.exploration, strict=True)
        return tuple(
            VerdictRow(v, v in chosen, *explain(position, v), *values, rank.get(position))
            for position, (v, values) in enumerate(zip(ordinals, channels, strict=True))
        )

    def to_row(
        self,
        *,
        id: int,
        session_id: int,
        exchange_id: int,
        turn: int,
        created_at: float,
        applied: bool,
        reason: str,
        parameters: Parameters,
        notice: bool,
        into_turn: int | None = None,
    ) -> SelectionRow:
        """The row that the archive keeps. `reason` says why the context may be selected anew; `into_turn` is the
        ordinal of the request whose own older steps were chosen from, too.
        """
        turn_too = {} if into_turn is None else {INTO_TURN: into_turn}
        return SelectionRow(
            id=id,
            session_id=session_id,
            exchange_id=exchange_id,
            turn=turn,
            created_at=created_at,
            applied=applied,
            reason=reason,
            parameters=parameters.to_json(rule=self.rule, selector=self.selector, **turn_too),
            budget=self.budget,
            cost=self.cost,
            protected_cost=self.protected_cost,
            total_cost=self.total_cost,
            notice=notice,
            verdicts=self.verdicts(),
        )


def select(
    history: Sequence[HistoryBlock],
    words: IdentifierIndex,
    request: frozenset[str],
    graph: ContextGraph,
    parameters: Parameters,
    *,
    session: str,
    turn: int,
    rest_chars: int = 0,
    rule: Rule = "paper",
    past: Sequence[float] = (),
    selector: Selector = RECAP,
) -> Selection:
    """Choose the blocks to send with a request (paper §4.3, Algorithm 1, Eq. 6).

    `words` are the identifiers of `history`, block by block, `request` those of the user's new words; `session` and
    `turn` name the exploration draw. `rest_chars` is the cost of what is sent besides the history. With the default of
    0 the request cap bounds the history alone. `rule` says which evidence counts, `past` is the past use of each block
    (`evidence.past_use`; empty: nothing is known of it). `selector` is another way to choose, to compare with.

    Bound: every protected block is chosen and c(C) <= max(c(P), (1 + delta) B), unless the request cap intervenes.
    """
    if not selector.uses_graph:
        graph, past = ContextGraph(), ()
    scores = score(history, words, request, graph, parameters, session=session, turn=turn, rule=rule, past=past)
    ordinals, costs = [block.ordinal for block in history], [block.cost for block in history]
    reasons = protection(history, edits=selector.protects_edits)
    total, protected_cost = sum(costs), sum(costs[i] for i in reasons)
    budget = budget_of(total, parameters, selector)
    allowance = int((1 + parameters.delta) * budget + ROUNDING)

    muted = {i for i, block in enumerate(history) if block.mark == "mute" and i not in reasons}
    unpacked = muted if selector.bars is None else muted | selector.bars([block.kind for block in history])
    ranking = [i for i in range(len(history)) if i not in reasons and i not in unpacked]
    order = _order(selector, scores, ordinals, seed=parameters.seed, session=session, turn=turn)
    ranking.sort(key=order.__getitem__, reverse=True)  # stable, also in reverse: ties stay chronological
    packed, cost = _pack(ranking, costs, protected_cost, budget)
    seeds = sorted([*reasons, *packed])
    barred = scores.stale if not muted else [gone or i in muted for i, gone in enumerate(scores.stale)]
    dependents = _expand(seeds, ordinals, costs, barred, graph, allowance - cost)
    cost += sum(costs[i] for i in dependents)
    chosen = {*seeds, *dependents}
    capped = _cap(chosen, history, reasons, cost + rest_chars - parameters.request_cap_chars)
    if capped is None:
        chosen, cost = set(range(len(history))), total
    else:
        chosen.difference_update(capped)
        cost -= sum(costs[i] for i in capped)

    def named(positions: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(ordinals.__getitem__, positions))

    return Selection(
        chosen=named(sorted(chosen)),
        protected=named(sorted(reasons)),
        seeds=named(seeds),
        expanded=named(dependents),
        capped=named(sorted(capped or ())),
        budget=budget,
        allowance=allowance,
        cost=cost,
        protected_cost=protected_cost,
        total_cost=total,
        over_cap=capped is None,
        rule=rule,
        selector=selector.name,
        scores=scores,
        _history=history,
        _ranking=ranking,
        _reasons=reasons,
        _dependents=dependents,
    )


def budget_of(total: int, parameters: Parameters, selector: Selector = RECAP) -> int:
    """B of a history of so many characters."""
    return int(parameters.beta * total + ROUNDING) if selector.is_bounded else total


def turn_reached_into(row: SelectionRow) -> int | None:
    """Ordinal of the request whose turn was under way when this selection chose from its older steps as well."""
    ordinal = json.loads(row.parameters).get(INTO_TURN)
    return ordinal if isinstance(ordinal, int) else None


def narrowed(row: SelectionRow, costs: Mapping[int, int], left_out: frozenset[int]) -> SelectionRow:
    """A selection over those of its blocks that still stand (ordinal -> cost), of which only `left_out` stay out.

    Its budget is the same share of what is now its history.
    """
    verdicts = tuple(
        v if v.kept or v.ordinal in left_out else v._replace(kept=True, rule="protected", detail=AGAIN)
        for v in row.verdicts
        if v.ordinal in costs
    )
    total = sum(costs[v.ordinal] for v in verdicts)
    return replace(
        row,
        budget=row.budget * total // row.total_cost if row.total_cost else 0,
        cost=sum(costs[v.ordinal] for v in verdicts if v.kept),
        protected_cost=sum(costs[v.ordinal] for v in verdicts if v.kept and v.rule == "protected"),
        total_cost=total,
        verdicts=verdicts,
    )


def score(
    history: Sequence[HistoryBlock],
    words: IdentifierIndex,
    request: frozenset[str],
    graph: ContextGraph,
    parameters: Parameters,
    *,
    session: str,
    turn: int,
    rule: Rule = "paper",
    past: Sequence[float] = (),
) -> Scores:
    """s(v) = z(u) + lambda z(lex) + epsilon xi [never observed] - kappa [stale] (paper §4.3, Eq. 3).

    Rules of ours put z(past) beside z(u) or in its place (`graphstore.evidence`).
    """
    ordinals = [block.ordinal for block in history]
    nothing = [0.0] * len(ordinals)
    z_u = standardised(graph.importance(ordinals)) if rule in OF_IMPORTANCE else nothing
    z_past = standardised(past) if rule in OF_PAST_USE and past else nothing
    z_lex = standardised(lexical_cue(words, request))
    observed, stale = graph.observed(ordinals), graph.stale(ordinals)
    fresh = [ordinal for ordinal, seen in zip(ordinals, observed, strict=True) if not seen]
    draws = iter(exploration(fresh, seed=parameters.seed, session=session, turn=turn))
    xi = [0.0 if seen else next(draws) for seen in observed]
    lam, eps, kappa = parameters.lam, parameters.eps, parameters.kappa
    total = [
        u + used + lam * lex + eps * draw - (kappa if gone else 0.0)
        for u, used, lex, draw, gone in zip(z_u, z_past, z_lex, xi, stale, strict=True)
    ]
    return Scores(total, z_u, z_lex, z_past, xi, stale)


def _order(
    selector: Selector, scores: Scores, ordinals: Sequence[int], *, seed: int, session: str, turn: int
) -> Sequence[float]:
    """What blocks are packed by, the largest first."""
    match selector.order:
        case "score":
            return scores.total
        case "newest":
            return range(len(ordinals))
        case "draw":
            return exploration(ordinals, seed=seed, session=session, turn=turn)


def protection(history: Sequence[HistoryBlock], *, edits: bool = True) -> dict[int, str]:
    """P: positions that are never left out for their score, with the rule that protects each (paper §4.3).

    `edits`: the latest edit of each file too.
    """
    latest = {path: position for position, block in enumerate(history) if edits for path in block.edits}
    edited: defaultdict[int, list[str]] = defaultdict(list)
    for path, position in latest.items():
        edited[position].append(path)
    reasons = {position: f"latest edit of {', '.join(paths)}" for position, paths in edited.items()}
    by_hand = {position: PINNED for position, block in enumerate(history) if block.mark == "pin"}
    return reasons | by_hand | {i: OWED[block.kind] for i, block in enumerate(history) if block.kind in OWED}


def _pack(ranking: Sequence[int], costs: Sequence[int], cost: int, budget: int) -> tuple[list[int], int]:
    """Add blocks in order of rank while they fit; one that does not fit is skipped, not the end (Algorithm 1)."""
    packed: list[int] = []
    cheapest = min(costs, default=0)
    for position in ranking:
        if cost + cheapest > budget:
            break
        if cost + costs[position] <= budget:
            packed.append(position)
            cost += costs[position]
    return packed, cost


def _expand(
    seeds: Sequence[int],
    ordinals: Sequence[int],
    costs: Sequence[int],
    barred: Sequence[bool],
    graph: ContextGraph,
    room: int,
) -> dict[int, int]:
    """Supports to add, in order of addition, each with the seed that it is for: one hop, within `room` characters.

    `barred`: by position, whether a block is no support: it is stale, or muted.
    """
    added: dict[int, int] = {}
    cheapest = min(costs, default=0)
    if room < cheapest:
        return added
    positions = dict(zip(ordinals, range(len(ordinals)), strict=True))
    taken = set(seeds)
    supports = graph.supports_of([ordinals[i] for i in seeds])
    for seed in seeds:
        for ordinal in supports.get(ordinals[seed], ()):
            position = positions.get(ordinal)
            if position is None or position in taken or barred[position] or costs[position] > room:
                continue
            taken.add(position)
            added[position] = seed
            room -= costs[position]
        if room < cheapest:
            break
    return added


def _cap(chosen: set[int], history: Sequence[HistoryBlock], reasons: dict[int, str], excess: int) -> list[int] | None:
    """Positions to drop so that at least `excess` characters go: the oldest first, protected edits last (ours).

    None when what is owed, users and pinned blocks, alone is too much.
    """
    dropped: list[int] = []
    if excess <= 0:
        return dropped
    for position in _droppable(chosen, history, reasons):
        dropped.append(position)
        excess -= history[position].cost
        if excess <= 0:
            return dropped
    return None


def _droppable(chosen: set[int], history: Sequence[HistoryBlock], reasons: dict[int, str]) -> Iterator[int]:
    order = sorted(chosen)
    edits = (i for i in order if i in reasons and not history[i].is_owed)
    return chain((i for i in order if i not in reasons), edits)
