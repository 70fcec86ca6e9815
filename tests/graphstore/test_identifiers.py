"""What counts as an identifier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.identifiers import STOP_WORDS, identifiers, leading_identifiers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        ("the cat saw it", set()),
        ("Parser parser", {"Parser", "parser"}),
        ("please use this function", set()),
        ("_private x1y2 9lives", {"_private", "x1y2", "lives"}),
        ("store.writer.py", {"store.writer.py", "store", "writer"}),
        ("a.b.c", {"a.b.c"}),
        ("self.return.value", {"self.return.value", "value"}),
        ("v1.2024beta.x", {"v1.2024beta.x"}),
        ("end. Next", {"Next"}),
        ("src/graph_store/Blocks.py:12", {"graph_store", "Blocks.py", "Blocks"}),
        ("größe naïve", set()),
        ("résumé_value", {"_value"}),
    ],
)
def test_words_dotted_names_and_their_parts(text: str, expected: set[str]) -> None:
    assert identifiers(text) == expected


@given(st.text())
def test_identifiers_are_long_enough_and_never_stop_words(text: str) -> None:
    found = identifiers(text)
    assert all(len(word) >= 4 and word in text for word in found)
    assert not found & STOP_WORDS


@given(st.text(), st.text())
def test_identifiers_of_lines_are_the_union_of_each_lines(left: str, right: str) -> None:
    """Blocks are scored by the union over their messages; that must equal scoring the joined text."""
    assert identifiers(left + "\n" + right) == identifiers(left) | identifiers(right)


def test_the_stale_rule_reads_only_the_beginning() -> None:
    assert leading_identifiers("x" * 3_996 + " abcdefgh") == {"x" * 3_996}
    assert leading_identifiers("x" * 3_990 + " abcdefghijkl") == {"x" * 3_990, "abcdefghi"}
    assert leading_identifiers("a " * 399 + "word1 word2") == {"word1"}
    assert leading_identifiers("one.two three", chars=9, matches=1) == {"one.two"}
