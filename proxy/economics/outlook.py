"""The sum of what is known when a request arrives: whose cache, how warm, how many requests to follow."""

from collections.abc import Sequence

from graphstore.store.report import TurnOpening
from proxy.economics.profiles import Profile, profile_of
from proxy.economics.warmth import WarmthBook
from proxy.economics.weighing import Ways, Weighed, further_requests, weigh


class Economics:
    def __init__(self, profiles: Sequence[Profile], book: WarmthBook) -> None:
        self._profiles = profiles
        self._book = book

    def weigh(self, ways: Ways, upstream: str, model: str, pause_s: float, openings: Sequence[TurnOpening]) -> Weighed:
        """A request after this pause (seconds). `openings`: the session's turns so far."""
        profile, warmth = profile_of(self._profiles, upstream, model), self._book.of(upstream, model)
        pauses = [opening.pause_s for opening in openings if opening.pause_s is not None] + [pause_s]
        warm = [warmth.probability(profile, pause) for pause in pauses]
        further = further_requests([opening.requests for opening in openings], sum(warm), len(warm))
        return weigh(ways, profile, warm[-1], further)
