"""Real sockets, any bytes in any pieces: the client gets what the upstream sent, the record is the same bytes, and
neither an odd encoding nor an odd body ever becomes an error of ours.
"""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from proxy.conversations import open_conversations
from proxy.settings import Settings
from tests.archives import lay_out_archive
from tests.clock import VirtualClock
from tests.fakes.conversations import FakeConversations
from tests.fakes.raw_client import Reply, exchange, request
from tests.fakes.raw_upstream import Call, RawUpstream, Script, answering, raw_upstream, response
from tests.fuzz.test_encodings import CODINGS, ENCODERS
from tests.fuzz.test_requests import any_body
from tests.fuzz.wild import cut, damaged
from tests.support import RunningProxy, running_proxy

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PATHS = st.sampled_from([CHAT, RESPONSES, "/v1/embeddings"])
FEWER = max(1, settings().max_examples // 4)
TEXT = 'data: {"choices":[{"delta":{"content":"漢字 😀"}}]}\n\ndata: [DONE]\n\n'.encode()
BODIES = st.binary(max_size=60) | st.just(TEXT) | damaged(TEXT)


class Line:
    """A proxy between two raw ends, on an event loop of its own, so that one serves every example."""

    def __init__(self, runner: asyncio.Runner, proxy: RunningProxy, upstream: RawUpstream) -> None:
        self.runner, self.proxy, self.upstream = runner, proxy, upstream

    def send(self, data: bytes, script: Script) -> tuple[Reply, Call]:
        """One request: what its client got, and how it reached the upstream."""
        self.upstream.scripts = [script]
        count = len(self.upstream.calls)
        reply = self.runner.run(exchange(self.proxy.port, data))
        assert len(self.upstream.calls) == count + 1
        return reply, self.upstream.calls[count]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def spoken_to(runner: asyncio.Runner) -> Iterator[tuple[Line, FakeConversations]]:
    """What is recorded can be looked at."""
    conversations, stack = FakeConversations(), AsyncExitStack()

    async def begin() -> Line:
        upstream = await stack.enter_async_context(raw_upstream())
        settings = Settings(upstream=upstream.url)
        return Line(runner, await stack.enter_async_context(running_proxy(settings, conversations)), upstream)

    yield runner.run(begin()), conversations
    runner.run(stack.aclose())


@pytest.fixture(scope="module")
def archiving(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """Everything as it ships."""
    database, stack, clock = tmp_path_factory.mktemp("archive") / "recap.db", AsyncExitStack(), VirtualClock()
    lay_out_archive(database)

    async def begin() -> Line:
        upstream = await stack.enter_async_context(raw_upstream())
        settings = Settings(upstream=upstream.url, db=str(database), max_body_bytes=1 << 16)
        conversations = open_conversations(settings, clock)
        stack.push_async_callback(conversations.close)
        return Line(runner, await stack.enter_async_context(running_proxy(settings, conversations)), upstream)

    yield runner.run(begin())
    runner.run(stack.aclose())


def in_pieces(pieces: list[bytes]) -> Script:
    """Each handed to the network before the next one is written."""

    async def script(call: Call) -> None:
        for piece in pieces:
            await call.send(piece)
            await asyncio.sleep(0)

    return script


def chunked(body: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*filter(None, body), b""])


def unchunked(body: bytes) -> bytes:
    plain = b""
    while size := int(body.partition(b"\r\n")[0], 16):
        body = body.partition(b"\r\n")[2]
        plain, body = plain + body[:size], body[size + 2 :]
    return plain


@settings(max_examples=FEWER, suppress_health_check=list(HealthCheck))
@given(BODIES, st.data(), PATHS, st.sampled_from([b"text/event-stream", b"application/json"]), st.booleans())
def test_any_answer_in_any_pieces_reaches_the_client_and_the_record_alike(
    spoken_to: tuple[Line, FakeConversations],
    body: bytes,
    data: st.DataObject,
    path: str,
    content_type: bytes,
    with_length: bool,
) -> None:
    """Cut by the upstream into chunks, and those by the network into packets, chunk lines and headers among them."""
    line, conversations = spoken_to
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n" % content_type
    if with_length:
        wire = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        wire = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(data.draw(cut(body)))
    reply, _ = line.send(request(path, b"{}"), in_pieces(data.draw(cut(wire))))
    assert reply.status == 200 and reply.header(b"content-type") == [content_type]
    assert (reply.body if reply.header(b"content-length") else unchunked(reply.body)) == body
    if path != "/v1/embeddings":
        line.runner.run(conversations.exchange.finished())
        assert conversations.exchange.endings == ["complete"] and conversations.exchange.body == body


SENT = any_body("chat") | any_body("responses") | st.just(bytes(1 << 20))
ENCODED = st.tuples(st.lists(CODINGS, max_size=3), st.lists(CODINGS | st.just("sdch"), max_size=5))


@settings(max_examples=FEWER, suppress_health_check=list(HealthCheck))
@given(
    any_body("chat") | any_body("responses") | st.just(bytes(1 << 20)),
    ENCODED,
    st.data(),
    st.sampled_from([CHAT, RESPONSES]),
)
def test_whatever_is_sent_and_answered_in_whatever_encoding_passes_as_it_came(
    archiving: Line,
    caplog: pytest.LogCaptureFixture,
    body: bytes,
    encoded: tuple[list[str], list[str]],
    data: st.DataObject,
    path: str,
) -> None:
    """Truly and falsely labelled, damaged, or a bomb: both ways."""
    layers, named = encoded
    for layer in layers:
        body = ENCODERS[layer](body)
    body = data.draw(st.just(body) | damaged(body[:200]))
    label = data.draw(st.just(layers) | st.just(named))
    headers = [("Content-Encoding", ", ".join(label))] if label else []
    caplog.clear()
    given = tuple((name.encode(), value.encode()) for name, value in headers)
    reply, call = archiving.send(request(path, body, headers=headers), answering(response(body, headers=given)))
    assert (reply.status, reply.body, call.body) == (200, body, body)
    assert call.header(b"content-encoding") == reply.header(b"content-encoding") == [value for _, value in given]
    state = archiving.runner.run(exchange(archiving.proxy.port, request("/recap/health", method="GET")))
    assert json.loads(state.body)["archive"]["state"] == "ok"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@settings(max_examples=4 * FEWER, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=8) | st.binary(max_size=8), st.sampled_from(["", "api/", "static/", "api/sessions/", "health"]))
@example(rest="\n", place="")  # a mount of Starlette takes no line feed, and what no route takes goes upstream
def test_no_path_of_ours_reaches_the_upstream(archiving: Line, rest: str | bytes, place: str) -> None:
    count = len(archiving.upstream.calls)
    quoted = quote(rest.encode("utf-8", "surrogatepass") if isinstance(rest, str) else rest)
    data = request(f"/recap/{place}{quoted}", method="GET", headers=[("Connection", "close")])
    reply = archiving.runner.run(exchange(archiving.proxy.port, data))
    assert len(archiving.upstream.calls) == count and reply.status < 500
