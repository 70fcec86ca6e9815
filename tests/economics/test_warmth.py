"""The probability that a prefix is still cached: the profile's word, and what was seen."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.economics.profiles import shipped
from proxy.economics.warmth import Seen, Warmth, WarmthBook, prior, seen_between
from tests.graphstore.store.history import exchange_row

UNKNOWN = shipped()[-1]  # warm for 300 s, cold after 3600
BEFORE = exchange_row(
    1, started_at=100.0, ended_at=110.0, input_tokens=10_000, cached_tokens=0, messages_total=8, messages_sent=8,
    prefix_messages=0, ending="complete",
)  # fmt: skip
AFTER = replace(
    BEFORE, id=2, started_at=710.0, ended_at=720.0, cached_tokens=9_900, prefix_messages=8, messages_sent=10
)


@pytest.mark.parametrize(("pause", "expected"), [(0, 1), (300, 1), (1950, 0.5), (3600, 0), (1e6, 0)])
def test_the_prior_falls_in_a_straight_line(pause: float, expected: float) -> None:
    assert prior(UNKNOWN, pause) == pytest.approx(expected)
    assert Warmth().probability(UNKNOWN, pause) == pytest.approx(expected)


def test_misses_within_the_sure_time_overrule_it_and_hits_beyond_the_cold_time_too() -> None:
    warmth = Warmth()
    for _ in range(20):
        warmth.note(Seen(60.0, hit=False))
        warmth.note(Seen(20_000.0, hit=True))
    assert warmth.probability(UNKNOWN, 60.0) < 0.15
    assert warmth.probability(UNKNOWN, 20_000.0) > 0.85
    assert warmth.probability(UNKNOWN, 1_500.0) == pytest.approx(prior(UNKNOWN, 1_500.0), abs=0.05), "too far from both"


def test_one_observation_does_not_turn_the_prior() -> None:
    warmth = Warmth()
    warmth.note(Seen(60.0, hit=False))
    assert warmth.probability(UNKNOWN, 60.0) > 0.6


def test_a_provider_may_change_its_mind() -> None:
    warmth = Warmth()
    for hit in [True] * 500 + [False] * 32:
        warmth.note(Seen(1000.0, hit))
    assert warmth.probability(UNKNOWN, 1000.0) < 0.1
    (learned,) = warmth.learned()
    assert (learned.hits, learned.seen) == (0, 32) and learned.pause_s == pytest.approx(1000, rel=0.2)


@given(st.lists(st.tuples(st.floats(0, 1e7), st.booleans()), max_size=50), st.floats(0, 1e7))
def test_it_is_always_a_probability(seen: list[tuple[float, bool]], pause: float) -> None:
    warmth = Warmth()
    for one in seen:
        warmth.note(Seen(*one))
    assert 0 <= warmth.probability(UNKNOWN, pause) <= 1


def test_a_request_that_goes_on_after_a_pause_shows_whether_the_cache_held() -> None:
    assert seen_between(BEFORE, AFTER, 1024) == Seen(600.0, hit=True)
    assert seen_between(BEFORE, replace(AFTER, cached_tokens=4_999), 1024) == Seen(600.0, hit=False)


@pytest.mark.parametrize(
    "change",
    [
        {"prefix_messages": 7},  # rewritten, or edited by the client
        {"model": "another"},
        {"cached_tokens": None},
        {"ending": "client gone"},
        {"fell_back": True},
        {"outcome": "side"},
        {"started_at": 109.0, "cached_tokens": 0},  # beside the first, or by a clock that was set back
        {"cached_tokens": 10_001},  # of 10,000
        {"input_tokens": None},
    ],
)
def test_other_requests_show_nothing(change: dict[str, object]) -> None:
    assert seen_between(BEFORE, replace(AFTER, **change), 1024) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"input_tokens": None}, {"input_tokens": 2000}, {"ending": "upstream broken"}])
def test_a_request_before_that_was_not_counted_or_too_short_shows_nothing(change: dict[str, object]) -> None:
    assert seen_between(replace(BEFORE, **change), AFTER, 1024) is None  # type: ignore[arg-type]


def test_a_book_keeps_upstreams_and_models_apart_and_skips_side_requests() -> None:
    book, side = WarmthBook(), replace(BEFORE, id=3, outcome="side")
    book.note_all("https://a", [BEFORE, side, AFTER])
    book.note_all("https://b", [BEFORE, replace(AFTER, cached_tokens=0)])
    assert {names: [(b.hits, b.seen) for b in bins] for names, bins in book.known().items()} == {
        ("https://a", BEFORE.model): [(1, 1)],
        ("https://b", BEFORE.model): [(0, 1)],
    }
