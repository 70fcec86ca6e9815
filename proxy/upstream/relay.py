"""One exchange on the wire: send a request upstream, give the answer's bytes to the client as they arrive.

Owns cancellation and closing. However an exchange ends, the upstream connection is closed or given back, and the
record is finished once. It parses nothing: the record gets the raw bytes when the answer is over.

    client leaves            -> upstream closed at once, unless detached: then it is read to its end
    upstream unreachable     -> an error answer of ours
    upstream breaks midway   -> the client's connection breaks as well: no made-up end
    upstream rejects (4xx)   -> `original` is sent in its place, once
"""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from graphstore.records import Ending
from proxy.connection import ClientConnection
from proxy.errors import ClientGone, UpstreamError, render_error
from proxy.headers import response_headers
from proxy.ports import Exchange, Headers
from proxy.upstream.client import Answer, Upstream

TAPE_BYTES_MAX = 64 << 20  # the record of an answer; a longer one is relayed all the same, and not recorded
ERROR_BYTES_MAX = 1 << 20  # of a rejection, kept for the record
# Answers about the caller or the moment, not about the body: the original would fare no better.
NOT_ABOUT_THE_BODY = frozenset({401, 403, 408, 429})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outgoing:
    method: str
    url: str
    headers: Headers
    body: bytes | AsyncIterator[bytes] | None


@dataclass(slots=True)
class _Record:
    """What `Exchange.finish` will be told, gathered on the way."""

    exchange: Exchange | None
    ending: Ending = "failed"
    status: int | None = None
    headers: Headers = ()
    error: str | None = "the proxy stopped"
    _chunks: list[bytes] = field(default_factory=list)
    _size: int = 0

    def begin(self, answer: Answer) -> None:
        self.status, self.headers = answer.status, answer.headers

    def add(self, chunk: bytes) -> None:
        if self.exchange is None:
            return
        if not self._size:
            with _contained():
                self.exchange.first_byte()
        self._size += len(chunk)
        if self._size <= TAPE_BYTES_MAX:
            self._chunks.append(chunk)
        else:
            self._chunks.clear()

    def close(self, ending: Ending, error: str | None = None) -> None:
        self.ending, self.error = ending, error

    def finish(self) -> None:
        if self.exchange is None:
            return
        body = b"".join(self._chunks) if self._size <= TAPE_BYTES_MAX else None
        with _contained():
            self.exchange.finish(self.ending, status=self.status, headers=self.headers, body=body, error=self.error)


async def relay(
    client: ClientConnection,
    upstream: Upstream,
    request: Outgoing,
    *,
    original: Outgoing | None = None,
    exchange: Exchange | None = None,
    detach: bool = False,
) -> None:
    """Run one exchange to its end. Raises nothing but cancellation from outside."""
    record = _Record(exchange)
    try:
        async with client.watch(detach=detach), _answer(upstream, request, original, exchange) as answer:
            record.begin(answer)
            await client.start(answer.status, response_headers(answer.headers, answer.status))
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    record.add(chunk)
                    await client.write(chunk)
        record.close("complete")
    except ClientGone:
        record.close("client gone")
    except UpstreamError as exc:
        record.close("upstream broken" if client.started else "failed", str(exc))
        await _report(client, request, exc)
    finally:
        record.finish()
    if record.ending == "complete":
        await client.end()


@asynccontextmanager
async def _answer(
    upstream: Upstream, request: Outgoing, original: Outgoing | None, exchange: Exchange | None
) -> AsyncIterator[Answer]:
    """The answer to `request`, or to `original` when the upstream rejects `request` for its body."""
    answer = await _send(upstream, request)
    try:
        if original is not None and 400 <= answer.status < 500 and answer.status not in NOT_ABOUT_THE_BODY:
            rejection = await _read_error(answer)
            await answer.aclose()
            log.warning("relay.fell_back status=%d bytes=%d", answer.status, len(rejection))
            if exchange is not None:
                with _contained():
                    exchange.fall_back(answer.status, rejection)
            answer = await _send(upstream, original)
        yield answer
    finally:
        await answer.aclose()


async def _send(upstream: Upstream, request: Outgoing) -> Answer:
    return await upstream.send(request.method, request.url, request.headers, request.body)


async def _read_error(answer: Answer) -> bytes:
    """The beginning of a rejection; what there is of it when it breaks off."""
    body = bytearray()
    try:
        async with aclosing(answer.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) >= ERROR_BYTES_MAX:
                    break
    except UpstreamError:
        pass
    return bytes(body[:ERROR_BYTES_MAX])


async def _report(client: ClientConnection, request: Outgoing, exc: UpstreamError) -> None:
    """One line for the operator and, as long as no status has gone out, an answer for the client.

    After that the ASGI application returns without an end, and the server closes the connection.
    """
    origin = "/".join(request.url.split("/", 3)[:3])
    log.warning("relay.failed upstream=%s code=%s cause=%s", origin, exc.code, exc)
    if not client.started:
        message = (
            f"ReCAP proxy got no answer from the upstream {origin} ({exc}). Is it up, and is the setting `upstream` "
            "right (--upstream, RECAP_UPSTREAM)? `recap config` shows where it comes from."
        )
        await client.respond(exc.status, render_error(message, code=exc.code))


@contextmanager
def _contained() -> Iterator[None]:
    """The record never costs an exchange, whatever goes wrong in it."""
    try:
        yield
    except Exception:
        log.exception("relay.record_failed")
