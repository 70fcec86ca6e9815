"""Request bodies: read, decoded, rewritten, or left alone, and always framed rightly."""

import gzip
import json
import zlib
from collections.abc import Callable

import brotli  # type: ignore[import-untyped]  # ships no types
import pytest
from backports import zstd

from proxy.settings import Settings
from tests.fakes.conversations import FakeConversations
from tests.fakes.raw_client import exchange, raw_client, request
from tests.fakes.raw_upstream import Call, answering, raw_upstream, response
from tests.support import running_proxy

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "你好 " * 50}]}).encode()


def _raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstd.compress,
    "gzip": gzip.compress,
    "br": brotli.compress,
    "deflate": zlib.compress,
    "Deflate ": _raw_deflate,
    "gzip, zstd": lambda data: zstd.compress(gzip.compress(data)),
    "identity": bytes,
}


@pytest.mark.parametrize("encoding", ENCODERS)
async def test_encoded_body_is_read_decoded_and_forwarded_as_it_came(encoding: str) -> None:
    """Codex compresses with zstd; a proxy that parsed the bytes as text answered 500 to every call."""
    wire = ENCODERS[encoding](BODY)
    conversations = FakeConversations()
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        await exchange(proxy.port, request(CHAT, wire, headers=[("Content-Encoding", encoding)]))
        call = await upstream.call()
    arrival = conversations.arrivals[0]
    assert (arrival.body, arrival.unreadable, arrival.dialect, arrival.path) == (BODY, None, "chat", CHAT)
    assert call.body == wire
    assert call.header(b"content-encoding") == [encoding.strip().encode()]
    assert call.header(b"content-length") == [str(len(wire)).encode()]


@pytest.mark.parametrize(
    ("encoding", "wire", "reason"),
    [
        ("zstd", b"{}", "damaged zstd body"),
        ("gzip", gzip.compress(BODY)[:-9], "damaged gzip body"),
        ("snappy", b"{}", "unknown content encoding 'snappy'"),
        ("zstd", zstd.compress(b" " * 5000), "more than 4096 bytes"),
        ("gzip, gzip, gzip, gzip, gzip", b"{}", "5 content encodings"),
    ],
)
async def test_what_cannot_be_decoded_is_forwarded_untouched(encoding: str, wire: bytes, reason: str) -> None:
    conversations = FakeConversations()
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url, max_body_bytes=4096), conversations) as proxy,
    ):
        reply = await exchange(proxy.port, request(CHAT, wire, headers=[("Content-Encoding", encoding)]))
        call = await upstream.call()
    assert (reply.status, call.body) == (200, wire)
    assert reason in (conversations.arrivals[0].unreadable or "")
    assert conversations.arrivals[0].body == b""


@pytest.mark.parametrize("new", [b"{}", BODY * 3])
async def test_rewritten_body_goes_out_plain_with_its_own_length(new: bytes) -> None:
    """An old length makes the upstream wait for ever or cuts the body."""
    conversations = FakeConversations(lambda _: new)
    sent = [("Content-Encoding", "gzip"), ("Authorization", "Bearer k"), ("X-Twice", "1"), ("X-Twice", "2")]
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        await exchange(proxy.port, request(CHAT, gzip.compress(BODY), headers=sent))
        call = await upstream.call()
    assert call.body == new
    assert call.header(b"content-length") == [str(len(new)).encode()]
    assert not call.header(b"content-encoding") and not call.header(b"transfer-encoding")
    assert call.header(b"x-twice") == [b"1", b"2"] and call.header(b"authorization") == [b"Bearer k"]


@pytest.mark.parametrize("recorded", [True, False])
async def test_chunked_request_stays_chunked_and_has_no_length(recorded: bool) -> None:
    conversations = FakeConversations() if recorded else None
    framed = b'5\r\n{"a":\r\n3\r\n 1}\r\n0\r\n\r\n'
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        await exchange(proxy.port, request(CHAT, framed, headers=[("Transfer-Encoding", "chunked")]))
        call = await upstream.call()
    assert call.header(b"transfer-encoding") == [b"chunked"]
    assert not call.header(b"content-length")
    assert call.unchunked() == b'{"a": 1}'
    if conversations is not None:
        assert conversations.arrivals[0].body == b'{"a": 1}'


async def test_answer_with_both_framings_never_reaches_the_client() -> None:
    """A length beside chunks is how answers are smuggled: nobody can say where this one ends."""
    both = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    async with raw_upstream(answering(both)) as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        reply = await exchange(proxy.port, request(CHAT, b"{}"))
    assert reply.status == 502
    assert b'"code":"upstream_unreachable"' in reply.body


@pytest.mark.parametrize("announced", [True, False])
async def test_body_over_the_limit_is_streamed_through_and_not_read(announced: bool) -> None:
    """Never an error of ours: the upstream decides what is too large."""
    body = bytes(range(256)) * 40
    framing = [] if announced else [("Transfer-Encoding", "chunked")]
    wire = body if announced else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    conversations = FakeConversations()
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url, max_body_bytes=1000), conversations) as proxy,
    ):
        reply = await exchange(proxy.port, request("/v1/responses", wire, headers=framing))
        call = await upstream.call()
    assert reply.status == 200
    assert (call.body if announced else call.unchunked()) == body
    assert (conversations.arrivals[0].body, conversations.arrivals[0].dialect) == (b"", "responses")
    assert "1000 bytes" in (conversations.arrivals[0].unreadable or "")
    assert conversations.exchange.endings == ["complete"]


async def test_large_body_below_the_limit_arrives_whole() -> None:
    body = b'{"x": "' + b"y" * (5 << 20) + b'"}'
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url), FakeConversations()) as proxy,
    ):
        await exchange(proxy.port, request(CHAT, body))
        call = await upstream.call()
    assert call.body == body
    assert call.header(b"content-length") == [str(len(body)).encode()]


async def test_malformed_json_is_the_upstreams_business() -> None:
    body = b'{"messages": [\xff\xfe "\\ud800" 1e999'
    async with (
        raw_upstream(answering(response(b"bad", status=b"400 Bad Request"))) as upstream,
        running_proxy(Settings(upstream=upstream.url), FakeConversations()) as proxy,
    ):
        reply = await exchange(proxy.port, request(CHAT, body))
        call = await upstream.call()
    assert (reply.status, reply.body, call.body) == (400, b"bad", body)


@pytest.mark.parametrize("status", [b"400 Bad Request", b"413 Too Large", b"422 Unprocessable Entity"])
async def test_rejected_rewrite_is_sent_again_in_its_original_form_once(status: bytes) -> None:
    """The second answer is relayed as it is, even when it is a rejection as well."""
    wire = zstd.compress(BODY)
    conversations = FakeConversations(lambda _: b"{}")
    async with (
        raw_upstream(
            answering(response(b"first", status=status)), answering(response(b"second", status=b"400 Again"))
        ) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        reply = await exchange(proxy.port, request(CHAT, wire, headers=[("Content-Encoding", "zstd")]))
    assert [call.body for call in upstream.calls] == [b"{}", wire]
    assert upstream.calls[1].header(b"content-encoding") == [b"zstd"]
    assert (reply.status, reply.body) == (400, b"second")
    assert conversations.exchange.rejections == [(int(status[:3]), b"first")]
    assert (conversations.exchange.endings, conversations.exchange.body) == (["complete"], b"second")


@pytest.mark.parametrize(
    ("rewrite", "status"), [(True, b"401 No"), (True, b"429 Slow"), (True, b"500 Oh"), (False, b"400 Bad")]
)
async def test_an_answer_that_the_rewrite_did_not_cause_is_relayed(rewrite: bool, status: bytes) -> None:
    conversations = FakeConversations(lambda _: b"{}" if rewrite else None)
    async with (
        raw_upstream(answering(response(b"no", status=status))) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        reply = await exchange(proxy.port, request(CHAT, BODY))
    assert (reply.status, reply.body, len(upstream.calls)) == (int(status[:3]), b"no", 1)
    assert conversations.exchange.rejections == []


async def test_a_rejection_without_end_does_not_hold_the_original_back() -> None:
    async def endless(call: Call) -> None:
        await call.send(b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not call.closed.is_set():
            await call.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")

    conversations = FakeConversations(lambda _: b"{}")
    async with (
        raw_upstream(endless, answering(response(b"fine"))) as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        reply = await exchange(proxy.port, request(CHAT, BODY))
    assert (reply.status, reply.body) == (200, b"fine")
    assert len(conversations.exchange.rejections[0][1]) == 1 << 20


async def test_expect_continue_is_answered_here() -> None:
    """The header is hop-by-hop: without our 100 the client would hold its body back."""
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url), FakeConversations()) as proxy,
        raw_client(proxy.port) as client,
    ):
        head = request(CHAT, BODY, headers=[("Expect", "100-continue")])[: -len(BODY)]
        await client.send(head)
        assert b"100 Continue" in await client.until(b"\r\n\r\n")
        await client.send(BODY)
        assert (await client.reply()).status == 200
        call = await upstream.call()
    assert call.body == BODY and not call.header(b"expect")
