"""One exchange on the wire: send a request upstream, give the answer's bytes to the client as they arrive.

Owns cancellation and closing. However an exchange ends, the upstream connection is closed or given back, and the
record is finished once. It parses nothing: the record gets the raw bytes when the answer is over.

    client leaves            -> upstream closed at once, unless detached: then it is read to its end
    upstream unreachable     -> an error answer of ours
    upstream breaks midway   -> the client's connection breaks as well: no made-up end
    upstream rejects (4xx)   -> `original` is sent in its place, once
    ... for its length       -> a shorter request is sent in its place, once; its own answer if that fails too
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from graphstore.records import Ending
from proxy.connection import ClientConnection
from proxy.errors import ClientGone, UpstreamError, render_error
from proxy.headers import response_headers
from proxy.overflow import STATUSES
from proxy.ports import Exchange, Headers, Shorter
from proxy.upstream.client import Answer, Upstream

TAPE_BYTES_MAX = 64 << 20  # the record of an answer; a longer one is relayed all the same, and not recorded
ERROR_BYTES_MAX = 1 << 20  # of a rejection, read before anything is made of it
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

    def begin(self, answer: "Answer | _Held") -> None:
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
    shorten: Callable[[bytes], Outgoing] | None = None,
) -> None:
    """Run one exchange to its end. Raises nothing but cancellation from outside.

    `shorten` makes a request of another body; None: one that is refused for its length is not sent again.
    """
    record = _Record(exchange)
    try:
        async with client.watch(detach=detach), _answer(upstream, request, original, shorten, exchange) as answer:
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
    upstream: Upstream,
    request: Outgoing,
    original: Outgoing | None,
    shorten: Callable[[bytes], Outgoing] | None,
    exchange: Exchange | None,
) -> AsyncIterator["Answer | _Held"]:
    """The answer to `request`, or to what is sent in its place when the upstream rejects it for its body."""
    answer: Answer | _Held
    answer = first = await _send(upstream, request)
    try:
        asks = shorten is not None and exchange is not None and answer.status in STATUSES
        falls_back = original is not None and 400 <= answer.status < 500 and answer.status not in NOT_ABOUT_THE_BODY
        if asks or falls_back:
            answer = refusal = await _hold(first)
            verdict = await _shorter(exchange, refusal) if asks and exchange is not None else None
            if verdict is not None and verdict.body is not None and shorten is not None and exchange is not None:
                log.warning("relay.shortened status=%d bytes=%d", answer.status, len(verdict.body))
                answer = await _or_else(upstream, shorten(verdict.body), refusal, exchange)
            elif verdict is None and falls_back and original is not None:
                await answer.aclose()
                log.warning("relay.fell_back status=%d bytes=%d", answer.status, len(refusal.beginning))
                if exchange is not None:
                    with _contained():
                        exchange.fall_back(answer.status, refusal.beginning[:ERROR_BYTES_MAX])
                answer = await _send(upstream, original)
        yield answer
    finally:
        await answer.aclose()


async def _shorter(exchange: Exchange, refusal: "_Held") -> Shorter | None:
    with _contained():
        return await exchange.shorter(refusal.status, refusal.headers, refusal.beginning)
    return None


async def _or_else(upstream: Upstream, shorter: Outgoing, refusal: "_Held", exchange: Exchange) -> "Answer | _Held":
    """The answer to `shorter`, or `refusal` if that has no success."""
    try:
        answer = await _send(upstream, shorter)
    except UpstreamError as exc:
        why = str(exc)
    else:
        if answer.status < 400:
            await refusal.aclose()
            return answer
        why = f"refused with {answer.status}"
        await answer.aclose()
    log.warning("relay.shortened_in_vain why=%s", why)
    with _contained():
        exchange.refused_again(why)
    return refusal


async def _send(upstream: Upstream, request: Outgoing) -> Answer:
    return await upstream.send(request.method, request.url, request.headers, request.body)


class _Held:
    """An answer whose beginning was read, which is all of it but for a very long one. It is still whole."""

    def __init__(self, answer: Answer, chunks: AsyncGenerator[bytes, None]) -> None:
        self.status, self.headers = answer.status, answer.headers
        self.beginning = b""
        self.broken: UpstreamError | None = None
        self._answer = answer
        self._rest = chunks

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        if self.beginning:
            yield self.beginning
        if self.broken is not None:
            raise self.broken
        async for chunk in self._rest:
            yield chunk

    async def aclose(self) -> None:
        await self._rest.aclose()
        await self._answer.aclose()


async def _hold(answer: Answer) -> _Held:
    """Read a rejection; what there is of it when it breaks off."""
    held = _Held(answer, chunks := answer.chunks())
    body = bytearray()
    try:
        async for chunk in chunks:
            body += chunk
            if len(body) >= ERROR_BYTES_MAX:
                break
    except UpstreamError as exc:
        held.broken = exc
    held.beginning = bytes(body)
    return held


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
