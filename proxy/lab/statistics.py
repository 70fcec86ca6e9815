"""Means with intervals over sessions: what one session contributes is not independent of itself. Pure.

The paired bootstrap (Efron and Tibshirani 1993; the paper's B.2) draws whole sessions with replacement, the same ones
for both sides, so that what makes a session easy for all selectors cancels.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")

RESAMPLES = 10_000  # the paper's
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with the bounds of its interval."""

    mean: float
    low: float
    high: float
    sessions: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def session_means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Session -> mean over its transitions; sessions without any are left away."""
    return {session: fmean(members) for session, members in values.items() if members}


def mean_of_sessions(values: Mapping[str, Sequence[float]], *, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """Mean over sessions, with the percentile interval of the bootstrap over sessions."""
    means = session_means(values)
    return _bootstrap([means[session] for session in sorted(means)], seed, resamples)


def paired_difference(
    left: Mapping[str, Sequence[float]], right: Mapping[str, Sequence[float]], *, seed: int, resamples: int = RESAMPLES
) -> Estimate:
    """Mean over sessions of left minus right, with the percentile interval of the paired bootstrap over sessions."""
    one, other = session_means(left), session_means(right)
    shared = sorted(one.keys() & other.keys())
    return _bootstrap([one[session] - other[session] for session in shared], seed, resamples)


def _bootstrap(values: Sequence[float], seed: int, resamples: int) -> Estimate:
    if not values:
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    draw = random.Random(seed)
    count = len(values)
    means = [fmean(draw.choices(values, k=count)) for _ in range(resamples)]
    return Estimate(fmean(values), *_interval(means), count)


def unpaired_difference(
    left: Sequence[T], right: Sequence[T], measure: Callable[[Sequence[T]], float], *, seed: int, resamples: int
) -> Estimate:
    """A measure of left minus that of right, neither empty, with the percentile interval of a bootstrap that draws the
    members of each side on their own (Efron and Tibshirani 1993, chapter 8). `measure` may be a ratio of sums."""
    draw = random.Random(seed)
    differences = [
        measure(draw.choices(left, k=len(left))) - measure(draw.choices(right, k=len(right))) for _ in range(resamples)
    ]
    return Estimate(measure(left) - measure(right), *_interval(differences), len(left) + len(right))


def _interval(drawn: Sequence[float]) -> tuple[float, float]:
    ordered, last, tail = sorted(drawn), len(drawn) - 1, (1 - LEVEL) / 2
    return ordered[int(tail * last)], ordered[round((1 - tail) * last)]
