"""The composition root: settings in, a running application out. Nothing else knows how the parts are joined."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from proxy.app import create_app
from proxy.ports import Conversations
from proxy.settings import Settings
from proxy.upstream.client import open_upstream


async def open_conversations(settings: Settings) -> Conversations:
    """The session logic and its archive."""
    from proxy.conversations import open_conversations as open_archive

    return await asyncio.to_thread(open_archive, settings, time.time)


@asynccontextmanager
async def open_app(
    settings: Settings, conversations: Conversations | None, clock: Callable[[], float] = time.time
) -> AsyncIterator[Starlette]:
    """The application with its upstream connections; closes those, then `conversations`, at the end."""
    try:
        bases = [settings.upstream, *settings.upstreams.values()]
        async with open_upstream(bases, read_timeout_s=settings.read_timeout) as upstream:
            app = create_app(settings, upstream, conversations, clock)
            try:
                yield app
            finally:
                await asyncio.to_thread(app.state.inspector.close)
    finally:
        if conversations is not None:
            await conversations.close()
