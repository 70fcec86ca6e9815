"""Requests over a fixed history: what is asked, how distances are taken, and a run with a real small model."""

import json
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.lab.queries import distance, distribution, redistribution, requests, studied, targets
from proxy.lab.recordings import Recording
from proxy.lab.results import read_results
from tests.proxy.dialogue import SYSTEM, turn

NAMES = ("alpha", "beta", "gamma")
MESSAGES = [SYSTEM, *(message for name in NAMES for message in turn(f"look at {name}.py", name, 400))]


def words(*blocks: str) -> list[frozenset[str]]:
    return [frozenset(block.split()) for block in blocks]


def test_targets_are_files_that_different_blocks_name() -> None:
    history = words("a.py b.py", "a.py b.py get_x", "c.py v.get", "get_x", "", "")
    assert targets(history) == ("a.py", "c.py"), "c.py shares no block with a.py, b.py both"
    assert targets(words("get_x v.get", "get_y", "", "")) == ("get_x", "get_y"), "names before what is dotted"
    assert targets(words("a.py get_x", "", "")) == ("a.py", "get_x"), "no second file"
    assert targets(words("a.py b.py", "a.py", "a.py c.py")) == ("b.py", "c.py"), "what every block names says nothing"
    assert targets(words("a.py", "")) is None and targets([]) is None


def test_a_target_stands_in_both_of_its_wordings() -> None:
    for family in requests(("a.py", "b.py")).values():
        (one, two), (three, four) = family
        assert one != two and all("a.py" in text and "b.py" not in text for text in (one, two))
        assert (three, four) == (one.replace("a.py", "b.py"), two.replace("a.py", "b.py"))


def test_a_distance_is_the_share_that_moves() -> None:
    p, q = distribution({0: 3.0, 1: 1.0}), distribution({0: 1.0, 1: 1.0, 2: 2.0})
    assert p == {0: 0.75, 1: 0.25} and distribution({0: 0.0}) == {}
    assert distance(p, q) == distance(q, p) == pytest.approx(0.5)
    assert distance(p, p) == 0.0 and distance({0: 1.0}, {1: 1.0}) == 1.0


def test_pairs_within_a_target_are_apart_from_pairs_across() -> None:
    here, there, between = {0: 1.0}, {1: 1.0}, {0: 0.5, 1: 0.5}
    assert redistribution([[here, here], [there, there]]) == (0.0, 1.0)
    within, across = redistribution([[here, between], [there, there]])
    assert within == pytest.approx((0.5 + 0) / 2) and across == pytest.approx((1 + 1 + 0.5 + 0.5) / 4)


def test_the_task_and_what_comes_later_are_no_part_of_the_history() -> None:
    session = Recording("s", tuple(json.dumps(message).encode() for message in MESSAGES), (1, 5, 9))
    assert [block.kind for block in session.blocks][0] == "user"
    assert studied(session, 9) == [1, 2, 3, 4, 5]


def test_a_model_is_needed_and_a_model_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, empty = tmp_path / "d.jsonl", tmp_path / "no-model"
    data.write_text(json.dumps({"id": "one", "messages": MESSAGES}))
    empty.mkdir()
    assert main(["eval", "queries", str(data), "--out", str(tmp_path / "out")]) == 1
    assert "name one with --model" in capsys.readouterr().err
    assert main(["eval", "queries", str(data), "--model", str(empty), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "no-model" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_real_model_moves_its_attention_and_a_stopped_run_goes_on(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "d.jsonl", tmp_path / "out"
    short = [SYSTEM, *turn("look at alpha.py", "alpha", 40)]
    sessions = [("short", short), ("one", MESSAGES), ("two", [*MESSAGES[1:], *turn("more", "delta", 40)])]
    data.write_text("".join(json.dumps({"id": name, "messages": messages}) + "\n" for name, messages in sessions))
    asked = ["eval", "queries", str(data), "--model", str(smollm2), "--tokens-max", "1500", "--out", str(out)]
    assert main(asked) == 0
    page = capsys.readouterr().out
    assert "1 no history of 5 blocks with two targets" in page and "2 histories of" in page
    assert (out / "queries.png").exists()
    file = out / "queries.jsonl"
    none, one, two = read_results(file).rows
    assert "skipped" in none and (one["turn"], one["blocks"]) == (3, 5) and (two["turn"], two["blocks"]) == (4, 8)
    for row in (one, two):
        for paraphrase, changed in row["moved"].values():
            assert 0 < paraphrase < 1 and 0 < changed < 1
        short_ones = row["moved"]["short"]
        assert short_ones[1] > short_ones[0], "files of their own names and words"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:20])  # killed while the last row was written
    assert main(asked) == 0
    assert file.read_text().splitlines(keepends=True) == lines and capsys.readouterr().out == page
