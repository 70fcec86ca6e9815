"""What one replay of a finished turn says of the blocks that it saw. A value; how it was measured is not known here."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Observation:
    """Attention over the served context of one turn, by block ordinal.

    `attention` is the mean attention a token of the block received, for every block of the served context R_t.
    `mass` holds (support, dependent, mass): the mean mass that the dependent's tokens gave to the support's.
    `identifiers` are the leading identifiers of each block (`identifiers.leading_identifiers`); a block without an
    entry cannot become stale or make another stale. `evidence` is what importance takes in instead of `attention`,
    for the same blocks. `replaced` are blocks that the stale rule has already been found to hold for.
    """

    attention: Mapping[int, float]
    mass: tuple[tuple[int, int, float], ...]
    identifiers: Mapping[int, frozenset[str]]
    evidence: Mapping[int, float] | None = None
    replaced: frozenset[int] = frozenset()

    def check(self) -> None:
        """Raise ValueError when a number is negative or not finite, or a support does not precede its dependent."""
        for values in (self.attention, self.evidence or {}):
            for ordinal, value in values.items():
                if ordinal < 0 or not 0 <= value < inf:
                    raise ValueError(f"attention of block {ordinal!r} must be finite and at least 0, not {value!r}")
        for edge in self.mass:
            support, dependent, value = edge
            if not (0 <= support < dependent and 0 <= value < inf):
                raise ValueError(f"mass must be finite, at least 0 and go from a block to a later one, not {edge!r}")
        if self.evidence is not None and self.evidence.keys() != self.attention.keys():
            odd = sorted(self.evidence.keys() ^ self.attention.keys())
            raise ValueError(f"evidence and attention must speak of the same blocks; blocks {odd!r} stand in one")
        if not self.replaced <= self.attention.keys():
            raise ValueError(f"blocks {sorted(self.replaced - self.attention.keys())!r} were replaced and not observed")
