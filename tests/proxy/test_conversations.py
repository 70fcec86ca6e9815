"""What is sent: selection at cold boundaries, stickiness, retries, fallbacks, failures of our own."""

import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graphstore.store.archive import open_reader
from graphstore.store.report import latest_selection
from tests.clock import VirtualClock
from tests.proxy.dialogue import LUNCH_S, TOOLS, Dialogue, read, said, turn, user

ID = {"x-session-id": "s"}
FIRST, SECOND = turn("please read the first file", "first"), turn("now the second one", "second")
HISTORY = [*FIRST, *SECOND]


@pytest.fixture
async def dialogue(tmp_path: Path) -> AsyncIterator[Dialogue]:
    made = Dialogue(tmp_path)
    yield made
    assert await made.findings() == []


async def worked(dialogue: Dialogue) -> None:
    """A session of two turns."""
    await dialogue.send(FIRST[:1], headers=ID)
    await dialogue.send([*FIRST, SECOND[0]], headers=ID)


async def test_the_history_is_compacted_after_a_break(dialogue: Dialogue) -> None:
    await worked(dialogue)
    reply = await dialogue.send([*HISTORY, user("and now?")], headers=ID, after_s=LUNCH_S)
    assert reply.rewritten
    roles = [message["role"] for message in reply.messages if message != said("ok")]
    assert roles == ["system", "system", "user", "user", "user"]
    assert "not shown" in reply.messages[1]["content"]
    assert reply.messages[-1] == user("and now?")


async def test_a_left_out_block_returns_when_a_later_request_names_it(dialogue: Dialogue) -> None:
    await dialogue.restart(beta=0.6)
    await worked(dialogue)
    one = await dialogue.send([*HISTORY, user("look at unique_second again")], headers=ID, after_s=LUNCH_S)
    assert "def unique_second" in one.text and "def unique_first" not in one.text
    history = [*HISTORY, user("look at unique_second again"), said("ok"), user("what did unique_first do?")]
    two = await dialogue.send(history, headers=ID, after_s=LUNCH_S)
    assert "def unique_first" in two.text and "def unique_second" not in two.text


async def test_every_request_until_the_next_break_extends_the_one_before(dialogue: Dialogue) -> None:
    await worked(dialogue)
    history = [*HISTORY, user("go on")]
    before = (await dialogue.send(history, headers=ID, after_s=LUNCH_S)).messages
    for number in range(4):
        history += read(f"x{number}.py", "text " * 50, call_id=f"c{number}")
        after = (await dialogue.send(history, headers=ID)).messages
        assert after[: len(before)] == before
        before = after
    history += [said("done"), user("at once")]
    assert (await dialogue.send(history, headers=ID)).messages[: len(before)] == before
    assert [row.prefix_messages for row in (await dialogue.exchanges())][3:] == [5, 7, 9, 11, 13]


async def test_a_retry_gets_the_same_bytes_however_late_it_comes(dialogue: Dialogue) -> None:
    await worked(dialogue)
    one = await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)
    two = await dialogue.send([*HISTORY, user("go on")], headers=ID)
    three = await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=10 * LUNCH_S)
    assert one.rewritten and one.sent == two.sent == three.sent
    assert len({row.selection_id for row in (await dialogue.exchanges())[2:]}) == 1


async def test_mode_off_sends_the_original_and_records_what_it_would_have_sent(dialogue: Dialogue) -> None:
    await dialogue.restart(mode="off")
    await worked(dialogue)
    reply = await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)
    assert not reply.rewritten
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        selection = reader.load_selection(1)
    assert selection is not None and not selection.applied
    assert any(not verdict.kept for verdict in selection.verdicts)


async def test_turning_it_off_sends_the_original_of_a_compacted_session(dialogue: Dialogue) -> None:
    await worked(dialogue)
    await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)
    await dialogue.restart(mode="off")
    assert not (await dialogue.send([*HISTORY, user("go on"), *read("f", "x")], headers=ID)).rewritten


async def test_mode_always_compacts_without_a_break_but_not_within_a_turn(dialogue: Dialogue) -> None:
    await dialogue.restart(mode="always")
    await worked(dialogue)
    one = await dialogue.send([*HISTORY, user("go on")], headers=ID)
    two = await dialogue.send([*HISTORY, user("go on"), *read("f", "x")], headers=ID)
    assert one.rewritten and two.messages[: len(one.messages)] == one.messages
    busy = await dialogue.send([*HISTORY, user("go on"), *read("f", "x"), user("hurry")], headers=ID)
    assert busy.messages[: len(two.messages)] == two.messages


async def test_a_request_with_an_open_call_is_never_rewritten(dialogue: Dialogue) -> None:
    await worked(dialogue)
    await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)
    open_call = [*HISTORY, user("go on"), read("f", "x")[0], user("never mind")]
    assert not (await dialogue.send(open_call, headers=ID, after_s=LUNCH_S)).rewritten


async def test_a_rejected_rewrite_makes_the_session_pass_through(dialogue: Dialogue) -> None:
    await worked(dialogue)
    await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S, reject=400)
    later = await dialogue.send([*HISTORY, user("go on"), said("ok"), user("more")], headers=ID, after_s=LUNCH_S)
    assert not later.rewritten
    (session,) = await dialogue.sessions()
    assert session.state == "pass-through" and "400" in (session.state_reason or "")
    assert [row.fell_back for row in await dialogue.exchanges()] == [False, False, True, False]


async def test_a_rejection_of_the_original_too_is_not_our_doing(dialogue: Dialogue) -> None:
    await worked(dialogue)
    await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S, reject=400, status=400)
    (session,) = await dialogue.sessions()
    assert session.state == "normal"


async def test_below_the_minimum_a_history_is_left_alone(dialogue: Dialogue) -> None:
    await dialogue.restart(min_history_tokens=4000)
    await worked(dialogue)
    assert not (await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)).rewritten
    assert "below 4000" in (await dialogue.exchanges())[-1].reason


@pytest.mark.parametrize(
    "more",
    [{"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"prompt": {"id": "p"}}],
    ids=["previous response", "conversation", "prompt"],
)
async def test_requests_that_refer_to_the_provider_are_opaque(tmp_path: Path, more: dict[str, Any]) -> None:
    dialogue = Dialogue(tmp_path, dialect="responses")
    reply = await dialogue.send([user("one")], headers=ID, more=more, after_s=LUNCH_S)
    assert not reply.rewritten
    await dialogue.close()
    with sqlite3.connect(dialogue.settings.db) as db:
        (outcome, reason), = db.execute("SELECT outcome, reason FROM exchanges").fetchall()  # fmt: skip
    assert outcome == "opaque" and next(iter(more)) in reason


async def test_a_body_that_is_not_understood_is_forwarded_and_recorded(dialogue: Dialogue) -> None:
    from proxy.ports import Arrival

    for body in (b"", b"{", b"[]", b'{"messages": 7}', b'{"messages": []}', b"\xff\xfe", b'{"messages":[[1]]}'):
        plan = await dialogue.conversations.admit(Arrival("chat", "/v1/chat/completions", [], body))
        assert plan.body is None
        dialogue.finish(plan, said("ok"))
    await dialogue.close()
    with sqlite3.connect(dialogue.settings.db) as db:
        reasons = [reason for (reason,) in db.execute("SELECT reason FROM exchanges")]
    assert len(reasons) == 7 and all(reason.startswith("not understood") for reason in reasons)


async def test_without_a_usable_archive_everything_passes_through(tmp_path: Path) -> None:
    (tmp_path / "recap.db").write_bytes(b"this is no database, " * 100)
    dialogue = Dialogue(tmp_path)
    await worked(dialogue)
    assert not (await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)).rewritten
    health = dialogue.conversations.health()
    assert health["state"] == "unavailable" and "not a database" in str(health["problem"])
    await dialogue.close()


async def test_an_archive_that_was_only_locked_is_opened_later(tmp_path: Path) -> None:
    """The proxy that ran before may still be draining its streams."""
    before = Dialogue(tmp_path)
    dialogue = Dialogue(tmp_path, before.clock)
    assert dialogue.conversations.health()["state"] == "unavailable"
    await before.close()
    await dialogue.send(FIRST[:1], headers=ID, after_s=60)
    await dialogue.conversations.flush()
    assert dialogue.conversations.health()["state"] == "ok"
    await dialogue.send([*FIRST, SECOND[0]], headers=ID)
    assert await dialogue.outcomes() == ["new"]


async def test_a_decision_that_cannot_be_saved_is_not_taken(
    dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left out before it is on disk: another process holds the write lock at the cold boundary."""
    monkeypatch.setattr("proxy.planning.DURABLE_DEADLINE_S", 0.3)
    await worked(dialogue)
    await dialogue.conversations.flush()
    blocker = sqlite3.connect(dialogue.settings.db, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    try:
        reply = await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)
        assert not reply.rewritten
    finally:
        blocker.execute("ROLLBACK")
        blocker.close()
    later = await dialogue.send([*HISTORY, user("go on"), *read("f", "x")], headers=ID)
    assert not later.rewritten
    assert any("not saved" in row.reason for row in await dialogue.exchanges())


async def test_an_edited_history_waits_for_nothing_that_is_on_disk(
    dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others wait behind it: fifty edits at once once took longer than a request may."""
    await worked(dialogue)
    await dialogue.conversations.flush()

    def settled() -> object:
        raise AssertionError("waits for the archive")

    monkeypatch.setattr(dialogue.conversations._recorder, "settled", settled)  # type: ignore[union-attr]
    pruned = [*FIRST[:2], FIRST[2] | {"content": "[cleared]"}, FIRST[3], *SECOND, user("go on")]
    await dialogue.send(pruned, headers=ID)
    monkeypatch.undo()
    assert (await dialogue.outcomes())[-1] == "client pruning"


async def test_credentials_are_not_in_the_archive(dialogue: Dialogue) -> None:
    await worked(dialogue)
    await dialogue.send([*HISTORY, user("go on")], headers=ID | {"cookie": "canary-cookie"}, after_s=LUNCH_S)
    await dialogue.close()
    for path in Path(dialogue.settings.db).parent.iterdir():
        assert b"canary" not in path.read_bytes()


async def test_instructions_and_tools_are_archived_once_per_version(dialogue: Dialogue) -> None:
    await worked(dialogue)
    await dialogue.send([*HISTORY, user("go on")], headers=ID)
    (session,) = await dialogue.sessions()
    with open_reader(dialogue.settings.db) as reader:
        stored = reader.message_contents([session.instructions_id or 0, session.tools_id or 0])
    assert json.loads(stored[session.tools_id or 0]) == TOOLS


async def test_an_image_counts_a_fixed_number_of_characters(dialogue: Dialogue) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}
    shown = {"role": "user", "content": [{"type": "text", "text": "look"}, picture]}
    await dialogue.send([shown], headers=ID)
    await dialogue.send([shown, said("a cat"), user("sure?")], headers=ID)
    (row, *_) = await dialogue.exchanges()
    assert row.chars_total == 4 + 4000


async def test_two_requests_at_once_share_no_boundary(dialogue: Dialogue) -> None:
    """A request that is still running keeps the cache of its session warm."""
    await worked(dialogue)
    running = await dialogue.send([*HISTORY, user("one")], headers=ID, finish=False)
    second = await dialogue.send([*HISTORY, user("one"), said("ok"), user("two")], headers=ID, after_s=LUNCH_S)
    assert not second.rewritten
    dialogue.finish(running.plan, said("late"))


async def test_the_clock_of_a_session_starts_at_the_end_of_its_answer(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, VirtualClock())
    await worked(dialogue)
    running = await dialogue.send([*HISTORY, user("long task")], headers=ID, finish=False)
    dialogue.clock.advance(LUNCH_S)
    dialogue.finish(running.plan, said("finished"))
    reply = await dialogue.send([*HISTORY, user("long task"), said("finished"), user("thanks")], headers=ID)
    assert not reply.rewritten
    await dialogue.close()


EVERY = "alpha beta gamma"


@pytest.mark.parametrize(
    ("selector", "kept"),
    [
        ("recency", "gamma"),
        ("user-messages", ""),
        ("full", "alpha beta gamma"),
        ("clear-tool-results", "alpha beta gamma"),
    ],
)
async def test_another_selector_chooses_in_its_own_way(tmp_path: Path, selector: str, kept: str) -> None:
    """Sent is what it chose, the archive says which one it was, and the user's words are always there."""
    dialogue = Dialogue(tmp_path, changes={"selector": selector, "beta": 0.4})
    history = [*turn("Where is alpha?", "alpha"), *turn("And beta?", "beta"), *turn("And gamma?", "gamma")]
    for end in (1, 5, 9):
        await dialogue.send(history[:end])
    reply = await dialogue.send([*history, user("Fix unique_alpha now")], after_s=LUNCH_S)
    assert {name for name in ("alpha", "beta", "gamma") if f"unique_{name}():" in reply.text} == set(kept.split())
    assert all(asked in reply.text for asked in ("Where is alpha?", "And beta?", "And gamma?"))
    assert await dialogue.findings() == []
    with open_reader(dialogue.settings.db) as reader:
        made = latest_selection(reader, reader.list_sessions()[0].id)
    assert made is not None and json.loads(made.parameters)["selector"] == selector
