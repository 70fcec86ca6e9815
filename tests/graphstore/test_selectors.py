"""The selectors that ReCAP is compared with: each chooses as its name says, and none leaves out what is owed."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.blocks import BlockKind
from graphstore.identifiers import IdentifierIndex
from graphstore.parameters import Parameters
from graphstore.selection import HistoryBlock, Selection, select
from graphstore.selectors import SELECTORS, SelectorName, selector_named
from tests.graphstore.test_selection import graph_of

NAMES: tuple[SelectorName, ...] = get_args(SelectorName)
HISTORY = [
    HistoryBlock(0, "user", 10),
    HistoryBlock(1, "tools", 10, ("a.py",)),
    HistoryBlock(2, "tools", 10),
    HistoryBlock(3, "assistant", 10),
    HistoryBlock(4, "tools", 10),
    HistoryBlock(5, "tools", 10),
    HistoryBlock(6, "tools", 10),
    HistoryBlock(7, "pinned", 10),
]
WORDS = [frozenset({"alpha"}) if v == 2 else frozenset({f"word{v}"}) for v in range(8)]
U = {3: 0.9, 4: 0.1}


def by(name: SelectorName, *, beta: float = 0.5, seed: int = 0, turn: int = 1) -> Selection:
    parameters = Parameters(beta=beta, seed=seed, delta=1.0)
    graph = graph_of(U, edges=((2, 3),))
    request = frozenset({"alpha"})
    return select(
        HISTORY, IdentifierIndex(WORDS), request, graph, parameters, session="s", turn=turn, selector=SELECTORS[name]
    )


def test_every_name_has_a_selector() -> None:
    assert set(SELECTORS) == set(NAMES) and all(SELECTORS[name].name == name for name in NAMES)


def test_recency_takes_the_newest_that_fit() -> None:
    assert by("recency").chosen == (0, 5, 6, 7), "four of eight, two of which are owed"


def test_user_messages_is_what_is_owed_and_nothing_else() -> None:
    selection = by("user-messages", beta=1.0)
    assert selection.chosen == (0, 7)
    assert {v.detail for v in selection.verdicts() if not v.kept} == {"not packed by user-messages"}


def test_full_leaves_nothing_out_whatever_the_budget() -> None:
    assert by("full", beta=0.1).chosen == tuple(range(8))


def test_clearing_keeps_everything_but_old_tool_blocks() -> None:
    assert by("clear-tool-results", beta=0.1).chosen == (0, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(("kept", "gone"), [(0, {1, 2, 4, 5, 6}), (1, {1, 2, 4, 5}), (5, set()), (9, set())])
def test_clearing_keeps_as_many_as_it_is_told(kept: int, gone: set[int]) -> None:
    bars = selector_named("clear-tool-results", tool_results_kept=kept).bars
    assert bars is not None and bars([block.kind for block in HISTORY]) == gone
    assert selector_named("recap", tool_results_kept=kept) == SELECTORS["recap"]


def test_without_the_graph_words_decide_and_edits_stay_protected() -> None:
    selection = by("recap-without-graph")
    assert selection.protected == (0, 1, 7) and 2 in selection.chosen and selection.expanded == ()
    assert 3 in by("recap").chosen, "importance would have taken it"


def test_random_is_the_same_for_a_seed_and_another_for_another() -> None:
    draws = {by("random", seed=seed).chosen for seed in range(20)}
    assert by("random").chosen == by("random").chosen and len(draws) > 1
    assert {v for chosen in draws for v in chosen} == set(range(8)), "every block has its chance"


@pytest.mark.parametrize("name", NAMES)
@given(
    kinds=st.lists(st.sampled_from(["user", "tools", "assistant", "pinned"]), max_size=20),
    beta=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_what_is_owed_is_chosen_and_every_block_has_a_verdict(
    name: SelectorName, kinds: list[BlockKind], beta: float, seed: int
) -> None:
    history = [HistoryBlock(v, kind, 10 + v) for v, kind in enumerate(kinds)]
    index = IdentifierIndex([frozenset()] * len(history))
    selection = select(
        history, index, frozenset(), graph_of({}), Parameters(beta=beta, seed=seed), session="s", turn=1,
        selector=SELECTORS[name],
    )  # fmt: skip
    assert {block.ordinal for block in history if block.is_owed} <= set(selection.chosen)
    verdicts = selection.verdicts()
    assert [v.ordinal for v in verdicts] == list(range(len(history)))
    assert {v.ordinal for v in verdicts if v.kept} == set(selection.chosen)
    assert all(v.detail for v in verdicts)
    if SELECTORS[name].is_bounded:
        assert selection.cost <= max(selection.protected_cost, selection.allowance)
