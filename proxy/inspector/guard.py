"""What every answer under /recap/ carries, and who may read and change there, beyond the proxy's own gate.

History is text that strangers wrote. The page shows it as text; these headers see to it that nothing else could happen.
"""

import hmac
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.errors import render_error

TOKEN = "x-recap-token"
SAFE_METHODS = frozenset({"GET", "HEAD"})
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """ASGI middleware around the page and its API."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("cache-control", "no-cache")
                headers.update(HEADERS)
            await send(message)

        refusal = why_refused(scope["method"], Headers(scope=scope), self._token)
        if refusal is not None:
            await _answer(send_guarded, 403, "not_same_origin", refusal)
            return
        try:
            await self._app(scope, receive, send_guarded)
        except HTTPException as error:  # no such file, or a method that a route does not take: answered outside of us
            status = HTTPStatus(error.status_code)
            message = f"{scope['method']} {scope['path']!r}: {status.phrase}."
            await _answer(send_guarded, status, status.name.lower(), message, error.headers or {})


async def _answer(
    send: Send, status: int, code: str, message: str, headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    response = Response(render_error(message, code=code), status, dict(headers), "application/json")
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def why_refused(method: str, headers: Headers, token: str) -> str | None:
    """Another site's page must neither read nor change anything here; what it may do is link to us. Pure."""
    site = headers.get("sec-fetch-site", "none")
    is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    is_link = is_link and headers.get("sec-fetch-dest", "document") == "document"
    if site not in ("none", "same-origin") and not is_link:
        return "Pages of other sites cannot use the inspector. Open /recap/ in its own tab."
    if method not in SAFE_METHODS and not hmac.compare_digest(headers.get(TOKEN, "").encode(), token.encode()):
        return f"A change needs the header {TOKEN}, whose value GET /recap/api/self gives to pages of this origin."
    return None
