"""Means with intervals over sessions: what one session contributes is not independent of itself. Pure.

The paired bootstrap (Efron and Tibshirani 1993; the paper's B.2) draws whole sessions with replacement, the same ones
for both sides, so that what makes a session easy for all selectors cancels.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

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
    means = sorted(fmean(draw.choices(values, k=count)) for _ in range(resamples))
    tail = (1 - LEVEL) / 2
    return Estimate(
        fmean(values), means[int(tail * (resamples - 1))], means[round((1 - tail) * (resamples - 1))], count
    )
