"""Which headers cross the proxy. Everything does, in order and with duplicates, but for the lists in this file.

Framing is the business of each connection: hop-by-hop headers end here, and so do those that `Connection` names.
"""

from proxy.ports import Headers

PROXY_KEY = b"x-recap-key"

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REQUEST_ONLY = frozenset({b"host", b"expect", PROXY_KEY})  # Host is made anew from the upstream's URL
# These speak for the upstream's host, and would bind the browser's view of ours.
_RESPONSE_ONLY = frozenset({b"alt-svc", b"strict-transport-security"})
_BODY = frozenset({b"content-encoding", b"content-length"})
_BODILESS_STATUS = frozenset({204, 304})


def request_headers(headers: Headers, *, new_body: bytes | None = None) -> list[tuple[bytes, bytes]]:
    """Headers for the upstream. With `new_body`, the body's old encoding and length are replaced by its own length."""
    dropped = _HOP_BY_HOP | _REQUEST_ONLY | _named_by_connection(headers)
    if new_body is None:
        return _without(headers, dropped)
    return [*_without(headers, dropped | _BODY), (b"content-length", str(len(new_body)).encode())]


def response_headers(headers: Headers, status: int) -> list[tuple[bytes, bytes]]:
    """Headers for the client, for a body that is relayed as it comes.

    The length stays unless the upstream also chunked its answer: both together are a smuggling vector.
    """
    dropped = _HOP_BY_HOP | _RESPONSE_ONLY | _named_by_connection(headers)
    if status in _BODILESS_STATUS or value_of(headers, b"transfer-encoding"):
        dropped |= {b"content-length"}
    return _without(headers, dropped)


def value_of(headers: Headers, name: bytes) -> bytes:
    """The first value of `name` (lower case); b"" when there is none."""
    return next((value for key, value in headers if key.lower() == name), b"")


def tokens_of(headers: Headers, name: bytes) -> list[bytes]:
    """The comma-separated tokens of all headers called `name`, lower case, in order."""
    values = [value for key, value in headers if key.lower() == name]
    return [token.strip().lower() for value in values for token in value.split(b",") if token.strip()]


def has_body(headers: Headers) -> bool:
    return bool(value_of(headers, b"transfer-encoding")) or value_of(headers, b"content-length") not in (b"", b"0")


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    # A sender may not take away what describes the body.
    return frozenset(tokens_of(headers, b"connection")) - {b"content-length", b"content-type", b"content-encoding"}


def _without(headers: Headers, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in dropped]
