"""The curve of attention over a history by numbers that can be had on paper, and the study over an archive."""

import json
from pathlib import Path

import pytest

from graphstore.evidence import StoredObservation
from proxy.cli import main
from proxy.lab.concentration import Part, curve, held, history_of, measure, needed, packed
from proxy.lab.observed import Observed
from proxy.lab.recordings import Recording
from proxy.lab.results import read_results
from tests.observed import observe, replay_of
from tests.proxy.dialogue import Dialogue, turn

PARTS = [Part(60, 0.1), Part(10, 0.3), Part(30, 0.1)]  # the second is dense, the third twice as dense as the first
MESSAGES = [message for name in ("alpha", "beta", "gamma") for message in turn(f"look at {name}", name)]
SESSION = Recording("s", tuple(json.dumps(message).encode() for message in MESSAGES), (0, 4, 8))


def test_the_curve_rises_by_the_densest_first() -> None:
    points = curve(PARTS)
    assert [x for x, _ in points] == pytest.approx([0.0, 0.1, 0.4, 1.0])
    assert [y for _, y in points] == pytest.approx([0.0, 0.6, 0.8, 1.0])
    assert held(points, 0.05) == pytest.approx(0.3) and held(points, 0.7) == pytest.approx(0.9)
    assert needed(points, 0.6) == pytest.approx(0.1) and needed(points, 0.9) == pytest.approx(0.7)
    assert held(points, 0.0) == 0.0 and held(points, 1.0) == pytest.approx(1.0)


def test_even_attention_is_the_diagonal_and_one_block_may_have_it_all() -> None:
    even = curve([Part(tokens, tokens / 100) for tokens in (20, 30, 50)])
    assert [held(even, x / 10) for x in range(11)] == pytest.approx([x / 10 for x in range(11)])
    one = curve([Part(10, 0.0), Part(10, 0.5), Part(20, 0.0)])
    assert held(one, 0.25) == 1.0 and needed(one, 0.5) == pytest.approx(0.125) and needed(one, 1.0) == 0.25


def test_whole_blocks_are_packed_while_they_fit() -> None:
    assert packed(PARTS, 0.09) == 0.0
    assert packed(PARTS, 0.1) == pytest.approx(0.6)
    assert packed(PARTS, 0.7) == pytest.approx(0.8), "the third fits beside the second, the first does not"


def observed(turn: int, mass: dict[int, float]) -> Observed:
    return Observed({turn: StoredObservation(turn, turn, turn, 0.0, replay_of(mass), frozenset())}, {})


def test_only_what_stood_before_the_turn_counts() -> None:
    """Blocks of the turn itself draw the most attention, and none of it is memory."""
    mass = {0: 0.3, 1: 0.1, 2: 0.0, 3: 0.05, 4: 0.05, 5: 0.0, 6: 0.9, 7: 0.8}
    assert [part.mass for part in history_of(SESSION, observed(3, mass), 3)] == [0.3, 0.1, 0.0, 0.05, 0.05, 0.0]
    (row,) = measure(SESSION, observed(3, mass))
    assert (row["turn"], row["blocks"], row["tokens"]) == (3, 6, 60)
    assert row["needed"][0] == pytest.approx(0.25 / 0.3 / 6, abs=1e-6), "half of it lies on most of the first block"
    assert row["packed"] == pytest.approx([0.0, 0.0, 0.6, 0.8])
    assert list(measure(SESSION, observed(3, dict.fromkeys(range(8), 0.0)))) == [], "no attention, no curve"
    assert list(measure(SESSION, observed(2, mass))) == [], "three blocks make none"


async def test_a_session_of_an_archive_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dialogue, out = Dialogue(tmp_path), tmp_path / "out"
    for end in (1, 3, 5, 7, 9, 11):
        await dialogue.send(MESSAGES[:end], headers={"x-session-id": "one"}, answer=MESSAGES[end])
    (session,) = await dialogue.sessions()
    observe(
        dialogue.settings.db, session.id, replay_of({0: 0.1, 1: 0.1, 2: 0.1, 3: 0.5, 4: 0.1, 5: 0.1, 6: 0.9}), turn=3
    )
    asked = ["eval", "concentration", "--archive", dialogue.settings.db, "--session", session.name, "--out", str(out)]
    assert main(asked) == 0
    page = capsys.readouterr().out
    assert "Of 3 turns not observed: 2 not replayed by the worker." in page
    assert "| 20% | 0.500 [0.500, 0.500] | – |" in page and "histories of 60 to 60 tokens" in page
    assert "test/model" in page and str(tmp_path) not in page
    (row,) = read_results(out / "concentration.jsonl").rows
    assert row["curves"][0]["packed"][1:3] == [0.0, 0.5]


def test_without_attention_there_is_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"id": "one", "messages": MESSAGES}))
    assert main(["eval", "concentration", str(data), "--out", str(tmp_path / "out")]) == 1
    assert "name a model with --model, or an archive" in capsys.readouterr().err
