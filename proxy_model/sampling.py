"""Which positions of a context are read: evenly spaced, both ends included. Pure; no tensor.

A position is the index of a token in the context. Only tokens of blocks are sampled, never the template's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from graphstore.replays import RowGroup
from proxy_model.context import ContextBlock
from proxy_model.spans import Encoded, Span

GROUPS: tuple[RowGroup, ...] = ("turn", "assistant")  # of RowPlan, in this order wherever G stands in a shape


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Query positions whose attention is read, all ascending.

    `turn` is W_t of Eq. 1 and `assistant` what the model wrote of it. `dependents` has W_t(b) of Eq. 5 for blocks b
    that edges may lead to: (index of the block in the context, its positions), by block.
    """

    turn: tuple[int, ...]
    assistant: tuple[int, ...]
    dependents: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def first(self) -> int:
        """The first position that is read: what lies before it may come from a cache."""
        return min(chain(self.turn[:1], (positions[0] for _, positions in self.dependents)))


def plan(blocks: Sequence[ContextBlock], encoded: Encoded, *, rows_max: int, block_rows_max: int) -> RowPlan:
    """DESIGN 5: at most `rows_max` positions of the finished turn and `block_rows_max` of each dependent block.

    What the graph does not know, or what does not stand in the context as a whole, is no dependent.
    """
    in_turn = [spans for block, spans in zip(blocks, encoded.spans, strict=True) if block.in_turn]
    turn = spread(list(chain.from_iterable(in_turn)), rows_max)
    written = _positions(
        span
        for block, spans in zip(blocks, encoded.spans, strict=True)
        if block.in_turn
        for part, span in zip(block.parts, spans, strict=False)  # a block that did not fit has no spans
        if part.role == "assistant"
    )
    dependents = (
        (index, spread(encoded.spans[index], block_rows_max))
        for index in observed(blocks, encoded)
        if blocks[index].is_dependent
    )
    return RowPlan(turn, tuple(p for p in turn if p in written), tuple((b, rows) for b, rows in dependents if rows))


def observed(blocks: Sequence[ContextBlock], encoded: Encoded) -> tuple[int, ...]:
    """Indexes of R_t: blocks of the graph that stood in the context as a whole."""
    lost = frozenset(encoded.unobserved)
    return tuple(index for index, block in enumerate(blocks) if block.ordinal is not None and index not in lost)


def spread(spans: Sequence[Span], most: int) -> tuple[int, ...]:
    """At most `most` of the positions in `spans`, evenly spaced by their count, the first and the last among them."""
    lengths = [end - start for start, end in spans]
    total = sum(lengths)
    if total <= most:
        return tuple(chain.from_iterable(range(start, end) for start, end in spans))
    steps = most - 1
    wanted = [(2 * i * (total - 1) + steps) // (2 * steps) for i in range(most)] if steps else [total - 1]
    found, passed, places = [], 0, iter(zip(spans, lengths, strict=True))
    (start, _), length = next(places)
    for place in wanted:
        while place >= passed + length:
            passed += length
            (start, _), length = next(places)
        found.append(start + place - passed)
    return tuple(found)


def _positions(spans: Iterable[Span]) -> frozenset[int]:
    return frozenset(chain.from_iterable(range(start, end) for start, end in spans))
