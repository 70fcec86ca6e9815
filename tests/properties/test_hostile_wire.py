"""The proxy as it ships, between hostile clients, a failing upstream and a disk that goes away.

Every test has a session that is served compacted: that is what must not break, get mixed up or lose anything.
"""

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from graphstore.store.archive import open_reader
from graphstore.store.verify import verify
from proxy.commands.verify import recut
from proxy.conversations import open_conversations
from proxy.settings import Settings
from tests.archives import lay_out_archive
from tests.clock import VirtualClock
from tests.fakes.raw_client import exchange, raw_client, request
from tests.fakes.raw_upstream import Call, RawUpstream, Script, answering, cutting, raw_upstream, response
from tests.proxy.dialogue import LUNCH_S, SYSTEM, TOOLS, Message, read, said, turn, user
from tests.support import RunningProxy, running_proxy

CHAT = "/v1/chat/completions"
ANSWER = response(
    json.dumps({"choices": [{"message": said("ok"), "finish_reason": "stop"}], "usage": {"prompt_tokens": 9}}).encode(),
    headers=((b"Content-Type", b"application/json"),),
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"o"}}]}\n\n'
FIRST, SECOND = turn("please read the first file", "first"), turn("now the second one", "second")
LONG = [*FIRST, *SECOND, user("go on")]


def body_of(history: Sequence[Message], **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [SYSTEM, *history], "tools": TOOLS} | more).encode()


@dataclass
class Wire:
    """A proxy between raw sockets. `send` takes raw bodies and gives what the upstream received."""

    proxy: RunningProxy
    upstream: RawUpstream
    clock: VirtualClock

    async def send(self, body: bytes, *headers: tuple[str, str], session: str = "s", path: str = CHAT) -> bytes:
        number = len(self.upstream.calls)
        reply = await exchange(self.proxy.port, self.request(body, *headers, session=session, path=path))
        assert reply.status == 200
        return self.upstream.calls[number].body

    def request(self, body: bytes, *headers: tuple[str, str], session: str = "s", path: str = CHAT) -> bytes:
        given = [("Authorization", "Bearer key"), ("x-session-id", session), *headers]
        return request(path, body, headers=given)

    async def work(self, session: str = "s") -> bytes:
        """A session of two turns, a break, and the request that is compacted: gives its body as sent."""
        await self.send(body_of(FIRST[:1]), session=session)
        await self.send(body_of([*FIRST, SECOND[0]]), session=session)
        self.clock.advance(LUNCH_S)
        sent = await self.send(body_of(LONG), session=session)
        assert len(sent) < len(body_of(LONG))
        return sent

    async def health(self) -> bytes:
        return (await exchange(self.proxy.port, request("/recap/health", method="GET"))).body


@asynccontextmanager
async def wire(folder: Path, *scripts: Script, **changes: Any) -> AsyncIterator[Wire]:
    path = folder / "recap.db"
    lay_out_archive(path)
    clock = VirtualClock()
    async with raw_upstream(*(scripts or (answering(ANSWER),))) as upstream:
        given: dict[str, Any] = {"mode": "idle", "upstream": upstream.url, "db": str(path), "min_history_tokens": 0}
        settings = Settings(**(given | changes))
        conversations = open_conversations(settings, clock)
        async with running_proxy(settings, conversations) as proxy:
            yield Wire(proxy, upstream, clock)
        await conversations.close()


def findings(folder: Path) -> list[str]:
    with open_reader(folder / "recap.db") as reader:
        return [str(finding) for finding in verify(reader, recut)]


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def delete(folder: Path) -> None:
    for path in folder.glob("recap.db*"):
        path.unlink()


MESSAGES = body_of(LONG)[:-1]
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "cut off": MESSAGES[:500],
    "a number": b"1e999",
    "an array": b"[]",
    "messages of the wrong type": b'{"model":[],"messages":{"0":{"role":"user"}}}',
    "a model of the wrong type": b'{"model":{"a":1},"messages":[{"role":"user","content":"x"}]}',
    "roles of every type": b'{"messages":[{"role":7},{"role":null},{"role":[]},{"role":{}},{"role":true},{}]}',
    "contents of every type": b'{"messages":[{"role":"user","content":7},{"role":"assistant","content":{"text":[]}},'
    b'{"role":"tool","tool_call_id":{},"content":[null,7,[],{"text":{}}]},{"role":"user","content":[[[]]]}]}',
    "calls of every type": b'{"messages":[{"role":"assistant","tool_calls":7},'
    b'{"role":"assistant","tool_calls":[7,null]},{"role":"assistant","tool_calls":[{"id":[],"function":7}]},{"role":"assistant","function_call":[]},'
    b'{"role":"user","content":"x"}]}',
    "lone surrogates": b'{"model":"\\ud800","messages":[{"role":"user","content":"\\udc00 \\ud83d"},'
    b'{"role":"\\ud800"}]}',
    "huge numbers": b'{"messages":[{"role":"user","content":"x","n":' + b"9" * 5000 + b',"m":1e400}],"seed":-1e-999}',
    "a key twice": MESSAGES + b',"model":"n"}',
    "messages twice": MESSAGES + b',"messages":[{"role":"user","content":"x"}]}',
    "a key twice in a message": b'{"messages":[{"role":"user","role":"tool","content":"x"},'
    b'{"role":"user","content":"y"}]}',
    "not UTF-8": MESSAGES + b',"user":"\xff\xfe"}',
    "not UTF-8 in a message": b'{"messages":[{"role":"user","content":"\xc3("}]}',
    "a byte order mark": b"\xef\xbb\xbf" + MESSAGES + b"}",
    "NUL": b'{"model":"\\u0000","messages":[{"role":"user","content":"\\u0000 x"}]}',
    "deeply nested": b'{"messages":[{"role":"user","content":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    "deeply nested aside": MESSAGES + b',"x":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    "unknown fields": MESSAGES + b',"frobnicate":{"__proto__":null},"":0}',
    "NaN": b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "two documents": MESSAGES + b"}" + MESSAGES + b"}",
}
UNDERSTOOD = {"unknown fields"}  # the history of the session as it stands, in a body that is unusual and clear


@pytest.mark.parametrize("session", ["s", "another"])
async def test_hostile_bodies_pass_as_they_came_and_disturb_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, session: str
) -> None:
    """Under the id of a compacted session they may move it, but what is understood of it later is compacted still."""
    async with wire(tmp_path) as between:
        before = await between.work()
        for name, body in HOSTILE.items():
            for path in (CHAT, "/v1/responses"):
                arrived = await between.send(body, session=session, path=path)
                if name in UNDERSTOOD and session == "s" and path == CHAT:
                    assert arrived == before[:-1] + body[len(MESSAGES) :], name
                else:
                    assert arrived == body, name
        after = await between.send(body_of([*LONG, *read("x.py", "text")]))
        if session == "another":
            assert (
                json.loads(after)["messages"][: len(json.loads(before)["messages"])] == json.loads(before)["messages"]
            )
        assert json.loads(await between.health())["archive"]["state"] == "ok"
    assert findings(tmp_path) == []
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("encoding", ["zstd", "plain"])
async def test_bombs_are_streamed_through(tmp_path: Path, encoding: str) -> None:
    """100 MB, as sent or when decoded: never read, never recorded as a history, and the session goes on."""
    body = b'{"messages":[{"role":"user","content":"' + b" " * 100_000_000 + b'"}]}'
    headers = [("Content-Encoding", "zstd")] if encoding == "zstd" else []
    sent = zstd.compress(body) if encoding == "zstd" else body
    async with wire(tmp_path) as between:
        before = await between.work()
        arrived = await between.send(sent, *headers)
        assert arrived == sent
        assert await between.send(body_of(LONG)) == before
    with sqlite3.connect(tmp_path / "recap.db") as db:
        reasons = [reason for (reason,) in db.execute("SELECT reason FROM exchanges")]
    assert sum("max_body_bytes" in reason or "bytes" in reason for reason in reasons) == 1
    assert findings(tmp_path) == []


@pytest.mark.parametrize(
    "framing",
    [
        [("Content-Length", "5"), ("Content-Length", "6")],
        [("Content-Length", "5"), ("Transfer-Encoding", "chunked")],
        [("Transfer-Encoding", "chunked"), ("Content-Length", "5")],
        [("Transfer-Encoding", "chunked, identity")],
        [("Transfer-Encoding", "xchunked")],
        [("Content-Length", "-1")],
        [("Content-Length", "+5")],
        [("Content-Length", "0x5")],
        [("Content-Length", "5, 5")],
    ],
    ids=lambda framing: " and ".join(": ".join(pair) for pair in framing),
)
async def test_ambiguous_framing_never_smuggles_a_request(tmp_path: Path, framing: list[tuple[str, str]]) -> None:
    """Whatever we make of it, the upstream sees at most one request, framed once."""
    smuggled = b"0\r\n\r\n" + request(CHAT, b"{}")
    async with wire(tmp_path) as between:
        async with raw_client(between.proxy.port) as client:
            await client.send(request(CHAT, smuggled, headers=[("Connection", "close"), *framing]))
            answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 ")
        assert len(between.upstream.calls) <= 1
        for call in between.upstream.calls:
            assert len(call.header(b"content-length")) + len(call.header(b"transfer-encoding")) == 1
            assert b"POST" not in call.body
        before = await between.work()
        assert await between.send(body_of(LONG)) == before


def hanging_after(data: bytes, number: int) -> Script:
    """Call `number` gets `data` and then nothing; all others get an answer."""

    async def script(call: Call) -> None:
        await call.send(data)
        await call.closed.wait()

    return script


PHASES = {
    "before headers": (b"", None),
    "after headers": (STREAM, b"\r\n\r\n"),
    "mid-stream": (STREAM + b"%x\r\n%s\r\n" % (len(EVENT), EVENT), EVENT),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_a_retry_after_the_client_left_gets_the_same_bytes(tmp_path: Path, phase: str) -> None:
    sent, awaited = PHASES[phase]
    ok = answering(ANSWER)
    async with wire(tmp_path, ok, ok, hanging_after(sent, 2), hanging_after(sent, 3), ok) as between:
        await between.send(body_of(FIRST[:1]))
        await between.send(body_of([*FIRST, SECOND[0]]))
        between.clock.advance(LUNCH_S)
        for number in (2, 3):  # at the boundary itself, and at a retry of it
            async with raw_client(between.proxy.port) as client:
                await client.send(between.request(body_of(LONG)))
                await between.upstream.call(number)
                if awaited:
                    await client.until(awaited)
                client.vanish()
            await between.upstream.calls[number].closed.wait()
        again = await between.send(body_of(LONG))
        bodies = [call.body for call in between.upstream.calls]
        assert bodies[2] == bodies[3] == again and len(again) < len(body_of(LONG))
        later = await between.send(body_of([*LONG, *read("x.py", "text")]))
        assert json.loads(later)["messages"][: len(json.loads(again)["messages"])] == json.loads(again)["messages"]
    assert findings(tmp_path) == []


async def test_a_client_that_leaves_while_its_request_is_planned_breaks_nothing(tmp_path: Path) -> None:
    """At the boundary the plan waits for the disk; whether or not it is sent then, the next request is served by it."""
    async with wire(tmp_path) as between:
        await between.send(body_of(FIRST[:1]))
        await between.send(body_of([*FIRST, SECOND[0]]))
        between.clock.advance(LUNCH_S)
        for _ in range(5):
            async with raw_client(between.proxy.port) as client:
                await client.send(between.request(body_of(LONG)))
                client.vanish()
        again = await between.send(body_of(LONG))
        assert len(again) < len(body_of(LONG))
        assert await between.send(body_of(LONG)) == again
    assert findings(tmp_path) == []


@pytest.mark.parametrize("broken", [b"", STREAM, STREAM + b"%x\r\n%s\r\n" % (len(EVENT), EVENT)])
async def test_a_retry_after_the_upstream_broke_gets_the_same_bytes(tmp_path: Path, broken: bytes) -> None:
    ok = answering(ANSWER)
    async with wire(tmp_path, ok, ok, cutting(broken), ok) as between:
        await between.send(body_of(FIRST[:1]))
        await between.send(body_of([*FIRST, SECOND[0]]))
        between.clock.advance(LUNCH_S)
        async with raw_client(between.proxy.port) as client:
            await client.send(between.request(body_of(LONG)))
            await client.until(b"\r\n\r\n")
        await between.upstream.call(2)
        again = await between.send(body_of(LONG))
        assert again == between.upstream.calls[2].body and len(again) < len(body_of(LONG))
    assert findings(tmp_path) == []


async def test_a_rejected_rewrite_is_answered_by_the_original_and_never_tried_again(tmp_path: Path) -> None:
    ok, no = answering(ANSWER), answering(response(b'{"error":{"message":"no"}}', status=b"400 Bad Request"))
    async with wire(tmp_path, ok, ok, no, ok) as between:
        await between.send(body_of(FIRST[:1]))
        await between.send(body_of([*FIRST, SECOND[0]]))
        between.clock.advance(LUNCH_S)
        await between.send(body_of(LONG))
        bodies = [call.body for call in between.upstream.calls]
        assert len(bodies[2]) < len(bodies[3]) and bodies[3] == body_of(LONG)
        for more in ([], read("x.py", "text"), [said("ok"), user("and now?")]):
            between.clock.advance(LUNCH_S)
            assert await between.send(body_of([*LONG, *more])) == body_of([*LONG, *more])
    assert findings(tmp_path) == []


async def test_a_deleted_archive_takes_nothing_new_with_it(tmp_path: Path) -> None:
    """SQLite goes on writing to a file that nobody can open any more: what is left out then would be lost."""
    async with wire(tmp_path) as between:
        await between.send(body_of(FIRST[:1]))
        await between.send(body_of([*FIRST, SECOND[0]]))
        delete(tmp_path)
        between.clock.advance(LUNCH_S)
        assert await between.send(body_of(LONG)) == body_of(LONG)
        archive = json.loads(await between.health())["archive"]
        assert archive["state"] == "failing" and "moved or deleted" in archive["problem"]


async def test_a_locked_archive_keeps_what_is_served_and_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.planning.DURABLE_DEADLINE_S", 0.2)
    async with wire(tmp_path) as between:
        before = await between.work("s")
        await between.send(body_of(FIRST[:1]), session="t")
        await between.send(body_of([*FIRST, SECOND[0]]), session="t")
        blocker = sqlite3.connect(tmp_path / "recap.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        try:
            between.clock.advance(LUNCH_S)
            assert await between.send(body_of(LONG), session="s") == before
            assert await between.send(body_of(LONG), session="t") == body_of(LONG)
        finally:
            blocker.execute("ROLLBACK")
            blocker.close()
    assert findings(tmp_path) == []


@pytest.mark.parametrize("named", [True, False])
async def test_fifty_sessions_with_one_beginning_stay_apart(tmp_path: Path, named: bool) -> None:
    """Equal up to the first answer; from there on each has words of its own, and sees those alone."""
    count = 50
    async with wire(tmp_path, beta=0.5) as between:

        def history(number: int, turns: int) -> list[Message]:
            found = [user("hello"), said(f"I am agent_number_{number:03d}")]
            for t in range(turns):
                found += turn(f"task {t}", f"agent_{number:03d}_{t}", 600)
            return found

        async def send(number: int, messages: list[Message]) -> bytes:
            body = body_of(messages, user=f"u{number}")
            headers = [("Authorization", "Bearer key"), *([("x-session-id", f"s{number}")] if named else [])]
            await exchange(between.proxy.port, request(CHAT, body, headers=headers))
            return body

        async def all_send(turns: int) -> None:
            await asyncio.gather(*(send(n, [*history(n, turns), user(f"task {turns}")]) for n in range(count)))

        for turns in (1, 2):
            await all_send(turns)
        between.clock.advance(LUNCH_S)
        await all_send(3)
        await all_send(4)
        bodies = [json.loads(call.body) for call in between.upstream.calls]
    for body in bodies:
        number = int(body["user"][1:])
        text = json.dumps(body["messages"])
        assert all(f"agent_{other:03d}" not in text for other in range(count) if other != number)
    compacted = [body for body in bodies if "not shown" in json.dumps(body["messages"])]
    assert len(compacted) == 2 * count
    assert findings(tmp_path) == []
    with sqlite3.connect(tmp_path / "recap.db") as db:
        assert db.execute("SELECT count(*) FROM sessions").fetchone() == (count,)


async def test_canaries_are_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = [("Authorization", "Bearer canary-1"), ("api-key", "canary-2"), ("Cookie", "id=canary-3")]
    secrets += [("x-api-key", "canary-4"), ("Proxy-Authorization", "Basic canary-5"), ("x-goog-api-key", "canary-6")]
    no = answering(response(b'{"error":{"message":"no"}}', status=b"400 Bad Request"))
    ok, path = answering(ANSWER), f"{CHAT}?key=canary-7&api_key=canary-8"
    async with wire(tmp_path, ok, ok, no, ok, cutting(b"")) as between:
        for history in ([FIRST[0]], [*FIRST, SECOND[0]], LONG, [*LONG, said("ok"), user("more")]):
            between.clock.advance(LUNCH_S)
            await exchange(between.proxy.port, request(path, body_of(history), headers=secrets))
        await exchange(between.proxy.port, request(path, b"{", headers=secrets))
        assert b"canary" not in await between.health()
        assert all(call.header(b"authorization") == [b"Bearer canary-1"] for call in between.upstream.calls)
        live = all_bytes(tmp_path)
    assert b"canary" not in live + all_bytes(tmp_path)
    assert "canary" not in caplog.text
