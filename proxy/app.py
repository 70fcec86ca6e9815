"""The ASGI application: our own routes, the gate around them, and the gateway for all other paths. No logic."""

import asyncio
from collections.abc import Callable
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.endpoints import Gateway, health
from proxy.gate import Gate, is_own
from proxy.inspector.routes import Inspector
from proxy.metrics import Meters
from proxy.ports import Conversations
from proxy.settings import Settings
from proxy.upstream.client import Upstream


def create_app(
    settings: Settings,
    upstream: Upstream,
    conversations: Conversations | None,
    clock: Callable[[], float],
    meters: Meters,
) -> Starlette:
    """Without `conversations`, requests pass through and nothing is recorded. `state.inspector` is to be closed."""

    def how_it_is() -> dict[str, object]:
        return health(settings, conversations, version("recap-proxy"))

    async def show_health(request: Request) -> Response:
        return Response(msgspec.json.encode(await asyncio.to_thread(how_it_is)), media_type="application/json")

    inspector = Inspector(settings, how_it_is, clock, meters)
    app = Starlette(
        routes=[Route("/recap/health", show_health), *inspector.routes()],
        middleware=[Middleware(Gate, settings=settings)],
    )
    app.state.inspector = inspector
    app.router.redirect_slashes = False
    gateway = Gateway(settings, upstream, conversations)

    async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
        """What no route takes, which under /recap/ is a path with a line feed in it: mounts do not match those."""
        await (inspector.nowhere if is_own(scope["path"]) else gateway)(scope, receive, send)

    app.router.default = elsewhere
    return app
