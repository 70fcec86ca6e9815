"""The paper's equations as pure functions over plain sequences; which blocks are chosen is not decided here.

Sequences are aligned: entry i of every argument and result speaks of the same block. Sums are exact (`fsum`), so a
result never depends on the iteration order of a set, which differs from process to process.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from math import fsum, log, sqrt
from struct import Struct

from graphstore.parameters import Parameters

DEVIATION_MIN = 1e-12  # a channel that varies less says nothing

_DIGEST_HEAD = Struct(">Q24x")  # the first 8 of 32 bytes, big-endian


def blend(importance: float, attention: float, attention_max: float, alpha: float) -> float:
    """u(v) after one observation (paper §4.2, Eq. 1); an observation whose largest attention is 0 counts as 0."""
    return (1 - alpha) * importance + (alpha * attention / attention_max if attention_max > 0 else 0.0)


def lexical_cue(texts: Sequence[frozenset[str]], request: frozenset[str]) -> list[float]:
    """lex(v): summed inverse document frequency of the identifiers shared with the request (paper §4.3, Eq. 2)."""
    touched = [i for i, text in enumerate(texts) if not request.isdisjoint(text)]
    shared = [request & texts[i] for i in touched]
    frequency = Counter(chain.from_iterable(shared))
    weight = {word: log(len(texts) / count) for word, count in frequency.items()}
    cue = [0.0] * len(texts)
    for i, words in zip(touched, shared, strict=True):
        cue[i] = fsum(map(weight.__getitem__, words))
    return cue


def standardised(values: Sequence[float]) -> list[float]:
    """z: distance from the mean in population standard deviations; all 0 for a constant channel (paper §4.3)."""
    if not values:
        return []
    mean = fsum(values) / len(values)
    deviations = [value - mean for value in values]
    deviation = sqrt(fsum([d * d for d in deviations]) / len(values))
    return [d / deviation for d in deviations] if deviation >= DEVIATION_MIN else [0.0] * len(values)


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
) -> Iterator[int]:
    """Blocks that a later block of the same observation replaces: the stale rule (paper §4.2, D.1).

    a is replaced by a later b when their identifiers overlap (Jaccard) and b draws more than `stale_ratio` times the
    attention of a, plus `stale_floor` of the largest. The cheap tests come first: most pairs differ in attention or in
    the number of identifiers by too much for their identifiers to be compared.
    """
    largest = max(attention.values(), default=0.0)
    floor, jaccard = parameters.stale_floor * largest, parameters.stale_jaccard
    described = [(v, attention[v], identifiers[v]) for v in sorted(attention) if identifiers.get(v)]
    rows = [(received, len(words), words) for _, received, words in described]
    for position, (ordinal, received, words) in enumerate(described):
        least = parameters.stale_ratio * received + floor
        if least >= largest:
            continue
        size = len(words)
        smallest, rivals = jaccard * size, rows[position + 1 :]
        candidates = (row for row in rivals if row[0] > least and row[1] >= smallest and size >= jaccard * row[1])
        for _, count, others in candidates:
            shared = len(words & others)
            if shared / (size + count - shared) > jaccard:
                yield ordinal
                break
