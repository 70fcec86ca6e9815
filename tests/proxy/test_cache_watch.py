"""The alarm for a cache that no longer serves a session: it rings when it should, and for nothing else."""

from collections.abc import Sequence

import pytest

from graphstore.records import ExchangeRow
from proxy.cache_watch import FALL, RECENT, SHARE_MIN, CacheFall, cache_fall
from tests.graphstore.store.history import exchange_row


def rows(shares: Sequence[float | None], **changes: object) -> list[ExchangeRow]:
    given: dict[str, object] = {"boundary": "step", "ending": "complete", "input_tokens": 10_000, **changes}
    return [
        exchange_row(i, **(given | {"cached_tokens": None if share is None else round(10_000 * share)}))
        for i, share in enumerate(shares, 1)
    ]


GOOD, BAD = [0.9] * RECENT, [0.1] * RECENT


def test_a_fall_below_half_of_what_it_was_rings() -> None:
    assert cache_fall(rows([*GOOD, *BAD])) == CacheFall(recent=0.1, earlier=0.9)
    assert "10% of the input lately, 90% before" in str(cache_fall(rows([*GOOD, *BAD])))


@pytest.mark.parametrize(
    "shares",
    [
        [*GOOD, *GOOD],
        [*GOOD, *BAD[1:]],  # too few to compare
        [*GOOD[1:], *BAD],
        [*GOOD, *[0.9 * FALL] * RECENT],
        [*[SHARE_MIN - 0.01] * RECENT, *[0.0] * RECENT],  # never served from the cache
        [*GOOD, 0.1, 0.1, 0.9, 0.9, 0.9],  # one cold moment is no fall
        [*BAD, *GOOD],
        [None] * 20,
        [],
    ],
)
def test_it_does_not_ring_for(shares: list[float | None]) -> None:
    assert cache_fall(rows(shares)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"boundary": "cold"},
        {"boundary": "none"},
        {"ending": "client gone"},
        {"fell_back": True},
        {"input_tokens": 1_999},
        {"input_tokens": None},
    ],
)
def test_requests_that_owe_the_cache_nothing_do_not_count(changes: dict[str, object]) -> None:
    assert cache_fall([*rows(GOOD), *rows(BAD, **changes)]) is None


def test_absurd_counts_are_no_more_than_everything() -> None:
    assert cache_fall(rows([*[5.0] * RECENT, *[0.6] * RECENT])) is None
