"""Who may look at the inspector and change something there. Real answers of a real server, upstream listening.

The trap: a page of another site, or a name that was rebound to 127.0.0.1, reads whole conversations through the browser
of somebody who runs the proxy.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from proxy.inspector.guard import HEADERS, TOKEN, why_refused
from proxy.settings import Settings
from tests.fakes.raw_client import Reply, exchange, raw_client, request
from tests.fakes.raw_upstream import RawUpstream, raw_upstream
from tests.support import RunningProxy, running_proxy

SECRET = "token-of-this-process"
PAGE, FILE, API = "/recap/", "/recap/static/index.html", "/recap/api/self"
NAVIGATION = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND")
OUTSIDE = ("../routes.py", "../../settings.py", "..", "../..//etc/passwd", "/etc/passwd", "x/../../guard.py")

SPELLINGS = (
    ("..", "/"), ("%2e%2e", "/"), ("..", "%2f"), ("%2E%2E", "%2F"), ("..", "\\"), ("..", "%5c"), ("%252e%252e", "/"),
)  # fmt: skip


@asynccontextmanager
async def guarded(folder: Path, **changes: str) -> AsyncIterator[tuple[RunningProxy, RawUpstream]]:
    """A proxy without an archive, and an upstream that counts what reaches it."""
    async with raw_upstream() as upstream:
        settings = Settings(upstream=upstream.url, db=str(folder / "recap.db"), **changes)  # type: ignore[arg-type]
        async with running_proxy(settings) as proxy:
            yield proxy, upstream


async def token_of(proxy: RunningProxy) -> str:
    async with httpx.AsyncClient(base_url=proxy.url) as client:
        found = (await client.get(API)).json()
    assert found["token_header"] == TOKEN
    return str(found["token"])


def code(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"]["code"])


def has_guard(reply: Reply) -> bool:
    return all(reply.header(name.encode()) == [value.encode()] for name, value in HEADERS.items())


# -- the rule ---------------------------------------------------------------------------------------------------------


def refused(method: str, **headers: str) -> bool:
    return why_refused(method, Headers({k.replace("_", "-"): v for k, v in headers.items()}), SECRET) is not None


@pytest.mark.parametrize("site", ["cross-site", "same-site", "invented"])
@pytest.mark.parametrize("mode", ["cors", "no-cors", "same-origin", "websocket", ""])
def test_another_site_reads_nothing(site: str, mode: str) -> None:
    assert refused("GET", sec_fetch_site=site, sec_fetch_mode=mode)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_may_link_to_us_and_not_post_to_us(site: str) -> None:
    """A form of another site navigates too; it has no token, and were it to guess one it would still be refused."""
    assert not refused("GET", sec_fetch_site=site, sec_fetch_mode="navigate")
    assert refused("POST", sec_fetch_site=site, sec_fetch_mode="navigate", x_recap_token=SECRET)


@pytest.mark.parametrize("destination", ["iframe", "object", "embed", "frame"])
def test_another_site_may_not_embed_us(destination: str) -> None:
    given = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert refused("GET", **given, sec_fetch_dest=destination)
    assert not refused("GET", **given, sec_fetch_dest="document")


@pytest.mark.parametrize("site", [None, "none", "same-origin"])
def test_our_own_page_and_programs_read(site: str | None) -> None:
    given = {} if site is None else {"sec_fetch_site": site}
    assert not refused("GET", **given) and not refused("HEAD", **given)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_a_change_needs_the_token(method: str) -> None:
    assert refused(method)
    for wrong in ("", SECRET[:-1], SECRET + "x", SECRET.upper(), "schlüssel"):
        assert refused(method, x_recap_token=wrong)
    assert not refused(method, x_recap_token=SECRET, sec_fetch_site="same-origin")


# -- on the server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PAGE, FILE, API, "/recap/api/sessions", "/recap/api/events"])
async def test_a_foreign_origin_and_a_rebound_name_are_refused(path: str, tmp_path: Path) -> None:
    async with guarded(tmp_path) as (proxy, upstream):
        for host, headers, said in (
            ("127.0.0.1", [("Origin", "https://evil.test")], "origin_not_allowed"),
            ("127.0.0.1", [("Origin", "null")], "origin_not_allowed"),
            ("127.0.0.1", [("Origin", f"http://127.0.0.1:{proxy.port + 1}")], "origin_not_allowed"),
            (f"evil.test:{proxy.port}", [], "host_not_allowed"),
            (f"evil.test:{proxy.port}", [("Origin", f"http://evil.test:{proxy.port}")], "host_not_allowed"),
        ):
            reply = await exchange(proxy.port, request(path, method="GET", headers=headers, host=host))
            assert (reply.status, code(reply)) == (403, said)
        assert not upstream.calls


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_another_site_can_neither_fetch_nor_embed_and_can_link(site: str, tmp_path: Path) -> None:
    """A `<script>` or an `<img>` sends no Origin: what it says of itself is Sec-Fetch-Site."""
    async with guarded(tmp_path) as (proxy, _), httpx.AsyncClient(base_url=proxy.url) as client:
        for path in (PAGE, FILE, API, "/recap/api/events", "/recap/api/nothing"):
            reply = await client.get(path, headers={"sec-fetch-site": site, "sec-fetch-mode": "no-cors"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "not_same_origin")
            assert "Open /recap/ in its own tab" in reply.json()["error"]["message"]
        for path in (PAGE, FILE):
            assert (await client.get(path, headers=NAVIGATION | {"sec-fetch-site": site})).status_code == 200


async def test_a_change_without_the_token_or_with_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (proxy, _), httpx.AsyncClient(base_url=proxy.url) as client:
        token = await token_of(proxy)
        path, body = "/recap/api/sessions/x/blocks/0/mark", {"mark": "pin"}
        for headers in ({}, {TOKEN: ""}, {TOKEN: token[:-1]}, {TOKEN: token, "sec-fetch-site": "cross-site"}):
            reply = await client.post(path, json=body, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "not_same_origin")
            assert (await client.post(f"{path}?{TOKEN}={token}", json=body)).status_code == 403, "not by the address"
        assert TOKEN in (await client.post(path, json=body)).json()["error"]["message"]
        reply = await client.post(path, json=body, headers={TOKEN: token, "sec-fetch-site": "same-origin"})
        assert reply.status_code == 503, "it got as far as the archive, which is not there"


async def test_each_process_has_a_token_of_its_own(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (one, _), guarded(tmp_path) as (other, _):
        tokens = {await token_of(one), await token_of(other), await token_of(one)}
    assert len(tokens) == 2 and all(len(token) >= 32 for token in tokens)


async def test_every_kind_of_answer_carries_the_guards_headers_and_lets_no_other_origin_read(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (proxy, _):
        token = [(TOKEN, await token_of(proxy))]
        own = [("Origin", f"http://127.0.0.1:{proxy.port}")]
        host = f"127.0.0.1:{proxy.port}"
        kinds = {
            "page": (200, request(PAGE, method="GET", headers=own, host=host)),
            "file": (200, request(FILE, method="GET", headers=own, host=host)),
            "part of a file": (206, request(FILE, method="GET", headers=[("Range", "bytes=0-3")])),
            "json": (200, request(API, method="GET", headers=own, host=host)),
            "no archive": (503, request("/recap/api/sessions", method="GET")),
            "no route": (404, request("/recap/api/nothing", method="GET")),
            "no page": (404, request("/recap/nothing", method="GET")),
            "no file": (404, request("/recap/static/nothing.js", method="GET")),
            "folder": (404, request("/recap/static/", method="GET")),
            "method": (405, request("/recap/api/sessions", b"{}", headers=token)),
            "method of a file": (405, request(FILE, b"{}", headers=token)),
            "get of a change": (404, request("/recap/api/sessions/x/what-if", method="GET")),
            "body": (400, request("/recap/api/sessions/x/what-if", b"{}", headers=token)),
            "other site": (403, request(API, method="GET", headers=[("Sec-Fetch-Site", "cross-site")])),
            "no token": (403, request("/recap/api/sessions/x/what-if", b"{}")),
            "preflight": (403, request(API, method="OPTIONS", headers=[("Access-Control-Request-Method", "POST")])),
        }
        replies = {name: await exchange(proxy.port, data) for name, (_, data) in kinds.items()}
        async with httpx.AsyncClient(base_url=proxy.url) as client:
            head = await client.head(PAGE)
    assert {name: reply.status for name, reply in replies.items()} == {
        name: status for name, (status, _) in kinds.items()
    }
    assert [name for name, reply in replies.items() if not has_guard(reply)] == []
    assert all(head.headers[name] == value for name, value in HEADERS.items()) and head.status_code == 200
    assert [name for name, reply in replies.items() if b"access-control" in reply.head.lower()] == []
    assert [name for name, reply in replies.items() if not reply.header(b"cache-control")] == []
    errors = {name: code(reply) for name, reply in replies.items() if reply.status >= 400}
    assert errors["no file"] == errors["folder"] == errors["no route"] == "not_found"
    assert errors["method"] == errors["method of a file"] == "method_not_allowed"
    assert replies["method"].header(b"allow") and b"/recap/api/sessions" in replies["method"].body


async def test_the_policy_allows_nothing_from_elsewhere_and_no_frame(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (proxy, _), httpx.AsyncClient(base_url=proxy.url) as client:
        headers = (await client.get(PAGE)).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "object-src": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["referrer-policy"] == "no-referrer"


async def test_with_a_key_the_page_comes_without_and_what_it_asks_for_does_not(tmp_path: Path) -> None:
    """A browser cannot send a header with an address that somebody types."""
    async with guarded(tmp_path, proxy_key="secret") as (proxy, _):
        async with httpx.AsyncClient(base_url=proxy.url, follow_redirects=True) as client:
            for path in ("/recap", PAGE, FILE):
                assert (await client.get(path)).status_code == 200
                assert (await client.head(path)).status_code == 200
                assert (await client.post(path)).status_code == 401
            for path in (API, "/recap/api/sessions", "/recap/api/events", "/recap/health", "/recap/static", "/recap/x"):
                for headers in ({}, {"x-recap-key": "wrong"}, NAVIGATION):
                    reply = await client.get(path, headers=headers)
                    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "proxy_key_wrong")
            assert (await client.get(API, headers={"x-recap-key": "secret"})).status_code == 200


async def test_the_page_without_a_key_is_no_way_around_the_other_rules(tmp_path: Path) -> None:
    async with guarded(tmp_path, proxy_key="secret") as (proxy, _):
        for path in (PAGE, FILE):
            assert (await exchange(proxy.port, request(path, method="GET", host="evil.test"))).status == 403
            headers = [("Origin", "https://evil.test")]
            assert (await exchange(proxy.port, request(path, method="GET", headers=headers))).status == 403


async def test_no_path_leads_out_of_the_static_files(tmp_path: Path) -> None:
    """Nor, with a key, from there into the API, which wants it."""
    ways = [path.replace("..", dots).replace("/", slash) for path in OUTSIDE for dots, slash in SPELLINGS]
    ways += [
        "%0A",
        "%0a../x",
        "%00",
        "index.html%00",
        "..%00/routes.py",
        "a" * 5000,
        "../api/self",
        "%2e%2e/api/self",
        "../api/sessions",
    ]
    async with guarded(tmp_path, proxy_key="secret") as (proxy, upstream):
        for way in ways:
            reply = await exchange(proxy.port, request(f"/recap/static/{way}", method="GET"))
            assert (reply.status, code(reply)) == (404, "not_found"), way
            assert b"import" not in reply.body and b"token" not in reply.body and b"root:" not in reply.body
        assert not upstream.calls


@pytest.mark.parametrize("method", METHODS)
async def test_nothing_under_recap_reaches_the_upstream(method: str, tmp_path: Path) -> None:
    """Whatever the method, and however much the path looks like one of the provider's."""
    paths = ("/recap", "/recap/", "/recap/v1/chat/completions", "/recap/api/responses", "/recap/static/../v1/models",
             "/%72ecap/api/x", "/recap%2fapi/x", "/recap/%0A", "/recap/static/%0Ax", "/recap%0A",
             "/recap/api/self%0D%0A", "/recap/api/self?path=/v1/models", "/recap/health")  # fmt: skip
    async with guarded(tmp_path) as (proxy, upstream):
        given = [("Connection", "close"), (TOKEN, await token_of(proxy))]
        body = b"{}" if method in ("POST", "PUT", "PATCH") else None
        for path in paths:
            assert await status_of(proxy.port, request(path, body, method=method, headers=given)) < 500, path
        assert not upstream.calls
        await status_of(proxy.port, request("/recapitulate", body, method=method))
        assert [call.target for call in upstream.calls] == [b"/recapitulate"], "the upstream is there"


async def status_of(port: int, data: bytes) -> int:
    """The status alone: an answer to HEAD has a length and no body."""
    async with raw_client(port) as client:
        await client.send(data)
        return int((await client.until(b"\r\n")).split(b" ")[1])
