"""Packing, protection, expansion, the request cap, and the reason given for every block."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.blocks import BlockKind
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex
from graphstore.parameters import Parameters
from graphstore.records import EdgeRow, NodeState
from graphstore.selection import HistoryBlock, Selection, select

NOTHING: frozenset[str] = frozenset()


def graph_of(
    u: dict[int, float], stale: frozenset[int] = frozenset(), edges: tuple[tuple[int, int], ...] = ()
) -> ContextGraph:
    ends = {v for edge in edges for v in edge}
    nodes = [NodeState(v, u.get(v, 0.0), v in u, v in stale) for v in sorted(u.keys() | ends)]
    return ContextGraph.from_rows(nodes, [EdgeRow(a, b, 0.5, i) for i, (a, b) in enumerate(edges)])


def tools(*costs: int) -> list[HistoryBlock]:
    return [HistoryBlock(i, "tools", cost) for i, cost in enumerate(costs)]


def chosen_from(
    history: list[HistoryBlock],
    graph: ContextGraph,
    *,
    texts: list[frozenset[str]] | None = None,
    request: frozenset[str] = NOTHING,
    rest_chars: int = 0,
    **parameters: float,
) -> Selection:
    return select(
        history,
        IdentifierIndex(texts or [NOTHING] * len(history)),
        request,
        graph,
        replace(Parameters(), **parameters),  # type: ignore[arg-type]
        session="s",
        turn=1,
        rest_chars=rest_chars,
    )


def details(selection: Selection) -> list[str]:
    return [f"{verdict.rule}: {verdict.detail}" for verdict in selection.verdicts()]


def test_a_block_that_does_not_fit_is_skipped_and_packing_goes_on() -> None:
    graph = graph_of({0: 0.9, 1: 0.8, 2: 0.7, 3: 0.6, 4: 0.1})
    selection = chosen_from(tools(30, 50, 20, 60, 40), graph, beta=0.25)
    assert (selection.budget, selection.chosen, selection.cost) == (50, (0, 2), 50)
    assert details(selection) == [
        "packed: rank 1 of 5",
        "left out: did not fit: 50 characters, more than was left",
        "packed: rank 3 of 5",
        "left out: did not fit: 60 characters, more than the whole budget",
        "left out: rank 5 of 5",
    ]


def test_ties_are_packed_in_chronological_order() -> None:
    graph = graph_of(dict.fromkeys(range(6), 0.5))
    assert chosen_from(tools(*[10] * 6), graph, beta=0.5).chosen == (0, 1, 2)


def test_a_budget_that_is_an_integer_on_paper_is_one() -> None:
    """0.07 * 100 is 7.000000000000001 and 0.29 * 100 is 28.999999999999996 in floating point."""
    assert chosen_from(tools(100), graph_of({}), beta=0.07).budget == 7
    assert chosen_from(tools(100), graph_of({}), beta=0.29).budget == 29


def test_users_pinned_blocks_and_the_latest_edit_of_each_file_are_protected() -> None:
    history = [
        HistoryBlock(0, "user", 10),
        HistoryBlock(3, "tools", 10, ("a.py", "b.py")),
        HistoryBlock(4, "tools", 10, ("c.py",)),
        HistoryBlock(7, "pinned", 10),
        HistoryBlock(8, "tools", 10, ("a.py",)),
        HistoryBlock(9, "tools", 10, ("c.py", "d.py")),
        HistoryBlock(12, "assistant", 10),
    ]
    selection = chosen_from(history, graph_of({}), beta=0.0)
    assert selection.chosen == selection.protected == (0, 3, 7, 8, 9)
    assert (selection.cost, selection.protected_cost, selection.total_cost) == (50, 50, 70)
    assert details(selection) == [
        "protected: user message",
        "protected: latest edit of b.py",
        "left out: protected blocks alone exceed the budget",
        "protected: pinned",
        "protected: latest edit of a.py",
        "protected: latest edit of c.py, d.py",
        "left out: protected blocks alone exceed the budget",
    ]
    assert selection.overfull


def test_pins_that_take_the_whole_budget_are_named() -> None:
    history = [HistoryBlock(0, "user", 10), HistoryBlock(1, "tools", 60, mark="pin"), HistoryBlock(2, "tools", 30)]
    assert details(chosen_from(history, graph_of({}), beta=0.5)) == [
        "protected: user message",
        "protected: pinned by hand",
        "left out: your pins and protected blocks exceed the budget",
    ]


def test_what_did_not_fit_is_told_beside_what_there_was() -> None:
    history = [HistoryBlock(0, "user", 100), HistoryBlock(1, "tools", 1200), HistoryBlock(2, "tools", 720)]
    assert details(chosen_from(history, graph_of({1: 0.1, 2: 0.2}, frozenset({1})), beta=0.4))[1:] == [
        "left out: did not fit, stale: 1,200 characters, more than the whole budget",
        "left out: did not fit: 720 characters, more than protected blocks leave",
    ]


def test_supports_of_seeds_are_added_once_one_hop_in_stored_order_while_they_fit() -> None:
    u = {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.9, 5: 0.8}
    graph = graph_of(u, edges=((3, 4), (1, 4), (0, 1), (1, 5), (2, 5)))
    selection = chosen_from(tools(10, 10, 30, 10, 50, 50), graph, beta=0.625, delta=0.2)
    assert (selection.budget, selection.allowance) == (100, 120)
    assert (selection.seeds, selection.expanded, selection.chosen) == ((4, 5), (3, 1), (1, 3, 4, 5))
    assert details(selection)[:4] == [
        "left out: rank 3 of 6",
        "expanded: for block 4",
        "left out: rank 5 of 6",
        "expanded: for block 4",
    ]


def test_a_stale_support_stays_out_and_a_stale_block_is_marked_down() -> None:
    u = {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}
    graph = graph_of(u, stale=frozenset({0, 1}), edges=((0, 2), (0, 3)))
    selection = chosen_from(tools(10, 10, 10, 10), graph, beta=0.5, delta=1.0)
    assert selection.chosen == (2, 3)
    assert details(selection)[:2] == ["left out: rank 3 of 4, stale", "left out: rank 4 of 4, stale"]
    assert selection.scores.total == pytest.approx([-2.0, -2.0, 0.0, 0.0])


def test_edges_to_blocks_outside_the_history_are_ignored() -> None:
    history = [HistoryBlock(2, "tools", 10), HistoryBlock(5, "tools", 10)]
    graph = graph_of({2: 0.1, 5: 0.9}, edges=((0, 5), (1, 2), (5, 9)))
    assert chosen_from(history, graph, beta=0.5, delta=1.0).chosen == (5,)


def test_without_a_model_the_request_decides() -> None:
    texts = [frozenset({"alpha"}), frozenset({"parser"}), frozenset({"omega"}), NOTHING]
    selection = chosen_from(
        tools(10, 10, 10, 10), ContextGraph(), texts=texts, request=frozenset({"parser"}), beta=0.25
    )
    assert selection.chosen == (1,)
    verdict = selection.verdicts()[1]
    assert (verdict.z_u, verdict.rank) == (0.0, 1)
    assert verdict.exploration is not None and 0.5 <= verdict.exploration <= 1
    assert verdict.score == pytest.approx(0.5 * selection.scores.z_lex[1] + 0.1 * verdict.exploration)


def test_observed_blocks_get_no_exploration_draw() -> None:
    selection = chosen_from(tools(10, 10), graph_of({0: 0.0}), beta=0.5)
    assert selection.scores.exploration[0] == 0.0
    assert selection.chosen == (1,)


def test_an_empty_history_selects_nothing() -> None:
    selection = chosen_from([], ContextGraph())
    assert (selection.chosen, selection.cost, selection.budget, selection.verdicts()) == ((), 0, 0, ())
    assert not selection.over_cap and not selection.overfull


CAPPED = [
    HistoryBlock(0, "tools", 10, ("a.py",)),
    HistoryBlock(1, "user", 10),
    HistoryBlock(2, "assistant", 10),
    HistoryBlock(3, "pinned", 10),
    HistoryBlock(4, "tools", 10),
]


@pytest.mark.parametrize(
    ("cap", "rest", "chosen", "capped"),
    [
        (50, 0, (0, 1, 2, 3, 4), ()),
        (49, 0, (0, 1, 3, 4), (2,)),
        (60, 20, (0, 1, 3, 4), (2,)),
        (30, 0, (0, 1, 3), (2, 4)),
        (29, 0, (1, 3), (0, 2, 4)),
        (20, 0, (1, 3), (0, 2, 4)),
    ],
)
def test_the_cap_drops_the_oldest_first_and_protected_edits_last(
    cap: int, rest: int, chosen: tuple[int, ...], capped: tuple[int, ...]
) -> None:
    selection = chosen_from(CAPPED, ContextGraph(), beta=1.0, request_cap_chars=cap, rest_chars=rest)
    assert (selection.chosen, selection.capped, selection.over_cap) == (chosen, capped, False)
    assert selection.cost == 10 * len(chosen)
    assert [v.ordinal for v in selection.verdicts() if v.detail == "request cap"] == list(capped)


def test_a_cap_that_users_and_pinned_blocks_exceed_keeps_everything_and_says_so() -> None:
    selection = chosen_from(CAPPED, ContextGraph(), beta=0.0, request_cap_chars=19)
    assert selection.over_cap
    assert selection.chosen == (0, 1, 2, 3, 4)
    assert selection.cost == selection.total_cost == 50
    assert all(verdict.kept for verdict in selection.verdicts())
    assert details(selection)[2] == "protected: request cap cannot be met: everything is sent"


def test_the_row_keeps_the_choice_and_its_parameters() -> None:
    parameters = Parameters(beta=0.5)
    selection = select(
        tools(10, 10), IdentifierIndex([NOTHING] * 2), NOTHING, graph_of({1: 0.5}), parameters, session="s", turn=2
    )
    row = selection.to_row(
        id=3, session_id=4, exchange_id=5, turn=2, created_at=6.0, applied=True, reason="idle 700 s",
        parameters=parameters, notice=True,
    )  # fmt: skip
    assert (row.id, row.session_id, row.exchange_id, row.turn, row.created_at) == (3, 4, 5, 2, 6.0)
    assert (row.budget, row.cost, row.protected_cost, row.total_cost) == (10, 10, 0, 20)
    assert (row.applied, row.reason, row.notice) == (True, "idle 700 s", True)
    kept = json.loads(row.parameters)
    assert (kept.pop("rule"), kept.pop("selector"), Parameters(**kept)) == ("paper", "recap", parameters)
    assert row.verdicts == selection.verdicts()


@pytest.mark.parametrize(
    "bad",
    [{"beta": 1.5}, {"beta": -0.1}, {"alpha": 2}, {"kappa": float("nan")}, {"delta": float("inf")}, {"eps": "much"}],
)
def test_parameters_out_of_range_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        replace(Parameters(), **bad).check()  # type: ignore[arg-type]


kinds: list[BlockKind] = ["user", "tools", "assistant", "pinned"]
words = st.frozensets(st.sampled_from([f"word{i}" for i in range(12)]), max_size=6)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[HistoryBlock], list[frozenset[str]], ContextGraph]:
    ordinals = sorted(draw(st.sets(st.integers(0, 60), max_size=25)))
    edits = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2, unique=True).map(tuple)
    history = [HistoryBlock(v, draw(st.sampled_from(kinds)), draw(st.integers(0, 500)), draw(edits)) for v in ordinals]
    texts = [draw(words) for _ in history]
    u = draw(st.dictionaries(st.integers(0, 60), st.floats(0, 1)))
    stale = frozenset(draw(st.sets(st.sampled_from(sorted(u))))) if u else frozenset()
    pair = st.tuples(st.integers(0, 60), st.integers(0, 60)).filter(lambda edge: edge[0] < edge[1])
    edges = draw(st.lists(pair, unique=True, max_size=40).map(tuple))
    return history, texts, graph_of(u, stale, edges)


drawn_parameters = st.builds(
    Parameters, beta=st.floats(0, 1), delta=st.floats(0, 2), lam=st.floats(0, 3), kappa=st.floats(0, 5)
)


@given(histories(), words, drawn_parameters)
def test_the_bound_and_the_laws_of_a_selection_hold(
    world: tuple[list[HistoryBlock], list[frozenset[str]], ContextGraph],
    request: frozenset[str],
    parameters: Parameters,
) -> None:
    """Eq. 6, chronological order, and a kept verdict exactly for every chosen block."""
    history, texts, graph = world
    selection = select(history, IdentifierIndex(texts), request, graph, parameters, session="s", turn=3)
    ordinals = [block.ordinal for block in history]
    costs = {block.ordinal: block.cost for block in history}
    chosen = set(selection.chosen)

    assert list(selection.chosen) == [v for v in ordinals if v in chosen]
    assert {b.ordinal for b in history if b.kind in ("user", "pinned")} <= set(selection.protected) <= chosen
    for path in {path for block in history for path in block.edits}:
        assert [b.ordinal for b in history if path in b.edits][-1] in chosen
    assert selection.cost == sum(costs[v] for v in chosen)
    assert selection.total_cost == sum(costs.values())
    assert selection.cost <= max(selection.protected_cost, (1 + parameters.delta) * selection.budget + 1e-6)
    assert set(selection.seeds) | set(selection.expanded) == chosen
    assert not set(selection.seeds) & set(selection.expanded)
    assert not any(graph.stale(selection.expanded))

    verdicts = selection.verdicts()
    assert [v.ordinal for v in verdicts] == ordinals
    assert {v.ordinal for v in verdicts if v.kept} == chosen
    assert all(v.kept == (v.rule != "left out") and v.detail for v in verdicts)
    ranks = [v.rank for v in verdicts if v.ordinal not in selection.protected]
    assert sorted(rank for rank in ranks if rank is not None) == list(range(1, len(ranks) + 1))


@given(histories(), words, drawn_parameters, st.integers(0, 3_000))
def test_the_cap_holds_or_everything_is_sent(
    world: tuple[list[HistoryBlock], list[frozenset[str]], ContextGraph],
    request: frozenset[str],
    parameters: Parameters,
    cap: int,
) -> None:
    history, texts, graph = world
    parameters = replace(parameters, request_cap_chars=cap)
    selection = select(history, IdentifierIndex(texts), request, graph, parameters, session="s", turn=3)
    owed = {b.ordinal for b in history if b.kind in ("user", "pinned")}
    assert owed <= set(selection.chosen)
    if selection.over_cap:
        assert len(selection.chosen) == len(history)
        assert sum(b.cost for b in history if b.ordinal in owed) > cap
    else:
        assert selection.cost <= cap


@given(histories(), words)
def test_the_same_values_give_the_same_selection(
    world: tuple[list[HistoryBlock], list[frozenset[str]], ContextGraph], request: frozenset[str]
) -> None:
    history, texts, graph = world
    copies = [frozenset(sorted(text, reverse=True)) for text in texts]
    again = ContextGraph.from_rows(*graph.to_rows())
    parameters = Parameters()
    first = select(history, IdentifierIndex(texts), request, graph, parameters, session="s", turn=3)
    second = select(list(history), IdentifierIndex(copies), frozenset(request), again, parameters, session="s", turn=3)
    assert first == second
    assert first.verdicts() == second.verdicts()


def test_what_a_person_pins_is_sent_and_what_they_mute_is_not() -> None:
    """Whatever the scores, the budget, the graph and the cap say; and what is protected cannot be muted."""
    graph = graph_of({0: 0.9, 1: 0.8, 2: 0.1, 3: 0.7}, edges=((0, 3),))
    history = [
        HistoryBlock(0, "tools", 10, mark="mute"),
        HistoryBlock(1, "tools", 10),
        HistoryBlock(2, "tools", 10, mark="pin"),
        HistoryBlock(3, "tools", 10),
        HistoryBlock(4, "user", 10, mark="mute"),
        HistoryBlock(5, "tools", 10, ("a.py",), mark="mute"),
    ]
    selection = chosen_from(history, graph, beta=0.85, delta=1.0)
    assert selection.chosen == (1, 2, 3, 4, 5) and selection.protected == (2, 4, 5)
    assert details(selection) == [
        "left out: muted by hand",
        "packed: rank 1 of 2",
        "protected: pinned by hand",
        "packed: rank 2 of 2",
        "protected: user message",
        "protected: latest edit of a.py",
    ]
    assert chosen_from(history, graph, beta=0.0).chosen == (2, 4, 5)
    assert chosen_from(history, graph, beta=0.85, request_cap_chars=25).chosen == (2, 4), "the cap takes edits first"


def test_a_cap_that_pins_alone_exceed_sends_everything() -> None:
    history = [HistoryBlock(0, "tools", 10, mark="mute"), HistoryBlock(1, "tools", 50, mark="pin")]
    selection = chosen_from(history, graph_of({}), request_cap_chars=40)
    assert selection.over_cap and selection.chosen == (0, 1)
    assert details(selection)[0] == "protected: request cap cannot be met: everything is sent"
