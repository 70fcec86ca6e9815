"""What is removed from the archive, and when: what a person asked to forget, and what the retention settings say.

The running proxy does it itself, between requests, because it alone knows which sessions are in use and must not find
one again that is gone. What is overdue goes one session at a time; a request never waits for more than the proxy's
memory of them to go.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from graphstore.records import SessionRow
from graphstore.store.archive import Archive
from graphstore.store.changes import Changes
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.forget import Forget, Forgotten, requested

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0  # for requests to forget; `recap forget` waits for it
RETENTION_INTERVAL_S = 60.0
PAUSE_S = 0.05  # between two sessions: the writer has other things to do
IN_USE_S = 3600.0  # a session that was active so lately is never removed to save space
DAY_S = 86_400.0


class Remove(Protocol):
    async def __call__(self, what: Forget, *, unless_active_after: float = ...) -> Forgotten: ...


def overdue(
    sessions: Sequence[SessionRow], active: Mapping[int, float], *, now: float, keep_days: int, is_too_big: bool
) -> tuple[int, float] | None:
    """The session to remove next, if any, and when it was active last: the one that has been inactive for longest.

    `active` says when those in memory were active last, later than their rows may know.
    """
    last = {row.id: max(row.last_active_at, active.get(row.id, 0.0)) for row in sessions}
    oldest = min(last, key=lambda id: (last[id], id), default=None)
    if oldest is None:
        return None
    is_old = keep_days > 0 and last[oldest] < now - keep_days * DAY_S
    may_make_room = is_too_big and last[oldest] < now - IN_USE_S
    return (oldest, last[oldest]) if is_old or may_make_room else None


class Keeper:
    """Looks for work every now and then. `active` and `remove` are those of the session logic."""

    def __init__(
        self,
        archive: Archive,
        *,
        keep_days: int,
        keep_bytes: int,
        active: Callable[[], Mapping[int, float]],
        remove: Remove,
        clock: Callable[[], float],
    ) -> None:
        self._archive = archive
        self._keep_days = keep_days
        self._keep_bytes = keep_bytes
        self._active = active
        self._remove = remove
        self._clock = clock
        self._removed = 0
        self._freed = 0  # bytes that went since the file was written anew: its pages are emptier, not fewer
        self._problem: str | None = None

    async def run(self) -> None:
        """For ever."""
        changes = Changes(Path(self._archive.path))
        loop = asyncio.get_running_loop()
        retain_at = loop.time()
        try:
            while True:
                try:
                    if await asyncio.to_thread(changes.happened):
                        await self.obey()
                    if loop.time() >= retain_at:
                        await self.retain()
                        retain_at = loop.time() + RETENTION_INTERVAL_S
                    self._problem = None
                except ArchiveUnavailable as error:
                    self._problem = str(error)
                except Exception as error:  # whatever it is, it must not end the looking
                    log.exception("keep.failed")
                    self._problem = f"{error}; the log has more"
                await asyncio.sleep(LOOK_INTERVAL_S)
        finally:
            changes.close()

    async def obey(self) -> None:
        """Remove what `recap forget` asked for, all of it at once: the file is written anew each time."""
        ids = await asyncio.to_thread(self._requested)
        if ids:
            await self._remove(Forget(ids, thorough=True))
        for id in sorted(ids):
            log.info("session.forgotten session_id=%d", id)

    async def retain(self) -> None:
        """Remove what the settings say, one session after the other; then, when nothing runs, write the file anew."""
        if not self._keep_days and not self._keep_bytes:
            return
        reader = self._archive.reader
        before = self._clock() - self._keep_days * DAY_S if self._keep_days else None
        while True:
            used = await asyncio.to_thread(reader.bytes_used) - self._freed
            due = overdue(
                await asyncio.to_thread(reader.list_sessions),
                self._active(),
                now=self._clock(),
                keep_days=self._keep_days,
                is_too_big=0 < self._keep_bytes < used,
            )
            if due is None:
                break
            id, last = due
            gone = await self._remove(Forget(frozenset([id])), unless_active_after=last)
            if not gone.sessions:
                break
            self._removed += gone.sessions
            self._freed += gone.freed
            log.info("session.expired session_id=%d", id)
            await asyncio.sleep(PAUSE_S)
        rewrite = self._freed > 0 and math.inf not in self._active().values()
        if rewrite or before is not None:
            await self._remove(Forget(frozenset(), thorough=rewrite, unattached_before=before))
            self._freed = 0 if rewrite else self._freed

    def health(self) -> dict[str, object]:
        """`removed` counts sessions since the start."""
        return {
            "keep_days": self._keep_days,
            "keep_bytes": self._keep_bytes,
            "removed": self._removed,
            "problem": self._problem,
        }

    def _requested(self) -> frozenset[int]:
        with self._archive.reader.snapshot() as db:
            return requested(db)
