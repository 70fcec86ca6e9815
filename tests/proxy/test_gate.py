"""Who may pass. Every rule is also tried on a real server, on our own routes and on the upstream's."""

import pytest

from proxy.gate import check_caller
from proxy.settings import Settings
from tests.fakes.raw_client import exchange, request
from tests.fakes.raw_upstream import raw_upstream
from tests.support import running_proxy

PATHS = ("/v1/chat/completions", "/v1/models", "/recap/health")


def code(settings: Settings, host: str, origin: str | None = None, key: str | None = None) -> str | None:
    headers = [(b"host", host.encode())]
    headers += [(b"origin", origin.encode())] if origin is not None else []
    headers += [(b"x-recap-key", key.encode())] if key is not None else []
    refusal = check_caller(headers, settings)
    return refusal.code if refusal else None


@pytest.mark.parametrize("host", ["127.0.0.1:8787", "localhost", "LocalHost:1", "[::1]:8787", "box:1", "Lan.Name"])
def test_known_hosts_pass(host: str) -> None:
    assert code(Settings(host="lan.name", allowed_hosts=("box",)), host) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.com",
        "127.0.0.1.evil.com:8787",
        "localhost.evil.com",
        "[::2]",
        "10.0.0.1",
        "[::1]evil.com",
        "localhost:80@evil.com",
        "[::1",
        "localhost/evil.com",
    ],
)
def test_other_hosts_are_refused(host: str) -> None:
    """A name that an attacker points at 127.0.0.1 is how a web page reaches a local server."""
    assert code(Settings(), host) == "host_not_allowed"


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8787", "https://box:3000"])
def test_own_origin_passes(origin: str) -> None:
    assert code(Settings(allowed_hosts=("box",)), "127.0.0.1:8787", origin) is None


@pytest.mark.parametrize("origin", ["https://evil.com", "null", "http://127.0.0.1:3000", "http://127.0.0.1:87"])
def test_other_origins_are_refused(origin: str) -> None:
    assert code(Settings(), "127.0.0.1:8787", origin) == "origin_not_allowed"


@pytest.mark.parametrize("key", [None, "", "wrong", "secret2", "secre", "schlüssel"])
def test_wrong_key_is_refused(key: str | None) -> None:
    assert code(Settings(proxy_key="secret"), "localhost", key=key) == "proxy_key_wrong"


def test_right_key_passes() -> None:
    assert code(Settings(proxy_key="secret"), "localhost", key="secret") is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("evil.com", [("x-recap-key", "k")], 403),
        (None, [("x-recap-key", "k")], 403),
        ("localhost", [("x-recap-key", "k"), ("Origin", "https://evil.com")], 403),
        ("localhost", [], 401),
    ],
)
async def test_refused_on_every_route(path: str, host: str | None, headers: list[tuple[str, str]], status: int) -> None:
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url, proxy_key="k")) as proxy,
    ):
        reply = await exchange(proxy.port, request(path, b"{}", headers=headers, host=host))
        calls = len(upstream.calls)
    assert (reply.status, calls) == (status, 0)


async def test_proxy_key_stays_here() -> None:
    async with (
        raw_upstream() as upstream,
        running_proxy(Settings(upstream=upstream.url, proxy_key="k")) as proxy,
    ):
        reply = await exchange(proxy.port, request("/v1/models", method="GET", headers=[("X-Recap-Key", "k")]))
        call = await upstream.call()
    assert reply.status == 200
    assert not call.header(b"x-recap-key")


@pytest.mark.parametrize(
    "headers",
    [
        [("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document"), ("Sec-Fetch-Site", "none")],
        [("Sec-Fetch-Dest", "iframe"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Site", "same-origin")],
        [("Sec-Fetch-Dest", "script"), ("Sec-Fetch-Mode", "no-cors")],
        [("Sec-Fetch-Dest", "object")],
        [("Service-Worker", "script")],
        [("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")],
    ],
)
async def test_no_browser_shows_or_runs_what_the_upstream_answers(headers: list[tuple[str, str]]) -> None:
    """It would run on the inspector's origin: read its token and the archive, pin and mute."""
    async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        reply = await exchange(proxy.port, request("/some/page", method="GET", headers=headers))
        calls = len(upstream.calls)
    assert (reply.status, calls) == (403, 0) and b"not_for_browsers" in reply.body


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Accept", "*/*")],
        [("Accept", "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2")],  # Java's own client
        [("Sec-Fetch-Dest", "empty"), ("Sec-Fetch-Mode", "cors"), ("Sec-Fetch-Site", "same-origin")],
    ],
)
async def test_clients_that_fetch_pass(headers: list[tuple[str, str]]) -> None:
    async with raw_upstream() as upstream, running_proxy(Settings(upstream=upstream.url)) as proxy:
        reply = await exchange(proxy.port, request("/v1/models", method="GET", headers=headers))
        calls = len(upstream.calls)
    assert (reply.status, calls) == (200, 1)
