"""What was saved, by numbers computed by hand: what the provider counted, beside what everything would have cost.

A million tokens cost 10 fresh, 1 from the cache, 12 written to it, 40 said. Requests of one session, turn by turn.
"""

from dataclasses import replace

import msgspec
import pytest

from graphstore.records import ExchangeRow
from graphstore.store.report import Tokens
from proxy.ledger import (
    MILLION,
    Entry,
    Price,
    Totals,
    entries,
    newly_removed,
    price_of,
    provider_tokens_per_ours,
    total,
)
from tests.graphstore.store.history import START, exchange_row

IDLE_S = 3600.0
PRICES = {"gpt-*": Price(input=10, output=40, cached=1, write=12)}


def until_idle(model: str, pause_s: float) -> float:
    """A cache that is warm for a known time."""
    return float(pause_s < IDLE_S)


class Session:
    """Requests one after the other; each takes a second. `full` and `sent` are tokens by our own count."""

    def __init__(self) -> None:
        self.rows: list[ExchangeRow] = []
        self.tokens: dict[int, Tokens] = {}
        self.now = START

    def ask(
        self, full: int, given: int | None, cached: int | None, *, sent: int | None = None, after_s: float = 60.0,
        **changes: object,
    ) -> None:  # fmt: skip
        """`given` and `cached` are the provider's numbers."""
        self.now += after_s
        left_out = sent is not None
        id = len(self.rows) + 1
        self.tokens[id] = Tokens(full, full if sent is None else sent)
        row = exchange_row(
            id, started_at=self.now, ended_at=self.now + 1, input_tokens=given, cached_tokens=cached, output_tokens=0,
            messages_total=10, messages_sent=4 if left_out else 10, selection_id=1 if left_out else None,
        )  # fmt: skip
        self.rows.append(replace(row, **changes))  # type: ignore[arg-type]
        self.now += 1

    def entries(self, prices: dict[str, Price] = PRICES) -> list[Entry]:
        return entries(self.rows, self.tokens, prices, until_idle)

    def total(self, prices: dict[str, Price] = PRICES) -> Totals:
        return total(self.rows, self.entries(prices))


def test_an_untouched_session_saves_exactly_nothing() -> None:
    """To the last bit: whoever never leaves anything out must not read of cents saved or lost."""
    session = Session()
    session.ask(1000, 1313, 0, output_tokens=77)
    session.ask(1100, 1433, 1280, output_tokens=3)
    session.ask(1307, 1691, 1408, cache_write_tokens=283, output_tokens=19)
    session.ask(1401, 1803, 7, cache_write_tokens=1001, after_s=IDLE_S + 1)
    sums = session.total({"gpt-*": Price(input=0.1, output=0.3, cached=0.07, write=0.11)})
    assert sums.untouched_input == sums.input == 1313 + 1433 + 1691 + 1803
    assert sums.untouched_cached == sums.cached == 1280 + 1408 + 7
    assert sums.untouched_cost == sums.cost > 0


def test_after_a_pause_a_smaller_history_is_cheaper_by_what_was_left_out() -> None:
    """Cold: the provider has forgotten everything, so all of the history would have been fresh."""
    session = Session()
    session.ask(1000, 2000, 0)  # the provider counts two tokens for one of ours
    session.ask(1500, 1000, 0, sent=500, after_s=IDLE_S)
    whole, cold = session.entries()
    assert (whole.cost, whole.untouched_cost) == (0.02, 0.02)
    assert (cold.input, cold.untouched_input, cold.untouched_cached) == (1000, 1000 + 2 * 1000, 0)
    assert cold.cost == pytest.approx(1000 * 10 / MILLION)
    assert cold.untouched_cost == pytest.approx(3000 * 10 / MILLION)


def test_a_warm_request_after_a_rewrite_saves_only_the_price_of_the_cache() -> None:
    """What was left out would have come from the cache: the share of the request before that the cache serves."""
    session = Session()
    session.ask(1000, 1000, 0)
    session.ask(2000, 2000, 900)  # the cache serves 0.9 of the request before
    session.ask(2000, 500, 0, sent=500, after_s=IDLE_S)
    session.ask(2100, 600, 450, sent=600)  # 0.9 of 500
    *_, warm = session.entries()
    assert warm.untouched_input == 600 + 1500
    assert warm.untouched_cached == pytest.approx(0.9 * 2000), "of the untouched request before, not of the sent one"
    assert warm.cost == pytest.approx((150 * 10 + 450 * 1) / MILLION)
    assert warm.untouched_cost == pytest.approx((300 * 10 + 1800 * 1) / MILLION)


def test_a_rewrite_of_a_warm_cache_costs_more_than_it_saves() -> None:
    """Fewer tokens and more money: 4000 fresh ones instead of 10000 that the cache had."""
    session = Session()
    session.ask(10_000, 10_000, 0)
    session.ask(10_000, 10_000, 10_000)
    session.ask(10_000, 4_000, 0, sent=4_000)
    rewrite = session.entries()[-1]
    assert rewrite.untouched_input - rewrite.input == 6_000
    assert rewrite.untouched_cached == 10_000
    assert rewrite.cost == pytest.approx(0.04) and rewrite.untouched_cost == pytest.approx(0.01)
    sums = session.total()
    assert sums.untouched_cost - sums.cost == pytest.approx(-0.03)


def test_a_history_sent_whole_again_is_not_blamed_for_what_the_selection_had_cooled() -> None:
    """The request after: nothing is left out, but had nothing ever been, the cache would know all of it."""
    session = Session()
    session.ask(1000, 1000, 0)
    session.ask(1000, 1000, 1000)
    session.ask(1000, 400, 0, sent=400)
    session.ask(1000, 1000, 400)
    back = session.entries()[-1]
    assert (back.cached, back.untouched_input, back.untouched_cached) == (400, 1000, 1000)
    assert back.untouched_cost == pytest.approx(0.001) and back.cost == pytest.approx(0.0064)


def test_a_warm_branch_begins_with_what_the_cache_held_of_its_parent() -> None:
    """Alone, its first request would look as if the untouched history had been fresh: a saving made of ignorance."""
    session = Session()
    session.ask(1000, 1000, 0)
    session.ask(1100, 300, 0, sent=300, after_s=IDLE_S)
    session.ask(1200, 400, 300, sent=400)
    parent, branch = session.rows[:2], session.rows[2:]
    (first,) = entries(branch, session.tokens, PRICES, until_idle, lead=parent)
    assert (first.input, first.untouched_input, first.untouched_cached) == (400, 1200, 1100)
    assert first == session.entries()[2], "as in one session"
    (alone,) = entries(branch, session.tokens, PRICES, until_idle)
    assert alone.untouched_cached == 0


def rewritten_and_warm() -> Session:
    """A cache that serves everything; 1500 of 2000 tokens are left out."""
    session = Session()
    session.ask(2000, 2000, 0)
    session.ask(2000, 2000, 2000)
    session.ask(2000, 500, 0, sent=500, after_s=IDLE_S)
    return session


def test_a_request_beside_the_session_is_not_what_its_cache_holds() -> None:
    """A title is asked for in between: the next request would still have found all of the untouched history."""
    session = rewritten_and_warm()
    session.ask(50, 50, 7, outcome="side", instructions_id=9)
    session.ask(2100, 600, 500, sent=600)
    *_, title, after = session.entries()
    assert (title.untouched_input, title.untouched_cached) == (50, 7), "nothing was left out of it: it is as it was"
    assert (after.untouched_input, after.untouched_cached) == (2100, 2000)


def test_requests_beside_a_session_say_nothing_of_how_much_its_cache_serves() -> None:
    session = Session()
    session.ask(2000, 2000, 0)
    for _ in range(3):
        session.ask(2000, 2000, 2000)
        session.ask(50, 60, 0, outcome="side")
    session.ask(2000, 500, 0, sent=500)
    assert session.entries()[-1].untouched_cached == 2000


def test_an_answer_without_usage_has_kept_the_cache_warm() -> None:
    """It was aborted, or its provider says nothing: the pause before the next request begins at its end."""
    session = rewritten_and_warm()
    session.ask(2000, None, None, sent=500, after_s=IDLE_S - 60, ending="client gone", status=200)
    session.ask(2100, 600, 500, sent=600, after_s=IDLE_S - 60)
    assert session.entries()[-1].untouched_cached == 2000


def test_a_refused_request_keeps_no_cache_warm() -> None:
    session = rewritten_and_warm()
    session.ask(2000, None, None, sent=500, after_s=IDLE_S - 60, status=429)
    session.ask(2100, 600, 0, sent=600, after_s=IDLE_S - 60)
    assert session.entries()[-1].untouched_cached == 0


def test_each_model_has_a_cache_of_its_own() -> None:
    """Another model knows nothing of the history, sent whole or not; the first one still does when it is back."""
    session = rewritten_and_warm()
    session.ask(2100, 600, 0, sent=600, model="gpt-other")
    session.ask(2200, 700, 500, sent=700)
    *_, other, back = session.entries()
    assert (other.untouched_cached, back.untouched_cached) == (0, 2000)
    assert other.untouched_cost is not None and other.cost is not None
    assert other.untouched_cost - other.cost == pytest.approx(1500 * 10 / MILLION)


@pytest.mark.parametrize("changes", [{"outcome": "client compaction"}, {"tools_id": 7}, {"instructions_id": 7}])
def test_a_cache_that_the_client_broke_itself_is_no_loss_of_ours(changes: dict[str, object]) -> None:
    """Nothing is left out of what it sends now, and untouched nothing of it would have been cached either."""
    session = rewritten_and_warm()
    session.ask(400, 400, 10, **changes)
    compacted = session.entries()[-1]
    assert (compacted.untouched_input, compacted.untouched_cached) == (400, 10)
    assert compacted.cost == compacted.untouched_cost


def test_without_cached_counts_nothing_is_taken_to_come_from_a_cache() -> None:
    session = Session()
    session.ask(1000, 1000, None)
    session.ask(1000, 400, None, sent=400)
    whole, rewrite = session.entries()
    assert (whole.cached, whole.untouched_cached, rewrite.cached, rewrite.untouched_cached) == (0, 0, 0, 0)
    assert rewrite.untouched_cost == pytest.approx(0.01) and rewrite.cost == pytest.approx(0.004)


def test_a_cache_not_yet_seen_at_work_is_taken_to_serve_everything() -> None:
    """A saving is never made of ignorance: the first request of a session is rewritten at once."""
    session = Session()
    session.ask(1000, 1000, 0)
    session.ask(1200, 400, 0, sent=400)
    rewrite = session.entries()[-1]
    assert rewrite.untouched_cached == 1000
    assert rewrite.untouched_cost == pytest.approx((200 * 10 + 1000) / MILLION)


def test_a_request_that_was_refused_and_resent_says_nothing_of_the_cache() -> None:
    """What came before it, as far as the provider knows, is not what the archive calls the request before."""
    session = Session()
    session.ask(1000, 1000, 0)
    session.ask(1000, 1000, 1000, fell_back=True)
    session.ask(1000, 1000, 0)
    session.ask(1000, 400, 0, sent=400)
    assert session.entries()[-1].untouched_cached == 1000


def test_a_pause_ends_where_the_answer_ended() -> None:
    """A long answer is no pause: from its end on the cache is warm."""
    session = Session()
    session.ask(1000, 1000, 0, ended_at=START + 60 + 5000)
    session.ask(1200, 400, 0, sent=400, after_s=5000 + 100)
    assert session.entries()[-1].untouched_cached == 1000


def test_what_is_written_to_the_cache_has_its_own_price_and_keeps_its_share() -> None:
    session = Session()
    session.ask(1000, 1000, 0, cache_write_tokens=1000)
    session.ask(1000, 500, 0, sent=500, after_s=IDLE_S, cache_write_tokens=400)
    whole, cold = session.entries()
    assert whole.cost == whole.untouched_cost == pytest.approx(1000 * 12 / MILLION)
    assert cold.cost == pytest.approx((400 * 12 + 100 * 10) / MILLION)
    assert cold.untouched_cost == pytest.approx((800 * 12 + 200 * 10) / MILLION)


def test_a_price_without_cached_and_write_takes_the_one_of_fresh_tokens() -> None:
    session = Session()
    session.ask(1000, 1000, 600, cache_write_tokens=300, output_tokens=50)
    sums = session.total({"*": Price(input=10)})
    assert sums.cost == sums.untouched_cost == pytest.approx(1000 * 10 / MILLION), "output is free unless it is priced"
    assert Price(input=10, cached=0).cost(uncached=0, cached=1000, written=0, output=0) == 0, "0 is a price"


def test_output_is_paid_once_and_saves_nothing() -> None:
    session = Session()
    session.ask(1000, 500, 0, sent=500, output_tokens=100)
    (entry,) = session.entries()
    assert entry.cost == pytest.approx((500 * 10 + 100 * 40) / MILLION)
    assert entry.untouched_cost is not None and entry.cost is not None
    assert entry.untouched_cost - entry.cost == pytest.approx(500 * 10 / MILLION)


def test_the_first_pattern_that_fits_counts() -> None:
    cheap, dear, other = Price(input=1), Price(input=2), Price(input=3)
    prices = {"gpt-5-mini": cheap, "gpt-5*": dear, "*": other}
    assert [price_of(model, prices) for model in ("gpt-5-mini", "gpt-5", "gpt-5-mini-2", "glm")] == [
        cheap, dear, dear, other,
    ]  # fmt: skip
    assert price_of("gpt-5-mini", {"gpt-5*": dear, "gpt-5-mini": cheap}) == dear
    assert price_of("GPT-5", {"gpt-5*": dear}) is None and price_of("gpt-5", {}) is None


def test_money_is_summed_over_priced_requests_alone_and_tokens_over_all() -> None:
    session = Session()
    session.ask(1000, 1000, 0)
    session.ask(1000, 1000, 0, model="glm")
    sums = session.total()
    assert (sums.requests, sums.priced, sums.input) == (2, 1, 2000)
    assert sums.cost == sums.untouched_cost == pytest.approx(0.01)
    assert session.entries()[1].cost is None and session.entries()[1].untouched_cost is None


def test_a_request_without_usage_is_left_away() -> None:
    session = Session()
    session.ask(1000, 1000, 0)
    session.ask(9000, None, None)
    session.ask(1000, 1000, 1000)
    assert [entry.exchange.id for entry in session.entries()] == [1, 3]


def test_the_rate_is_that_of_whole_requests() -> None:
    """What every request costs beside its words must not be multiplied by a request of which little was sent."""
    session = Session()
    session.ask(1000, 1200, 0)
    session.ask(3000, 3600, 0)
    session.ask(4000, 400, 0, sent=100)
    assert provider_tokens_per_ours(session.rows, session.tokens) == 1.2
    assert provider_tokens_per_ours(session.rows[2:], session.tokens) == 1.0, "nothing was sent whole: no rate is known"


def test_a_request_that_goes_on_from_what_the_provider_keeps_says_nothing_of_the_rate() -> None:
    session = Session()
    session.ask(1000, 2000, 0)
    session.ask(10, 50_000, 0, outcome="opaque")
    assert provider_tokens_per_ours(session.rows, session.tokens) == 2


def test_counts_of_a_provider_that_do_not_add_up_stay_within_what_was_sent() -> None:
    session = Session()
    session.ask(1000, 1000, 4000, cache_write_tokens=4000)
    (entry,) = session.entries()
    assert (entry.cached, entry.written) == (1000, 0)
    assert entry.cost == pytest.approx(0.001)


@pytest.mark.parametrize("text", ['{"output": 1}', '{"input": -1}', '{"input": 1, "chached": 1}', '{"input": "x"}'])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Price)


def test_what_the_cache_would_have_served_is_weighed_by_how_surely_it_was_warm() -> None:
    session = Session()
    session.ask(1000, 1000, 0)
    session.ask(2000, 500, 0, sent=500, after_s=60)
    sure, half, gone = (
        entries(session.rows, session.tokens, PRICES, lambda _, __, q=q: q)[-1].untouched_cached  # type: ignore[misc]
        for q in (1.0, 0.5, 0.0)
    )
    assert (sure, half, gone) == (1000, 500, 0)


def test_reasoning_that_was_removed_counts_once_however_often_it_is_reported() -> None:
    """An answer names every item that its request lost; refusals, side requests and answers cut short name none."""
    session = Session()
    for transformations in (0, 2, 2):
        session.ask(1000, 1000, 0, transformations=transformations)
    session.ask(1000, None, None, status=502)
    session.ask(1000, 1000, 0, outcome="side")
    session.ask(1000, 1000, 0, transformations=5)
    session.ask(1000, 1000, 0, transformations=1)
    session.ask(1000, 1000, 0, transformations=2)
    assert newly_removed(session.rows) == {1: 0, 2: 2, 3: 0, 6: 3, 7: 0, 8: 1}


def test_a_branch_does_not_count_what_its_parent_had_lost() -> None:
    session = Session()
    for transformations in (3, 3, 4):
        session.ask(1000, 1000, 0, transformations=transformations)
    removed = newly_removed(session.rows[1:], lead=session.rows[:1])
    assert [removed[row.id] for row in session.rows[1:]] == [0, 1]
