"""The costs study as a command, and its made-up graph by count."""

import json
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.lab.costs import EDGES_A_BLOCK, made_up
from proxy.lab.results import read_results
from tests.proxy.dialogue import SYSTEM, Message, turn

TURNS = [turn(f"please look at unique_{name}", name, 2000) for name in ("alpha", "beta", "gamma")]
MESSAGES: list[Message] = [SYSTEM, *(message for members in TURNS for message in members)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"id": name, "messages": MESSAGES}) + "\n" for name in ("one", "two")))
    return path


def test_a_made_up_graph_has_the_papers_edges_as_far_as_there_are_pairs() -> None:
    small, large = made_up(4, 0), made_up(400, 0)
    assert len(small.to_rows()[1]) == 6
    nodes, edges = large.to_rows()
    assert (len(nodes), len(edges)) == (400, int(400 * EDGES_A_BLOCK))
    of_nodes, of_edges = large.held_bytes()
    assert 9 <= of_nodes / 400 < 11 and 12 <= of_edges / len(edges) < 14, "flat arrays, not objects"


def test_every_request_with_a_history_is_timed_and_what_was_not_measured_is_said(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["eval", "costs", str(data), "--out", str(out)]) == 0
    page = capsys.readouterr().out
    assert "Replay: not measured" in page and "| paper, SWE-Together, Qwen3-Coder | – | 132 | 20.2 |" in page
    rows = read_results(out / "costs.jsonl").rows
    assert [[s["blocks"] for s in row["selections"]] for row in rows] == [[3, 6], [3, 6]]
    assert all(s["first"] > 0 and s["again"] > 0 for row in rows for s in row["selections"])
    assert [row["graph"]["nodes"] for row in rows] == [8, 8], "the last answer came with no later request"
    file = out / "costs.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:20])  # killed while the second row was written
    assert main(["eval", "costs", str(data), "--out", str(out)]) == 0
    assert file.read_text().splitlines(keepends=True)[:2] == lines[:2], "what was finished is not timed again"
    assert len(read_results(file).rows) == 2


def test_a_model_that_is_none_is_named(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "no-model"
    empty.mkdir()
    assert main(["eval", "costs", str(data), "--out", str(tmp_path / "out"), "--model", str(empty)]) == 1
    said = capsys.readouterr().err
    assert "no-model" in said and "Traceback" not in said


def test_replays_are_timed_and_make_the_graph(tmp_path: Path, data: Path, smollm2: Path) -> None:
    out = tmp_path / "out"
    assert main(["eval", "costs", str(data), "--out", str(out), "--model", str(smollm2)]) == 0
    for row in read_results(out / "costs.jsonl").rows:
        (replay,) = row["replays"]
        assert replay["tokens"] > 500 and replay["seconds"] > 0
        assert row["graph"]["nodes"] == 8 and row["graph"]["edges"] > 0
