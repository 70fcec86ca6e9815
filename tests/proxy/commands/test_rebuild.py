"""recap rebuild, and what show and explain say of attention."""

from pathlib import Path

import pytest

from graphstore.store.archive import open_queue, open_reader
from proxy.cli import main
from tests.observed import observe, replay_of
from tests.proxy.commands.conftest import newest_name
from tests.proxy.dialogue import LUNCH_S, Dialogue, turn, user

ID = {"x-session-id": "one"}


@pytest.fixture
async def observed(tmp_path: Path) -> Dialogue:
    """A session whose first turn was replayed: block 1 is read much for its length, block 4 as a whole."""
    dialogue = Dialogue(tmp_path)
    history = [*turn("one", "alpha"), *turn("two", "beta")]
    await dialogue.send(history[:1], headers=ID)
    await dialogue.send([*history, user("three")], headers=ID)
    await dialogue.close()
    density = {0: 0.1, 1: 0.5, 2: 0.1, 3: 0.1, 4: 0.2}
    replay = replay_of(density, [(1, 4, 0.5)], mass={v: 0.9 if v == 4 else 0.1 for v in density})
    observe(dialogue.settings.db, 1, replay, turn=50)
    return dialogue


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def importances(dialogue: Dialogue) -> list[float]:
    with open_reader(dialogue.settings.db) as reader:
        return [round(node.u, 3) for node in reader.load_graph(1)[0]]


def name_of(dialogue: Dialogue) -> str:
    return newest_name(dialogue.settings.db)


async def test_a_rule_can_be_changed_afterwards(observed: Dialogue, capsys: pytest.CaptureFixture[str]) -> None:
    before = importances(observed)
    db = ("--db", observed.settings.db)
    assert before[1] > before[4]
    assert "1 session rebuilt by 'mass'" in said(capsys, "rebuild", "mass", *db)
    assert importances(observed)[4] > importances(observed)[1]
    assert "everything agrees" in said(capsys, "verify", *db)
    said(capsys, "rebuild", "paper", name_of(observed)[:3], *db)
    assert importances(observed) == before


async def test_it_works_beside_a_running_worker(observed: Dialogue, capsys: pytest.CaptureFixture[str]) -> None:
    with open_queue(observed.settings.db):
        assert "rebuilt" in said(capsys, "rebuild", "mass", "--db", observed.settings.db)


async def test_explain_shows_importance_edges_and_the_rule(
    observed: Dialogue, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "explain", name_of(observed), "--query", "go on", "--db", observed.settings.db)
    assert "rule paper: score = z(u) + 0.5 z(words)" in text
    assert "1 replay by test/model" in text
    header, rows = text.split("─\n")[0], text.split("─\n")[1].splitlines()
    assert {"u", "z(u)", "uses"} <= set(header.split()) and "z(past)" not in header
    assert "0.600" in rows[1] and " 1 " in rows[4]


async def test_explain_without_a_model_says_which_signal_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dialogue = Dialogue(tmp_path)
    await dialogue.send([*turn("one", "alpha"), user("two")], headers=ID)
    await dialogue.close()
    asked = (name_of(dialogue), "--db", dialogue.settings.db, "--attention", "off")
    for command in (("explain", *asked, "--query", "go on"), ("show", *asked)):
        assert "attention: none, so no importance, edges or stale marks: the setting attention is off" in said(
            capsys, *command
        )
    text = said(capsys, "explain", *asked, "--query", "go on")
    assert "rule past-use: score = z(past) + 0.5 z(words)" in text and "z(past)" in text


async def test_show_tells_what_became_of_each_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dialogue = Dialogue(tmp_path)
    history = [user("one")]
    await dialogue.send(history, headers=ID)
    for request in ("two", "three"):
        history += [{"role": "assistant", "content": "ok"}, user(request)]
        await dialogue.send(history, headers=ID, after_s=LUNCH_S)
    await dialogue.close()
    with open_queue(dialogue.settings.db) as queue:
        job = queue.claim()
        assert job is not None and job.turn == 3
        queue.fail(job, "attention is no number; set attention_dtype to float32", again=False)
    text = said(capsys, "show", name_of(dialogue), "--db", dialogue.settings.db)
    assert text.count("replay: part of a later turn's") == 2
    assert "replay: failed after 1 attempt: attention is no number; set attention_dtype to float32" in text


async def test_explain_shows_the_graph_that_the_selection_went_by(
    observed: Dialogue, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a later replay found, or another rule would say, had no part in it."""
    dialogue = Dialogue(Path(observed.settings.db).parent, changes={"beta": 0.5})
    history = [*turn("one", "alpha"), *turn("two", "beta"), user("three"), *turn("four", "gamma")]
    dialogue.clock.advance(LUNCH_S)
    assert (await dialogue.send([*history, user("five")], headers=ID)).rewritten
    await dialogue.close()
    asked = ("explain", name_of(observed), "--db", observed.settings.db)
    before = said(capsys, *asked)
    assert "0.600" in before and "u: importance that replays gave it" in before
    later = replay_of({0: 0.9, 1: 0.1, 4: 0.9})
    observe(observed.settings.db, 1, later, turn=60, at=dialogue.clock() + 1)
    said(capsys, "rebuild", "mass", "--db", observed.settings.db)
    after = said(capsys, *asked)
    assert after.replace("2 replays", "1 replay").replace("turn 60", "turn 50") == before
