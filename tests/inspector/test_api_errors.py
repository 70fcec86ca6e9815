"""What the API refuses and what it cannot do: a sentence that names the value, and never a request that suffers."""

import asyncio
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from graphstore.store import engine
from graphstore.store.reader import Reader
from proxy.conversations import open_conversations
from proxy.inspector import routes
from proxy.settings import Settings
from tests.archives import lay_out_archive
from tests.clock import VirtualClock
from tests.fakes.raw_client import exchange, raw_client, request
from tests.fakes.recording_upstream import RecordingUpstream
from tests.inspector.conftest import Recorded
from tests.inspector.looking import Look, looking, said
from tests.proxy.dialogue import TOOLS, user
from tests.support import running_proxy

CODING = "entire-3fb30de16616"
JSON = {"content-type": "application/json"}
READING = ("sessions", "search?q=x", "savings", "sessions/x", "sessions/x/map", "sessions/x/graph",
           "sessions/x/turns/1", "sessions/x/blocks/0")  # fmt: skip
LONG = "9" * 5000  # Python refuses to read such a number


# -- what is not there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["", "/map", "/graph", "/turns/1", "/blocks/0"])
async def test_an_unknown_session_is_named(rest: str, recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        status, code, message = await look.refusal(f"sessions/no%25body{rest}")
    assert (status, code) == (404, "not_found")
    assert message == "no session is called 'no%body'; `recap sessions` lists them"


async def test_an_unknown_turn_and_an_unknown_block_are_named_with_what_there_is(
    recorded: Recorded, tmp_path: Path
) -> None:
    async with looking(recorded, tmp_path) as look:
        name = look.names[CODING]
        last = len(look.reader.load_blocks(look.session(CODING).id)) - 1
        no_turn = (404, "not_found", f"{name} has no turn 7: it has turns 1 to 6")
        assert await look.refusal(f"sessions/{name}/turns/7") == no_turn
        assert (await look.refusal(f"sessions/{name}/turns/0"))[0] == 404
        no_block = f"{name} has no block {last + 1}: they go from 0 to {last}; `recap explain {name}` lists them"
        assert await look.refusal(f"sessions/{name}/blocks/{last + 1}") == (404, "not_found", no_block)
        marked = await look.send(f"sessions/{name}/blocks/{last + 1}/mark", {"mark": "pin"})
        assert said(marked) == (404, "not_found", no_block)
        for path, body in (
            ("sessions/nobody/blocks/0/mark", {"mark": "pin"}),
            ("sessions/nobody/what-if", {"query": ""}),
        ):
            assert "'nobody'" in said(await look.send(path, body))[2]


async def test_the_beginning_of_a_name_is_enough_unless_several_share_it(recorded: Recorded, tmp_path: Path) -> None:
    db = sqlite3.connect(shutil.copyfile(recorded.path, tmp_path / "copy.db"))
    db.execute("UPDATE sessions SET name = 'same-' || id")
    db.commit()
    db.close()
    async with looking(Recorded(tmp_path / "copy.db", recorded.now, {}), tmp_path) as look:
        assert (await look.get(f"sessions/same-{look.session(CODING).id}"))["session"]["client_id"] == CODING
        status, code, message = await look.refusal("sessions/same")
        assert (status, code) == (404, "not_found") and "'same' may be same-5, same-4" in message
        assert (await look.refusal("sessions/%25"))[0] == 404, "no pattern of SQL"


# -- what is malformed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "1e3", "0x1", "+1", "٣", "1234567890", LONG, "%20", "1%00"])
async def test_a_number_that_is_none_is_named(number: str, recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        name = look.names[CODING]
        for path, what in ((f"sessions/{name}/turns/{number}", "turn"), (f"sessions/{name}/blocks/{number}", "block"),
                           (f"sessions?limit={number}", "limit")):  # fmt: skip
            status, code, message = await look.refusal(path)
            assert (status, code) == (400, "bad_request") and message.startswith(f"{what} '") and len(message) < 80
        reply = await look.send(f"sessions/{name}/blocks/{number}/mark", {"mark": "pin"})
        assert said(reply)[:2] == (400, "bad_request")


BODIES: list[tuple[str, bytes, str]] = [
    ("application/json", b"", "not understood"),
    ("application/json", b"mark=pin", "not understood"),
    ("application/json", b"[]", "Expected `object`"),
    ("application/json", b"{}", "missing required field"),
    ("application/json", b'{"mark": "pin"', "not understood"),
    ("application/json", b'{"mark": "burn"}', "burn"),
    ("application/json", b'{"mark": 1}', "not understood"),
    ("application/json", b'{"mark": "pin", "more": 1}', "more"),
    ("application/json", b'{"mark": "\xff"}', "not understood"),
    ("text/plain", b'{"mark": "pin"}', "must be application/json"),
    ("application/x-www-form-urlencoded", b'{"mark": "pin"}', "must be application/json"),
    ("", b'{"mark": "pin"}', "must be application/json"),
    ("application/json", b'{"mark": "pin"}' + b" " * routes.BODY_BYTES_MAX, "more than 801024 bytes"),
]


@pytest.mark.parametrize(("kind", "body", "named"), BODIES, ids=[f"{k}-{n}" for k, _, n in BODIES])
async def test_a_body_that_is_not_what_it_should_be_changes_nothing(
    kind: str, body: bytes, named: str, recorded: Recorded, tmp_path: Path
) -> None:
    async with looking(recorded, tmp_path) as look:
        headers = [("X-Recap-Token", look.token)] + ([("Content-Type", kind)] if kind else [])
        path = f"/recap/api/sessions/{look.names[CODING]}/blocks/3/mark"
        reply = await exchange(look.proxy.port, request(path, body, headers=headers))
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"]) == (400, "bad_request") and named in error["message"]
        assert look.reader.marks(look.session(CODING).id) == {}


@pytest.mark.parametrize(
    ("body", "named"),
    [({}, "query"), ({"query": None}, "null"), ({"query": 1}, "int"), ({"query": "x", "beta": 1}, "beta")],
)
async def test_a_what_if_without_a_query_says_what_is_missing(
    body: dict[str, Any], named: str, recorded: Recorded, tmp_path: Path
) -> None:
    async with looking(recorded, tmp_path) as look:
        status, code, message = said(await look.send(f"sessions/{look.names[CODING]}/what-if", body))
        assert (status, code) == (400, "bad_request") and named in message


async def test_a_long_query_is_tried_and_a_longer_one_refused_before_it_is_whole(
    recorded: Recorded, tmp_path: Path
) -> None:
    async with looking(recorded, tmp_path) as look:
        path = f"sessions/{look.names[CODING]}/what-if"
        frame = len(json.dumps({"query": ""}))
        assert (await look.send(path, {"query": "x" * (routes.QUERY_CHARS_MAX)})).status_code == 200
        assert (await look.send(path, {"query": "x" * (routes.BODY_BYTES_MAX - frame)})).status_code == 200
        head = [("X-Recap-Token", look.token), ("Content-Type", "application/json"), ("Content-Length", "99999999")]
        data = request(f"/recap/api/{path}", b"x" * (routes.BODY_BYTES_MAX + 1), headers=head)
        async with raw_client(look.proxy.port) as client:
            await client.send(data)  # the rest never comes
            reply = await client.reply()
        assert reply.status == 400 and b"801024" in reply.body


# -- what fails -------------------------------------------------------------------------------------------------------


async def converse(client: httpx.AsyncClient, upstream: RecordingUpstream, text: str) -> None:
    """A request through the proxy, which must arrive as it was sent."""
    body = {"model": "m", "messages": [user(text)], "tools": TOOLS, "stream": True}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200 and b"done" in reply.content
    assert json.loads(upstream.bodies[-1]) == body


@asynccontextmanager
async def unusable(database: Path) -> AsyncIterator[tuple[httpx.AsyncClient, RecordingUpstream]]:
    upstream, clock = RecordingUpstream(), VirtualClock()
    async with upstream.running():
        settings = Settings(upstream=upstream.url, db=str(database))
        async with (
            running_proxy(settings, open_conversations(settings, clock), clock=clock) as proxy,
            httpx.AsyncClient(base_url=proxy.url) as client,
        ):
            yield client, upstream


async def every_view_says(client: httpx.AsyncClient, *words: str) -> None:
    for path in READING:
        status, code, message = said(await client.get(f"/recap/api/{path}"))
        assert (status, code) == (503, "archive_unavailable"), path
        assert [word for word in words if word not in message] == []
    well = (await client.get("/recap/api/health")).json()
    assert well["health"]["upstream"] and well["database"]["sessions"] is None, "health tells of itself what it can"
    assert [word for word in words if word not in well["database"]["problem"]] == []


async def test_without_an_archive_every_view_says_why_and_requests_pass(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    database = tmp_path / "file" / "recap.db"
    async with unusable(database) as (client, upstream):
        await every_view_says(client, f"no archive at {str(database)!r}", "recap serve")
        await converse(client, upstream, "all the same")
        token = (await client.get("/recap/api/self")).json()["token"]
        for path, body in (("blocks/0/mark", {"mark": "pin"}), ("what-if", {"query": "x"})):
            reply = await client.post(f"/recap/api/sessions/x/{path}", json=body, headers={"x-recap-token": token})
            assert said(reply)[:2] == (503, "archive_unavailable")
        assert (await client.get("/recap/")).status_code == 200
        assert (await client.get("/recap/health")).json()["archive"]["state"] == "unavailable"


async def test_a_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "recap.db").write_bytes(b"no database at all, but long enough to be read as one" * 100)
    async with unusable(tmp_path / "recap.db") as (client, upstream):
        await every_view_says(client, str(tmp_path / "recap.db"), "move the file away")
        await converse(client, upstream, "all the same")


async def test_an_archive_that_appears_later_is_shown_then(tmp_path: Path) -> None:
    database = tmp_path / "later" / "recap.db"
    async with running_proxy(Settings(db=str(database))) as proxy, httpx.AsyncClient(base_url=proxy.url) as client:
        assert (await client.get("/recap/api/sessions")).status_code == 503
        database.parent.mkdir()
        lay_out_archive(database)
        assert (await client.get("/recap/api/sessions")).json() == {"total": 0, "sessions": []}
        empty = (await client.get("/recap/api/savings")).json()
        assert (empty["days"], empty["sessions"], empty["total"]["requests"]) == ([], [], 0)
        assert (await client.get("/recap/api/health")).json()["errors"] == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 0.01)


async def test_a_locked_archive_is_named_and_shown_when_it_is_free(
    recorded: Recorded, tmp_path: Path, impatient: None
) -> None:
    """Another program holds the file for itself alone: nobody reads, and requests go on."""
    holder = sqlite3.connect(shutil.copyfile(recorded.path, tmp_path / "recap.db"), isolation_level=None)
    for statement in ("PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=DELETE", "BEGIN EXCLUSIVE"):
        holder.execute(statement)
    async with unusable(tmp_path / "recap.db") as (client, upstream):
        await every_view_says(client, "the database is locked", "close the program that holds it open")
        await converse(client, upstream, "meanwhile")
        holder.close()
        assert (await client.get("/recap/api/sessions")).json()["total"] == 4


async def test_another_file_in_the_archives_place_is_neither_shown_nor_written_to(
    recorded: Recorded, tmp_path: Path
) -> None:
    async with looking(recorded, tmp_path) as look:
        name, database = look.names[CODING], tmp_path / "recap.db"
        assert (await look.get("sessions"))["total"] == 4
        shutil.copyfile(recorded.path, tmp_path / "other.db")
        (tmp_path / "other.db").replace(database)
        was = database.read_bytes()
        for path in ("sessions", f"sessions/{name}"):
            status, code, message = await look.refusal(path)
            assert (status, code) == (503, "archive_unavailable") and "moved or deleted" in message
        reply = await look.send(f"sessions/{name}/blocks/13/mark", {"mark": "pin"})
        assert said(reply)[:2] == (503, "archive_unavailable")
        assert database.read_bytes() == was


async def test_tables_of_another_version_are_said_to_be_that(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        assert (await look.get("sessions"))["total"] == 4
        with closing(sqlite3.connect(tmp_path / "recap.db")) as db:
            db.execute("ALTER TABLE sessions RENAME COLUMN title TO heading")
            db.commit()
        status, code, message = await look.refusal("sessions")
        assert (status, code) == (503, "archive_unavailable") and "restart the proxy" in message


async def test_a_graph_that_contradicts_itself_is_said_to_be_damaged(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        session = look.session(CODING)
        with closing(sqlite3.connect(tmp_path / "recap.db")) as db:
            db.execute(
                "INSERT INTO edges (session_id, support, dependent, weight, position) VALUES (?, 0, 9999, 1.0, 99999)",
                (session.id,),
            )
            db.commit()
        for path in ("graph", "blocks/3"):
            status, code, message = await look.refusal(f"sessions/{session.name}/{path}")
            assert (status, code) == (503, "archive_damaged") and "recap verify" in message


async def test_a_body_that_does_not_come_is_not_waited_for(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "BODY_S", 0.05)
    async with looking(recorded, tmp_path) as look:
        headers = [("X-Recap-Token", look.token), ("Content-Type", "application/json"), ("Content-Length", "100")]
        reader, writer = await asyncio.open_connection("127.0.0.1", look.proxy.port)
        writer.write(request("/recap/api/sessions/x/what-if", b"{", headers=headers))
        async with asyncio.timeout(30):
            assert b" 400 " in await reader.readline()
        writer.close()


async def test_a_mark_that_cannot_be_written_is_said_and_the_views_go_on(
    recorded: Recorded, tmp_path: Path, impatient: None
) -> None:
    upstream = RecordingUpstream()
    async with upstream.running(), looking(recorded, tmp_path, upstream=upstream.url) as look:
        holder = sqlite3.connect(tmp_path / "recap.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        path = f"sessions/{look.names[CODING]}/blocks/3"
        status, code, message = said(await look.send(f"{path}/mark", {"mark": "pin"}))
        assert (status, code) == (503, "archive_unavailable")
        assert "the database is locked" in message and "close the program" in message
        assert (await look.get(path))["mark"] is None
        await converse(look.client, upstream, "meanwhile")
        holder.execute("ROLLBACK")
        holder.close()
        await look.post(f"{path}/mark", {"mark": "pin"})


async def test_what_is_removed_while_a_view_reads_it_is_not_there(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view reads in several steps, and somebody forgets the session between two of them."""
    async with looking(recorded, tmp_path) as look:
        name = look.names[CODING]

        def node_contents(reader: Reader, ids: Iterable[int]) -> list[bytes]:
            with closing(sqlite3.connect(tmp_path / "recap.db")) as db:
                db.execute("UPDATE sessions SET name = 'another' WHERE name = ?", (name,))
                db.commit()
            raise KeyError(next(iter(ids)))

        monkeypatch.setattr(Reader, "node_contents", node_contents)
        status, code, message = await look.refusal(f"sessions/{name}/blocks/0")
    assert (status, code) == (404, "not_found") and name in message


async def test_a_view_that_fails_is_an_answer_and_the_log_knows_more(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("canary")

    monkeypatch.setattr(routes, "sum_up", fail)
    upstream = RecordingUpstream()
    async with upstream.running(), looking(recorded, tmp_path, upstream=upstream.url) as look:
        status, code, message = await look.refusal("savings")
        assert (status, code) == (500, "inspector_failed") and "canary" not in message
        assert "RuntimeError: canary" in caplog.text
        await converse(look.client, upstream, "all the same")
        assert await look.get("sessions")


async def test_a_path_that_leads_nowhere_is_named(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        name = look.names[CODING]
        own = [f"sessions/{name}{rest}" for rest in ("/", "/turns", "/map/x", "%2Fmap%2Fx")]
        for path in ("", "nothing", "sessions/", *own):
            status, code, message = await look.refusal(path)
            assert (status, code) == (404, "not_found") and "/recap/api/" in message
        await other_methods(look, name)


async def other_methods(look: Look, name: str) -> None:
    """A change of what can only be read, and the reading of what can only be changed."""
    headers = {"x-recap-token": look.token}
    for method, path in (("POST", "sessions"), ("DELETE", f"sessions/{name}"), ("PUT", f"sessions/{name}/what-if")):
        reply = await look.client.request(method, f"/recap/api/{path}", headers=headers)
        assert said(reply)[:2] == (405, "method_not_allowed")
