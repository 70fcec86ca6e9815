"""Open pages are told that the archive changed, whoever changed it, and hold nobody up who wants to stop."""

import asyncio
import json
import shutil
import signal
import sqlite3
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest

from graphstore.store.blobs import pack
from graphstore.store.changes import Changes
from graphstore.store.marks import set_mark
from proxy.inspector import feed
from proxy.server import Server, bind, serve
from proxy.settings import Settings
from proxy.wiring import open_app
from tests.archives import lay_out_archive
from tests.fakes.raw_client import request
from tests.fakes.recording_upstream import RecordingUpstream
from tests.inspector.conftest import Recorded
from tests.inspector.looking import looking
from tests.proxy.test_cli import serving

DEADLINE_S = 30.0
EVENTS = "/recap/api/events"
CODING = "entire-3fb30de16616"


@pytest.fixture(autouse=True)
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "INTERVAL_S", 0.01)


class Stream:
    """The events of one page, one at a time, as the standard spells them."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._bytes = response.aiter_bytes()
        self._rest = b""

    async def next(self) -> bytes:
        """b"" at the end."""
        async with asyncio.timeout(DEADLINE_S):
            while b"\n\n" not in self._rest:
                piece = await anext(self._bytes, b"")
                if not piece:
                    assert not self._rest
                    return b""
                self._rest += piece
        event, _, self._rest = self._rest.partition(b"\n\n")
        return event


HELLO, CHANGE = b"event: hello\ndata: {}", b"event: change\ndata: {}"


@asynccontextmanager
async def listening(client: httpx.AsyncClient) -> AsyncIterator[Stream]:
    """Past the first look, which takes everything for new."""
    async with client.stream("GET", EVENTS) as response:
        assert response.status_code == 200
        stream = Stream(response)
        assert await stream.next() == HELLO
        yield stream


async def settled(stream: Stream) -> None:
    """Until the watch has seen the archive as it is: the only listener is told once."""
    assert await stream.next() == CHANGE


async def test_a_page_is_told_of_what_the_proxy_records(recorded: Recorded, tmp_path: Path) -> None:
    upstream = RecordingUpstream()
    async with upstream.running(), looking(recorded, tmp_path, upstream=upstream.url) as look:
        async with listening(look.client) as stream:
            assert stream.response.headers["content-type"].startswith("text/event-stream")
            assert stream.response.headers["cache-control"] == "no-store"
            await settled(stream)
            body = {"model": "m", "messages": [{"role": "user", "content": "something new"}]}
            reply = await look.client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200
            assert await stream.next() == CHANGE
            await look.conversations.flush()  # type: ignore[attr-defined]
            assert (await look.get("sessions"))["sessions"][0]["title"] == "something new"


async def test_a_page_is_told_of_what_somebody_else_writes(recorded: Recorded, tmp_path: Path) -> None:
    """`recap pin` and the worker are processes of their own."""
    async with looking(recorded, tmp_path) as look, listening(look.client) as stream:
        await settled(stream)
        for mark in ("pin", "mute", None):
            session = look.session(CODING).id
            await asyncio.to_thread(set_mark, look.proxy.settings.db, session, 13, mark, clock=look.clock)
            assert await stream.next() == CHANGE
            assert (await look.get(f"sessions/{look.names[CODING]}/blocks/13"))["mark"] == mark


async def test_every_open_page_is_told(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look, listening(look.client) as one, listening(look.client) as other:
        await settled(one)
        await look.post(f"sessions/{look.names[CODING]}/blocks/13/mark", {"mark": "pin"})
        assert [await one.next(), await other.next()] == [CHANGE, CHANGE]


async def test_silence_is_broken_by_a_comment(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection whose other end is gone shows when it is written to, and not before."""
    monkeypatch.setattr(feed, "QUIET_S", 0.05)
    async with looking(recorded, tmp_path) as look, listening(look.client) as stream:
        await settled(stream)
        assert (await stream.next()).startswith(b":")


async def test_an_archive_that_appears_later_is_watched_then(tmp_path: Path) -> None:
    """It could not be opened when the page came; the page must not have to come again."""
    database = tmp_path / "recap.db"
    settings = Settings(upstream="http://upstream.test/v1", db=str(database))
    async with open_app(settings, None) as app:
        listener = bind("127.0.0.1", 0)
        server = asyncio.create_task(serve(stopping := Server(app, on_stop=app.state.inspector.feed.close), listener))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            async with listening(client) as stream:
                await asyncio.to_thread(lay_out_archive, database)
                assert await stream.next() == CHANGE
                stopping.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(DEADLINE_S):
            await server


async def test_a_watch_that_fails_in_a_way_that_nobody_knows_goes_on(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([RuntimeError("never seen"), sqlite3.OperationalError("no such thing")])
    honest = Changes.happened

    def happened(self: Changes) -> bool:
        if (error := next(looks, None)) is not None:
            raise error
        return honest(self)

    monkeypatch.setattr(Changes, "happened", happened)
    async with looking(recorded, tmp_path) as look, listening(look.client) as stream:
        await settled(stream)


async def test_a_page_is_told_when_another_file_takes_the_archives_place(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look, listening(look.client) as stream:
        await settled(stream)
        shutil.copyfile(recorded.path, tmp_path / "other.db")
        (tmp_path / "other.db").replace(tmp_path / "recap.db")
        assert await stream.next() == CHANGE


async def test_the_watch_ends_with_the_last_page_and_begins_again_with_the_next(recorded: Recorded) -> None:
    """Nobody looks at the file for pages that have left."""
    watches: list[Changes] = []

    def watch() -> Changes:
        watches.append(Changes(recorded.path))
        return watches[-1]

    with ThreadPoolExecutor(1) as executor:
        watched = feed.Feed(watch, executor)
        for opened in (1, 2):
            pages = [watched.listen() for _ in range(2)]
            for page in pages:
                assert await anext(page) == HELLO + b"\n\n"
            assert await anext(pages[0]) == CHANGE + b"\n\n"
            task = watched._task
            assert task is not None and len(watches) == opened, "one watch for all"
            await pages[0].aclose()  # type: ignore[attr-defined]
            assert watched._task is task
            await pages[1].aclose()  # type: ignore[attr-defined]
            with pytest.raises(asyncio.CancelledError):
                await task
            assert watched._task is None and watches[-1]._connection is None


async def test_a_closed_feed_ends_every_stream_and_opens_none(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        async with listening(look.client) as one, listening(look.client) as other:
            await settled(one)
            look.proxy.app.state.inspector.feed.close()
            for stream in (one, other):
                left = [await stream.next() for _ in range(2)]
                assert left[-1] == b"" and set(left) <= {CHANGE, b""}
        async with look.client.stream("GET", EVENTS) as response:
            assert await Stream(response).next() == b""
        assert await look.get("sessions"), "the rest of the inspector goes on"


async def test_a_server_that_is_told_to_stop_does_not_wait_for_an_open_page(tmp_path: Path) -> None:
    """Open streams run out before the server stops, and this one never would."""
    lay_out_archive(tmp_path / "recap.db")
    async with serving(tmp_path, "http://127.0.0.1:9/v1", "--db", str(tmp_path / "recap.db")) as (process, port, _):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, listening(client) as stream:
            process.send_signal(signal.SIGTERM)
            while await stream.next():
                pass
        async with asyncio.timeout(DEADLINE_S):
            _, said = await process.communicate()
        assert process.returncode == 0 and b"serve.stopped" in said and b"Traceback" not in said


@pytest.mark.parametrize("held_by", ["a body that does not end", "an answer that nobody reads", "many maps"])
async def test_a_server_that_is_told_to_stop_does_not_wait_for_people(
    held_by: str, recorded: Recorded, tmp_path: Path
) -> None:
    database = shutil.copyfile(recorded.path, tmp_path / "recap.db")
    session = f"/recap/api/sessions/{recorded.names[CODING]}"
    if held_by == "an answer that nobody reads":
        lengthen_block(database, recorded.names[CODING], 3, 30_000_000)
    async with serving(tmp_path, "http://127.0.0.1:9/v1", "--db", str(database)) as (process, port, _):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            token = (await client.get("/recap/api/self")).json()["token"]
        writers = []
        for _ in range(60 if held_by == "many maps" else 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writers.append(writer)
            if held_by == "a body that does not end":
                sizes = [("X-Recap-Token", token), ("Content-Type", "application/json"), ("Content-Length", "100")]
                writer.write(request(f"{session}/what-if", b"{", headers=sizes))
            elif held_by == "many maps":
                writer.write(request(f"{session}/map", method="GET"))
            else:
                writer.write(request(f"{session}/blocks/3", method="GET"))
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            _, said = await process.communicate()
        for writer in writers:
            writer.close()
        assert process.returncode == 0 and b"serve.stopped" in said and b"Traceback" not in said


def lengthen_block(database: Path, session: str, ordinal: int, characters: int) -> None:
    codec, content = pack(json.dumps({"role": "user", "content": "abcde" * (characters // 5)}).encode())
    with closing(sqlite3.connect(database)) as db:
        db.execute(
            "UPDATE messages SET codec = ?, content = ? WHERE id = (SELECT message_id FROM nodes JOIN block_nodes "
            "ON block_nodes.node_id = nodes.id JOIN sessions ON sessions.id = block_nodes.session_id "
            "WHERE sessions.name = ? AND block_nodes.ordinal = ? LIMIT 1)",
            (codec, content, session, ordinal),
        )
        db.commit()


async def test_asking_for_the_head_of_the_stream_does_not_open_it(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        async with asyncio.timeout(DEADLINE_S):
            answer = await look.client.head(EVENTS)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
