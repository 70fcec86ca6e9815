"""A provider's prefix cache as a simulation needs it. Pure: it is told the time, and never moves it.

A prompt is a sequence of messages, each a digest and its tokens. What the cache serves ends where a message ends, so
two messages that begin alike share nothing: less than a step, once, where a history was cut. Answers are cached when
they come back in a prompt, not before.

Two rules. By prefix: the longest known one, in whole steps (OpenAI until gpt-5.5). At breakpoints: only what was the
whole prompt of one of the latest requests, to the token (gpt-5.6 and later, the implicit breakpoint). Neither evicts
for want of room, and neither routes a request to another machine.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf

BREAKPOINTS_KEPT = 80  # the latest that gpt-5.6 looks at


@dataclass(frozen=True, slots=True)
class CacheRules:
    ttl_s: float  # since a prefix was last used
    minimum_tokens: int = 1024  # a shorter prefix is not served
    step_tokens: int = 128
    at_breakpoints: bool = False


class ProviderCache:
    def __init__(self, rules: CacheRules) -> None:
        self._rules = rules
        self._used_at: OrderedDict[bytes, float] = OrderedDict()  # prefix -> last use, the latest last

    def serve(self, prompt: Sequence[tuple[bytes, int]], at: float) -> int:
        """Tokens of `prompt` that are read from the cache at this moment; then the prompt itself is in it."""
        rules, prefixes = self._rules, _prefixes(prompt)
        alive = [i for i, (prefix, _) in enumerate(prefixes) if at - self._used_at.get(prefix, -inf) <= rules.ttl_s]
        served = prefixes[alive[-1]][1] if alive else 0
        if not rules.at_breakpoints:
            served -= served % rules.step_tokens
        if served < rules.minimum_tokens:
            served = 0
        used = prefixes
        if rules.at_breakpoints:  # the one that was read, and the one that this request writes
            used = [prefixes[i] for i in alive[-1:] if served] + prefixes[-1:]
        for prefix, _ in used:
            self._used_at[prefix] = at
            self._used_at.move_to_end(prefix)
        while rules.at_breakpoints and len(self._used_at) > BREAKPOINTS_KEPT:
            self._used_at.popitem(last=False)
        return served


def _prefixes(prompt: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """Every prefix that ends with a message, the shortest first: its digest and its tokens."""
    found: list[tuple[bytes, int]] = []
    link, total = b"", 0
    for digest, tokens in prompt:
        link, total = sha256(link + digest).digest(), total + tokens
        found.append((link, total))
    return found
