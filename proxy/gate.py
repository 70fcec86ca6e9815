"""Who may talk to the proxy: checked before any route, on every route.

A web page must not reach a server on the user's own machine: a name that was rebound to 127.0.0.1 shows in Host, a page
of another site in Origin. Beyond loopback, a key shows who is meant to be here. The inspector's page itself needs none,
because a browser cannot send one with an address: the page holds nothing of anybody, and asks for the key.
"""

import hmac
import re
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.connection import ClientConnection
from proxy.errors import render_error
from proxy.headers import PROXY_KEY, value_of
from proxy.ports import Headers
from proxy.settings import Settings
from proxy.upstream.target import is_loopback

_AUTHORITY = re.compile(r"(?:\[(?P<literal>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/?#@\[\]]+))(?::[0-9]{0,5})?")


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    code: str
    message: str


def check_caller(headers: Headers, settings: Settings, *, needs_key: bool = True) -> Refusal | None:
    """Why this request is refused; None when it may pass. Pure."""
    host = value_of(headers, b"host").decode("latin-1")
    if not _is_known(_hostname(host), settings):
        return Refusal(403, "host_not_allowed", f"Host {host!r} is not allowed. Add its name to `allowed_hosts`.")
    origin = value_of(headers, b"origin").decode("latin-1")
    if origin and not _is_own_origin(origin, host, settings):
        return Refusal(403, "origin_not_allowed", f"Origin {origin!r} is not allowed. Add its name to `allowed_hosts`.")
    key = value_of(headers, PROXY_KEY)
    if needs_key and settings.proxy_key and not hmac.compare_digest(key, settings.proxy_key.encode()):
        return Refusal(401, "proxy_key_wrong", "This proxy wants its key in the header `x-recap-key`.")
    return None


class Gate:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http":
            refusal = check_caller(scope["headers"], self._settings, needs_key=not is_page(scope))
            refusal = refusal or check_destination(scope["path"], scope["headers"])
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            body = render_error(refusal.message, code=refusal.code)
            await ClientConnection(scope, receive, send).respond(refusal.status, body)


def check_destination(path: str, headers: Headers) -> Refusal | None:
    """Why a browser must not show or run what the upstream would answer here. Pure.

    It would do so on the inspector's own origin, with all that the inspector may. Clients fetch; they neither navigate
    nor embed. Browsers that send no Fetch Metadata (plain http beyond loopback) are known by what they accept.
    """
    if is_own(path):
        return None
    destination = value_of(headers, b"sec-fetch-dest").lower()
    is_shown = destination not in (b"", b"empty") or value_of(headers, b"sec-fetch-mode").lower() == b"navigate"
    accepts = value_of(headers, b"accept").lower()
    is_browser = accepts.startswith(b"text/html") and b"application/xhtml+xml" in accepts
    if is_shown or is_browser or value_of(headers, b"service-worker"):
        message = "Pages of the upstream are not shown here: this address is for clients. The inspector is at /recap/."
        return Refusal(403, "not_for_browsers", message)
    return None


def is_own(path: str) -> bool:
    """Whether this is one of ours to answer, whatever comes after: nothing of it may reach the upstream."""
    return path == "/recap" or path.startswith("/recap/")


def is_page(scope: Scope) -> bool:
    """Whether this asks for the inspector's page or one of its files."""
    path = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in ("/recap", "/recap/") or path.startswith("/recap/static/"))


def _hostname(authority: str) -> str:
    """`localhost:8787` -> `localhost`, `[::1]:8787` -> `::1`; empty for what is no host with a port (RFC 9110, 4.1)."""
    found = _AUTHORITY.fullmatch(authority)
    return (found["literal"] or found["name"]).lower() if found is not None else ""


def _is_known(name: str, settings: Settings) -> bool:
    return bool(name) and (is_loopback(name) or name == settings.host.lower() or name in settings.allowed_hosts)


def _is_own_origin(origin: str, host: str, settings: Settings) -> bool:
    """Another port of this machine is another site: any program may listen there, and any page may be served."""
    authority = origin.partition("://")[2]
    return authority.lower() == host.lower() or _hostname(authority) in settings.allowed_hosts
