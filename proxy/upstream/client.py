"""The one HTTP client: sends bytes to the upstream and hands its answer back untouched.

Knows pools, timeouts, TLS and URLs; nothing of dialects or sessions. httpx gives the request and response types,
aiohttp the connections: it carries several times more streams at once. `_Wire` stands between the two and undoes what
either would change on the way: merged, lower-cased or added headers, cookies kept from one caller to the next, URLs
quoted anew.
"""

import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache
from typing import Any, cast

import aiohttp
import httpx
from httpx_aiohttp.transport import AiohttpTransport
from multidict import CIMultiDict
from yarl import URL

from proxy.errors import UpstreamBroken, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from proxy.headers import value_of
from proxy.ports import Headers
from proxy.upstream.target import is_loopback

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 15.0  # below what servers and load balancers usually keep: a reused socket should never be a dead one
HEADER_LINE_BYTES_MAX = 1 << 18  # aiohttp's own 8 kB is less than what some gateways send in one cookie
_PIECE_BYTES = 1 << 18  # large bodies go out in pieces, so that the event loop stays free


class Answer:
    """A response whose body is still on its way. Close it, read or not."""

    def __init__(self, response: httpx.Response) -> None:
        self.status: int = response.status_code
        self.headers: Headers = response.headers.raw
        self._response = response

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Body bytes as they arrive, never held back. Raises UpstreamBroken or UpstreamTimeout."""
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        try:
            async for chunk in self._response.stream:
                yield chunk
        except (httpx.TransportError, aiohttp.ClientError, OSError) as exc:
            raise _translate(exc, broken=True) from exc

    async def aclose(self) -> None:
        """Ends the connection if the body was not read to its end, else gives it back to the pool."""
        await self._response.aclose()


_NOWHERE = httpx.URL("http://verbatim")  # parsed once; every request gets its own URL in its place


class Upstream:
    def __init__(self, wire: "_Wire", *, read_timeout_s: float) -> None:
        # `verify` would only matter for a session that the transport makes itself.
        self._transport = AiohttpTransport(client=cast(Any, wire), verify=False)
        self._timeout = {"connect": CONNECT_TIMEOUT_S, "read": read_timeout_s}

    async def send(self, method: str, url: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None) -> Answer:
        """Send one request; return once the answer's headers are here. Cancelling closes the connection.

        `url` and `headers` go out as they are; the framing follows `headers`: a body without content-length is chunked.
        Raises UpstreamUnreachable or UpstreamTimeout.
        """
        request = httpx.Request(method, _NOWHERE, headers=list(headers), stream=_stream(body, headers))
        request.url = _verbatim(url)
        request.extensions["timeout"] = self._timeout
        if isinstance(request.stream, httpx.ByteStream):
            request.read()
        try:
            return Answer(await self._transport.handle_async_request(request))
        except (httpx.TransportError, aiohttp.ClientError, OSError) as exc:
            raise _translate(exc) from exc


@asynccontextmanager
async def open_upstream(bases: Sequence[str], *, read_timeout_s: float) -> AsyncIterator[Upstream]:
    """An upstream client for URLs under one of `bases`; closes its connections at the end.

    A proxy from HTTP(S)_PROXY and NO_PROXY is used for hosts beyond loopback; nothing else is read from the environment
    but SSL_CERT_FILE and SSL_CERT_DIR.
    """
    # Loading the certificate bundle takes a while; a local upstream has no need of it.
    tls = httpx.create_ssl_context() if any(base.startswith("https:") for base in bases) else False
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
        auto_decompress=False,
        trust_env=False,
        request_class=_PlainRequest,
        max_line_size=HEADER_LINE_BYTES_MAX,
        max_field_size=HEADER_LINE_BYTES_MAX,
    )
    async with session:
        yield Upstream(_Wire(session), read_timeout_s=read_timeout_s)


class _Wire:
    """What `AiohttpTransport` takes for an aiohttp session. It calls its client to get one, hence `__call__`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._proxy_for = lru_cache(maxsize=64)(_proxy_for)  # the environment is asked once for each host

    def __call__(self) -> "_Wire":
        return self

    def request(self, *, url: str, headers: httpx.Headers, **options: Any) -> AbstractAsyncContextManager[Any]:
        target = URL(url, encoded=True)
        options["proxy"] = self._proxy_for(target.scheme, target.host or "")
        return self._session.request(
            url=target, headers=CIMultiDict((_text(k), _text(v)) for k, v in headers.raw), **options
        )


class _PlainRequest(aiohttp.ClientRequest):
    """Adds no length to a request that came without a body and without a length."""

    def update_body_from_data(self, body: Any, *args: Any, **kwargs: Any) -> None:
        length = self.headers.get("content-length")
        super().update_body_from_data(body, *args, **kwargs)
        if body is None and length is None:
            self.headers.pop("content-length", None)


class _VerbatimURL(httpx.URL):
    """httpx would re-quote some characters; the transport only ever takes the text of its URL."""

    def __init__(self, text: str) -> None:
        super().__init__("http://verbatim")
        self._text = text

    def __str__(self) -> str:
        return self._text


@lru_cache(maxsize=256)  # parsing a URL costs more than everything else here, and conversations use few
def _verbatim(url: str) -> _VerbatimURL:
    return _VerbatimURL(url)


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._source


async def _cut(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def _stream(body: bytes | AsyncIterator[bytes] | None, headers: Headers) -> httpx.ByteStream | _Pieces:
    if body is None:
        return httpx.ByteStream(b"")
    if not isinstance(body, bytes):
        return _Pieces(body)
    # Only bytes in one piece get a length from aiohttp; what came chunked goes on chunked.
    if len(body) <= _PIECE_BYTES and value_of(headers, b"content-length"):
        return httpx.ByteStream(body)
    return _Pieces(_cut(body))


def _text(raw: bytes) -> str:
    """aiohttp writes header text as UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _proxy_for(scheme: str, host: str) -> str | None:
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies_environment().get(scheme)


def _translate(exc: Exception, *, broken: bool = False) -> UpstreamError:
    """httpx-aiohttp calls every lost connection a connect timeout; what aiohttp raised is the cause it keeps."""
    cause = exc.__cause__ or exc
    if isinstance(cause, TimeoutError | httpx.TimeoutException) or isinstance(cause, aiohttp.ServerTimeoutError):
        return UpstreamTimeout("it sent nothing in time" if broken else _timeout_text(cause))
    # Only connect errors speak of hosts alone; other texts may hold the URL with a key in its query.
    detail = f": {cause}" if isinstance(cause, aiohttp.ClientConnectorError) else ""
    text = f"{type(cause).__name__}{detail}"
    return UpstreamBroken(text) if broken else UpstreamUnreachable(text)


def _timeout_text(cause: BaseException) -> str:
    return "no connection in time" if isinstance(cause, aiohttp.ConnectionTimeoutError) else "no answer in time"
