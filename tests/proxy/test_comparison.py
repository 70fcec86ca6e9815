"""The comparison of the arms: on made-up tasks with a known difference, and on what a proxy archived."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphstore.records import Arm
from proxy.cli import main
from proxy.commands.text import LINE_CHARS
from proxy.comparison import MEASURES, TASKS_MIN, Compared, Comparison, Task, compare, tasks
from proxy.lab.statistics import unpaired_difference
from proxy.ledger import Price, Totals
from proxy.savings import Share
from tests.graphstore.store.history import session_row
from tests.proxy.dialogue import Dialogue, said, turn, user

HISTORY = [m for name in ("alpha", "beta", "gamma", "delta") for m in turn(f"Where is {name}?", name)]
DAY = "2026-11-30"


def made(count: int, mean: int, *, seed: int, cached: float = 0.5) -> list[Task]:
    draw = random.Random(seed)
    sizes = [(draw.randint(2, 20), draw.randint(mean // 2, mean * 3 // 2)) for _ in range(count)]
    return [Task(n, n * size, round(n * size * cached), n * size / 1e6) for n, size in sizes]


def line(comparison: Comparison, measure: str) -> Compared:
    return next(found for found in comparison.lines if found.measure == measure)


def test_a_difference_that_is_there_is_found_and_one_that_is_not_is_not_claimed() -> None:
    other = compare({"held out": made(60, 10_000, seed=1), "treated": made(300, 5_000, seed=2)}, priced=True, seed=0)
    for measure in ("input tokens a request", "uncached tokens a request", "input cost a request"):
        difference = line(other, measure).difference
        assert difference is not None and difference.low < difference.mean < difference.high < 0, measure
    found = line(other, "input tokens a request")
    assert found.difference is not None and found.difference.mean == pytest.approx(found.treated - found.held_out)
    same = compare({"held out": made(60, 10_000, seed=1), "treated": made(300, 10_000, seed=2)}, priced=True, seed=0)
    difference = line(same, "input tokens a request").difference
    assert difference is not None and difference.low < 0 < difference.high


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Both arms are alike: of fifty comparisons with 95 % intervals few may miss zero."""
    measure = MEASURES["uncached tokens a request"]
    missed = 0
    for seed in range(50):
        arms = made(40, 8000, seed=seed), made(20, 8000, seed=seed + 999)
        difference = unpaired_difference(*arms, measure, seed=seed, resamples=400)
        missed += not difference.low <= 0 <= difference.high
    assert missed <= 8


def test_a_request_is_weighed_as_one_and_a_session_as_one() -> None:
    arms: dict[Arm | None, list[Task]] = {
        "held out": [Task(1, 100, 0, 1.0), Task(3, 900, 500, 5.0)],
        "treated": [Task(2, 80, 60, 0.5)],
    }
    found = {one.measure: (one.held_out, one.treated) for one in compare(arms, priced=True, seed=0).lines}
    assert found == {
        "input tokens a request": (250, 40),
        "uncached tokens a request": (125, 10),
        "cached share": (0.5, 0.75),
        "input tokens a session": (500, 80),
        "uncached tokens a session": (250, 20),
        "requests a session": (2, 2),
        "input cost a request": (1.5, 0.25),
        "input cost a session": (3.0, 0.5),
    }


@pytest.mark.parametrize("held_out", [0, 1, TASKS_MIN - 1])
def test_too_few_sessions_make_no_interval(held_out: int) -> None:
    arms: dict[Arm | None, list[Task]] = {
        "held out": made(held_out, 100, seed=1),
        "treated": made(50, 100, seed=2),
        None: made(3, 100, seed=3),
    }
    found = compare(arms, priced=False, seed=0)
    assert (found.held_out, found.treated, found.undrawn, found.is_enough) == (held_out, 50, 3, False)
    assert bool(found.lines) == bool(held_out) and all(one.difference is None for one in found.lines)


def test_sessions_without_usage_are_counted_and_not_compared() -> None:
    arms: dict[Arm | None, list[Task]] = {"held out": [Task(1, 9, 0, 0.0), Task()], "treated": [Task(), Task(1, 5)]}
    found = compare(arms, priced=False, seed=0)
    assert (found.held_out, found.treated, found.without_usage) == (1, 1, 2)


def test_a_task_is_a_session_with_its_sub_agents_and_side_requests() -> None:
    root, lone = session_row(1, arm="treated"), session_row(5, arm="held out", kind="side")
    rows = [
        root,
        session_row(2, parent_id=1, arm="treated"),
        session_row(3, parent_id=2, arm="treated", kind="side"),
        session_row(4),
        session_row(6, parent_id=1, fork_depth=3, arm="treated"),
        lone,
    ]
    sums = Totals(requests=3, with_usage=2, input=100, cached=40, written=10)
    parts = {row.id: {Share(DAY, "a"): sums, Share(DAY, "b"): sums} for row in rows}
    found = tasks(rows, parts, {"*": Price(input=1.0, cached=0.5, write=2.0, output=9.0)})
    cost = (50 * 1.0 + 40 * 0.5 + 10 * 2.0) / 1e6
    assert {arm: len(members) for arm, members in found.items()} == {"treated": 2, None: 1}
    task, branch = found["treated"]
    assert (branch.requests, branch.input) == (4, 200)
    assert replace(task, cost=0) == Task(12, 600, 240, 0) and task.cost == pytest.approx(6 * cost)


def test_one_model_without_a_price_is_no_money_at_all() -> None:
    sums = Totals(requests=1, with_usage=1, input=10)
    unused = Totals(requests=1)
    rows = [session_row(1, arm="treated"), session_row(2, arm="held out")]
    prices = {"a": Price(input=1.0)}
    parts = {1: {Share(DAY, "a"): sums, Share(DAY, "b"): sums}, 2: {Share(DAY, "a"): sums}}
    assert not compare(tasks(rows, parts, prices), priced=True, seed=0).priced
    parts[1] = {Share(DAY, "a"): sums, Share(DAY, "b"): unused}
    assert compare(tasks(rows, parts, prices), priced=True, seed=0).priced


async def archived(folder: Path, sessions: int) -> str:
    """Every session is rewritten at its second request, unless it is held out; the provider counts what was sent.

    All begin with the same words, as the runs of a benchmark do.
    """
    dialogue = Dialogue(folder, changes={"holdout": 0.5, "mode": "always"})
    for number in range(sessions):
        headers = {"x-session-id": f"session {number}"}
        for history in (HISTORY[:1], [*HISTORY, user(f"more {number}")]):
            reply = await dialogue.send(history, headers=headers, finish=False)
            dialogue.finish(reply.plan, said("ok"), tokens={"prompt_tokens": len(reply.sent)})
    await dialogue.close()
    return dialogue.settings.db


async def test_the_command_shows_what_rewriting_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = await archived(tmp_path, 60)  # fewer than ten in an arm: once in 10^8 archives
    assert main(["savings", "--compare", "--json", "--db", database, "--prices", '{"*": {"input": 2}}']) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["held_out"] + told["treated"] == 60 and told["undrawn"] == 0
    lines = {one["measure"]: one for one in told["lines"]}
    for measure in ("input tokens a request", "input cost a session"):
        assert lines[measure]["difference"]["high"] < 0, measure
    assert lines["requests a session"]["difference"]["mean"] == 0

    assert main(["savings", "--compare", "--db", database]) == 0
    shown = capsys.readouterr().out
    assert "held out" in shown and "95% interval" in shown and "too few" not in shown
    assert all(len(text) <= LINE_CHARS for text in shown.splitlines())


async def test_the_command_says_plainly_when_it_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = await archived(tmp_path, 3)
    assert main(["savings", "--compare", "--db", database]) == 0
    shown = capsys.readouterr().out
    assert f"too few sessions to tell a difference from chance: {TASKS_MIN} of each are needed" in shown
    assert "`holdout` is 0 now" in shown
    assert main(["savings", "some", "--compare", "--db", database]) == 1
    assert "leave 'some' away" in capsys.readouterr().err
