"""The ASGI application: our own routes, the gate around them, and the gateway for all other paths. No logic."""

from importlib.metadata import version

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.endpoints import Gateway, health
from proxy.errors import render_error
from proxy.gate import Gate
from proxy.ports import Conversations
from proxy.settings import Settings
from proxy.upstream.client import Upstream


def create_app(settings: Settings, upstream: Upstream, conversations: Conversations | None) -> Starlette:
    """Without `conversations`, requests pass through and nothing is recorded."""

    async def show_health(request: Request) -> Response:
        return Response(health(settings, conversations, version("recap-proxy")), media_type="application/json")

    async def unknown(request: Request) -> Response:
        body = render_error(f"ReCAP proxy has no page {request.url.path!r}.", code="not_found")
        return Response(body, status_code=404, media_type="application/json")

    app = Starlette(
        routes=[Route("/recap/health", show_health), Route("/recap/{rest:path}", unknown)],
        middleware=[Middleware(Gate, settings=settings)],
    )
    app.router.redirect_slashes = False
    app.router.default = Gateway(settings, upstream, conversations)
    return app
