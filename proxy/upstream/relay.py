"""One exchange on the wire: send a request upstream, give the answer's bytes to the client as they arrive.

Owns cancellation and closing. However an exchange ends, the upstream connection is closed or given back, and the
record is finished once. It parses nothing: the record gets the raw bytes when the answer is over.

    client leaves            -> upstream closed at once, unless detached: then it is read to its end
    upstream unreachable     -> an error answer of ours
    upstream breaks midway   -> the client's connection breaks as well: no made-up end
    upstream rejects (4xx)   -> `original` is sent in its place, once
    ... for its length       -> a shorter request is sent before that, once; without success the first answer stands
    ... within a 200         -> the same, as long as the client has seen nothing of the answer but comments
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from graphstore.records import Ending
from proxy.connection import ClientConnection
from proxy.dialects.opening import Opening
from proxy.errors import ClientGone, UpstreamError, render_error
from proxy.headers import response_headers, value_of
from proxy.overflow import IN_ANSWER, STATUSES
from proxy.ports import Exchange, Headers, Shorter
from proxy.upstream.client import Answer, Upstream

TAPE_BYTES_MAX = 64 << 20  # the record of an answer; a longer one is relayed all the same, and not recorded
ERROR_BYTES_MAX = 1 << 20  # of a rejection, read before anything is made of it
# Answers about the caller or the moment, not about the body: the original would fare no better.
NOT_ABOUT_THE_BODY = frozenset({401, 403, 408, 429})

log = logging.getLogger(__name__)

_Any: TypeAlias = "Answer | _Held | _Watched"


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

    def begin(self, answer: "_Any") -> None:
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

    async def start(answer: "_Any") -> None:
        record.begin(answer)
        await client.start(answer.status, response_headers(answer.headers, answer.status))

    again = _Again(upstream, exchange, shorten) if exchange is not None and shorten is not None else None
    try:
        async with (
            client.watch(detach=detach),
            _answer(upstream, request, original, again, exchange, watches=not detach) as answer,
        ):
            if not isinstance(answer, _Watched) or answer.starts_at_once:
                await start(answer)
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    if not client.started:
                        await start(answer)
                    record.add(chunk)
                    await client.write(chunk)
            if not client.started:
                await start(answer)
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
    again: "_Again | None",
    exchange: Exchange | None,
    *,
    watches: bool,
) -> AsyncIterator["_Any"]:
    """The answer to `request`, or to what is sent in its place when the upstream rejects it for its body."""
    answer: _Any
    answer = first = await _send(upstream, request)
    try:
        asks = again is not None and answer.status in STATUSES
        falls_back = original is not None and 400 <= answer.status < 500 and answer.status not in NOT_ABOUT_THE_BODY
        if asks or falls_back:
            answer = refusal = await _hold(first)
            second = await again.answer(answer.status, answer.headers, refusal.beginning) if again and asks else None
            if second is not None:
                answer = second
                await refusal.aclose()
            elif falls_back and original is not None:
                await answer.aclose()
                log.warning("relay.fell_back status=%d bytes=%d", answer.status, len(refusal.beginning))
                if exchange is not None:
                    with _contained():
                        exchange.fall_back(answer.status, refusal.beginning[:ERROR_BYTES_MAX])
                answer = await _send(upstream, original)
        elif again is not None and watches and answer.status == IN_ANSWER and again.is_possible(first):
            answer = _Watched(first, again)
        yield answer
    finally:
        await answer.aclose()


class _Again:
    """What is sent in place of a request that was refused for its length, once."""

    def __init__(self, upstream: Upstream, exchange: Exchange, shorten: Callable[[bytes], Outgoing]) -> None:
        self._upstream = upstream
        self._exchange = exchange
        self._shorten = shorten

    def is_possible(self, answer: Answer) -> bool:
        """An encoded beginning cannot be read, and nothing else could go on behind it."""
        with _contained():
            return not value_of(answer.headers, b"content-encoding") and self._exchange.may_be_shortened()
        return False

    def is_likely(self) -> bool:
        with _contained():
            return self._exchange.may_be_too_long()
        return False

    def begun(self) -> None:
        with _contained():
            self._exchange.begun()

    async def answer(
        self, status: int, headers: Headers, body: bytes, *, goes_on: "Answer | None" = None
    ) -> "_Held | None":
        """The answer to a shorter request, if that begins well; None: this refusal stands.

        `goes_on`: the answer whose head the client has, and behind which it is to go on.
        """
        verdict: Shorter | None = None
        with _contained():
            verdict = await self._exchange.shorter(status, headers, body)
        if verdict is None or verdict.body is None:
            return None
        log.warning("relay.shortened status=%d bytes=%d", status, len(verdict.body))
        try:
            answer = await _begin(await _send(self._upstream, self._shorten(verdict.body)))
        except UpstreamError as exc:
            why = str(exc)
        else:
            if answer.status < 400 and not answer.is_refusal and (goes_on is None or _goes_on(goes_on, answer)):
                return answer
            why = f"refused with {answer.status}" if answer.is_refusal or answer.status >= 400 else "of another form"
            await answer.aclose()
        log.warning("relay.shortened_in_vain why=%s", why)
        with _contained():
            self._exchange.refused_again(why)
        return None


def _goes_on(first: Answer, second: "_Held") -> bool:
    """Can this body go out under the head of the other."""
    alike = (b"content-type", b"content-encoding")
    return second.status == first.status and all(
        value_of(first.headers, name) == value_of(second.headers, name) for name in alike
    )


class _Watched:
    """An answer with status 200, in whose place another comes if it begins by saying that the context is too long.

    `starts_at_once`: its head can go out, for it promises no length.
    """

    def __init__(self, first: Answer, again: _Again) -> None:
        self.starts_at_once = not value_of(first.headers, b"content-length")
        self._first = first
        self._again = again
        self._opening = Opening(keeps_all=not self.starts_at_once, holds=again.is_likely())
        self._second: _Held | None = None

    @property
    def status(self) -> int:
        return (self._second or self._first).status

    @property
    def headers(self) -> Headers:
        return (self._second or self._first).headers

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._first.chunks()) as chunks:
            async for piece in self._beginning(chunks):
                yield piece
            if self._opening.refusal is not None:
                goes_on = self._first if self.starts_at_once else None
                self._second = await self._again.answer(IN_ANSWER, (), self._opening.refusal, goes_on=goes_on)
            if self._second is None:
                self._again.begun()
                if held := self._opening.release():
                    yield held
                async for chunk in chunks:
                    yield chunk
        if self._second is not None:
            async for chunk in self._second.chunks():
                yield chunk

    async def _beginning(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """What may go out until it is known how the answer begins."""
        opening = self._opening
        try:
            async for chunk in chunks:
                if passed := opening.feed(chunk):
                    yield passed
                if opening.is_over or opening.refusal is not None:
                    return
            if passed := opening.finish():
                yield passed
        except UpstreamError:
            if held := opening.release():
                yield held
            raise

    async def aclose(self) -> None:
        await self._first.aclose()
        if self._second is not None:
            await self._second.aclose()


async def _send(upstream: Upstream, request: Outgoing) -> Answer:
    return await upstream.send(request.method, request.url, request.headers, request.body)


class _Held:
    """An answer whose beginning was read: all of a refusal, but of a very long one. It is still whole."""

    def __init__(self, answer: Answer, chunks: AsyncGenerator[bytes, None]) -> None:
        self.status, self.headers = answer.status, answer.headers
        self.is_refusal = False
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


async def _begin(answer: Answer) -> _Held:
    """Read a success until it says something. Raises UpstreamError when it breaks off before that."""
    held = _Held(answer, chunks := answer.chunks())
    if answer.status != IN_ANSWER or value_of(answer.headers, b"content-encoding"):
        return held
    opening = Opening(keeps_all=True)
    try:
        async for chunk in chunks:
            held.beginning += opening.feed(chunk)
            if opening.is_over or opening.refusal is not None:
                break
        held.beginning += opening.finish()
    except BaseException:
        await held.aclose()
        raise
    held.is_refusal = opening.refusal is not None
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
