"""One proxy, several providers: the path names the one that a request goes to, and nothing else can."""

from pathlib import Path

import msgspec
import pytest

from graphstore.store.archive import open_reader
from proxy.conversations import open_conversations
from proxy.settings import Settings
from proxy.upstream.target import split_name
from tests.clock import VirtualClock
from tests.fakes.raw_client import exchange, request
from tests.fakes.raw_upstream import answering, raw_upstream, response
from tests.support import running_proxy

OK = answering(response())
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("/to/near/v1/models", ("near", "/v1/models")),
        ("/to/near/", ("near", "/")),
        ("/to/near", ("near", "/")),
        ("/to/", ("", "/")),
        ("/to", None),
        ("/v1/to/near/x", None),
        ("/tone/x", None),
    ],
)
def test_the_name_is_the_second_part_of_the_path(path: str, split: tuple[str, str] | None) -> None:
    assert split_name(path) == split


async def test_each_name_is_an_upstream_of_its_own_with_its_own_base_path() -> None:
    async with raw_upstream(OK) as own, raw_upstream(OK) as near, raw_upstream(OK) as far:
        named = {"near": f"{near.url}/api/v1", "far": far.url}
        async with running_proxy(Settings(upstream=f"{own.url}/v1", upstreams=named)) as proxy:
            for path in ("/v1/models", "/to/near/v1/models?a=%2F", "/to/far/v1/chat/completions", "/to/far/x%2Fy"):
                reply = await exchange(proxy.port, request(path, BODY))
                assert reply.status == 200, reply
        assert [call.target for call in own.calls] == [b"/v1/models"]
        assert [call.target for call in near.calls] == [b"/api/v1/models?a=%2F"]
        assert [call.target for call in far.calls] == [b"/v1/chat/completions", b"/x%2Fy"]


async def test_an_unknown_name_is_told_what_there_is_and_reaches_nobody() -> None:
    async with raw_upstream(OK) as own, raw_upstream(OK) as near:
        settings = Settings(upstream=own.url, upstreams={"near": near.url})
        async with running_proxy(settings) as proxy:
            for path in ("/to/nowhere/v1/models", "/to/Near/v1/models", "/to//v1/models", "/to/near%2f/v1/models"):
                reply = await exchange(proxy.port, request(path, BODY))
                error = msgspec.json.decode(reply.body)["error"]
                assert (reply.status, error["code"]) == (404, "upstream_unknown")
                assert "/to/near/" in error["message"] and "`upstreams`" in error["message"]
        assert own.calls == near.calls == []


async def test_without_named_upstreams_every_path_is_the_one_upstreams() -> None:
    async with raw_upstream(OK) as own:
        async with running_proxy(Settings(upstream=own.url)) as proxy:
            assert (await exchange(proxy.port, request("/to/near/v1/models", BODY))).status == 200
        assert [call.target for call in own.calls] == [b"/to/near/v1/models"]


async def test_sessions_of_different_upstreams_never_meet(tmp_path: Path) -> None:
    """The same client, key and history: two conversations, for the one provider's cache says nothing of the other's."""
    async with raw_upstream(OK) as own, raw_upstream(OK) as near:
        settings = Settings(upstream=own.url, upstreams={"near": near.url}, db=str(tmp_path / "recap.db"))
        clock = VirtualClock()
        conversations = open_conversations(settings, clock)
        async with running_proxy(settings, conversations, clock=clock) as proxy:
            for path in ("/v1/chat/completions", "/to/near/v1/chat/completions", "/to/near/v1/chat/completions"):
                await exchange(proxy.port, request(path, BODY, headers=(("Authorization", "Bearer k"),)))
    with open_reader(settings.db) as reader:
        sessions = sorted(reader.list_sessions(), key=lambda row: row.id)
        assert [row.upstream for row in sessions] == [own.url, near.url]
        paths = [[e.path for e in reader.session_exchanges(row.id)] for row in sessions]
        assert paths == [["/v1/chat/completions"], ["/v1/chat/completions"] * 2]


async def test_no_header_chooses_an_upstream() -> None:
    async with raw_upstream(OK) as own, raw_upstream(OK) as near:
        async with running_proxy(Settings(upstream=own.url, upstreams={"near": near.url})) as proxy:
            headers = (("X-Recap-Upstream", "near"), ("X-Forwarded-Host", "near"), ("X-Original-URL", "/to/near/"))
            assert (await exchange(proxy.port, request("/v1/models", BODY, headers=headers))).status == 200
        assert (len(own.calls), near.calls) == (1, [])


async def test_what_is_no_path_reaches_nobody() -> None:
    """Behind the base it would be part of the host's name."""
    async with raw_upstream(OK) as own, running_proxy(Settings(upstream=own.url)) as proxy:
        reply = await exchange(proxy.port, request("*", method="OPTIONS"))
        assert (reply.status, own.calls) == (400, [])
        assert msgspec.json.decode(reply.body)["error"]["code"] == "target_unsupported"
