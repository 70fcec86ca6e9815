"""The boundary policy, rule by rule: what forbids a selection, what makes the cache cold, what keeps it warm."""

from dataclasses import replace

import pytest

from proxy.boundary import Facts, Policy, decide, decide_again

IDLE = Policy(mode="idle", idle_after_s=3600.0, min_history_tokens=1000, context_window_tokens=0)
RETURNED = Facts(at_user_request=True, history_blocks=20, history_tokens=50_000, served_tokens=50_000, idle_s=4000.0)
BUSY = replace(RETURNED, idle_s=20.0)


def test_a_user_who_returns_after_the_cache_expired_gets_a_new_selection() -> None:
    decision = decide(RETURNED, IDLE)
    assert (decision.boundary, decision.select) == ("cold", True)
    assert "4000 s" in decision.reason


def test_a_user_who_answers_at_once_gets_his_warm_prefix() -> None:
    assert decide(BUSY, IDLE).boundary == "warm"
    assert not decide(BUSY, IDLE).select


@pytest.mark.parametrize(
    ("facts", "boundary", "word"),
    [
        (replace(RETURNED, opaque="previous_response_id"), "none", "previous_response_id"),
        (replace(RETURNED, side=True), "none", "side"),
        (replace(RETURNED, held_out=True), "none", "held out"),
        (replace(RETURNED, passing_through="rejected with 400"), "none", "rejected with 400"),
        (replace(RETURNED, open_calls=True), "none", "no result"),
        (replace(RETURNED, retry=True), "warm", "retry"),
        (replace(RETURNED, at_user_request=False), "step", "step"),
        (replace(RETURNED, history_blocks=0), "none", "no history"),
        (replace(RETURNED, in_flight=True), "warm", "running"),
        (replace(RETURNED, archive_trouble="disk full"), "cold", "disk full"),
        (replace(RETURNED, history_tokens=999), "cold", "below 1000"),
    ],
)
@pytest.mark.parametrize("mode", ["idle", "auto", "always", "off"])
def test_nothing_is_selected_when(facts: Facts, boundary: str, word: str, mode: str) -> None:
    decision = decide(facts, replace(IDLE, mode=mode))  # type: ignore[arg-type]
    assert decision.boundary == ("warm" if (mode, boundary) == ("auto", "cold") else boundary)
    assert word in decision.reason
    assert not decision.select


@pytest.mark.parametrize("name", ["model", "tools", "instructions"])
def test_a_prefix_that_the_client_broke_itself_is_cold(name: str) -> None:
    decision = decide(replace(BUSY, changed=(name,)), IDLE)
    assert decision.select
    assert name in decision.reason


def test_a_history_that_the_client_compacted_is_cold() -> None:
    assert decide(replace(BUSY, client_compacted=True), IDLE).select


def test_pressure_is_cold_only_when_the_window_is_known() -> None:
    assert decide(replace(BUSY, served_tokens=130_000), replace(IDLE, context_window_tokens=128_000)).select
    assert not decide(replace(BUSY, served_tokens=130_000), IDLE).select


def test_a_message_sent_while_the_agent_works_is_not_a_boundary_in_any_mode() -> None:
    for mode in ("idle", "always", "off"):
        facts = replace(BUSY, mid_turn=True, changed=("tools",), client_compacted=True)
        assert not decide(facts, replace(IDLE, mode=mode)).select  # type: ignore[arg-type]


def test_a_turn_aborted_in_a_tool_is_a_boundary_once_the_cache_is_cold() -> None:
    assert decide(replace(RETURNED, mid_turn=True), IDLE).select


def test_a_history_seen_for_the_first_time_may_be_warm() -> None:
    decision = decide(replace(RETURNED, first_seen=True, idle_s=None), IDLE)
    assert (decision.boundary, decision.select) == ("none", False)
    assert decide(replace(RETURNED, first_seen=True, idle_s=None), replace(IDLE, mode="always")).select


def test_mode_always_selects_at_every_user_request() -> None:
    assert decide(BUSY, replace(IDLE, mode="always")).select
    assert not decide(replace(BUSY, at_user_request=False), replace(IDLE, mode="always")).select


def test_the_threshold_itself_is_cold() -> None:
    assert decide(replace(RETURNED, idle_s=3600.0), IDLE).select
    assert not decide(replace(RETURNED, idle_s=3599.9), IDLE).select


def test_a_selection_that_does_not_relieve_the_window_is_not_made_again_at_every_request() -> None:
    """An agent compacted 211 times in one session: its trigger still looked true afterwards."""
    pressed, policy = replace(BUSY, served_tokens=130_000), replace(IDLE, context_window_tokens=128_000)
    helpless = decide(replace(pressed, unrelieved=True), policy)
    assert (helpless.boundary, helpless.select) == ("warm", False)
    assert "130000 tokens for a window of 128000, and a selection did not help" in helpless.reason
    assert decide(replace(pressed, unrelieved=True, idle_s=4000.0), policy).select, "an idle cache is another matter"
    assert "did not help" not in decide(replace(BUSY, unrelieved=True), policy).reason


AUTO = replace(IDLE, mode="auto")


def test_mode_auto_weighs_at_every_user_request_and_only_there() -> None:
    for facts in (BUSY, RETURNED):
        assert (decide(facts, AUTO).select, decide(facts, AUTO).weigh) == (True, True)
    assert not decide(replace(BUSY, at_user_request=False), AUTO).select
    assert not decide(replace(BUSY, mid_turn=True), AUTO).select
    assert decide(replace(RETURNED, mid_turn=True), AUTO).weigh, "after an hour nothing is mid-turn any more"


@pytest.mark.parametrize(
    "facts", [replace(BUSY, changed=("tools",)), replace(BUSY, client_compacted=True)], ids=["changed", "compacted"]
)
def test_mode_auto_need_not_weigh_what_the_client_broke_itself(facts: Facts) -> None:
    assert (decide(facts, AUTO).boundary, decide(facts, AUTO).weigh) == ("cold", False)


def test_mode_auto_need_not_weigh_a_window_that_is_full() -> None:
    decision = decide(replace(BUSY, served_tokens=130_000), replace(AUTO, context_window_tokens=128_000))
    assert decision.select and not decision.weigh


PRESSED = Facts(
    history_blocks=3, history_tokens=10, served_tokens=120_000, least_tokens=60_000, idle_s=5.0
)  # a step of a long turn
KNOWN = replace(IDLE, context_window_tokens=128_000)


@pytest.mark.parametrize("mode", ["idle", "auto", "always"])
def test_a_step_that_nears_the_window_is_selected_anew_in_the_middle_of_the_turn(mode: str) -> None:
    decision = decide(PRESSED, replace(KNOWN, mode=mode))  # type: ignore[arg-type]
    assert (decision.boundary, decision.select, decision.pressed, decision.weigh) == ("cold", True, True, False)
    assert "120000 tokens for a window of 128000" in decision.reason


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (replace(PRESSED, served_tokens=115_200), "step"),
        (replace(PRESSED, least_tokens=115_201), "no selection would help"),
        (replace(PRESSED, unrelieved=True), "no selection would help"),
        (replace(PRESSED, archive_trouble="disk full"), "disk full"),
        (replace(PRESSED, in_flight=True), "step"),
        (replace(PRESSED, open_calls=True), "no result"),
        (replace(PRESSED, held_out=True), "held out"),
        (replace(PRESSED, passing_through="rejected"), "rejected"),
        (replace(PRESSED, retry=True), "retry"),
    ],
)
def test_a_step_is_left_alone_when(facts: Facts, word: str) -> None:
    decision = decide(facts, KNOWN)
    assert not decision.select and word in decision.reason


def test_pressure_can_be_switched_off_and_is_nothing_for_mode_off() -> None:
    for policy in (replace(KNOWN, pressure=False), replace(KNOWN, mode="off"), IDLE):
        assert not decide(PRESSED, policy).select
        assert not decide_again(PRESSED, replace(policy, pressure=False), "refused").select
    assert not decide(replace(BUSY, served_tokens=130_000), replace(KNOWN, pressure=False)).select
    assert not decide_again(PRESSED, replace(KNOWN, mode="off"), "refused").select


def test_pressure_asks_neither_for_the_cache_nor_for_a_long_history() -> None:
    request = replace(PRESSED, at_user_request=True)
    for facts in (request, replace(request, first_seen=True), replace(request, mid_turn=True)):
        assert decide(facts, KNOWN).pressed


def test_a_refusal_for_length_asks_for_a_selection_whatever_was_decided() -> None:
    for facts in (PRESSED, replace(PRESSED, retry=True), replace(PRESSED, in_flight=True), replace(BUSY, idle_s=1.0)):
        assert decide_again(facts, IDLE, "refused").select
    for facts in (
        replace(PRESSED, side=True),
        replace(PRESSED, opaque="conversation"),
        replace(PRESSED, open_calls=True),
        replace(PRESSED, held_out=True),
        replace(PRESSED, archive_trouble="disk full"),
    ):
        assert not decide_again(facts, IDLE, "refused").select
