"""What speaks for a block beside the words of the request: rules that turn raw numbers into importance.

A replay stores what it measured (`graphstore.replays`); a rule says which of those numbers importance follows, and
whether the model-free signal, past use, counts. Rules change nothing else: edges and stale marks are
the same under each.

| rule       | u follows (Eq. 1)     | score of a block (Eq. 3)                    |
|------------|-----------------------|---------------------------------------------|
| `paper`    | density, a token's    | z(u) + lambda z(lex) + annotations          |
| `mass`     | mass, a block's       | z(u) + lambda z(lex) + annotations          |
| `past-use` | density, and unused   | z(past) + lambda z(lex) + annotations       |
| `hybrid`   | mass                  | z(past) + z(u) + lambda z(lex) + annotations |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from typing import Literal

from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex
from graphstore.observation import Observation
from graphstore.parameters import Parameters
from graphstore.replays import Replay

Rule = Literal["paper", "mass", "past-use", "hybrid"]
RULES: tuple[Rule, ...] = ("paper", "mass", "past-use", "hybrid")
OF_IMPORTANCE: frozenset[Rule] = frozenset({"paper", "mass", "hybrid"})  # rules whose score has z(u)
OF_PAST_USE: frozenset[Rule] = frozenset({"past-use", "hybrid"})  # ... and z(past)
OF_MASS: frozenset[Rule] = frozenset({"mass", "hybrid"})  # rules under which u follows mass

PAPER_PARAMETERS_MIN = 500_000_000  # Qwen3-0.6B, the paper's model, has 596 million


@dataclass(frozen=True, slots=True)
class StoredObservation:
    """A replay as the archive keeps it. `replaced` are the blocks that the stale rule held for."""

    turn: int
    since_turn: int
    exchange_id: int
    created_at: float
    replay: Replay
    replaced: frozenset[int]


def default_rule(parameters: int | None) -> Rule:
    """The rule for a model of so many parameters; None: no replay has been made.

    Smaller models than the paper's did not beat past use by density, and helped a little by mass (ours).
    """
    if parameters is None:
        return "past-use"
    return "paper" if parameters >= PAPER_PARAMETERS_MIN else "hybrid"


def past_use(history: IdentifierIndex, words: frozenset[str], costs: Sequence[int]) -> list[float]:
    """past(v): summed inverse document frequency of what the finished turn named, per character of the block (ours).

    `words` are the identifiers of the finished turn: what the agent said, called and got back. `costs` are aligned with
    `history`; a block without cost has no past use. Weights are added in the order of their size, as for the cue.
    """
    naming = [blocks for blocks in map(history.naming, words) if blocks]
    use = [0.0] * len(history)
    for blocks in sorted(naming, key=len):
        weight = log(len(history) / len(blocks))
        for block in blocks:
            use[block] += weight
    return [value / cost if cost > 0 else 0.0 for value, cost in zip(use, costs, strict=True)]


def observation_of(replay: Replay, rule: Rule, replaced: frozenset[int] = frozenset()) -> Observation:
    """What a replay says under a rule. The stale rule has been applied already; its result is `replaced`."""
    density = {block.ordinal: block.density for block in replay.blocks}
    mass = {block.ordinal: block.mass for block in replay.blocks} if rule in OF_MASS else None
    return Observation(density, replay.edges, {}, mass, replaced)


def derive(
    observations: Iterable[StoredObservation], rule: Rule, parameters: Parameters, start: ContextGraph | None = None
) -> ContextGraph:
    """The graph that these observations make, in order, from `start` on (which is changed) or from nothing."""
    graph = ContextGraph() if start is None else start
    for stored in observations:
        graph.update(observation_of(stored.replay, rule, stored.replaced), parameters)
    return graph


def restricted(graph: ContextGraph, ordinals: frozenset[int]) -> ContextGraph:
    """What a graph knows of these blocks alone: what a fork inherits."""
    nodes, edges = graph.to_rows()
    return ContextGraph.from_rows(
        [node for node in nodes if node.ordinal in ordinals],
        [edge for edge in edges if edge.support in ordinals and edge.dependent in ordinals],
    )
