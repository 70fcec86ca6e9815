"""Rules of evidence: which raw numbers importance follows, and what past use is."""

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.evidence import (
    RULES,
    Rule,
    StoredObservation,
    default_rule,
    derive,
    observation_of,
    past_use,
    restricted,
)
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex, identifiers
from graphstore.parameters import Parameters
from graphstore.selection import HistoryBlock, score
from tests.observed import replay_of

PARAMETERS = Parameters()


def stored(turn: int, density: dict[int, float], **more: object) -> StoredObservation:
    return StoredObservation(turn, turn, turn, 0.0, replay_of(density, **more), frozenset())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "rule"),
    [(None, "past-use"), (135_000_000, "hybrid"), (596_049_920, "paper"), (8_000_000_000, "paper")],
)
def test_the_default_rule_goes_by_the_model(parameters: int | None, rule: Rule) -> None:
    assert default_rule(parameters) == rule


def test_past_use_is_rarity_of_what_was_named_a_character() -> None:
    index = IdentifierIndex([identifiers("alpha beta"), identifiers("beta"), identifiers("gamma")])
    found = past_use(index, identifiers("beta gamma unknown"), [10, 10, 100])
    assert found == [log(3 / 2) / 10, log(3 / 2) / 10, log(3) / 100]


def test_past_use_of_a_block_without_cost_is_nothing() -> None:
    assert past_use(IdentifierIndex([identifiers("alpha"), identifiers("beta")]), identifiers("alpha"), [0, 5]) == [
        0,
        0,
    ]


def test_density_prefers_short_blocks_and_mass_long_ones() -> None:
    """The paper's density is a token's, so that a long block that got most of the attention may rank last."""
    seen = stored(1, {0: 0.1, 1: 0.01}, mass={0: 0.1, 1: 0.5})
    by_rule = {rule: derive([seen], rule, PARAMETERS).importance([0, 1]) for rule in RULES}
    assert by_rule["paper"] == by_rule["past-use"]
    assert by_rule["paper"][0] > by_rule["paper"][1]
    assert by_rule["mass"] == by_rule["hybrid"]
    assert by_rule["mass"][0] < by_rule["mass"][1]


@given(st.lists(st.dictionaries(st.integers(0, 6), st.floats(0, 1), min_size=1), max_size=5), st.sampled_from(RULES))
def test_edges_and_stale_marks_are_the_same_under_every_rule(seen: list[dict[int, float]], rule: Rule) -> None:
    observations = [
        StoredObservation(
            turn, turn, turn, 0.0, replay_of(density, [(0, 7, 0.3)], mass={v: 1 - d for v, d in density.items()}),
            frozenset(list(density)[:1]),
        )
        for turn, density in enumerate(seen, 1)
    ]  # fmt: skip
    one, other = derive(observations, "paper", PARAMETERS), derive(observations, rule, PARAMETERS)
    assert one.to_rows()[1] == other.to_rows()[1]
    assert one.stale(range(8)) == other.stale(range(8)) and one.observed(range(8)) == other.observed(range(8))
    other.check_integrity()


def test_a_fork_keeps_what_it_shares() -> None:
    graph = derive([stored(1, {0: 0.5, 1: 0.2, 2: 0.1})], "paper", PARAMETERS)
    graph.update(observation_of(replay_of({0: 0.5, 1: 0.2, 2: 0.1}, [(0, 1, 0.4), (1, 2, 0.4)]), "paper"), PARAMETERS)
    shared = restricted(graph, frozenset({0, 1}))
    assert shared.importance([0, 1, 2]) == [*graph.importance([0, 1]), 0.0]
    assert [(e.support, e.dependent) for e in shared.to_rows()[1]] == [(0, 1)]


@pytest.mark.parametrize("rule", RULES)
def test_a_score_is_the_sum_of_the_channels_of_its_rule(rule: Rule) -> None:
    history = [HistoryBlock(i, "tools", 100) for i in range(3)]
    index = IdentifierIndex([identifiers("alpha"), identifiers("beta"), identifiers("gamma")])
    graph: ContextGraph = derive([stored(1, {0: 0.9, 1: 0.1, 2: 0.1})], rule, PARAMETERS)
    scores = score(
        history, index, identifiers("beta"), graph, PARAMETERS, session="s", turn=1, rule=rule, past=[0.0, 0.0, 1.0]
    )
    channels = zip(scores.total, scores.z_u, scores.z_past, scores.z_lex, strict=True)
    assert all(total == u + past + PARAMETERS.lam * lex for total, u, past, lex in channels)
    assert any(scores.z_u) == (rule != "past-use")
    assert any(scores.z_past) == (rule in ("past-use", "hybrid"))
