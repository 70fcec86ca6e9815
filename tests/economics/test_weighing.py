"""The expected net of a rewrite, against the sums of a person with a pencil."""

from dataclasses import replace
from itertools import product

import pytest

from graphstore.blocks import Block, Message
from proxy.economics.profiles import shipped
from proxy.economics.warmth import PROBABLY
from proxy.economics.weighing import MARGIN, READ_AGAIN, Ways, further_requests, ways_of, weigh

KNOWN = {profile.name: profile for profile in shipped()}
GPT5, GPT56 = KNOWN["openai-5"], KNOWN["openai"]  # r 0.1, w 1, by prefix; r 0.1, w 1.25, by requests, reasoning bound
WAYS = Ways(appended=51_200, rewritten=11_200, known=51_200, shared=1_280)


def again(ways: Ways, read: float, write: float, further: float) -> float:
    dropped = ways.appended - ways.rewritten
    return READ_AGAIN * dropped * (write + read * further / 2) + read * ways.rewritten


def test_a_cold_rewrite_saves_what_is_dropped_now_and_at_every_request_to_follow() -> None:
    weighed = weigh(WAYS, GPT5, warm=0.0, further=10)
    assert weighed.net == pytest.approx(40_000 * (1 + 10 * 0.1) - again(WAYS, 0.1, 1, 10))
    assert weighed.pays


def test_a_warm_rewrite_pays_for_what_stands_behind_the_first_cut() -> None:
    weighed = weigh(WAYS, GPT5, warm=1.0, further=3)
    stay, go = 0.1 * 51_200, 0.1 * 1_280 + (11_200 - 1_280)
    assert weighed.net == pytest.approx(stay - go + 3 * 0.1 * 40_000 - again(WAYS, 0.1, 1, 3))


def test_it_breaks_even_where_the_literature_says() -> None:
    """n* = (w - r)/r * S/D - 1 with a matchable prefix and nothing read again."""
    ways = Ways(appended=3 * 128_000, rewritten=2 * 128_000, known=3 * 128_000, shared=128_000)
    at = (1 - 0.1) / 0.1 * 1 - 1
    for further, sign in ((at - 0.01, -1), (at + 0.01, 1)):
        weighed = weigh(ways, GPT5, 1.0, further)
        assert (weighed.net + again(ways, 0.1, 1, further)) * sign > 0


def test_where_only_whole_requests_match_nothing_of_the_prefix_is_left() -> None:
    weighed = weigh(WAYS, GPT56, warm=1.0, further=0)
    assert weighed.net == pytest.approx(0.1 * 51_200 - 1.25 * 11_200 - again(WAYS, 0.1, 1.25, 0))
    assert not weighed.pays


def test_lost_reasoning_counts_where_it_is_bound_to_its_prefix() -> None:
    with_reasoning = replace(WAYS, reasoning=1_000)
    for profile, lost in ((GPT56, 0.5 * 1_000 * 8), (GPT5, 0)):
        pair = [weigh(ways, profile, 0.0, 5).net for ways in (WAYS, with_reasoning)]
        assert pair[0] - pair[1] == pytest.approx(lost)


def test_coming_down_from_a_price_cliff_pays_even_when_warm() -> None:
    ways = Ways(appended=300_000, rewritten=260_000, known=300_000, shared=0)
    assert not weigh(ways, GPT5, 1.0, 30).pays
    assert weigh(ways, KNOWN["openai-5.4"], 1.0, 30).pays, "the same prices, and twice as much beyond 272,000 tokens"


def test_little_is_not_worth_a_broken_prefix() -> None:
    ways = Ways(appended=20_000, rewritten=18_000, known=20_000, shared=17_900)
    assert not weigh(ways, GPT5, warm=1.0, further=100).pays
    assert weigh(ways, GPT5, warm=0.0, further=100).pays


def test_nothing_to_drop_never_pays() -> None:
    ways = Ways(20_000, 20_000, 18_000, 18_000)
    for warm in (0.0, 0.5, 1.0):
        assert not weigh(ways, GPT5, warm, further=50).pays


def test_the_margin_is_a_share_of_the_request_as_it_stands() -> None:
    assert weigh(WAYS, GPT5, 0.0, 1).margin == pytest.approx(MARGIN * 51_200)


def test_the_words_hold_the_numbers() -> None:
    text = str(weigh(WAYS, GPT5, 0.25, 7))
    for part in ("51200", "11200", "1280", "0.25", "7 requests", "openai-5", "saves"):
        assert part in text


# -- sizes ------------------------------------------------------------------------------------------------------------

COSTS = {"user": 400, "tools": 4000, "assistant": 800}
KINDS = ("user", "tools", "assistant", "user", "tools", "assistant", "user")
MESSAGES = [Message("user") if kind == "user" else Message("assistant", cost=COSTS[kind]) for kind in KINDS]
BLOCKS = [Block(kind, (i,), COSTS[kind], ()) for i, kind in enumerate(KINDS)]  # type: ignore[arg-type]


def sizes(
    present: set[int], proposed: set[int], *, noticed: bool, known: int = 5, marked: frozenset[int] = frozenset()
) -> Ways:
    return ways_of(
        BLOCKS, range(7), MESSAGES, known=known, present=frozenset(present), proposed=frozenset(proposed), head=2000,
        noticed=noticed, marked=marked,
    )  # fmt: skip


def test_sizes_without_a_notice_share_what_stands_before_the_first_difference() -> None:
    ways = sizes(set(), {4}, noticed=False)
    assert ways == Ways(
        appended=(2000 + 10_800) // 4, rewritten=(2000 + 6_800) // 4, known=(2000 + 9_600) // 4,
        shared=(2000 + 5_600) // 4,
    )  # fmt: skip


def test_the_first_notice_breaks_the_prefix_behind_the_instructions() -> None:
    assert sizes(set(), {4}, noticed=True).shared == 500
    assert sizes({1}, {1, 4}, noticed=True).shared == (2000 + 400 + 800 + 400) // 4


def test_what_was_left_out_and_comes_back_breaks_the_prefix_too() -> None:
    ways = sizes({1}, {4}, noticed=True)
    assert (ways.appended, ways.rewritten, ways.shared) == ((2000 + 6800) // 4, (2000 + 6800) // 4, 600)


def test_only_what_was_sent_before_is_shared() -> None:
    assert sizes(set(), {5}, noticed=False, known=2).shared == (2000 + 4400) // 4


def test_what_comes_back_or_goes_by_hand_was_asked_for() -> None:
    assert not sizes({1}, {1, 4}, noticed=True).asked
    assert sizes({1}, {4}, noticed=True).asked
    assert sizes({1}, {1, 4}, noticed=True, marked=frozenset({4})).asked
    assert not sizes({1}, {1, 4}, noticed=True, marked=frozenset({1, 2})).asked


def test_what_was_asked_for_is_sent_at_any_price_once_the_cache_is_gone() -> None:
    ways = Ways(appended=10_000, rewritten=12_000, known=9_000, shared=500)
    for warm, asked in product((0.0, PROBABLY, 1.0), (False, True)):
        weighed = weigh(replace(ways, asked=asked), GPT5, warm, 0)
        assert weighed.net < 0
        assert weighed.pays == (asked and warm <= PROBABLY)
        assert ("asked for" in str(weighed)) == weighed.pays


def test_reasoning_counts_behind_the_cut_alone() -> None:
    blocks = [Block("assistant", (0, 1), 100, ()), Block("tools", (2,), 50, ()), Block("assistant", (3, 4), 90, ())]
    messages = [
        Message("reasoning", cost=60), Message("assistant", cost=40), Message("output", cost=50),
        Message("reasoning", cost=80), Message("assistant", cost=10),
    ]  # fmt: skip
    ways = ways_of(
        blocks, range(3), messages, known=5, present=frozenset(), proposed=frozenset({1}), head=0, noticed=False
    )
    assert ways.reasoning == 80 // 4


# -- what follows -----------------------------------------------------------------------------------------------------


def test_more_requests_follow_in_long_turns_and_in_sessions_that_go_on() -> None:
    assert further_requests([40, 40, 40], 1, 3) > further_requests([4, 4, 4], 1, 3)
    assert further_requests([10] * 20, 20, 20) > further_requests([10] * 2, 2, 2) > further_requests([10] * 2, 0, 2)


def test_a_session_whose_pauses_are_all_cold_has_little_but_its_own_turn() -> None:
    assert further_requests([10] * 50, 0, 50) == pytest.approx(9, abs=1)
