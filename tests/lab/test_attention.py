"""Observations of recorded sessions: the worker's own contexts, and an archive's numbers under other names."""

import argparse
import json
from pathlib import Path

import pytest

from graphstore.replays import ReplayJob
from graphstore.store.archive import open_reader
from graphstore.store.report import find_session
from proxy.cli import main
from proxy.contexts import context_of
from proxy.lab.archived import MISSING, read_archive
from proxy.lab.attention import add_attention, load_attention
from proxy.lab.errors import LabError
from proxy.lab.recordings import Recording
from proxy.lab.replayed import context_at
from proxy.lab.results import read_results
from proxy.settings import Settings
from tests.observed import observe, replay_of
from tests.proxy.dialogue import SYSTEM, Dialogue, Message, said, turn, user

ID = {"x-session-id": "one"}


def recording(messages: list[Message], starts: list[int]) -> Recording:
    return Recording("s", tuple(json.dumps(message).encode() for message in messages), tuple(starts))


async def worked(dialogue: Dialogue) -> list[Message]:
    """Two turns, step by step as a client sends them."""
    history: list[Message] = []
    for name in ("alpha", "beta"):
        steps = turn(f"look at {name}", name)
        await dialogue.send([*history, *steps[:1]], headers=ID, answer=steps[1])
        await dialogue.send([*history, *steps[:3]], headers=ID, answer=steps[3])
        history += steps
    return history


async def test_a_recorded_turn_is_replayed_over_what_the_worker_would_read(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    history = await worked(dialogue)
    await dialogue.close()
    session = recording([SYSTEM, *history], [1, 5])
    with open_reader(dialogue.settings.db) as reader:
        exchanges = {row.turn: row.id for row in reader.session_exchanges(1)}  # the last of each turn
        for number in (1, 2):
            job = ReplayJob(1, 1, number, exchanges[number], number, 1)
            assert context_at(session, number) == context_of(reader, job).blocks
    assert len(context_at(session, 1)) == 4 and len(context_at(session, 2)) == 7


async def undone(folder: Path) -> tuple[Path, str]:
    """An archive, and its session that a user began by taking a request back: its blocks have gaps in their numbers."""
    dialogue = Dialogue(folder)
    first, second = turn("look at alpha", "alpha"), turn("look at beta", "beta")
    await dialogue.send(first[:1], headers=ID, answer=said("hm"))
    await dialogue.send([*first, user("never mind")], headers=ID)
    await dialogue.send([*first, *second[:3]], headers=ID, answer=second[3])
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        return Path(dialogue.settings.db), max(reader.list_sessions(), key=lambda session: session.id).name


async def test_an_archives_observations_come_under_the_names_of_the_recording(tmp_path: Path) -> None:
    path, name = await undone(tmp_path)
    with open_reader(path) as reader:
        session = find_session(reader, name)
        ordinals = [block.ordinal for block, _ in reader.load_blocks(session.id)]
        turns = [row.turn for row in reader.session_exchanges(session.id)]
    assert (ordinals, turns) == ([0, 1, 2, 4, 5], [1]), "else all names would be the same"
    observe(path, session.id, replay_of({0: 0.1, 4: 0.2, 5: 0.4}, [(4, 5, 0.3)]), turn=1)
    data, attention = read_archive(path, [name])
    (found,) = data.recordings
    assert [json.loads(raw)["role"] for raw in found.messages] == [
        "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    observed = attention.observe(found, 2)
    (number,) = observed.turns
    replay = observed.turns[number].replay
    assert (number, observed.missing) == (2, {MISSING: 1})
    assert {block.ordinal: block.density for block in replay.blocks} == {0: 0.1, 3: 0.2, 4: 0.4}
    assert replay.edges == ((3, 4, 0.3),)
    assert attention.about["model"] == "test/model"


async def test_an_archive_without_observations_is_named(tmp_path: Path) -> None:
    path, name = await undone(tmp_path)
    with pytest.raises(LabError, match=rf"'{name}' has no observation; run `recap worker`"):
        read_archive(path, [name])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], "there is nothing to read"),
        (["--session", "x"], "name it with --archive"),
        (["--archive", "a.db"], "--archive needs a session"),
        (["--archive", "a.db", "--session", "x", "--model", "m"], "leave out --model"),
        (["d.jsonl", "--model", ""], "the model's name is empty"),
        (["d.jsonl", "--model", "m", "--tokens-max", "9"], "--tokens-max 9 holds no turn"),
    ],
)
def test_arguments_that_say_nothing_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text(json.dumps({"messages": [user("hello")]}))
    parser = argparse.ArgumentParser()
    add_attention(parser)
    with pytest.raises(LabError, match=wanted):
        load_attention(parser.parse_args(words), Settings())


@pytest.mark.slow
def test_a_replay_of_a_real_model_reads_every_block_of_the_turns_that_fit(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reuse and concentration go by one model's attention; the third turn is too long for it, and said to be."""
    messages = [SYSTEM, *turn("look at alpha", "alpha", 300), *turn("look at beta", "beta", 300)]
    messages += [*turn("again unique_alpha", "alpha", 300), *turn("and unique_beta", "beta", 90_000)]
    data, out = tmp_path / "d.jsonl", tmp_path / "out"
    data.write_text(json.dumps({"id": "one", "messages": messages}))
    shared = [str(data), "--model", str(smollm2), "--tokens-max", "2000", "--out", str(out)]
    assert main(["eval", "reuse", *shared]) == 0
    page = capsys.readouterr().out
    (row,) = read_results(out / "reuse.jsonl").rows
    assert (row["turns"], row["missing"]) == (3, {}), "nothing comes after the last turn"
    assert len(row["coverage"]["product|code|attention|0.4"]) == len(row["coverage"]["product|code|recency|0.4"]) > 0
    assert "| recap (hybrid) |" in page and "Protected blocks" in page

    assert main(["eval", "concentration", *shared]) == 0
    page = capsys.readouterr().out
    (row,) = read_results(out / "concentration.jsonl").rows
    assert row["missing"] == {"longer than 2,000 tokens": 1} and "1 longer than 2,000 tokens" in page
    (third,) = row["curves"]  # the second turn has a history of three blocks
    assert (third["turn"], third["blocks"]) == (3, 6)
    assert third["held"][-1] == 1.0 and third["held"] == sorted(third["held"])
    assert all(share >= x / 20 - 1e-6 for x, share in enumerate(third["held"])), "the densest come first"
    assert (out / "concentration.svg").exists()
