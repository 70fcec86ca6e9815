"""The comparison of boundary policies: what it counts, and that `auto` is worth its name on the shipped sessions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.economics.profiles import shipped
from proxy.lab.drive import Missed, Request, Rereads, Tokens
from proxy.lab.modes import MODES, ratio, reread_cost, rules_of
from proxy.lab.modes import input_cost as cost
from proxy.lab.recordings import Recording
from proxy.lab.results import read_results
from tests.graphstore.store.history import exchange_row
from tests.proxy.dialogue import SYSTEM, read, said, user

DATA = Path(__file__).parents[1] / "data/sessions"
KNOWN = {profile.name: profile for profile in shipped()}


def test_input_costs_what_the_profile_says() -> None:
    row = exchange_row(1, input_tokens=10_000, cached_tokens=4_000)
    assert cost(row, KNOWN["openai-5"]) == pytest.approx(0.1 * 4_000 + 6_000)
    assert cost(row, KNOWN["openai"]) == pytest.approx(0.1 * 4_000 + 1.25 * 6_000)
    beyond = replace(row, input_tokens=300_000)
    assert cost(beyond, KNOWN["openai-5.4"]) == pytest.approx(2 * cost(beyond, KNOWN["openai-5"]))
    assert reread_cost(row, Missed(100, 50), KNOWN["openai-5"]) == pytest.approx(100 + 0.1 * 50 + 0.1 * 10_000)
    assert reread_cost(row, Missed(0, 50), KNOWN["openai-5"]) == pytest.approx(0.1 * 50)


def test_the_caches_lifetime_lies_between_what_the_profile_knows() -> None:
    for profile in shipped():
        rules = rules_of(profile)
        assert profile.warm_s < rules.ttl_s < profile.cold_s
        assert rules.at_breakpoints == (profile.match == "requests")


def test_auto_is_compared_with_the_cheapest_of_the_others() -> None:
    assert ratio({"auto": 90.0, "idle": 100.0, "always": 120.0, "off": 200.0}) == pytest.approx(0.9)


def recording() -> Recording:
    files = [*read("a.py", "def alpha_one(): pass"), *read("b.py", "def beta_two(): pass", "call_1")]
    talk = [
        user("Change alpha_one and beta_two."), said("alpha_one and beta_two are changed"),
        user("Again."), said("alpha_one once more"), user("And now?"), said("alpha_one, beta_two"),
    ]  # fmt: skip
    messages = [SYSTEM, user("Look."), *files, said("done"), *talk]
    return Recording("r", tuple(json.dumps(m).encode() for m in messages), (1, 7, 9, 11))


def test_what_an_answer_names_and_nothing_sent_has_is_read_again_once() -> None:
    rereads, tokens, session = Rereads(recording()), Tokens(), recording()
    gone = frozenset({2, 3})  # the call that read a.py, and its result
    of_a = tokens.of(session.messages[3])
    assert rereads.note(Request(7, range(6, 7), 1, True), frozenset(), tokens) == Missed(0, 0)
    assert rereads.note(Request(8, range(8, 9), 2, True), gone, tokens) == Missed(0, 0), "the user named it"
    assert rereads.note(Request(4, range(10, 11), 3, True), gone, tokens) == Missed(of_a, 0)
    assert rereads.note(Request(4, range(12, 13), 4, True), gone, tokens) == Missed(0, of_a), "carried since"
    assert rereads.note(Request(4, range(12, 13), 4, True), gone | {1}, tokens) == Missed(of_a, 0), "selected anew"


def test_a_session_that_comes_twice_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"id": "twin", "messages": [json.loads(m) for m in recording().messages], "turn_starts": [1, 7]})
    (tmp_path / "two.jsonl").write_text(f"{line}\n{line}\n")
    assert main(["eval", "modes", str(tmp_path / "two.jsonl"), "--profile", "openai", "--out", str(tmp_path)]) != 0
    assert "twin: its history begins like that of another session" in capsys.readouterr().err


@pytest.mark.slow
def test_auto_costs_no_more_than_the_cheapest_other_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within two per cent, on the shipped sessions, for a provider that matches prefixes and one that does not."""
    arguments = ["--profile", "openai-4", "--profile", "openai", "--out", str(tmp_path)]
    assert main(["eval", "modes", str(DATA / "entire_cli.jsonl"), str(DATA / "tau_airline.jsonl"), *arguments]) == 0
    results = read_results(tmp_path / "modes.jsonl")
    assert len(results.rows) == 2 * 2 * len(MODES)
    for profile in ("openai-4", "openai"):
        for pauses in results.about["pauses"]:
            rows = {r["mode"]: r for r in results.rows if (r["profile"], r["pauses"]) == (profile, pauses)}
            costs = {mode: float(sum(row["costs"])) for mode, row in rows.items()}
            assert ratio(costs) <= 1.02, (profile, pauses, costs)
            assert costs["auto"] < 0.9 * costs["off"]
    shown = capsys.readouterr().out
    assert "auto / cheapest" in shown and "--profile openai-4" in shown
