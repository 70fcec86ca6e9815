"""Positions that are read: evenly spaced over what they stand for, and never a token of the template."""

from hypothesis import given
from hypothesis import strategies as st

from proxy_model.context import ContextBlock, Part, Role
from proxy_model.sampling import observed, plan, spread
from proxy_model.spans import Encoded, Span


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Ranges in order, with and without gaps, some empty."""
    found, place = [], draw(st.integers(0, 5))
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=8)):
        found.append((place + gap, place + gap + length))
        place += gap + length
    return found


@given(spans(), st.integers(1, 60))
def test_positions_are_evenly_spaced_with_both_ends(ranges: list[Span], most: int) -> None:
    tokens = [place for start, end in ranges for place in range(start, end)]
    found = spread(ranges, most)
    ranks = [tokens.index(place) for place in found]
    assert len(found) == min(most, len(tokens))
    assert ranks == sorted(set(ranks))
    if len(found) > 1:
        assert (ranks[0], ranks[-1]) == (0, len(tokens) - 1)
        gaps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
        assert max(gaps) - min(gaps) <= 1


def test_known_positions() -> None:
    assert spread([(0, 10)], 4) == (0, 3, 6, 9)
    assert spread([(0, 5), (100, 105)], 4) == (0, 3, 101, 104)
    assert spread([(7, 20)], 1) == (19,)
    assert spread([], 5) == ()
    assert spread([(3, 3)], 5) == ()


def block(ordinal: int | None, *roles: Role, in_turn: bool = False, is_dependent: bool = False) -> ContextBlock:
    return ContextBlock(ordinal, tuple(Part(role, "") for role in roles), in_turn=in_turn, is_dependent=is_dependent)


BLOCKS = (
    block(None, "system"),
    block(0, "user"),
    block(1, "assistant", is_dependent=True),  # the answer of the turn before
    block(2, "user", in_turn=True, is_dependent=True),
    block(3, "assistant", "tool", "tool", in_turn=True, is_dependent=True),
    block(None, "assistant", in_turn=True, is_dependent=True),  # no request has brought it back yet
)
SPANS: tuple[tuple[Span, ...], ...] = (
    ((1, 10),), ((12, 20),), ((22, 30),), ((32, 36),), ((38, 48), (50, 60), (60, 60)), ((62, 80),),
)  # fmt: skip
WHOLE = Encoded(tuple(range(82)), SPANS, ())


def test_the_turn_is_sampled_and_what_the_model_wrote_of_it_is_a_part_of_that() -> None:
    rows = plan(BLOCKS, WHOLE, rows_max=1000, block_rows_max=1000)
    assert rows.turn == (*range(32, 36), *range(38, 48), *range(50, 60), *range(62, 80))
    assert rows.assistant == (*range(38, 48), *range(62, 80))


def test_few_rows_are_shared_by_the_whole_turn() -> None:
    rows = plan(BLOCKS, WHOLE, rows_max=5, block_rows_max=3)
    assert rows.turn == (32, 44, 57, 69, 79)
    assert rows.assistant == (44, 69, 79)
    assert rows.dependents == ((2, (22, 26, 29)), (3, (32, 34, 35)), (4, (38, 50, 59)))


def test_an_answer_that_the_graph_does_not_know_yet_is_no_dependent() -> None:
    rows = plan(BLOCKS, WHOLE, rows_max=5, block_rows_max=3)
    assert [index for index, _ in rows.dependents] == [2, 3, 4]


def test_the_first_row_is_the_earliest_of_turn_and_dependents() -> None:
    assert plan(BLOCKS, WHOLE, rows_max=5, block_rows_max=3).first == 22
    later = Encoded(WHOLE.ids, WHOLE.spans, (2,))
    assert plan(BLOCKS, later, rows_max=5, block_rows_max=3).first == 32


def test_a_block_that_stands_there_in_part_gives_rows_of_the_turn_and_no_reading() -> None:
    """An oversized last result: the end of it is read, and says nothing of the block as a whole."""
    cut = Encoded(WHOLE.ids, (*SPANS[:1], (), (), (), *SPANS[4:]), (1, 2, 3, 4))
    rows = plan(BLOCKS, cut, rows_max=1000, block_rows_max=3)
    assert rows.turn == (*range(38, 48), *range(50, 60), *range(62, 80))
    assert rows.dependents == ()
    assert observed(BLOCKS, cut) == ()
    assert observed(BLOCKS, WHOLE) == (1, 2, 3, 4)


def test_a_dependent_without_words_has_no_rows() -> None:
    spans = (*SPANS[:2], ((22, 22),), *SPANS[3:])
    rows = plan(BLOCKS, Encoded(WHOLE.ids, spans, ()), rows_max=5, block_rows_max=3)
    assert [index for index, _ in rows.dependents] == [3, 4]
