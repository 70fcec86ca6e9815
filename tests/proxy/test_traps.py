"""Traps that other proxies fell into and that no module owns alone; `docs/testing.md` lists all of them."""

import asyncio
import json
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import main
from proxy.conversations import ArchivedConversations
from proxy.planning import Draft, Planner
from proxy.rewrite import GuardFailure
from tests.observed import observe, replay_of
from tests.proxy.dialogue import LUNCH_S, Dialogue, Message, read, said, turn, user

ID = {"x-session-id": "s"}
HISTORY = [*turn("please read the first file", "first"), *turn("now the second one", "second")]


@pytest.fixture
async def dialogue(tmp_path: Path) -> AsyncIterator[Dialogue]:
    made = Dialogue(tmp_path)
    yield made
    assert await made.findings() == []


async def worked(dialogue: Dialogue) -> None:
    """A session of two turns."""
    await dialogue.send(HISTORY[:1], headers=ID)
    await dialogue.send(HISTORY[:5], headers=ID)


async def test_what_the_guard_refuses_goes_out_as_it_came(dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection that split a pair was built anew for every retry, and met the same 400 eleven times a day."""

    def refuse(*_: object) -> None:
        raise GuardFailure("made to fail")

    await worked(dialogue)
    with monkeypatch.context() as patch:
        patch.setattr("proxy.planning.check_rewritten", refuse)
        first = await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)
    again = await dialogue.send([*HISTORY, user("go on")], headers=ID)
    assert (first.sent, again.sent) == (first.original, first.original)
    later = await dialogue.send([*HISTORY, user("go on"), said("ok"), user("more")], headers=ID, after_s=LUNCH_S)
    assert later.rewritten, "the next boundary may try again"
    assert "original sent: made to fail" in (await dialogue.exchanges())[2].reason


async def test_new_scores_wait_for_the_next_boundary(dialogue: Dialogue) -> None:
    """Work in the background changed what had already been sent, and every answer broke the cache once more."""
    await dialogue.restart(beta=0.6, eps=0.0)
    await worked(dialogue)
    history = [*HISTORY, user("look at unique_second again")]
    before = await dialogue.send(history, headers=ID, after_s=LUNCH_S)
    assert "def unique_first" not in before.text
    await dialogue.conversations.flush()
    assert isinstance(dialogue.conversations, ArchivedConversations)
    observe(dialogue.settings.db, 1, replay_of({1: 1.0, 4: 0.0}), turn=50)

    assert (await dialogue.send(history, headers=ID)).sent == before.sent
    history += read("more.py", "text")
    step = await dialogue.send(history, headers=ID)
    assert step.messages[: len(before.messages)] == before.messages
    history += [said("ok"), user("go on")]
    warm = await dialogue.send(history, headers=ID)
    assert warm.messages[: len(step.messages)] == step.messages

    cold = await dialogue.send([*history, said("ok"), user("and now?")], headers=ID, after_s=LUNCH_S)
    assert "def unique_first" in cold.text and "def unique_second" not in cold.text


async def test_savings_are_those_of_the_bytes_sent(dialogue: Dialogue) -> None:
    """A dashboard reported savings of requests whose messages it had not understood, and so had not touched."""
    await worked(dialogue)
    replies = [await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)]
    strange = [*HISTORY, user("go on"), said("ok"), {"role": "narrator", "content": "x" * 5000}, user("and?")]
    replies.append(await dialogue.send(strange, headers=ID, after_s=LUNCH_S))
    rows = (await dialogue.exchanges())[2:]
    assert [row.bytes_sent for row in rows] == [len(reply.sent) for reply in replies]
    assert [row.bytes_total for row in rows] == [len(reply.original) for reply in replies]
    assert all(reply.rewritten and row.bytes_sent < row.bytes_total for reply, row in zip(replies, rows, strict=True))
    assert "x" * 5000 in replies[1].text, "what is not understood is sent"


async def test_a_request_without_tools_gets_none(dialogue: Dialogue) -> None:
    """Proxies added `tools: []`, forced usage chunks, or offered tools of their own that the client did not know."""
    extra = {"stream": True, "stream_options": {"include_usage": False}, "prompt_cache_key": "k", "store": None}
    for end, pause in ((1, 5.0), (5, 5.0), (8, LUNCH_S)):
        history = [*HISTORY, user("go on")] if end == 8 else HISTORY[:end]
        reply = await dialogue.send(history, headers=ID, tools=None, more=extra, after_s=pause)
        before, after = json.loads(reply.original), json.loads(reply.sent)
        assert list(after) == list(before)
        assert {**after, "messages": None} == {**before, "messages": None}
    assert reply.rewritten


async def test_one_selection_for_each_request_of_the_user(dialogue: Dialogue) -> None:
    """Compaction that left its own trigger standing fired again at once, and 211 times in one session."""
    await dialogue.restart(mode="always", context_window_tokens=1)
    await worked(dialogue)
    history = [*HISTORY, user("go on")]
    sent = [await dialogue.send(history, headers=ID, after_s=LUNCH_S)]
    for number in range(5):
        history = [*history, *read(f"f{number}.py", "text " * 400, call_id=f"c{number}")]
        sent.append(await dialogue.send(history, headers=ID, after_s=LUNCH_S))
    for before, after in zip(sent, sent[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages
    rows = (await dialogue.exchanges())[2:]
    assert rows[0].selection_id is not None
    assert {row.selection_id for row in rows} == {rows[0].selection_id}


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_the_newest_request_stays_the_last_word(tmp_path: Path, dialect: Any) -> None:
    """A note after the user's message made the model act on what nobody had asked for."""
    dialogue = Dialogue(tmp_path, dialect=dialect)
    plain = [user("one"), said("a" * 5000), user("two"), said("b" * 5000), user("three")]
    await dialogue.send(plain[:1], headers=ID)
    await dialogue.send(plain[:3], headers=ID)
    reply = await dialogue.send(plain, headers=ID, after_s=LUNCH_S)
    assert reply.rewritten
    assert reply.messages[-1] == user("three")
    assert [m for m in reply.messages if m["role"] == "user"] == [user("one"), user("two"), user("three")]
    assert reply.messages[1] not in plain and "not shown" in json.dumps(reply.messages[1]), "the notice stands in front"
    assert await dialogue.findings() == []


async def test_a_warm_request_does_not_wait_for_the_disk(dialogue: Dialogue) -> None:
    """`database is locked` reached clients as a 500, or held their requests for minutes."""
    await worked(dialogue)
    await dialogue.conversations.flush()
    other = sqlite3.connect(dialogue.settings.db, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        history = [*HISTORY[:5]]
        for number in range(3):
            history += read(f"f{number}.py", "text", call_id=f"c{number}")
            reply = await dialogue.send(history, headers=ID)
            assert reply.sent == reply.original and reply.plan.exchange is not None
        assert other.execute("SELECT count(*) FROM exchanges").fetchone() == (2,), "nothing was written meanwhile"
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert len(await dialogue.exchanges()) == 5, "and nothing was lost"


async def test_a_plan_that_hangs_is_not_waited_for(dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that did not answer froze every request for ten minutes."""
    monkeypatch.setattr("proxy.conversations.ADMIT_DEADLINE_S", 0.05)
    go_on = threading.Event()
    secure = Planner.secure

    def hang(self: Planner, draft: Draft) -> None:
        go_on.wait(60)
        secure(self, draft)

    await worked(dialogue)
    monkeypatch.setattr(Planner, "secure", hang)
    try:
        reply = await dialogue.send([*HISTORY, user("go on")], headers=ID, after_s=LUNCH_S)
        assert reply.sent == reply.original and reply.plan.exchange is None
    finally:
        go_on.set()
    await asyncio.wait_for(dialogue.conversations.flush(), 30)
    rows = await dialogue.exchanges()
    assert rows[-1].error == "planned too late, sent as it came"


async def test_keys_are_in_no_file_no_log_and_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Keys stood in logs, databases and crash reports."""
    caplog.set_level(logging.DEBUG)
    secrets = {
        "authorization": "Bearer canary-a",
        "api-key": "canary-b",
        "cookie": "canary-c",
        "x-recap-key": "canary-d",
    }
    dialogue = Dialogue(tmp_path)
    for end, pause in ((1, 5.0), (5, 5.0), (8, LUNCH_S)):
        history = [*HISTORY, user("go on")] if end == 8 else HISTORY[:end]
        await dialogue.send(history, headers=ID | secrets, after_s=pause, reject=400)
    (session,) = await dialogue.sessions()
    for command in (["sessions", "--all"], ["show", session.name], ["explain", session.name], ["export", session.name]):
        assert await asyncio.to_thread(main, [*command, "--db", dialogue.settings.db]) == 0
    printed = capsys.readouterr()
    assert session.name in printed.out and "exchange session=" in caplog.text
    assert "canary" not in printed.out + printed.err + caplog.text
    files = await asyncio.to_thread(lambda: [path.read_bytes() for path in tmp_path.iterdir()])
    assert files and all(b"canary" not in content for content in files)


async def test_pressure_that_a_selection_cannot_relieve_breaks_the_cache_once(dialogue: Dialogue) -> None:
    """The user's own words alone exceed the window: nothing that is left out can help."""
    await dialogue.restart(context_window_tokens=2_000)
    history: list[Message] = []
    for number in range(5):
        history += [user(f"request {number} " + "words " * 1500)]
        await dialogue.send(history, headers=ID)
        history += [*read(f"f{number}.py", "text " * 300), said("ok")]
    rows = await dialogue.exchanges()
    assert sum(row.selection_id is not None and row.boundary == "cold" for row in rows) == 1
    assert "a selection did not help" in rows[-1].reason


async def test_matches_without_an_id_are_counted_and_logged(
    dialogue: Dialogue, caplog: pytest.LogCaptureFixture
) -> None:
    """Two projects with the same greeting shared a session, and nobody could see that it was a guess."""
    history = [user("hello"), said("hi"), user("more")]
    with caplog.at_level("INFO", "proxy.recorder"):
        await dialogue.send(history[:1])
        assert dialogue.conversations.health()["matches_without_client_id"] == 0
        await dialogue.send(history)
        assert dialogue.conversations.health()["matches_without_client_id"] == 1
        await dialogue.send([user("other")], headers=ID)
        await dialogue.send([user("other"), said("hi"), user("more")], headers=ID)
        assert dialogue.conversations.health()["matches_without_client_id"] == 1
        await dialogue.close()
    known_by = [record.getMessage().split("known_by=")[1].split()[0] for record in caplog.records]
    assert known_by == ["history", "history", "id", "id"]


async def test_a_cache_that_no_longer_serves_a_session_is_an_alarm(
    dialogue: Dialogue, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users saw their quota burn faster; the share of cached tokens told it, and nobody looked."""
    history: list[Message] = []
    for number in range(12):
        history += [user(f"request {number}")]
        cached = 9_000 if number < 6 else 100
        await dialogue.send(history, headers=ID, usage={"prompt_tokens": 10_000, "cached": cached})
        history += [said("ok")]
    await dialogue.conversations.flush()
    falls = dialogue.conversations.health()["cache_falls"]
    assert isinstance(falls, dict) and len(falls) == 1
    assert [r.getMessage().split()[0] for r in caplog.records if r.levelname == "WARNING"] == ["cache.fell"]
    (session,) = await dialogue.sessions()
    asked = ("--db", dialogue.settings.db)
    assert main(["sessions", *asked]) == 0 and " FELL" in capsys.readouterr().out
    assert (
        main(["show", session.name, *asked]) == 0 and "CACHE: the provider's cache serves 1%" in capsys.readouterr().out
    )
