"""The equations, by hand-computed values and by law."""

import hashlib
import subprocess
import sys
from math import log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.identifiers import IdentifierIndex
from graphstore.parameters import Parameters
from graphstore.scoring import blend, exploration, lexical_cue, replaced, standardised

amounts = st.floats(0, 1e6, allow_subnormal=False)


def test_importance_moves_towards_the_share_of_the_largest_attention() -> None:
    assert blend(0.5, 1.0, 4.0, 0.6) == pytest.approx(0.4 * 0.5 + 0.6 * 0.25)
    assert blend(0.5, 0.0, 0.0, 0.6) == pytest.approx(0.2)


def test_a_shared_word_counts_by_its_rarity_in_the_history() -> None:
    texts = [frozenset({"rare", "common"}), frozenset({"common"}), frozenset({"other"}), frozenset[str]()]
    cue = lexical_cue(IdentifierIndex(texts), frozenset({"rare", "common", "absent"}))
    assert cue == pytest.approx([log(4) + log(2), log(2), 0.0, 0.0])


def test_a_word_of_every_block_says_nothing() -> None:
    assert lexical_cue(IdentifierIndex([frozenset({"word"})] * 3), frozenset({"word"})) == [0.0, 0.0, 0.0]
    assert lexical_cue(IdentifierIndex(), frozenset({"word"})) == []


def test_the_cue_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    """Sets of strings are iterated in another order in every process; a last digit could turn a tie."""
    program = (
        "from graphstore.identifiers import IdentifierIndex\n"
        "from graphstore.scoring import lexical_cue\n"
        "texts = [frozenset(f'w{j}' for j in range(60) if (i * j) % 7 < 4) for i in range(9)]\n"
        "print(lexical_cue(IdentifierIndex(texts), frozenset(f'w{j}' for j in range(50))))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in "1234"
    }
    assert len(runs) == 1


def test_blocks_that_share_equally_rare_words_tie() -> None:
    """The order of the sum must not tell them apart: 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in floating point."""
    left, right = ({f"{side}{count}": count for count in (2, 3, 5, 7, 11, 13)} for side in ("left", "right"))
    frequency = left | right
    others = [frozenset(word for word, count in frequency.items() if count > other) for other in range(1, 13)]
    texts = [frozenset(left), frozenset(right), *others]
    cue = lexical_cue(IdentifierIndex(texts), frozenset(frequency))
    assert cue[0] == cue[1] > 0


@given(st.lists(st.frozensets(st.sampled_from([f"word{i}" for i in range(12)])), max_size=12), st.data())
def test_the_cue_is_its_definition(texts: list[frozenset[str]], data: st.DataObject) -> None:
    """However the index grew."""
    cut = data.draw(st.integers(0, len(texts)))
    request = data.draw(st.frozensets(st.sampled_from([f"word{i}" for i in range(14)])))
    index = IdentifierIndex(texts[:cut])
    index.extend(texts[cut:])
    assert len(index) == len(texts)
    expected = [sum(log(len(texts) / sum(w in other for other in texts)) for w in request & text) for text in texts]
    assert lexical_cue(index, request) == pytest.approx(expected)


def test_standardisation_uses_the_population_deviation() -> None:
    assert standardised([1.0, 2.0, 3.0]) == pytest.approx([-sqrt(1.5), 0.0, sqrt(1.5)])
    assert standardised([]) == []


@given(st.floats(-1e3, 1e3), st.integers(1, 50))
def test_a_constant_channel_says_nothing(value: float, count: int) -> None:
    assert standardised([value] * count) == [0.0] * count


@given(st.lists(amounts, min_size=2))
def test_standardised_values_keep_the_order(values: list[float]) -> None:
    z = standardised(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(z[a] <= z[b] for a, b in zip(order, order[1:], strict=False))


def test_exploration_is_the_named_hash() -> None:
    digest = hashlib.sha256(b"7|s-1|3|12").digest()
    expected = 0.5 + 0.5 * int.from_bytes(digest[:8], "big") / 2**64
    assert exploration([4, 12], seed=7, session="s-1", turn=3)[1] == expected


@given(st.lists(st.integers(0, 10**6)), st.text(), st.integers(0, 100))
def test_exploration_draws_lie_between_a_half_and_one(ordinals: list[int], session: str, turn: int) -> None:
    assert all(0.5 <= draw <= 1 for draw in exploration(ordinals, seed=0, session=session, turn=turn))


WORDS = {
    name: frozenset(f"word{i}" for i in range(*bounds)) for name, bounds in {"ten": (0, 10), "five": (0, 5)}.items()
}


@pytest.mark.parametrize(
    ("attention", "later_words", "stale"),
    [
        ({1: 0.1, 2: 1.0}, frozenset(f"word{i}" for i in range(10)), [1]),
        ({1: 0.1, 2: 1.0}, frozenset(f"word{i}" for i in range(6)), [1]),  # 6 of 10
        ({1: 0.1, 2: 1.0}, frozenset(f"word{i}" for i in range(5)), []),  # exactly a half
        ({1: 0.1, 2: 1.0}, frozenset(f"word{i}" for i in range(5, 30)), []),
        ({1: 0.475, 2: 1.0}, WORDS["ten"], []),  # exactly 2 * 0.475 + 0.05
        ({1: 0.47, 2: 1.0}, WORDS["ten"], [1]),
        ({1: 1.0, 2: 0.1}, WORDS["ten"], []),  # never a later one by an earlier one
        ({1: 0.0, 2: 0.0}, WORDS["ten"], []),
        ({1: 0.1}, WORDS["ten"], []),  # the later block was not observed
    ],
)
def test_a_later_block_that_overlaps_and_dominates_replaces(
    attention: dict[int, float], later_words: frozenset[str], stale: list[int]
) -> None:
    assert list(replaced(attention, {1: WORDS["ten"], 2: later_words}, Parameters())) == stale


@given(
    st.dictionaries(st.integers(0, 12), st.floats(0, 1), max_size=10),
    st.dictionaries(st.integers(0, 12), st.frozensets(st.sampled_from("abcdefg"))),
    st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0]),
)
def test_the_stale_rule_is_its_definition(
    attention: dict[int, float], words: dict[int, frozenset[str]], jaccard: float
) -> None:
    """The quick tests before the comparison of identifiers never change the outcome."""
    parameters = Parameters(stale_jaccard=jaccard)
    top = max(attention.values(), default=0.0)

    def replaces(a: int, b: int) -> bool:
        left, right = words.get(a, frozenset()), words.get(b, frozenset())
        overlap = len(left & right) / len(left | right) if left | right else 0.0
        return overlap > jaccard and attention[b] > 2.0 * attention[a] + 0.05 * top

    expected = [a for a in sorted(attention) if any(replaces(a, b) for b in attention if b > a)]
    assert list(replaced(attention, words, parameters)) == expected
