"""With nothing to rewrite, both sides receive exactly the other's bytes and headers."""

import pytest

from proxy.settings import Settings
from tests.fakes.raw_client import exchange, raw_client, request
from tests.fakes.raw_upstream import answering, raw_upstream, response
from tests.support import running_proxy


async def test_request_arrives_with_its_bytes_its_header_multiset_and_nothing_else() -> None:
    """Client libraries add Accept, User-Agent and Content-Type by themselves, and merge duplicates."""
    sent = [
        ("Authorization", "Bearer key"),
        ("X-Twice", "a"),
        ("x-stainless-os", "Linux"),
        ("X-Twice", "b"),
        ("Cookie", "c=1; d=2"),
        ("accept-encoding", "zstd"),
    ]
    dropped = [("Connection", "keep-alive, X-Private"), ("X-Private", "1"), ("TE", "trailers"), ("Keep-Alive", "9")]
    body = b'{"b": 1,\n "a": "\xc3\xa9", "a": 2}'
    async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        reply = await exchange(proxy.port, request("/v1/chat/completions", body, headers=sent + dropped))
        call = await upstream.call()
    assert reply.status == 200
    assert call.body == body
    expected = [(k.lower().encode(), v.encode()) for k, v in sent]
    expected += [(b"host", f"127.0.0.1:{upstream.port}".encode()), (b"content-length", str(len(body)).encode())]
    assert sorted((k.lower(), v) for k, v in call.headers) == sorted(expected)


async def test_response_arrives_with_its_bytes_and_headers() -> None:
    """Encoded bytes stay encoded, the length stays, and both cookies arrive as two headers."""
    body = b"\x1f\x8b not really gzip"
    fields = (
        (b"Content-Encoding", b"gzip"),
        (b"Set-Cookie", b"a=1"),
        (b"X-Request-Id", b"r1"),
        (b"Set-Cookie", b"b=2"),
        (b"Date", b"Thu, 01 Jan 1970 00:00:00 GMT"),
        (b"Server", b"theirs"),
    )
    hidden = ((b"Keep-Alive", b"timeout=5"), (b"Alt-Svc", b'h3=":443"'), (b"Strict-Transport-Security", b"max-age=1"))
    script = answering(response(body, status=b"418 Teapot", headers=fields + hidden))
    async with raw_upstream(script) as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        reply = await exchange(proxy.port, request("/v1/responses", b"{}"))
    assert (reply.status, reply.body) == (418, body)
    expected = [(k.lower(), v) for k, v in fields] + [(b"content-length", str(len(body)).encode())]
    assert sorted(reply.headers) == sorted(expected)
