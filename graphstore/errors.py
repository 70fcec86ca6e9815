"""Errors of the context graph.

    ValueError
      GraphIntegrityError   rows or a graph break a named invariant; never repaired by guessing

The selection itself has no expected failures: it is a pure function of valid values.
"""


class GraphIntegrityError(ValueError):
    """An invariant of the context graph does not hold. The text names the invariant and the offending value."""

    def __init__(self, invariant: str, offender: object) -> None:
        super().__init__(f"graph invariant broken: {invariant}: {offender!r}")
        self.invariant = invariant
