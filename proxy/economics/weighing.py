"""What a rewrite costs and saves, in uncached input tokens (the expected net of a rewrite).

Both ways are priced alike: the request at hand, which finds what was sent before in the cache with probability q, and
the requests that are expected after it while the cache stays warm. Once it is cold a rewrite is free to be made then,
so nothing later counts. What is left out may be read again; reasoning that the provider drops may be done again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graphstore.blocks import Block, Message
from proxy.economics.profiles import STEP_TOKENS, Profile
from proxy.economics.warmth import PROBABLY

CHARS_PER_TOKEN = 4  # an estimate, alike for both ways

MARGIN = 0.05  # of what the request costs as it stands: estimates are off by some per cent
WARM_DROP_MIN_TOKENS = 2048  # less is not worth a prefix that is probably still cached
REASONED_AGAIN = 0.5  # share of lost reasoning that the model does again
READ_AGAIN = 0.05  # share of what is dropped that the agent reads again, with one more request
REQUESTS_PRIOR = 6.0  # of a turn, of which nothing is known yet


@dataclass(frozen=True, slots=True)
class Ways:
    """Sizes in tokens of the request as it would go on, and as it would be rewritten. Instructions and tools count."""

    appended: int
    rewritten: int
    known: int  # the beginning of `appended` that was sent before
    shared: int  # the beginning that both have
    reasoning: int = 0  # after that beginning, in `rewritten`
    asked: bool = False  # by the request or a person: blocks come back, or one muted by hand goes


@dataclass(frozen=True, slots=True)
class Weighed:
    """`net` in uncached input tokens: positive, when rewriting is cheaper."""

    net: float
    margin: float
    warm: float
    further: float
    ways: Ways
    profile: str

    @property
    def is_warm(self) -> bool:
        return self.warm > PROBABLY

    @property
    def pays(self) -> bool:
        """Once the cache is gone, what was asked for is sent whatever it costs."""
        if not self.is_warm and self.ways.asked:
            return True
        is_little = self.ways.appended - self.ways.rewritten < WARM_DROP_MIN_TOKENS
        return self.net > self.margin and not (is_little and self.is_warm)

    def __str__(self) -> str:
        ways = self.ways
        wanted = "asked for" if ways.asked and not self.is_warm else f"{self.margin:.0f} are wanted"
        return (
            f"a rewrite from {ways.appended} to {ways.rewritten} tokens, the first {ways.shared} alike, "
            f"{'saves' if self.net >= 0 else 'costs'} {abs(self.net):.0f} ({wanted}): "
            f"cached with probability {self.warm:.2f}, {self.further:.0f} requests to follow, prices of {self.profile}"
        )


def ways_of(
    blocks: Sequence[Block],
    ordinals: Sequence[int],
    messages: Sequence[Message],
    *,
    known: int,
    present: frozenset[int],
    proposed: frozenset[int],
    head: int,
    noticed: bool,
    marked: frozenset[int] = frozenset(),
) -> Ways:
    """`known`: leading messages of the request before. `present`, `proposed`: ordinals left out. `head`: characters
    before the messages; `noticed`: a notice follows them as soon as anything is left out. `marked`: ordinals that a
    person pinned or muted."""
    appended = rewritten = sent = shared = reasoning = 0
    asked = False
    alike = not noticed or bool(present) == bool(proposed)
    for block, ordinal in zip(blocks, ordinals, strict=True):
        stands, stays = ordinal not in present, ordinal not in proposed
        alike = alike and stands == stays
        asked = asked or (stays and not stands) or (ordinal in marked and stays != stands)
        if stands:
            appended += block.cost
            sent += block.cost if block.messages[-1] < known else 0
        if stays:
            rewritten += block.cost
            if not alike:
                reasoning += sum(messages[i].cost for i in block.messages if messages[i].role == "reasoning")
        shared += block.cost if alike and stands else 0
    return Ways(
        appended=(head + appended) // CHARS_PER_TOKEN,
        rewritten=(head + rewritten) // CHARS_PER_TOKEN,
        known=(head + sent) // CHARS_PER_TOKEN,
        shared=(head + min(shared, sent)) // CHARS_PER_TOKEN,
        reasoning=reasoning // CHARS_PER_TOKEN,
        asked=asked,
    )


def weigh(ways: Ways, profile: Profile, warm: float, further: float) -> Weighed:
    """`warm`: probability that what was sent before is in the cache. `further`: requests expected while it stays so."""
    matched = 0 if profile.match == "requests" else _served(ways.shared, profile)
    stay = _first(ways.appended, _served(ways.known, profile), profile, warm)
    go = _first(ways.rewritten, matched, profile, warm)
    later = further * profile.read * (_priced(ways.appended, profile) - _priced(ways.rewritten, profile))
    lost = REASONED_AGAIN * ways.reasoning * profile.output if profile.reasoning == "bound" else 0.0
    dropped = max(0, ways.appended - ways.rewritten)
    again = READ_AGAIN * dropped * (profile.write + profile.read * further / 2)
    again += profile.read * ways.rewritten if dropped else 0.0
    return Weighed(stay - go + later - lost - again, MARGIN * stay, warm, further, ways, profile.name)


def _served(tokens: int, profile: Profile) -> int:
    whole = tokens if profile.match == "requests" else tokens - tokens % STEP_TOKENS
    return whole if whole >= profile.minimum_tokens else 0


def _first(tokens: int, cached: int, profile: Profile, warm: float) -> float:
    factor = _priced(tokens, profile) / tokens if tokens else 1.0
    when_warm = profile.read * cached + profile.write * (tokens - cached)
    return factor * (warm * when_warm + (1 - warm) * profile.write * tokens)


def _priced(tokens: int, profile: Profile) -> float:
    beyond = 0 < profile.cliff_tokens < tokens
    return tokens * profile.cliff_factor if beyond else float(tokens)


def further_requests(turns: Sequence[int], warm_pauses: float, pauses: int) -> float:
    """Requests expected after the first one of a turn, until the cache is cold or the session over.

    `turns`: requests of each earlier turn. `warm_pauses`: how many of the pauses left the cache warm, by probability.
    A turn has as many requests as their mean; another warm one follows as often as one did, and as often as a session
    that has come so far goes on. Each begins with one made-up observation.
    """
    usual = (sum(turns) + REQUESTS_PRIOR) / (len(turns) + 1)
    follow = (warm_pauses + 1) / (pauses + 2) * (len(turns) + 1) / (len(turns) + 2)
    return max(0.0, usual - 1) + usual * follow / (1 - follow)
