"""However an exchange ends, the other side learns of it at once, and the record is finished exactly once."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any, cast

import pytest

from proxy.connection import ClientConnection
from proxy.ports import Conversations
from proxy.server import bind
from proxy.settings import Settings
from proxy.upstream.client import Upstream
from proxy.upstream.relay import Outgoing, relay
from tests.fakes.conversations import FakeConversations
from tests.fakes.raw_client import exchange, raw_client, request
from tests.fakes.raw_upstream import Call, Script, answering, cutting, raw_upstream, response, stalling
from tests.support import running_proxy

CHAT = "/v1/chat/completions"
ROUTES = (CHAT, "/responses", "/v1/embeddings")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sending_then_stalling(data: bytes) -> Script:
    async def script(call: Call) -> None:
        await call.send(data)
        await call.closed.wait()

    return script


async def closed_by_proxy(call: Call) -> None:
    """Within the promised second, and no sooner than the test asks."""
    assert not call.closed.is_set()
    async with asyncio.timeout(1):
        await call.closed.wait()


# (what the upstream has sent when the client leaves, what the client waits for before it leaves)
MOMENTS = {
    "before headers": (b"", None),
    "before the first token": (STREAM_HEAD, b"\r\n\r\n"),
    "mid-stream": (STREAM_HEAD + chunk(b"data: 1\n\n"), b"data: 1\n\n"),
    "plain JSON": (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"{"),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_upstream_is_closed_within_a_second_of_the_client_leaving(moment: str, path: str, recorded: bool) -> None:
    """Servers notice by themselves only once they write: the wait before the first byte needs watching of its own."""
    sent, awaited = MOMENTS[moment]
    conversations = FakeConversations() if recorded else None
    async with (
        raw_upstream(sending_then_stalling(sent)) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
        raw_client(proxy.port) as client,
    ):
        await client.send(request(path, b"{}"))
        call = await upstream.call()
        if awaited:
            await client.until(awaited)
        client.vanish()
        await closed_by_proxy(call)
        if conversations is not None and conversations.exchanges:
            await conversations.exchange.finished()
            assert conversations.exchange.endings == ["client gone"]


async def test_client_that_closes_in_good_order_is_noticed_too() -> None:
    async with (
        raw_upstream(stalling) as upstream,
        running_proxy(Settings(upstream=upstream.url), FakeConversations()) as proxy,
    ):
        async with raw_client(proxy.port) as client:
            await client.send(request(CHAT, b"{}"))
            call = await upstream.call()
        await closed_by_proxy(call)


async def test_client_leaving_within_its_upload_ends_the_upload() -> None:
    async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        async with raw_client(proxy.port) as client:
            await client.send(request("/v1/files", b"x" * 10, headers=[("Content-Length", "100")], method="PUT"))
            await upstream.connected(1)
            client.vanish()
        await upstream.connected(0)
        assert not upstream.calls
        assert (await exchange(proxy.port, request("/v1/models", method="GET"))).status == 200


@pytest.mark.parametrize("moment", ["before headers", "mid-stream"])
async def test_detached_exchange_is_read_to_its_end_after_the_client_left(moment: str) -> None:
    """`background: true`: the provider goes on by itself, and the archive wants the answer."""
    head, rest = STREAM_HEAD + chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n") + b"0\r\n\r\n"
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(head if moment == "mid-stream" else b"")
        await go_on.wait()
        await call.send(rest if moment == "mid-stream" else head + rest)

    conversations = FakeConversations(detach=True)
    async with (
        raw_upstream(script) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        async with raw_client(proxy.port) as client:
            await client.send(request("/v1/responses", b"{}"))
            await upstream.call()
            if moment == "mid-stream":
                await client.until(b"data: 1\n\n")
            client.vanish()
        assert (await exchange(proxy.port, request("/recap/health", method="GET"))).status == 200
        go_on.set()
        await conversations.exchange.finished()
    assert conversations.exchange.endings == ["complete"]
    assert conversations.exchange.body == b"data: 1\n\ndata: 2\n\n"


BROKEN = {
    "chunked": (STREAM_HEAD + chunk(b"data: 1\n\n"), b"data: 1\n\n"),
    "inside a chunk": (STREAM_HEAD + b"ff\r\ndata: 1\n\n", b"data: 1\n\n"),
    "with a length": (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"{"),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("framing", BROKEN)
async def test_broken_upstream_breaks_the_client_without_an_end(
    framing: str, recorded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A clean end would make half an answer look whole."""
    sent, arrives = BROKEN[framing]
    conversations = FakeConversations() if recorded else None
    async with (
        raw_upstream(cutting(sent)) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
        raw_client(proxy.port) as client,
    ):
        await client.send(request(CHAT, b"{}"))
        received = await client.rest()
    assert arrives in received
    assert not received.endswith(b"0\r\n\r\n")
    assert [(r.levelno, r.exc_info) for r in caplog.records if r.levelno >= logging.WARNING] == [
        (logging.WARNING, None)
    ]
    if conversations is not None:
        assert conversations.exchange.endings == ["upstream broken"]
        assert conversations.exchange.body == arrives


async def test_upstream_that_closes_without_an_answer_is_502() -> None:
    conversations = FakeConversations()
    async with (
        raw_upstream(cutting(b"")) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        reply = await exchange(proxy.port, request(CHAT, b"{}"))
        calls = len(upstream.calls)
    assert (reply.status, calls) == (502, 1)
    assert (conversations.exchange.endings, conversations.exchange.status) == (["failed"], None)


async def test_unreachable_upstream_is_502_that_names_it_and_the_remedy() -> None:
    with bind("127.0.0.1", 0) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    async with running_proxy(Settings(upstream=url)) as proxy:
        reply = await exchange(proxy.port, request(CHAT + "?api-key=SECRET", b"{}"))
    assert reply.status == 502
    assert b'"code":"upstream_unreachable"' in reply.body
    assert url.encode() in reply.body and b"--upstream" in reply.body
    assert b"SECRET" not in reply.body


async def test_silent_upstream_is_504() -> None:
    async with (
        raw_upstream(stalling) as upstream,
        running_proxy(Settings(upstream=upstream.url, read_timeout=0.05)) as proxy,
    ):
        reply = await exchange(proxy.port, request(CHAT, b"{}"))
    assert reply.status == 504
    assert b'"code":"upstream_timeout"' in reply.body


async def test_each_byte_passes_before_the_next_one_is_sent() -> None:
    """A proxy that buffers would wait here for ever: the upstream sends a byte only once the client has the last."""
    arrived = asyncio.Semaphore(0)
    text = b"data: \xe4\xbd\xa0\n\n"

    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for byte in text:
            await arrived.acquire()
            await call.send(chunk(bytes([byte])))
        await call.send(b"0\r\n\r\n")

    conversations = FakeConversations()
    async with (
        raw_upstream(script) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
        raw_client(proxy.port) as client,
    ):
        await client.send(request(CHAT, b"{}"))
        await client.until(b"\r\n\r\n")  # the headers are here before the first token
        for byte in text:
            arrived.release()
            assert await client.until(b"\r\n") == b"1\r\n"
            assert (await client.exactly(3))[:1] == bytes([byte])
        await client.until(b"0\r\n\r\n")
    assert conversations.exchange.body == text
    assert conversations.exchange.first_bytes == 1


class _CountingAnswer:
    status, headers = 200, ()

    def __init__(self) -> None:
        self.pulled = 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for _ in range(1000):
            self.pulled += 1
            yield b"x"

    async def aclose(self) -> None:
        pass


async def test_slow_client_slows_the_upstream_down() -> None:
    """Without backpressure the whole answer would pile up in memory: a write that waits must hold the next read."""
    answer = _CountingAnswer()
    writing, go_on = asyncio.Event(), asyncio.Event()

    class _Upstream:
        async def send(self, *_: object) -> _CountingAnswer:
            return answer

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("more_body"):
            writing.set()
            await go_on.wait()

    client = ClientConnection({"type": "http", "headers": []}, receive, send)
    outgoing = Outgoing("GET", "http://u/", [], None)
    task = asyncio.create_task(relay(client, cast(Upstream, _Upstream()), outgoing))
    await writing.wait()
    assert answer.pulled == 1
    go_on.set()
    await task
    assert answer.pulled == 1000


async def test_an_answer_longer_than_the_tape_is_relayed_and_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.upstream.relay.TAPE_BYTES_MAX", 10)
    conversations = FakeConversations()
    async with (
        raw_upstream(answering(response(b"x" * 11)), answering(response(b"x" * 10))) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        assert (await exchange(proxy.port, request(CHAT, b"{}"))).body == b"x" * 11
        assert (await exchange(proxy.port, request(CHAT, b"{}"))).body == b"x" * 10
    assert [e.body for e in conversations.exchanges] == [None, b"x" * 10]


class _Failing(FakeConversations):
    async def admit(self, arrival):  # type: ignore[no-untyped-def]
        raise RuntimeError("no archive")


async def test_a_failure_of_the_session_logic_never_costs_the_request() -> None:
    failing: Conversations = _Failing()
    async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url), failing) as proxy:
        reply = await exchange(proxy.port, request(CHAT, b'{"a": 1}'))
        call = await upstream.call()
    assert (reply.status, call.body) == (200, b'{"a": 1}')


async def test_cut_off_by_the_operator_the_record_is_finished_before_the_archive_closes() -> None:
    conversations = FakeConversations()
    async with raw_upstream(stalling) as upstream:
        async with running_proxy(Settings(upstream=upstream.url), conversations) as proxy:
            async with raw_client(proxy.port) as client:
                await client.send(request(CHAT, b"{}"))
                call = await upstream.call()
                assert not call.closed.is_set()
                for task in list(proxy.server.server_state.tasks):
                    task.cancel()
                await conversations.exchange.finished()
        assert conversations.exchange.endings == ["failed"]
        assert conversations.closed == 1


async def test_answers_in_pieces_do_not_wait_for_acknowledgements() -> None:
    """asyncio leaves Nagle's algorithm on where a listening socket does not say that it speaks TCP: 40 ms an answer."""
    accepted = asyncio.get_running_loop().create_future()

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(note, sock=bind("127.0.0.1", 0)) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await accepted
        writer.close()
