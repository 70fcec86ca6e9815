"""The composition root: settings in, a running application out. Nothing else knows how the parts are joined."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from proxy.app import create_app
from proxy.metrics import Meters
from proxy.ports import Conversations, Observer
from proxy.settings import Settings
from proxy.upstream.client import open_upstream


async def open_conversations(settings: Settings, observers: Sequence[Observer]) -> Conversations:
    """The session logic and its archive."""
    from proxy.conversations import open_conversations as open_archive

    return await asyncio.to_thread(open_archive, settings, time.time, observers)


@asynccontextmanager
async def open_app(
    settings: Settings,
    conversations: Conversations | None,
    clock: Callable[[], float] = time.time,
    meters: Meters | None = None,
) -> AsyncIterator[Starlette]:
    """The application with its upstream connections; closes those, then `conversations`, at the end.

    `meters`: those that observe `conversations`.
    """
    try:
        bases = [settings.upstream, *settings.upstreams.values()]
        async with open_upstream(bases, read_timeout_s=settings.read_timeout) as upstream:
            app = create_app(settings, upstream, conversations, clock, meters or Meters())
            try:
                yield app
            finally:
                await asyncio.to_thread(app.state.inspector.close)
    finally:
        if conversations is not None:
            await conversations.close()
