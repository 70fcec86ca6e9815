"""The context graph: updates, order of edges, rows and integrity."""

import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphstore.errors import GraphIntegrityError
from graphstore.graph import ORDINAL_MAX, ContextGraph
from graphstore.observation import Observation
from graphstore.parameters import Parameters
from graphstore.records import EdgeRow, NodeState

PARAMETERS = Parameters()


def observed(attention: dict[int, float], *mass: tuple[int, int, float], **words: str) -> Observation:
    identifiers = {int(name[1:]): frozenset(text.split()) for name, text in words.items()}
    return Observation(attention, mass, identifiers)


def grown(*observations: Observation) -> ContextGraph:
    graph = ContextGraph()
    for observation in observations:
        graph.update(observation, PARAMETERS)
    return graph


def edges_of(graph: ContextGraph) -> list[tuple[int, int, float]]:
    return [(edge.support, edge.dependent, edge.weight) for edge in graph.to_rows()[1]]


def test_importance_blends_and_the_unobserved_keep_theirs() -> None:
    graph = grown(observed({0: 1.0, 3: 4.0}), observed({3: 0.0, 5: 2.0}))
    assert graph.importance([0, 3, 5, 4, 99]) == pytest.approx([0.15, 0.24, 0.6, 0.0, 0.0])
    assert graph.observed([0, 3, 5, 4, 99]) == [True, True, True, False, False]


def test_edges_need_more_than_theta_and_keep_the_largest_mass_in_their_first_place() -> None:
    graph = grown(
        observed({}, (1, 3, 0.5), (0, 3, 0.02), (0, 2, 0.3)),
        observed({}, (0, 3, 0.9), (1, 3, 0.4), (0, 2, 0.7), (0, 1, 0.1)),
    )
    assert edges_of(graph) == [(0, 2, 0.7), (1, 3, 0.5), (0, 1, 0.1), (0, 3, 0.9)]
    assert graph.supports_of([3, 1, 7, 10**6]) == {1: [0], 3: [1, 0]}


def test_an_edge_seen_twice_in_one_observation_is_stored_once_with_the_largest_mass() -> None:
    graph = grown(observed({}, (1, 2, 0.3), (0, 2, 0.2), (1, 2, 0.7), (1, 2, 0.5)), observed({}, (0, 2, 0.1)))
    assert edges_of(graph) == [(0, 2, 0.2), (1, 2, 0.7)]


def test_stale_is_for_good() -> None:
    words = {"b0": "alpha beta", "b1": "alpha beta"}
    graph = grown(observed({0: 0.1, 1: 1.0}, **words), observed({0: 1.0, 1: 0.1}, **words))
    assert graph.stale([0, 1]) == [True, False]


@pytest.mark.parametrize(
    "bad",
    [
        observed({0: float("nan")}),
        observed({0: -0.1}),
        observed({0: float("inf")}),
        observed({-1: 0.1}),
        observed({ORDINAL_MAX + 1: 0.1}),
        observed({0: 1.0}, (2, 1, 0.5)),
        observed({0: 1.0}, (1, 1, 0.5)),
        observed({0: 1.0}, (-1, 1, 0.5)),
        observed({0: 1.0}, (0, ORDINAL_MAX + 1, 0.5)),
        observed({0: 1.0}, (0, 1, float("nan"))),
        observed({0: 1.0}, (0, 1, float("inf"))),
    ],
)
def test_an_impossible_observation_is_refused_and_changes_nothing(bad: Observation) -> None:
    graph = grown(observed({0: 1.0, 1: 0.5}, (0, 1, 0.5)))
    before = graph.to_rows()
    with pytest.raises(ValueError):
        graph.update(bad, PARAMETERS)
    assert graph.to_rows() == before


words_of = st.dictionaries(st.integers(0, 40), st.frozensets(st.sampled_from("abcdef")), max_size=12)
pairs = st.tuples(st.integers(0, 40), st.integers(0, 40), st.floats(0, 1)).filter(lambda edge: edge[0] < edge[1])
observations = st.builds(
    Observation,
    st.dictionaries(st.integers(0, 40), st.floats(0, 1e3)),
    st.lists(pairs, max_size=20).map(tuple),
    words_of,
)


@given(st.lists(observations, max_size=5))
@example([Observation({0: 1.0}, (), {}), Observation({0: 5e-324}, (), {})])  # alpha times it rounds up to itself
def test_any_updates_keep_the_invariants_and_survive_as_rows(turns: list[Observation]) -> None:
    graph = grown(*turns)
    graph.check_integrity()
    nodes, edges = graph.to_rows()
    assert ContextGraph.from_rows(reversed(nodes), reversed(edges)).to_rows() == (nodes, edges)
    assert [edge.position for edge in edges] == list(range(len(edges)))


@given(st.lists(observations, min_size=1, max_size=4), observations)
def test_loading_between_updates_makes_no_difference(turns: list[Observation], last: Observation) -> None:
    kept, loaded = grown(*turns), ContextGraph.from_rows(*grown(*turns).to_rows())
    kept.update(last, PARAMETERS)
    loaded.update(last, PARAMETERS)
    assert kept.to_rows() == loaded.to_rows()


def test_sessions_of_more_than_65536_blocks_keep_their_edges() -> None:
    graph = grown(observed({}, (1, 65_535, 0.5)), observed({}, (65_535, 65_536, 0.6), (1, 65_535, 0.7)))
    assert edges_of(graph) == [(1, 65_535, 0.7), (65_535, 65_536, 0.6)]
    assert edges_of(ContextGraph.from_rows(*graph.to_rows())) == edges_of(graph)


NODES = [NodeState(0, 0.5, True, False), NodeState(2, 0.1, True, True), NodeState(5, 0.0, False, False)]
EDGE = EdgeRow(0, 2, 0.5, 0)


@pytest.mark.parametrize(
    ("nodes", "edges", "invariant"),
    [
        ([NodeState(0, 1.5, True, False)], [], "importance lies in"),
        ([NodeState(0, float("nan"), True, False)], [], "importance lies in"),
        ([NodeState(0, 0.0, False, True)], [], "only observed blocks are stale"),
        ([NodeState(0, 0.5, False, False)], [], "only observed blocks have importance"),
        ([NodeState(-1, 0.5, True, False)], [], "ordinals"),
        ([NodeState(2**31, 0.5, True, False)], [], "ordinals"),
        ([NODES[0], NODES[0]], [], "a block is stored once"),
        (NODES, [replace(EDGE, support=2, dependent=0)], "a support precedes"),
        (NODES, [replace(EDGE, dependent=3)], "known blocks"),
        (NODES, [replace(EDGE, dependent=6)], "known blocks"),
        (NODES, [replace(EDGE, dependent=10**6)], "known blocks"),
        (NODES, [replace(EDGE, support=-1)], "known blocks"),
        (NODES, [replace(EDGE, weight=float("nan"))], "weights"),
        (NODES, [replace(EDGE, weight=-0.1)], "weights"),
        (NODES, [EDGE, EDGE], "an edge is stored once"),
    ],
)
def test_rows_that_break_an_invariant_are_refused_by_name(nodes: Any, edges: Any, invariant: str) -> None:
    with pytest.raises(GraphIntegrityError, match=invariant):
        ContextGraph.from_rows(nodes, edges)


def test_an_empty_graph_knows_nothing() -> None:
    graph = ContextGraph.from_rows([], [])
    assert graph.to_rows() == ([], [])
    assert (graph.importance([0]), graph.observed([0]), graph.stale([0]), graph.supports_of([0])) == (
        [0],
        [False],
        [False],
        {},
    )


def test_the_hot_form_is_small() -> None:
    """At most 12 bytes a node and 12 an edge, besides a constant."""
    size = 5_000
    graph = ContextGraph.from_rows(
        [NodeState(i, 0.5, True, False) for i in range(size)],
        [EdgeRow(i, i + step, 0.5, step * size + i) for step in (1, 2, 3) for i in range(size - step)],
    )
    held = sum(sys.getsizeof(getattr(graph, name)) for name in ContextGraph.__slots__)
    assert held <= 12 * size + 12 * (3 * size - 6) + 1_000
