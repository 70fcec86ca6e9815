"""The two ways through the proxy: a conversation is read, planned and recorded; everything else is streamed through.

A thin shell: reads the request, asks `Conversations` what to send, and hands both sides to the relay.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from proxy.connection import ClientConnection
from proxy.dialects.base import DialectName
from proxy.encodings import Undecodable, decode_body
from proxy.errors import ClientGone, render_error
from proxy.headers import has_body, request_headers, tokens_of, value_of
from proxy.ports import Arrival, Conversations, Headers, Plan
from proxy.settings import Settings
from proxy.upstream.client import Upstream
from proxy.upstream.relay import Outgoing, relay
from proxy.upstream.target import join_target, split_name

_INLINE_DECODE_BYTES = 1 << 17  # JSON shrinks about tenfold: more than this is decoded in a thread
_ENDINGS: tuple[tuple[str, DialectName], ...] = (("/chat/completions", "chat"), ("/responses", "responses"))

log = logging.getLogger(__name__)


def dialect_of(method: str, path: str) -> DialectName | None:
    """Conversation endpoints by their ending: `/v1` or not, Azure deployments, gateways with paths of their own."""
    if method != "POST":
        return None
    return next((name for ending, name in _ENDINGS if path.endswith(ending)), None)


class Gateway:
    """The ASGI application for every path that is not our own."""

    def __init__(self, settings: Settings, upstream: Upstream, conversations: Conversations | None) -> None:
        self._base = settings.upstream
        self._named = settings.upstreams
        self._body_bytes_max = settings.max_body_bytes
        self._shortens = settings.pressure and settings.mode != "off"
        self._upstream = upstream
        self._conversations = conversations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientConnection(scope, receive, send)
        try:
            if not scope["raw_path"].startswith(b"/"):
                await _refuse_target(client)
                return
            target = self._target(scope)
            if target is None:
                await _refuse_name(client, self._named)
                return
            dialect = dialect_of(scope["method"], target.path)
            if b"websocket" in tokens_of(client.headers, b"upgrade"):
                await _refuse_websocket(client)
            elif dialect is None or self._conversations is None:
                await self._pass_through(client, target)
            else:
                await self._converse(client, target, dialect, self._conversations)
        except ClientGone:
            pass  # while its request was read: there is nobody to answer

    def _target(self, scope: Scope) -> "_Target | None":
        """Where this goes; None, when it asks for an upstream of a name that there is not.

        Without named upstreams all paths are the one upstream's, whatever they look like.
        """
        raw, query = scope["raw_path"].decode("ascii"), scope["query_string"].decode("latin-1")
        named = split_name(raw) if self._named else None
        if named is None:
            return _Target(self._base, scope["path"], join_target(self._base, raw, query))
        name, rest = named
        base = self._named.get(name)
        return _Target(base, unquote(rest), join_target(base, rest, query)) if base is not None else None

    async def _pass_through(self, client: ClientConnection, target: "_Target") -> None:
        body: AsyncIterator[bytes] | None = client.body()
        if not has_body(client.headers):
            async for _ in client.body():
                pass
            body = None
        await relay(client, self._upstream, target.outgoing(client, request_headers(client.headers), body))

    async def _converse(
        self, client: ClientConnection, target: "_Target", dialect: DialectName, conversations: Conversations
    ) -> None:
        intake = await _read_body(client, self._body_bytes_max)
        plan = await self._plan(client, target, dialect, intake, conversations)
        original = target.outgoing(client, request_headers(client.headers), intake.unchanged())

        def made_of(body: bytes) -> Outgoing:
            return target.outgoing(client, request_headers(client.headers, new_body=body), body)

        await relay(
            client,
            self._upstream,
            original if plan.body is None else made_of(plan.body),
            original=None if plan.body is None else original,
            exchange=plan.exchange,
            detach=plan.detach,
            shorten=made_of if self._shortens else None,
        )

    async def _plan(
        self,
        client: ClientConnection,
        target: "_Target",
        dialect: DialectName,
        intake: "_Intake",
        conversations: Conversations,
    ) -> Plan:
        """What to send. Whatever fails in here: the client's own bytes."""
        body, unreadable = await _decode(intake, client.headers, self._body_bytes_max)
        arrival = Arrival(dialect, target.path, client.headers, body, unreadable, upstream=target.base)
        try:
            return await conversations.admit(arrival)
        except Exception:
            log.exception("gateway.admit_failed")
            return Plan(body=None, exchange=None)


@dataclass(frozen=True, slots=True)
class _Target:
    """An upstream and the path there. `path` is decoded, without the upstream's name; `url` is what is asked for."""

    base: str
    path: str
    url: str

    def outgoing(
        self, client: ClientConnection, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> Outgoing:
        return Outgoing(client.scope["method"], self.url, headers, body)


@dataclass(frozen=True, slots=True)
class _Intake:
    """A request body as it came: whole, or its beginning and the rest still on the way."""

    chunks: deque[bytes]
    rest: AsyncIterator[bytes] | None

    def joined(self) -> bytes:
        """The whole body; held once, however often it is asked for."""
        if len(self.chunks) > 1:
            whole = b"".join(self.chunks)
            self.chunks.clear()
            self.chunks.append(whole)
        return self.chunks[0] if self.chunks else b""

    def unchanged(self) -> bytes | AsyncIterator[bytes] | None:
        """What to forward. A stream can be sent once, and lets go of each piece that it has sent."""
        return self._stream(self.rest) if self.rest is not None else self.joined() or None

    async def _stream(self, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        while self.chunks:
            yield self.chunks.popleft()
        async for chunk in rest:
            yield chunk


async def _read_body(client: ClientConnection, limit_bytes: int) -> _Intake:
    """Read the body, or up to `limit_bytes` of it; nothing at all when it announces that it is longer."""
    chunks: deque[bytes] = deque()
    size = 0
    body = client.body()
    announced = value_of(client.headers, b"content-length")
    if announced.isdigit() and int(announced) > limit_bytes:
        return _Intake(chunks, body)
    async for chunk in body:
        chunks.append(chunk)
        size += len(chunk)
        if size > limit_bytes:
            return _Intake(chunks, body)
    return _Intake(chunks, None)


async def _decode(intake: _Intake, headers: Headers, limit_bytes: int) -> tuple[bytes, str | None]:
    """The plain body, or b"" and the reason why there is none."""
    if intake.rest is not None:
        return b"", f"body of more than {limit_bytes} bytes (max_body_bytes)"
    body = intake.joined()
    encodings = tokens_of(headers, b"content-encoding")
    try:
        if encodings and len(body) > _INLINE_DECODE_BYTES:
            return await asyncio.to_thread(decode_body, body, encodings, limit_bytes), None
        return decode_body(body, encodings, limit_bytes), None
    except Undecodable as exc:
        return b"", str(exc)


async def _refuse_name(client: ClientConnection, named: Mapping[str, str]) -> None:
    name, _ = split_name(client.scope["path"]) or ("", "")
    known = ", ".join(f"/to/{known}/" for known in named)
    message = f"No upstream is called {name!r}: there are {known}. Others go into the setting `upstreams`."
    await client.respond(404, render_error(message, code="upstream_unknown"))


async def _refuse_target(client: ClientConnection) -> None:
    """`OPTIONS *`, `CONNECT host:port`: behind the upstream's name they would make another name."""
    message = "ReCAP proxy takes paths, such as /v1/models; it is a base URL for clients, not their HTTP proxy."
    await client.respond(400, render_error(message, code="target_unsupported"))


async def _refuse_websocket(client: ClientConnection) -> None:
    """Codex goes on over HTTP at once when it sees 426. The connection ends: its parser waits for another protocol."""
    message = "ReCAP proxy speaks HTTP only: send the request as POST, with `stream: true` for a stream of events."
    await client.respond(426, render_error(message, code="websocket_unsupported"), [(b"connection", b"close")])


def health(settings: Settings, conversations: Conversations | None, version: str) -> dict[str, object]:
    """/recap/health: what runs here, and what the archive says of itself."""
    archive = conversations.health() if conversations is not None else None
    problem = _problem(archive) if archive is not None else None
    return {
        "status": "ok" if problem is None else "degraded",
        "problem": problem,
        "version": version,
        "upstream": settings.upstream,
        "upstreams": settings.upstreams,
        "mode": settings.mode,
        "archive": archive,
    }


def _problem(archive: Mapping[str, object]) -> str | None:
    """What a person must know of an archive that is not well."""
    match archive["state"]:
        case "ok":
            return None
        case "unavailable":
            return f"requests pass through untouched and nothing is recorded: {archive['problem']}"
        case _:
            return f"the archive cannot be written, so nothing new is left out: {archive['problem']}"
