"""The paper's equations as pure functions over plain sequences; which blocks are chosen is not decided here.

Sequences are aligned: entry i of every argument and result speaks of the same block. No result depends on the iteration
order of a set, which differs from process to process.
"""

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import dist, fsum, log, sqrt
from operator import itemgetter
from struct import Struct

from graphstore.identifiers import IdentifierIndex
from graphstore.parameters import Parameters

DEVIATION_MIN = 1e-12  # a channel that varies less says nothing
_FIRST = itemgetter(0)
_DIGEST_HEAD = Struct(">Q24x")  # the first 8 of 32 bytes, big-endian


def blend(importance: float, attention: float, attention_max: float, alpha: float) -> float:
    """u(v) after one observation (paper §4.2, Eq. 1); an observation whose largest attention is 0 counts as 0."""
    return (1 - alpha) * importance + (alpha * (attention / attention_max) if attention_max > 0 else 0.0)


def lexical_cue(history: IdentifierIndex, request: frozenset[str]) -> list[float]:
    """lex(v): summed inverse document frequency of the identifiers shared with the request (paper §4.3, Eq. 2).

    Weights are added in the order of their size, so that blocks whose shared words are equally rare tie.
    """
    naming = [blocks for blocks in map(history.naming, request) if blocks]
    cue = [0.0] * len(history)
    for blocks in sorted(naming, key=len):
        weight = log(len(history) / len(blocks))
        for block in blocks:
            cue[block] += weight
    return cue


def standardised(values: Sequence[float]) -> list[float]:
    """z: distance from the mean in population standard deviations; all 0 for a constant channel (paper §4.3)."""
    if not values:
        return []
    mean = fsum(values) / len(values)
    deviation = dist(values, [mean] * len(values)) / sqrt(len(values))
    return [(value - mean) / deviation for value in values] if deviation >= DEVIATION_MIN else [0.0] * len(values)


def exploration(ordinals: Sequence[int], *, seed: int, session: str, turn: int) -> list[float]:
    """xi(v) in [0.5, 1]: a draw that depends on nothing but these names (paper §4.3; the hash is ours)."""
    named = sha256(f"{seed}|{session}|{turn}|".encode("utf-8", "backslashreplace"))
    digests = bytearray()
    for ordinal in ordinals:
        draw = named.copy()
        draw.update(b"%d" % ordinal)
        digests += draw.digest()
    return [0.5 + 0.5 * (head / 2**64) for (head,) in _DIGEST_HEAD.iter_unpack(digests)]


def replaced(
    attention: Mapping[int, float], identifiers: Mapping[int, frozenset[str]], parameters: Parameters
) -> list[int]:
    """Blocks that a later block of the same observation replaces: the stale rule (paper §4.2, D.1).

    a is replaced by a later b when their identifiers overlap (Jaccard) and b draws more than `stale_ratio` times the
    attention of a, plus `stale_floor` of the largest. From the newest block back, each meets only later ones that
    dominate it, and compares identifiers only with those that have about as many.
    """
    floor, jaccard = parameters.stale_floor * max(attention.values(), default=0.0), parameters.stale_jaccard
    later: list[tuple[float, int, frozenset[str]]] = []  # by attention
    found = []
    for ordinal in sorted(attention, reverse=True):
        words = identifiers.get(ordinal)
        if not words:
            continue
        received, size = attention[ordinal], len(words)
        least, smallest = parameters.stale_ratio * received + floor, jaccard * size
        for _, count, others in later[bisect_right(later, least, key=_FIRST) :]:
            if count >= smallest and size >= jaccard * count:
                shared = len(words & others)
                if shared / (size + count - shared) > jaccard:
                    found.append(ordinal)
                    break
        insort(later, (received, size, words), key=_FIRST)
    return found[::-1]
