"""Does the provider's cache still serve a session as it used to? A pure watch over its exchanges.

Only requests that should hit the cache count: warm ones and steps, of some size, that were answered and whose usage
the provider reported. When the recent ones get less than half of the session's own earlier share, something breaks the
prefix: the proxy, the client, or the provider. A person must look.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from graphstore.records import ExchangeRow

RECENT = 5  # requests that are compared with all before them, of which there must be as many
INPUT_TOKENS_MIN = 2_000  # smaller ones hit by steps of the provider's cache, or not at all
SHARE_MIN = 0.2  # a session that was never served from the cache has nothing to lose
FALL = 0.5


@dataclass(frozen=True, slots=True)
class CacheFall:
    """Shares of the input tokens that came from the cache, 0 to 1: median of the recent requests, and of all before."""

    recent: float
    earlier: float

    def __str__(self) -> str:
        return (
            f"the provider's cache serves {self.recent:.0%} of the input lately, {self.earlier:.0%} before: "
            "something changes the beginning of the requests; compare with --mode off, and please report it"
        )


@dataclass(slots=True)
class CacheWatch:
    """The shares of one session in order."""

    shares: list[float] = field(default_factory=list)

    def note(self, row: ExchangeRow) -> "CacheWatch":
        """Take an exchange that has ended; returns self."""
        counts = row.boundary in ("warm", "step") and row.ending == "complete" and not row.fell_back
        if counts and row.cached_tokens is not None and (row.input_tokens or 0) >= INPUT_TOKENS_MIN:
            self.shares.append(min(1.0, row.cached_tokens / (row.input_tokens or 1)))
        return self

    @property
    def fall(self) -> CacheFall | None:
        if len(self.shares) < 2 * RECENT:
            return None
        found = CacheFall(median(self.shares[-RECENT:]), median(self.shares[:-RECENT]))
        return found if found.earlier >= SHARE_MIN and found.recent < FALL * found.earlier else None


def cache_fall(rows: Iterable[ExchangeRow]) -> CacheFall | None:
    """What the watch says after these exchanges of one session."""
    watch = CacheWatch()
    for row in rows:
        watch.note(row)
    return watch.fall
