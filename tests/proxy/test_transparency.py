"""With nothing to rewrite, both sides receive exactly the other's bytes and headers."""

import json
from pathlib import Path

import pytest

from proxy.settings import Settings
from tests.fakes.conversations import FakeConversations
from tests.fakes.raw_client import exchange, raw_client, request
from tests.fakes.raw_upstream import answering, cutting, raw_upstream, response
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


PATHS = [
    "GET /v1/models",
    "GET /v1/models?limit=2&after=%2Fx",
    "POST /v1/embeddings",
    "POST /v1/responses/compact",
    "POST /v1/responses/input_tokens",
    "GET /v1/responses/resp_1?stream=true&starting_after=3",
    "DELETE /v1/responses/resp_1",
    "POST /v1/responses/resp_1/cancel",
    "POST /openai/deployments/my%20d/chat/completions?api-version=2025-01-01",
    "POST /openai/responses?api-version=preview",
    "POST /responses",
    "POST /chat/completions",
    "PATCH /v1/x",
    "OPTIONS /v1/chat/completions",
    "GET /a%2fb//c/../d%7E~;p=1'(x)!$&*+,=:@?q=%7e~'[]|{}\"&&=",
    "POST /line%0Abreak",
]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("line", PATHS)
async def test_method_path_and_query_arrive_letter_by_letter(line: str, recorded: bool) -> None:
    """Libraries like to decode, quote anew and tidy up what they take for a URL."""
    method, target = line.split(" ", 1)
    body = b"{}" if method in ("POST", "PATCH") else None
    conversations = FakeConversations() if recorded else None
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url), conversations) as proxy,
    ):
        reply = await exchange(proxy.port, request(target, body, method=method))
        call = await upstream.call()
    assert reply.status == 200
    assert call.line == f"{line} HTTP/1.1".encode()
    assert call.body == (body or b"")
    if body is None:
        assert [name.lower() for name, _ in call.headers] == [b"host"]
    if conversations is not None:
        is_conversation = method == "POST" and target.partition("?")[0].endswith(("/chat/completions", "/responses"))
        assert len(conversations.arrivals) == is_conversation


async def test_head_and_bodiless_answers_keep_their_connection() -> None:
    """Their length describes a body that does not follow; whoever waits for it hangs."""
    scripts = (
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"),
        answering(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\nETag: x\r\n\r\n"),
        answering(b"HTTP/1.1 204 No Content\r\n\r\n"),
        answering(response(b"last")),
    )
    async with (
        raw_upstream(*scripts) as upstream,
        running_proxy(Settings(upstream=upstream.url)) as proxy,
        raw_client(proxy.port) as client,
    ):
        await client.send(request("/v1/x", method="HEAD"))
        assert b"content-length: 500" in await client.until(b"\r\n\r\n")
        for status, body in ((304, b""), (204, b""), (200, b"last")):
            await client.send(request("/v1/x", method="GET"))
            reply = await client.reply()
            assert (reply.status, reply.body) == (status, body)
        assert upstream.connections == 1


async def test_redirects_and_cookies_are_the_clients_business() -> None:
    """A cookie that one caller was given must never show up in another one's request."""
    moved = response(b"", status=b"307 Moved", headers=((b"Location", b"/v1/b"), (b"Set-Cookie", b"__cf_bm=secret")))
    async with (
        raw_upstream(answering(moved), answering(response())) as upstream,
        # by name: cookie jars ignore addresses
        running_proxy(Settings(upstream=f"http://localhost:{upstream.port}")) as proxy,
    ):
        reply = await exchange(proxy.port, request("/v1/a", b"{}"))
        assert (reply.status, reply.header(b"location")) == (307, [b"/v1/b"])
        await exchange(proxy.port, request("/v1/c", b"{}"))
        assert [call.target for call in upstream.calls] == [b"/v1/a", b"/v1/c"]
        assert not upstream.calls[1].header(b"cookie")


async def test_proxy_of_the_environment_is_used_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_upstream() as company:
        monkeypatch.setenv("HTTP_PROXY", company.url)
        monkeypatch.setenv("http_proxy", company.url)
        async with running_proxy(Settings(upstream="http://provider.test/v1")) as proxy:
            assert (await exchange(proxy.port, request("/v1/responses?a=%2f", b"{}"))).status == 200
        assert company.calls[0].line == b"POST http://provider.test/v1/responses?a=%2f HTTP/1.1"
        async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
            await exchange(proxy.port, request("/v1/responses", b"{}"))
            await upstream.call()
        monkeypatch.setenv("no_proxy", "provider.test")
        async with running_proxy(Settings(upstream="http://provider.test/v1")) as proxy:
            assert (await exchange(proxy.port, request("/v1/responses", b"{}"))).status == 502
        assert len(company.calls) == 1


async def test_environment_never_adds_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HTTP libraries read ~/.netrc; the proxy must send the caller's credentials or none."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login u password p")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        await exchange(proxy.port, request("/v1/models", method="GET"))
        call = await upstream.call()
    assert not call.header(b"authorization")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime"])
async def test_websocket_upgrade_is_refused_so_that_the_client_takes_http(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = [
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "x" * 22 + "=="),
    ]
    async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        reply = await exchange(proxy.port, request(path, method="GET", headers=upgrade))
        calls = len(upstream.calls)
    assert (reply.status, calls) == (426, 0)
    assert not reply.header(b"upgrade")
    assert b'"error"' in reply.body
    assert not caplog.records


async def test_large_response_header_passes() -> None:
    """Gateways put policies and cookies of tens of kilobytes into one field."""
    value = b"x" * 100_000
    script = answering(response(headers=((b"X-Policy", value),)))
    async with raw_upstream(script) as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        reply = await exchange(proxy.port, request("/v1/models", method="GET"))
    assert reply.header(b"x-policy") == [value]


async def test_keys_reach_the_upstream_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    secrets = [("Authorization", "Bearer canary-1"), ("api-key", "canary-2"), ("Cookie", "canary-3")]
    path = "/v1/chat/completions?key=canary-4"
    async with raw_upstream() as upstream:
        async with running_proxy(Settings(upstream=upstream.url), FakeConversations()) as proxy:
            await exchange(proxy.port, request(path, b'{"canary-5": 1}', headers=secrets))
            call = await upstream.call()
            upstream.scripts = [cutting(b""), cutting(b"HTTP/1.1 nonsense\r\n\r\n")]
            assert (await exchange(proxy.port, request(path, b"canary-6", headers=secrets))).status == 502
            upstream.scripts = [cutting(b"HTTP/1.1 nonsense\r\n\r\n")]
            assert (await exchange(proxy.port, request(path, b"canary-6", headers=secrets))).status == 502
    assert b"canary-1" in call.head and b"canary-4" in call.head
    assert "canary" not in caplog.text


async def test_unknown_pages_of_our_own_never_reach_the_upstream() -> None:
    async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        reply = await exchange(proxy.port, request("/recap/heath", method="GET"))
        calls = len(upstream.calls)
    assert (reply.status, calls) == (404, 0)


async def test_health_tells_what_runs_here() -> None:
    settings = Settings(upstream="http://127.0.0.1:9/v1", mode="off")
    async with running_proxy(settings, FakeConversations()) as proxy:
        reply = await exchange(proxy.port, request("/recap/health", method="GET"))
    facts = json.loads(reply.body)
    assert (facts["status"], facts["upstream"], facts["mode"], facts["archive"]) == (
        "ok",
        "http://127.0.0.1:9/v1",
        "off",
        {"state": "ok", "queue": 0},
    )
