"""What attention has said of a recorded session, turn by turn, wherever it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from graphstore.evidence import StoredObservation
from proxy.lab.recordings import Recording
from proxy.lab.results import Row


@dataclass(frozen=True, slots=True)
class Observed:
    """By finished turn, counted from 1. Blocks are named by their place in `Recording.blocks`.

    `missing`: why turns have no observation, with the number of those turns.
    """

    turns: Mapping[int, StoredObservation]
    missing: Mapping[str, int]

    def until(self, turn: int) -> list[StoredObservation]:
        """In order, up to this turn and with it."""
        return [self.turns[number] for number in sorted(self.turns) if number <= turn]


class Attention(Protocol):
    """Where observations come from. `about` names it in the results."""

    @property
    def about(self) -> Row: ...

    def observe(self, recording: Recording, turns: int) -> Observed:
        """The first `turns` turns. Raises LabError when nothing can be observed at all."""
