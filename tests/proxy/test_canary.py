"""Secrets in every header and in the query go upstream and nowhere else: no log, file, page or error has one."""

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from graphstore.store.blobs import unpack
from proxy.conversations import open_conversations
from proxy.settings import Settings
from tests.archives import lay_out_archive
from tests.fakes.raw_client import exchange, request
from tests.fakes.raw_upstream import answering, cutting, raw_upstream, response
from tests.support import running_proxy

NAMES = (
    "Authorization", "Proxy-Authorization", "api-key", "x-api-key", "x-goog-api-key", "Cookie", "OpenAI-Organization",
    "OpenAI-Project", "chatgpt-account-id", "x-stainless-secret", "X-Forwarded-For", "Referer",
)  # fmt: skip
CANARIES = [f"canary{i}secret{name.lower().replace('-', '')}" for i, name in enumerate(NAMES)]
HEADERS = [(name, canary) for name, canary in zip(NAMES, CANARIES, strict=True)]
IN_QUERY, IN_ANSWER, PROXY_KEY = "canaryinquery", "canaryinsetcookie", "canaryproxykey"
SECRETS = (*CANARIES, IN_QUERY, IN_ANSWER, PROXY_KEY)
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
ANSWER = (
    b'{"id": "c", "choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],'
    b' "usage": {"prompt_tokens": 3, "completion_tokens": 1}}'
)
PATHS = [f"{path}?key={IN_QUERY}" for path in ("/v1/chat/completions", "/v1/responses", "/v1/models", "/x/y")]
VIEWS = ("/recap/health", "/recap/", "/recap/api/sessions", "/recap/api/health", "/recap/api/savings", "/recap/metrics")


def found_in(text: bytes) -> list[str]:
    return [secret for secret in SECRETS if secret.encode() in text.lower()]


def on_disk(folder: Path) -> bytes:
    """Every byte of every file, and what is compressed in them."""
    parts = [file.read_bytes() for file in folder.iterdir()]
    with closing(sqlite3.connect(folder / "recap.db")) as db:
        parts += [unpack(*row) for row in db.execute("SELECT codec, content FROM messages")]
    return b"\n".join(parts)


async def test_no_secret_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("aiohttp", "asyncio", "httpx", "httpcore"):  # as `recap serve` sets them
        caplog.set_level(logging.WARNING, logger=name)
    cookie = ((b"Set-Cookie", b"session=" + IN_ANSWER.encode()), (b"Content-Type", b"application/json"))
    answers = [
        answering(response(ANSWER, headers=cookie)),
        answering(response(b'{"error": {"message": "no"}}', status=b"401 Unauthorized", headers=cookie)),
        answering(response(b"oops", status=b"500 Internal Server Error", headers=cookie)),
        cutting(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
        cutting(b""),
    ]
    seen: list[bytes] = []
    pages: list[bytes] = []
    for script in answers:
        async with raw_upstream(script) as upstream:
            settings = Settings(upstream=upstream.url, db=str(tmp_path / "recap.db"), proxy_key=PROXY_KEY)
            lay_out_archive(Path(settings.db))
            conversations = await asyncio.to_thread(open_conversations, settings, lambda: 1_800_000_000.0)
            async with running_proxy(settings, conversations) as proxy:
                for path in PATHS:
                    headers = [*HEADERS, ("x-recap-key", PROXY_KEY)]
                    try:
                        reply = await exchange(proxy.port, request(path, BODY, headers=headers))
                    except (ConnectionError, EOFError, asyncio.IncompleteReadError):
                        continue
                    pages.append(reply.body)
                refused = await exchange(proxy.port, request(PATHS[0], BODY, headers=HEADERS))
                assert refused.status == 401
                pages.append(refused.body)
                await conversations.flush()
                async with httpx.AsyncClient(base_url=proxy.url, headers={"x-recap-key": PROXY_KEY}) as client:
                    pages += [(await client.get(view)).content for view in VIEWS]
                seen += [call.head for call in upstream.calls]
    assert seen and set(CANARIES) - {CANARIES[1]} <= set(found_in(seen[0]))  # they do go upstream
    assert IN_QUERY in found_in(seen[0]) and PROXY_KEY not in found_in(b"".join(seen))
    assert found_in(caplog.text.encode()) == []
    assert found_in(b"\n".join(pages)) == []
    assert b"hello" in on_disk(tmp_path)
    assert found_in(on_disk(tmp_path)) == []
