"""Is a prefix still in the provider's cache after a pause? A prior from the profile, and what was seen since.

After each pause the provider's `cached_tokens` say whether what was sent before was still there. Pauses are counted in
bins that grow by a factor of about 1.4; a bin's neighbours count too, with less weight, and the prior counts as two
observations. What is older than the latest observations of a bin is forgotten, so that a provider may change its mind.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

from graphstore.records import ExchangeRow
from proxy.economics.profiles import Profile

BINS_PER_DOUBLING = 2
KEPT_PER_BIN = 32
PRIOR_WEIGHT = 2.0
WIDTH = 0.5  # of the kernel, in natural logarithms of the pause
HIT_SHARE = 0.5  # of the prompt before, from which on it counts as served
PAUSE_MIN_S = 1.0
PROBABLY = 0.5  # above this probability a cache counts as warm


class Seen(NamedTuple):
    """One pause, and whether what was sent before it was still served after it."""

    pause_s: float
    hit: bool


def prior(profile: Profile, pause_s: float) -> float:
    """1 until `warm_s`, 0 from `cold_s` on, and a straight line between them."""
    if pause_s <= profile.warm_s:
        return 1.0
    if pause_s >= profile.cold_s:
        return 0.0
    return (profile.cold_s - pause_s) / (profile.cold_s - profile.warm_s)


def probably_cold_after(profile: Profile) -> float:
    """The pause, in seconds, after which the prior is no more than `PROBABLY`."""
    return profile.cold_s - PROBABLY * (profile.cold_s - profile.warm_s)


@dataclass(frozen=True, slots=True)
class Learned:
    """One bin, for people."""

    pause_s: float
    hits: int
    seen: int


class Warmth:
    """Of one upstream and model."""

    def __init__(self) -> None:
        self._bins: dict[int, deque[bool]] = {}

    def note(self, seen: Seen) -> None:
        number = round(BINS_PER_DOUBLING * log(max(seen.pause_s, PAUSE_MIN_S), 2))
        self._bins.setdefault(number, deque(maxlen=KEPT_PER_BIN)).append(seen.hit)

    def probability(self, profile: Profile, pause_s: float) -> float:
        """q, 0 to 1: that what was sent before a pause of this length is still in the cache."""
        here = log(max(pause_s, PAUSE_MIN_S))
        hits, weight = PRIOR_WEIGHT * prior(profile, pause_s), PRIOR_WEIGHT
        for number, seen in list(self._bins.items()):
            near = exp(-(((here - _middle(number)) / WIDTH) ** 2) / 2)
            hits += near * sum(seen)
            weight += near * len(seen)
        return hits / weight

    def learned(self) -> list[Learned]:
        """By pause, the shortest first."""
        return [Learned(exp(_middle(n)), sum(seen), len(seen)) for n, seen in sorted(self._bins.items())]


def _middle(number: int) -> float:
    return number / BINS_PER_DOUBLING * log(2)


def seen_between(before: ExchangeRow, row: ExchangeRow, minimum_tokens: int) -> Seen | None:
    """What two requests of a session in a row show; None: nothing.

    The second must begin with all that the first sent, under the same model, and come after its end; the provider must
    have counted both, in numbers that can be true.
    """
    is_continued = row.prefix_messages >= before.messages_sent > 0 and row.model == before.model
    were_whole = before.ending == "complete" and row.ending == "complete" and not row.fell_back
    if not is_continued or not were_whole or row.cached_tokens is None or row.outcome in ("side", "opaque"):
        return None
    if before.input_tokens is None or before.input_tokens < 2 * minimum_tokens:
        return None
    if row.input_tokens is None or row.cached_tokens > row.input_tokens:
        return None
    pause_s = row.started_at - (before.ended_at or before.started_at)
    if pause_s < 0:  # they ran side by side, or the clock was set back
        return None
    return Seen(pause_s, row.cached_tokens >= HIT_SHARE * before.input_tokens)


class WarmthBook:
    """By upstream and model. Written by the thread that reads answers, read by the one that plans."""

    def __init__(self, minimum_tokens: int = 1024) -> None:
        self._minimum_tokens = minimum_tokens
        self._of: dict[tuple[str, str], Warmth] = {}

    def of(self, upstream: str, model: str) -> Warmth:
        return self._of.setdefault((upstream, model), Warmth())

    def note(self, upstream: str, before: ExchangeRow, row: ExchangeRow) -> None:
        seen = seen_between(before, row, self._minimum_tokens)
        if seen is not None:
            self.of(upstream, row.model).note(seen)

    def note_all(self, upstream: str, rows: Iterable[ExchangeRow]) -> None:
        """The exchanges of one session in order."""
        before: ExchangeRow | None = None
        for row in rows:
            if row.outcome in ("side", "opaque"):
                continue
            if before is not None:
                self.note(upstream, before, row)
            before = row

    def known(self) -> dict[tuple[str, str], list[Learned]]:
        return {names: learned for names, warmth in sorted(self._of.items()) if (learned := warmth.learned())}
