"""Sessions that go while the proxy runs: no request is broken, none of them comes back, no other one notices."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graphstore.records import SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.forget import Forget, Forgotten, request_forget
from graphstore.store.verify import verify
from proxy.commands.verify import recut
from proxy.conversations import ArchivedConversations
from proxy.keeping import DAY_S, IN_USE_S, overdue
from tests.graphstore.store.history import session_row
from tests.proxy.dialogue import LUNCH_S, Dialogue, Message, said, turn, user

ID = {"x-session-id": "one"}
HISTORY: list[Message] = [m for name in ("alpha", "beta", "gamma") for m in turn(name, name)]


class Kept(Dialogue):
    @property
    def live(self) -> ArchivedConversations:
        assert isinstance(self.conversations, ArchivedConversations)
        return self.conversations

    async def rows(self) -> list[SessionRow]:
        await self.live.flush()
        health = self.live.health()
        assert (health["state"], health["batches_lost"]) == ("ok", 0)  # nothing was refused, either
        with open_reader(self.settings.db) as reader:
            assert verify(reader, recut) == []
            return sorted(reader.list_sessions(), key=lambda row: row.id)

    async def forget(self, *ids: int) -> None:
        assert (await self.live.forget(Forget(frozenset(ids), thorough=True))).problem is None

    def bytes(self) -> bytes:
        return b"".join(file.read_bytes() for file in self.folder.iterdir())


@pytest.fixture
async def dialogue(tmp_path: Path) -> AsyncIterator[Kept]:
    dialogue = Kept(tmp_path, changes={"beta": 0.05, "idle_after": 3600.0})
    yield dialogue
    await dialogue.close()


async def compacted(dialogue: Kept, headers: dict[str, str] = ID) -> list[Message]:
    """A session that leaves something out. Returns its history."""
    await dialogue.send(HISTORY[:-1], headers=headers)
    history = [*HISTORY, user("delta")]
    assert (await dialogue.send(history, headers=headers, after_s=LUNCH_S)).rewritten
    return [*history, said("ok")]


async def test_the_next_request_begins_a_new_session_and_passes_untouched(dialogue: Kept) -> None:
    history = [*await compacted(dialogue), user("next")]
    await dialogue.live.flush()
    await dialogue.forget(1)
    assert await dialogue.rows() == [] and b"delta" not in dialogue.bytes()
    reply = await dialogue.send(history, headers=ID)
    assert not reply.rewritten
    (row,) = await dialogue.rows()
    assert row.id == 2 and row.turns == 5
    later = [*history, said("ok"), user("more")]
    assert (await dialogue.send(later, headers=ID, after_s=LUNCH_S)).rewritten
    assert await dialogue.outcomes() == ["new", "extension"]


@pytest.mark.parametrize("headers", [ID, {}])
async def test_a_request_that_runs_meanwhile_ends_well_and_is_not_recorded(
    dialogue: Kept, headers: dict[str, str]
) -> None:
    history = [*await compacted(dialogue, headers), user("while it runs")]
    reply = await dialogue.send(history, headers=headers, finish=False)
    await dialogue.forget(1)
    dialogue.finish(reply.plan, said("canary-late-answer"))
    assert await dialogue.rows() == []
    assert b"canary-late-answer" not in dialogue.bytes() and b"while it runs" not in dialogue.bytes()
    assert not (await dialogue.send(history, headers=headers)).rewritten
    assert [row.id for row in await dialogue.rows()] == [2]


async def test_requests_that_come_meanwhile_are_served_in_order(dialogue: Kept) -> None:
    history = await compacted(dialogue)
    other = {"x-session-id": "two"}
    await compacted(dialogue, other)
    before = asyncio.create_task(dialogue.forget(1))
    replies = await asyncio.gather(
        *(dialogue.send([*history, user(f"r{i}")], headers=headers) for i, headers in enumerate((ID, other, ID, other)))
    )
    await before
    assert all(reply.plan.exchange is not None for reply in replies)
    assert replies[1].rewritten and replies[3].rewritten  # the other session goes on as it was
    assert 1 not in {row.id for row in await dialogue.rows()}


async def test_a_branch_goes_on_as_it_was(dialogue: Kept) -> None:
    history = await compacted(dialogue)
    branch = {"x-session-id": "branch"}
    first = await dialogue.send([*history, user("one way")], headers=branch)
    assert first.rewritten
    await dialogue.send([*history, user("canary-other-way")], headers=ID)
    await dialogue.live.flush()
    await dialogue.forget(1)
    (row,) = await dialogue.rows()
    assert row.client_id == "branch" and row.parent_id is None
    more = [*history, user("one way"), said("ok"), user("on")]
    second = await dialogue.send(more, headers=branch)
    assert second.messages[: len(first.messages)] == first.messages
    await dialogue.rows()
    await dialogue.restart()
    third = await dialogue.send([*more, said("ok"), user("and on")], headers=branch)
    assert third.messages[: len(second.messages)] == second.messages
    assert b"canary-other-way" not in dialogue.bytes()
    assert await dialogue.findings() == []


async def test_titles_go_with_the_session_that_they_are_of(dialogue: Kept) -> None:
    opencode = {"user-agent": "opencode/1.18.33 ai-sdk", "x-session-affinity": "ses_1"}
    await dialogue.send([user("Where is alpha?")], headers=opencode)
    titles: Message = {"role": "system", "content": "You make titles."}
    await dialogue.send([user("canary alpha?")], headers=opencode, tools=None, system=titles)
    rows = await dialogue.rows()
    assert [row.kind for row in rows] == ["agent", "side"]
    await dialogue.forget(rows[0].id)
    assert await dialogue.rows() == [] and b"canary" not in dialogue.bytes()


async def test_a_restart_does_not_bring_it_back(dialogue: Kept) -> None:
    history = await compacted(dialogue)
    await dialogue.live.flush()
    await dialogue.forget(1)
    await dialogue.restart()
    assert not (await dialogue.send([*history, user("next")], headers=ID, after_s=LUNCH_S)).rewritten
    assert await dialogue.outcomes() == ["new"]


def test_what_is_overdue() -> None:
    now = 1000 * DAY_S
    rows = [session_row(id, last_active_at=now - days * DAY_S) for id, days in ((1, 40), (2, 10), (3, 0))]

    def due(active: dict[int, float] | None = None, keep_days: int = 0, is_too_big: bool = False) -> Any:
        found = overdue(rows, active or {}, now=now, keep_days=keep_days, is_too_big=is_too_big)
        return found and found[0]

    assert due() is None and due(keep_days=41) is None
    assert due(keep_days=39) == 1 and due(is_too_big=True) == 1
    assert due({1: now}, keep_days=39) is None
    assert due({1: now}, is_too_big=True) == 2
    assert due({1: now, 2: float("inf")}, is_too_big=True) is None
    assert due({1: now, 2: now - IN_USE_S - 1}, is_too_big=True) == 2


async def test_old_sessions_go_and_used_ones_stay(dialogue: Kept) -> None:
    await dialogue.restart(keep_days=30)
    await compacted(dialogue)
    dialogue.clock.advance(20 * DAY_S)
    running = await dialogue.send([user("another")], headers={"x-session-id": "two"}, finish=False)
    await dialogue.live.flush()
    await dialogue.live.keeper.retain()
    assert [row.id for row in await dialogue.rows()] == [1, 2]
    dialogue.clock.advance(20 * DAY_S)
    await dialogue.live.keeper.retain()
    assert [row.id for row in await dialogue.rows()] == [2]
    dialogue.clock.advance(40 * DAY_S)
    await dialogue.live.keeper.retain()
    assert [row.id for row in await dialogue.rows()] == [2]  # its request still runs
    dialogue.finish(running.plan, said("ok"))
    dialogue.clock.advance(31 * DAY_S)
    await dialogue.live.flush()
    await dialogue.live.keeper.retain()
    assert await dialogue.rows() == [] and b"another" not in dialogue.bytes()
    assert dialogue.live.health()["retention"] == {"keep_days": 30, "keep_bytes": 0, "removed": 2, "problem": None}


async def test_room_is_made_and_no_more_than_needed(dialogue: Kept) -> None:
    for i in range(8):
        noise = "".join(f"{(i + 1) * 7919 * k:x} " for k in range(3000))
        await dialogue.send([user(noise)], headers={"x-session-id": f"s{i}"}, after_s=60.0)
    await dialogue.restart()
    size = dialogue.live._archive.reader.bytes_used()
    await dialogue.restart(keep_bytes=size - 20_000)
    await dialogue.live.keeper.retain()
    assert len(await dialogue.rows()) == 8  # all were active within the hour
    dialogue.clock.advance(2 * IN_USE_S)
    await dialogue.live.keeper.retain()
    await dialogue.live.keeper.retain()  # what goes is estimated; the second look measures
    left = [row.id for row in await dialogue.rows()]
    assert left == list(range(9 - len(left), 9)) and 5 <= len(left) < 8
    assert (dialogue.folder / "recap.db").stat().st_size <= size - 20_000


async def test_all_that_was_asked_for_goes_at_once(dialogue: Kept) -> None:
    """The file is written anew for each removal: once for many sessions, not once for each of them."""
    for name in ("one", "two", "three"):
        await compacted(dialogue, {"x-session-id": name})
    await dialogue.live.flush()
    asked: list[Forget] = []

    async def counted(what: Forget, *, unless_active_after: float = math.inf) -> Forgotten:
        asked.append(what)
        return await dialogue.live.forget(what, unless_active_after=unless_active_after)

    dialogue.live.keeper._remove = counted
    for id in (1, 3):
        request_forget(dialogue.settings.db, id, clock=dialogue.clock)
    await dialogue.live.keeper.obey()
    await dialogue.live.keeper.obey()
    assert asked == [Forget(frozenset([1, 3]), thorough=True)]
    assert [row.id for row in await dialogue.rows()] == [2]
