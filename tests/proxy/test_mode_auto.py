"""Mode `auto` through the session logic: when it rewrites, what it says, and what it learned."""

from pathlib import Path
from typing import Any

from proxy.cli import main
from tests.proxy.dialogue import LUNCH_S, Dialogue, Reply, read, said, turn, user

ONE = {"x-session-id": "one"}
LONG = 40_000  # characters of what a turn reads


def history(turns: int) -> list[dict[str, Any]]:
    """What the user wrote first is long, so that a selection keeps something."""
    return [
        m
        for i in range(turns)
        for m in turn(f"Where is part{i}?" + (" as said" * 5000 if i == 0 else ""), f"part{i}", LONG)
    ]


def auto(folder: Path, **profile: Any) -> Dialogue:
    """Its cache is surely warm for 1,000 s and gone after 2,000; a read costs next to nothing unless it is changed."""
    known = {"name": "test", "warm_s": 1000, "cold_s": 2000, "read": 0.01, "minimum_tokens": 1024} | profile
    return Dialogue(folder, changes={"mode": "auto", "profiles": (known,)})


async def asked(dialogue: Dialogue, turns: int, after_s: float, cached: float = 1.0) -> Reply:
    """The last step of the turn before, then a user's request. `cached`: share of what was sent before that is read."""
    step, request = history(turns)[:-1], [*history(turns), user(f"Where is part{turns}?")]
    for messages, before, wait in ((step, step[:-2], 2.0), (request, step, after_s)):
        usage = {"prompt_tokens": tokens(messages), "cached": int(cached * tokens(before))}
        reply = await dialogue.send(messages, headers=ONE, after_s=wait, usage=usage)
    return reply


def tokens(messages: list[dict[str, Any]]) -> int:
    return len(str(messages)) // 4


async def test_it_goes_on_while_the_cache_is_warm_and_reads_are_cheap(tmp_path: Path) -> None:
    dialogue = auto(tmp_path)
    await asked(dialogue, 2, 0)
    reply = await asked(dialogue, 3, 60)
    assert not reply.rewritten and reply.sent == reply.original
    row = (await dialogue.exchanges())[-1]
    assert row.boundary == "warm" and "costs" in row.reason and "cached with probability 1.00" in row.reason


async def test_it_rewrites_when_the_cache_is_gone(tmp_path: Path) -> None:
    dialogue = auto(tmp_path)
    await asked(dialogue, 2, 0)
    assert (await asked(dialogue, 3, 3000)).rewritten
    row = (await dialogue.exchanges())[-1]
    assert row.boundary == "cold" and "saves" in row.reason and "cached with probability 0.00" in row.reason


async def test_it_rewrites_a_warm_cache_when_that_pays(tmp_path: Path) -> None:
    dialogue = auto(tmp_path, read=0.5)
    await asked(dialogue, 2, 0)
    assert (await asked(dialogue, 3, 60)).rewritten
    await dialogue.close()


async def test_a_selection_that_stays_is_sent_again_to_the_byte(tmp_path: Path) -> None:
    dialogue = auto(tmp_path)
    await asked(dialogue, 2, 0)
    first = await asked(dialogue, 3, 3000)
    second = await asked(dialogue, 4, 60)
    kept = first.messages
    assert second.rewritten and second.messages[: len(kept)] == kept
    await dialogue.close()


async def test_what_the_provider_serves_is_learned_and_survives_a_restart(tmp_path: Path) -> None:
    """The profile says that the cache is surely warm after ten minutes; this provider never has anything."""
    dialogue = auto(tmp_path)
    for turns in range(2, 12):
        reply = await asked(dialogue, turns, 600, cached=0.0)
    assert reply.rewritten
    cold = [row.boundary for row in await dialogue.exchanges() if row.boundary in ("cold", "warm")]
    assert cold[0] == "warm" and cold[-1] == "cold"
    await dialogue.restart()
    two = {"x-session-id": "two"}
    other = [m for i in range(3) for m in turn(f"What of thing{i}?", f"thing{i}", LONG)]
    await dialogue.send([*other[:-4], user("And?")], headers=two)
    assert (await dialogue.send([*other, user("And now?")], headers=two, after_s=600)).rewritten
    await dialogue.close()


async def test_a_short_history_is_left_alone(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, changes={"mode": "auto", "min_history_tokens": 4000})
    await dialogue.send([user("hello")], headers=ONE)
    await dialogue.send([user("hello"), said("ok"), user("more")], headers=ONE, after_s=10 * LUNCH_S)
    row = (await dialogue.exchanges())[-1]
    assert row.boundary == "warm" and "below 4000" in row.reason


async def test_an_open_turn_is_never_weighed(tmp_path: Path) -> None:
    dialogue = auto(tmp_path)
    await asked(dialogue, 3, 0)
    step = [*history(3), user("Where is part3?"), *read("x.py", "x" * LONG)]
    await dialogue.send(step, headers=ONE)
    assert (await dialogue.exchanges())[-1].boundary == "step"


async def test_profiles_are_shown_with_what_was_learned(tmp_path: Path, capsys: Any) -> None:
    dialogue = auto(tmp_path)
    for turns in range(2, 5):
        await asked(dialogue, turns, 60)
    await dialogue.close()
    own = ["--profiles", '[{"name": "test", "read": 0.3}]']
    assert main(["config", "profiles", "--db", dialogue.settings.db, *own]) == 0
    shown = capsys.readouterr().out
    for part in ("test*", "0.3", "openai-5.4", "272,000", "gpt-test", "1 min", "upstream.test"):
        assert part in shown, part
    assert main(["config", "profiles", "--db", str(tmp_path / "none.db")]) == 0
    assert "holds no pause" in capsys.readouterr().out
