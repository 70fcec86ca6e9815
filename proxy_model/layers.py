"""Which layers of a stack are read. Pure; ATTENTION depths are fractions of the whole stack (paper, 5.6; DESIGN 5)."""

from collections.abc import Sequence
from dataclasses import dataclass

DEPTHS = ((1, 3), (1, 2), (2, 3), (5, 6))
DEPENDENCY = 1  # index in DEPTHS, and in an explicit choice
FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class Choice:
    """`layers` ascending; `dependency_layer` is the one of them that edges are read from."""

    layers: tuple[int, ...]
    dependency_layer: int


def by_depth(kinds: Sequence[str]) -> Choice:
    """Depths 1/3, 1/2, 2/3 and 5/6, each snapped to the nearest layer of full attention, the lower of two.

    `kinds`: for each layer what kind of attention it has. A layer with a window cannot see what it is asked about.
    ValueError when no layer has full attention.
    """
    full = _full(kinds)
    if not full:
        raise ValueError("no layer of full attention")
    snapped = [min(full, key=lambda layer: abs(layer - _rounded(len(kinds) * a, b))) for a, b in DEPTHS]
    return Choice(tuple(sorted(set(snapped))), snapped[DEPENDENCY])


def chosen(layers: Sequence[int], kinds: Sequence[str]) -> Choice:
    """An explicit choice. ValueError names the layer that is none of full attention."""
    full = _full(kinds)
    ordered = tuple(sorted(set(layers)))
    for layer in ordered:
        if layer not in full:
            raise ValueError(f"layer {layer} is none of full attention; those are {', '.join(map(str, full))}")
    return Choice(ordered, ordered[min(DEPENDENCY, len(ordered) - 1)])


def _full(kinds: Sequence[str]) -> list[int]:
    return [layer for layer, kind in enumerate(kinds) if kind == FULL]


def _rounded(numerator: int, denominator: int) -> int:
    """Nearest whole number, halves up: the stack's 9.33rd layer is its 9th."""
    return (2 * numerator + denominator) // (2 * denominator)
