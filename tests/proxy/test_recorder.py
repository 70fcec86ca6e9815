"""Recording while the writer is behind: what its full queue refused is not referred to, and nobody waits for it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphstore.records import ExchangeRow
from graphstore.store.archive import open_reader
from graphstore.store.writer import QUEUE_BATCHES_MAX
from tests.proxy.dialogue import LUNCH_S, Dialogue, Message, Reply, read, said, turn, user

ID = {"x-session-id": "s"}
CHILD = {"x-session-id": "child", "x-parent-session-id": "s"}
COMPACTING = {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
FIRST, SECOND = turn("please read the first file", "first"), turn("now the second one", "second")
THIRD = [*FIRST, *SECOND, user("and the third")]


class FullQueue:
    """A dialogue whose writer takes nothing for a while."""

    def __init__(self, folder: Path) -> None:
        self.dialogue = Dialogue(folder)
        self.recorder: Any = self.dialogue.conversations._recorder  # type: ignore[union-attr]
        self._writer: Any = self.dialogue.conversations._archive.writer  # type: ignore[union-attr]

    @contextmanager
    def full(self) -> Iterator[None]:
        self.recorder._add(lambda: setattr(self._writer, "_queue_max", 0))
        yield
        self.recorder._add(lambda: setattr(self._writer, "_queue_max", QUEUE_BATCHES_MAX))

    async def refused(self, history: list[Message], **more: Any) -> Reply:
        with self.full():
            return await self.dialogue.send(history, **more)

    async def stored(self) -> dict[int, list[bytes]]:
        """The history of every exchange in the archive, by its id. The writer had nothing that the file refused."""
        await self.dialogue.conversations.flush()
        health = self.dialogue.conversations.health()
        assert (health["batches_lost"], health["problem"]) == (0, None)
        with open_reader(self.dialogue.settings.db) as reader:
            return {
                row.id: reader.path_contents(row.head_node_id) if row.head_node_id is not None else []
                for session in reader.list_sessions()
                for row in reader.session_exchanges(session.id)
            }


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[FullQueue]:
    made = FullQueue(tmp_path)
    yield made
    assert await made.dialogue.findings() == []


def row_of(reply: Reply) -> ExchangeRow:
    row: ExchangeRow = reply.plan.exchange.row  # type: ignore[union-attr]
    return row


def whole(reply: Reply) -> tuple[int, int]:
    return row_of(reply).id, row_of(reply).messages_total


def lengths(stored: dict[int, list[bytes]]) -> list[tuple[int, int]]:
    return sorted((id, len(history)) for id, history in stored.items())


async def test_the_end_of_a_refused_request_is_told_and_not_archived(queue: FullQueue) -> None:
    heard: list[int] = []
    queue.recorder._observer = SimpleNamespace(ended=lambda row, upstream: heard.append(row.id))
    lost = await queue.refused(FIRST[:1], headers=ID, finish=False)
    queue.dialogue.finish(lost.plan, said("ok"))
    assert await queue.stored() == {}
    assert heard == [row_of(lost).id]
    assert lost.plan.exchange.session.ended.id == row_of(lost).id  # type: ignore[union-attr]
    later = await queue.dialogue.send([*FIRST, SECOND[0]], headers=ID)
    assert lengths(await queue.stored()) == [whole(later)]


async def test_the_late_end_of_a_refused_request_stays_away_although_its_session_is_whole_again(
    queue: FullQueue,
) -> None:
    lost = await queue.refused(FIRST[:1], headers=ID, finish=False, system={"role": "system", "content": "another"})
    later = await queue.dialogue.send(FIRST[:1], headers=ID)
    queue.dialogue.finish(lost.plan, said("ok"))
    assert lengths(await queue.stored()) == [whole(later)]


async def test_a_branch_of_a_session_with_a_gap_brings_its_whole_history(queue: FullQueue) -> None:
    await queue.dialogue.send(FIRST[:1], headers=ID)
    await queue.refused([*FIRST, SECOND[0], *read("lost.py", "lost")], headers=ID)
    branch = await queue.dialogue.send([*FIRST, SECOND[0], *read("lost.py", "lost"), user("or so")], headers={})
    assert row_of(branch).outcome == "fork"
    stored = await queue.stored()
    assert whole(branch) in lengths(stored)


@pytest.mark.parametrize("after_s", [5.0, LUNCH_S])
async def test_a_branch_of_a_session_that_was_never_stored_stands_alone(queue: FullQueue, after_s: float) -> None:
    """Also when its first request is compacted, and so is committed before it is sent."""
    await queue.refused(THIRD, headers=ID)
    branch = await queue.dialogue.send([*THIRD[:-1], user("or so")], headers={}, after_s=after_s)
    assert row_of(branch).outcome == "fork" and branch.rewritten == (after_s == LUNCH_S)
    assert lengths(await queue.stored()) == [whole(branch)]
    assert [row.parent_id for row in await queue.dialogue.sessions()] == [None]


async def test_a_session_that_names_a_parent_that_was_never_stored_stands_alone(queue: FullQueue) -> None:
    await queue.refused(FIRST[:1], headers=ID)
    child = await queue.dialogue.send([user("look at this alone")], headers=CHILD)
    assert lengths(await queue.stored()) == [whole(child)]
    assert [row.parent_id for row in await queue.dialogue.sessions()] == [None]


async def test_a_side_session_of_one_that_was_never_stored_stands_alone(queue: FullQueue) -> None:
    await queue.refused(FIRST[:1], headers=ID)
    other = {"role": "system", "content": "Give it a title."}
    title = await queue.dialogue.send([user("about the first file")], headers=ID, system=other, tools=None)
    assert row_of(title).outcome == "side" and title.plan.exchange.session.row.kind == "side"  # type: ignore[union-attr]
    assert lengths(await queue.stored()) == [whole(title)]
    assert [row.parent_id for row in await queue.dialogue.sessions()] == [None]


@pytest.mark.parametrize("known", [False, True])
async def test_a_side_request_leaves_the_gap_of_its_session_alone(queue: FullQueue, known: bool) -> None:
    """It goes over another history than the one that was lost."""
    if known:
        await queue.dialogue.send(FIRST[:1], headers=ID)
    await queue.refused(THIRD, headers=ID, model="another")
    side = await queue.dialogue.send([*FIRST, user("sum it up")], headers=ID | COMPACTING, system=None)
    assert row_of(side).outcome == "side"
    assert whole(side) in lengths(await queue.stored())
    later = await queue.dialogue.send([*THIRD, said("ok"), user("go on")], headers=ID)
    stored = lengths(await queue.stored())
    assert whole(side) in stored and whole(later) in stored


async def test_what_is_not_understood_of_a_session_that_was_never_stored_is_not_recorded(queue: FullQueue) -> None:
    queue.dialogue.dialect = "responses"
    await queue.refused(FIRST[:1], headers=ID)
    opaque = await queue.dialogue.send(FIRST[:1], headers=ID, more={"previous_response_id": "r"})
    assert row_of(opaque).outcome == "opaque"
    assert await queue.stored() == {}
    later = await queue.dialogue.send([*FIRST, SECOND[0]], headers=ID)
    assert lengths(await queue.stored()) == [whole(later)]


async def test_recording_goes_on_while_the_disk_takes_its_time(
    queue: FullQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job holds a whole request: they must not pile up behind one that waits."""
    reached, free, commit = threading.Event(), threading.Event(), queue._writer._commit

    def slow(group: object) -> None:
        reached.set()
        assert free.wait(60)
        commit(group)

    monkeypatch.setattr(queue._writer, "_commit", slow)
    settled = queue.recorder.settled()
    assert await asyncio.to_thread(reached.wait, 60)
    await queue.dialogue.send(FIRST[:1], headers=ID)
    try:
        async with asyncio.timeout(20):
            await asyncio.wrap_future(queue.recorder._add(lambda: None, hurry=True))
        assert not settled.done()
    finally:
        free.set()
    await asyncio.wrap_future(settled)


async def test_recording_goes_on_when_somebody_no_longer_waits_for_it(queue: FullQueue) -> None:
    waiting = asyncio.create_task(queue.dialogue.conversations.flush())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    sent = await queue.dialogue.send(FIRST[:1], headers=ID)
    async with asyncio.timeout(60):
        assert lengths(await queue.stored()) == [whole(sent)]
