"""Who is held out: by a draw that stays, for a session and all that comes of it; and that nothing of it is touched."""

from pathlib import Path

import pytest

from proxy.cli import main
from proxy.holdout import HELD_OUT, draw
from proxy.sessions import session_name
from tests.proxy.dialogue import LUNCH_S, SYSTEM, Dialogue, Message, said, turn, user
from tests.proxy.test_pressure import TOO_LONG

SECRET = b"secret of a test"
NAMES = [session_name(i, b"scope") for i in range(4000)]
HISTORY = [m for name in ("alpha", "beta", "gamma") for m in turn(f"Where is {name}?", name)]


def held_out(share: float, secret: bytes = SECRET) -> set[str]:
    return {name for name in NAMES if draw(secret, name, share) == "held out"}


def test_the_share_is_kept_and_a_larger_one_holds_the_same_sessions_out_and_more() -> None:
    assert len(held_out(0.1)) / len(NAMES) == pytest.approx(0.1, abs=0.02)
    assert held_out(0.1) < held_out(0.3) < held_out(1.0) == set(NAMES)
    assert held_out(0.1) != held_out(0.1, b"another archive")
    assert {draw(SECRET, name, 0.0) for name in NAMES} == {None}
    assert {draw(SECRET, name, 0.1) for name in NAMES} == {"held out", "treated"}


async def after_lunch(dialogue: Dialogue, history: list[Message], **headers: str) -> bool:
    """Whether a request that comes when the cache is cold is rewritten."""
    reply = await dialogue.send(history, headers=headers, after_s=LUNCH_S)
    return reply.rewritten


@pytest.mark.parametrize("mode", ["idle", "always", "off"])
async def test_a_session_that_is_held_out_is_never_touched_and_every_request_says_why(
    tmp_path: Path, mode: str
) -> None:
    dialogue = Dialogue(tmp_path, changes={"holdout": 1.0, "mode": mode})
    await dialogue.send(HISTORY[:-1])
    assert not await after_lunch(dialogue, [*HISTORY, user("more")])
    assert not await after_lunch(dialogue, [*HISTORY, user("more"), said("ok"), user("and more")])
    rows = await dialogue.exchanges()
    assert [(row.reason, row.boundary, row.selection_id) for row in rows] == [(HELD_OUT, "none", None)] * 3
    assert [row.arm for row in await dialogue.sessions()] == ["held out"]


@pytest.mark.parametrize("mode", ["auto", "idle", "always"])
async def test_neither_a_full_window_nor_a_refusal_for_length_touches_it(tmp_path: Path, mode: str) -> None:
    """An agent without the proxy would have failed as well: it is compared with that."""
    for share in (1.0, 0.0):
        (folder := tmp_path / str(share)).mkdir()
        changes = {"holdout": share, "mode": mode, "context_window_tokens": 1000}
        dialogue = Dialogue(folder, changes=changes)
        first = await dialogue.send(HISTORY[:-1])
        second = await dialogue.send([*HISTORY, user("more")], finish=False)
        assert second.plan.exchange is not None
        shorter = await second.plan.exchange.shorter(400, [], TOO_LONG)
        touched = (first.rewritten, second.rewritten, shorter is not None and shorter.body is not None)
        assert any(touched) == (share == 0.0), "and the others are touched, so that this could fail"
        await dialogue.close()


async def test_the_arm_outlives_restarts_and_changes_of_the_setting(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, changes={"holdout": 1.0})
    await dialogue.send(HISTORY[:1], headers={"x-session-id": "first"})
    await dialogue.restart(holdout=0.0)
    await dialogue.send(HISTORY[:1], headers={"x-session-id": "second"})
    assert not await after_lunch(dialogue, [*HISTORY, user("more")], **{"x-session-id": "first"})
    await dialogue.restart(holdout=1.0)
    assert await after_lunch(dialogue, [*HISTORY, user("more")], **{"x-session-id": "second"})
    assert [row.arm for row in await dialogue.sessions()] == ["held out", None]


@pytest.mark.parametrize(("share", "arm"), [(1.0, "held out"), (1e-12, "treated")])
async def test_what_comes_of_a_session_shares_its_arm_whatever_the_setting_is_by_then(
    tmp_path: Path, share: float, arm: str
) -> None:
    dialogue = Dialogue(tmp_path, changes={"holdout": share})
    opencode = {"user-agent": "opencode/1.18.33 ai-sdk", "x-session-affinity": "ses_1"}
    await dialogue.send([*HISTORY, user("one way")], headers=opencode)
    await dialogue.restart(holdout=1.0 - share)
    branch = {"user-agent": "opencode/1.18.33 ai-sdk", "x-session-affinity": "ses_2"}
    await dialogue.send([*HISTORY, user("one way")], headers=opencode)  # in memory again
    await dialogue.send([*HISTORY, user("another way")], headers=branch | {"x-parent-session-id": "ses_1"})
    await dialogue.send([user("Title?")], headers=opencode, tools=None, system=SYSTEM | {"content": "You make titles."})
    rows = await dialogue.sessions()
    assert len(rows) > 1 and all(row.parent_id == rows[0].id for row in rows[1:])
    assert {row.arm for row in rows} == {arm}


async def test_the_same_opening_words_are_not_the_same_session(tmp_path: Path) -> None:
    """Else all runs of one benchmark would be in one arm."""
    dialogue = Dialogue(tmp_path, changes={"holdout": 0.5})
    for number in range(40):
        await dialogue.send([user("The same task")], headers={"x-session-id": f"run {number}"})
    arms = [row.arm for row in await dialogue.sessions()]
    assert len(arms) == 40 and set(arms) == {"held out", "treated"}


async def test_people_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dialogue = Dialogue(tmp_path, changes={"holdout": 1.0})
    await dialogue.send(HISTORY[:-1])
    (session,) = await dialogue.sessions()
    for command in (["sessions"], ["show", session.name]):
        assert main([*command, "--db", dialogue.settings.db]) == 0
        assert "held out" in capsys.readouterr().out
