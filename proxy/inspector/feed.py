"""Tells open pages that the archive changed: server-sent events (WHATWG HTML, 9.2), as long as somebody listens.

An event carries no content: the page asks again for what it shows.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor

from graphstore.store.changes import Changes
from graphstore.store.engine import ArchiveUnavailable

INTERVAL_S = 0.4  # nobody sees a page change faster, and a look costs microseconds
QUIET_S = 15.0  # a comment at least this often: a connection that is gone shows when it is written to
HELLO, CHANGED, QUIET = b"event: hello\ndata: {}\n\n", b"event: change\ndata: {}\n\n", b": still here\n\n"

log = logging.getLogger(__name__)


class Feed:
    """One watch for all listeners."""

    def __init__(self, watch: Callable[[], Changes], executor: Executor) -> None:
        self._watch = watch
        self._executor = executor
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def listen(self) -> AsyncIterator[bytes]:
        """Ends when the feed is closed. A listener that does not keep up gets one event for many changes."""
        if self._closed:
            return
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._listeners.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield HELLO
            while not self._closed:
                try:
                    event = await asyncio.wait_for(queue.get(), QUIET_S)
                except TimeoutError:
                    event = QUIET
                if event is not None:
                    yield event
        finally:
            self._listeners.discard(queue)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    def close(self) -> None:
        """End every stream: a server that stops waits for open ones."""
        self._closed = True
        for queue in self._listeners:
            _tell(queue, None)

    async def _run(self) -> None:
        changes = self._watch()
        loop = asyncio.get_running_loop()
        try:
            while not self._closed:
                try:
                    if await loop.run_in_executor(self._executor, changes.happened):
                        for queue in self._listeners:
                            _tell(queue, CHANGED)
                except ArchiveUnavailable as error:
                    log.debug("feed.unavailable %s", error)
                except Exception:  # whatever it was, pages go on listening
                    log.exception("feed.failed")
                    changes.close()
                await asyncio.sleep(INTERVAL_S)
        finally:
            changes.close()


def _tell(queue: "asyncio.Queue[bytes | None]", event: bytes | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)
