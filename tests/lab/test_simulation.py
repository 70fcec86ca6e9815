"""Sessions through the real session logic against a simulated cache, and the cache alone by numbers made on paper."""

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import main
from proxy.lab.drive import Tokens, drive, empty_archive, laid_out, requests_of
from proxy.lab.provider_cache import BREAKPOINTS_KEPT, CacheRules, ProviderCache
from proxy.lab.recordings import Recording
from proxy.lab.results import read_results
from proxy.lab.simulation import Pauses
from proxy.settings import Settings
from tests.proxy.dialogue import SYSTEM, Message, read, said, turn, user

A, B, C, D = ((name.encode(), 700) for name in "abcd")
PREFIX = CacheRules(ttl_s=100)
MARKS = CacheRules(ttl_s=100, at_breakpoints=True)


# -- the cache --------------------------------------------------------------------------------------------------------


def test_the_longest_common_prefix_is_read_in_whole_steps() -> None:
    cache = ProviderCache(PREFIX)
    assert cache.serve([A, B], 0) == 0
    assert cache.serve([A, B, C], 1) == 1400 // 128 * 128
    assert cache.serve([A, B, D], 2) == 1400 // 128 * 128, "what two prompts share, not what one of them was"
    assert cache.serve([A, C], 3) == 0, "700 tokens are below the minimum"
    assert cache.serve([B, A, C], 4) == 0, "the same messages in another order"


def test_a_prefix_lives_from_its_last_use() -> None:
    cache = ProviderCache(PREFIX)
    cache.serve([A, B], 0)
    assert cache.serve([A, B, C], 100) > 0
    assert cache.serve([A, B, D], 200) > 0, "read at 100"
    assert cache.serve([A, B, C, D], 201) == 1400 // 128 * 128, "its third message was last used at 100"
    assert cache.serve([A, B], 302) == 0


def test_at_breakpoints_only_whole_former_prompts_are_read() -> None:
    cache = ProviderCache(MARKS)
    cache.serve([A, B, C], 0)
    assert cache.serve([A, B, D], 1) == 0, "what is common is nobody's whole prompt"
    assert cache.serve([A, B, C, D], 2) == 2100, "to the token"
    assert cache.serve([A, B, D, C], 3) == 2100
    for i in range(BREAKPOINTS_KEPT - 2):
        cache.serve([B, (str(i).encode(), 700)], 4)
    assert cache.serve([A, B, D, C], 5) == 2800
    for i in range(BREAKPOINTS_KEPT):
        cache.serve([C, (str(i).encode(), 700)], 6)
    assert cache.serve([A, B, D, C], 7) == 0, "eighty later ones stand before it"


# -- the drive --------------------------------------------------------------------------------------------------------


def recording(messages: list[Message], starts: list[int], name: str = "s") -> Recording:
    return Recording(name, tuple(json.dumps(m, separators=(",", ":")).encode() for m in messages), tuple(starts))


TURNS = [turn(f"please look at unique_{name}", name, 6000) for name in ("alpha", "beta", "gamma", "delta")]
MESSAGES = [SYSTEM, *(message for members in TURNS for message in members)]
STARTS = [1, 5, 9, 13]
SESSION = recording(MESSAGES, STARTS)


def test_a_request_stands_before_every_run_of_the_agents_messages() -> None:
    session = recording([SYSTEM, user("a"), said("x"), *read("f", "t"), said("b"), user("c"), said("d")], [1, 6])
    assert [(r.messages, list(r.answer), r.turn, r.opens_turn) for r in requests_of(session)] == [
        (2, [2, 3], 1, True), (5, [5], 1, False), (7, [7], 2, True),
    ]  # fmt: skip
    greeted = recording([said("hello"), said("there"), user("a"), said("b")], [2])
    assert [r.messages for r in requests_of(greeted)] == [3], "nobody asked for the greeting"


def driven(pause_s: float, **changes: Any) -> Any:
    requests = requests_of(SESSION)
    waits = [pause_s if request.opens_turn else 5.0 for request in requests]
    cache = ProviderCache(CacheRules(ttl_s=3600))
    with empty_archive() as archive, laid_out(archive, "secret") as path:
        settings = Settings(db=str(path), mode="idle", min_history_tokens=0, **changes)
        return asyncio.run(drive(SESSION, requests, waits, settings, cache, Tokens()))


def test_the_archive_holds_what_the_simulated_provider_counted() -> None:
    """Warm throughout: every request reads what the one before it was, in steps; after cold pauses nothing is read."""
    warm, cold = driven(60.0), driven(7200.0, selector="full")
    tokens = Tokens()
    prompts = [sum(n for _, n in tokens.prompt(SESSION.request(r.messages).body)) for r in requests_of(SESSION)]
    assert [row.input_tokens for row in warm.exchanges] == prompts and not warm.selections
    expected = [0, *(known - known % 128 if known >= 1024 else 0 for known in prompts[:-1])]
    assert [row.cached_tokens for row in warm.exchanges] == expected
    assert max(expected) > 0
    after_pauses = [row for row in cold.exchanges if row.boundary == "cold"]
    assert len(after_pauses) == 3 and all(row.cached_tokens == 0 for row in after_pauses)
    assert [row.input_tokens for row in cold.exchanges] == prompts, "full leaves nothing out"


def test_a_selection_shortens_what_is_served_and_later_requests_read_it_from_the_cache() -> None:
    found = driven(7200.0)
    assert len(found.selections) == 3
    last, step = found.exchanges[-2:]
    assert last.boundary == "cold" and last.blocks_left_out > 0 and last.cached_tokens == 0
    assert step.blocks_left_out == last.blocks_left_out
    assert step.cached_tokens == last.input_tokens - last.input_tokens % 128


FORESEEN = [
    SYSTEM,
    *(message for name in ("alpha", "beta", "gamma") for message in turn(f"look at {name}", f"{name}_{name}", 6000)),
    user("go on"), *read("file", "nothing new"), said("beta_beta it was"),
]  # fmt: skip


@pytest.mark.parametrize(("foresees", "kept"), [(True, "beta"), (False, "gamma")])
def test_the_oracle_sends_what_the_turn_will_name_and_the_request_does_not(foresees: bool, kept: str) -> None:
    """Each of three turns takes a third of the history: the budget has room for one."""
    session = recording(FORESEEN, [1, 5, 9, 13])
    requests = requests_of(session)
    waits = [7200.0 if request.turn == 4 and request.opens_turn else 5.0 for request in requests]
    with empty_archive() as archive, laid_out(archive, "secret") as path:
        settings = Settings(db=str(path), mode="idle", min_history_tokens=0, selector="recency", beta=0.35)
        cache, tokens = ProviderCache(PREFIX), Tokens()
        found = asyncio.run(drive(session, requests, waits, settings, cache, tokens, foresees=foresees))
    (selection,) = found.selections.values()
    tools = [v for v in selection.verdicts if v.kept and session.blocks[v.ordinal].kind == "tools"]
    assert [kept in session.text_of(session.blocks[v.ordinal]) for v in tools] == [True]


def test_the_same_seed_makes_the_same_selections() -> None:
    """Exploration is drawn by the session's name, which an archive's random secret would make another each time."""
    one, two = (driven(7200.0, selector="random", seed=3) for _ in range(2))
    assert one.selections == two.selections
    assert one.exchanges[0].session_id == two.exchanges[0].session_id


# -- pauses -----------------------------------------------------------------------------------------------------------


def test_what_is_warm_stays_warm_as_the_probability_grows() -> None:
    draws = [i / 100 for i in range(100)]
    warm = {p: {u for u in draws if Pauses(p).draw(u, 3600) < 3600} for p in (0.0, 0.25, 0.75, 1.0)}
    assert warm[0.0] < warm[0.25] < warm[0.75] < warm[1.0] == set(draws)
    assert len(warm[0.25]) == 25 and Pauses(0.25).draw(0.9, 3600) == 7200


def test_a_log_normal_pause_has_its_median_in_the_middle() -> None:
    pauses = Pauses(None, 600, 2)
    found = [pauses.draw(u, 3600) for u in (0.0, 0.159, 0.5, 0.841)]
    assert found == sorted(found) and found[2] == pytest.approx(600)
    assert found[3] / 600 == pytest.approx(7.39, rel=0.01) and found[1] * found[3] == pytest.approx(600**2, rel=0.01)


# -- the command ------------------------------------------------------------------------------------------------------


def write_sessions(path: Path, *names: str) -> Path:
    sessions = ({"id": name, "messages": MESSAGES, "turn_starts": STARTS} for name in names)
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return path


SHORT = ["--selector", "recap", "--selector", "user-messages", "--min-history-tokens", "0"]


def simulate(data: Path, out: Path, *more: str) -> int:
    return main(["eval", "simulate", str(data), "--out", str(out), *SHORT, *more])


def test_rows_are_paired_with_full_and_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_sessions(tmp_path / "d.jsonl", "one", "two"), tmp_path / "out"
    assert simulate(data, out, "--p-warm", "0", "--p-warm", "1") == 0
    page = capsys.readouterr().out
    rows = {(row["session"], row["selector"], row["pauses"]): row for row in read_results(out / "simulate.jsonl").rows}
    assert len(rows) == 2 * 3 * 2
    for session in ("0 one", "1 two"):
        warm = [rows[session, s, "p(warm) 1"] for s in ("full", "recap", "user-messages")]
        assert all(row["served"] == warm[0]["served"] and not row["changes"] for row in warm)
        full, recap, users = (rows[session, s, "p(warm) 0"] for s in ("full", "recap", "user-messages"))
        assert full["served"] > recap["served"] >= users["served"]
        for row in (recap, users):
            assert [c["turn"] for c in row["changes"]] == [2, 3, 4]
            assert [sum(c[k] for k in ("kept", "revived", "new", "left out")) for c in row["changes"]] == [3, 6, 9]
            assert row["changes"][0]["new"] == row["changes"][0]["revived"] == 0
        assert users["changes"][2]["kept"] == 2 and users["changes"][2]["new"] == 1, "the users' words and no more"
    assert "| recap | -0." in page and "simulate-served.svg" in page and (out / "simulate-origins.png").exists()
    file = out / "simulate.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + lines[5][:30])  # killed while a row was written
    assert simulate(data, out, "--p-warm", "0", "--p-warm", "1") == 0
    assert file.read_text().splitlines(keepends=True) == lines and capsys.readouterr().out == page


@pytest.mark.parametrize(
    "more", [["--gap-median", "900", "--gap-sigma", "1.5", "--ttl", "1800", "--breakpoints"], ["--seed", "4"]]
)
def test_a_page_names_the_command_that_makes_it(
    tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_sessions(tmp_path / "d.jsonl", "one"), tmp_path / "out"
    assert simulate(data, out, *more) == 0
    page = capsys.readouterr().out
    said_command = next(line for line in page.splitlines() if line.startswith("`recap eval simulate"))
    words = shlex.split(said_command.split("`")[1])[1:]
    again = [str(data) if word == data.name else word for word in words]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "simulate.jsonl").read_text() == (out / "simulate.jsonl").read_text()


def test_a_price_is_by_what_was_read_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_sessions(tmp_path / "d.jsonl", "one"), tmp_path / "out"
    assert simulate(data, out, "--p-warm", "1", "--price-cached", "0", "--price-output", "0") == 0
    (row,) = [row for row in read_results(out / "simulate.jsonl").rows if row["selector"] == "full"]
    assert f"| {(row['served'] - row['cached']) / 1000:.1f} |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--p-warm", "1.5"], "--p-warm is 1.5: give a probability"),
        (["--ttl", "30"], "--ttl is 30"),
        (["--idle-after", "nan"], "--idle-after is nan"),
        (["--gap-median", "-1"], "--gap-median is -1"),
        (["--gap-median", "60", "--gap-sigma", "99"], "--gap-sigma is 99"),
        (["--prefill", "0"], "--prefill is 0"),
        (["--price-cached", "-0.1"], "--price-cached is -0.1"),
    ],
)
def test_bad_numbers_are_named(
    tmp_path: Path, more: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(write_sessions(tmp_path / "d.jsonl", "one"), tmp_path / "out", *more) == 1
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([user("a"), *read("f", "t")[:1], user("b")], "before the result of 'call_0'"),
        ([user("a"), user("b")], "no session has a request that an agent answered"),
    ],
)
def test_sessions_that_cannot_be_driven_are_named(
    tmp_path: Path, messages: list[Message], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(json.dumps({"id": "bad", "messages": messages}) + "\n")
    assert simulate(data, tmp_path / "out") == 1
    assert wanted in capsys.readouterr().err
