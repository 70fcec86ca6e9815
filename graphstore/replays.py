"""What one replay of a finished turn measured, raw: the numbers from which importance is derived, and by no rule yet.

Values only; how they were measured is the business of `proxy_model`, where they lie that of `store.replays`.
"""

from dataclasses import dataclass
from typing import Literal

RowGroup = Literal["turn", "assistant"]  # all sampled positions of the finished turn; those that the model wrote


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """A finished turn to be replayed. `since_turn` is the first turn that no earlier replay has covered."""

    id: int
    session_id: int
    turn: int
    exchange_id: int  # the last exchange of the turn: its served context and its answer are replayed
    since_turn: int
    attempts: int  # including this one


@dataclass(frozen=True, slots=True)
class LayerReading:
    """Attention that one block received at one layer, mean over heads and over the rows of one group."""

    layer: int
    group: RowGroup
    mass: float  # share of the attention, 0 to 1
    density: float  # mean per token of the block, clipped at the 99.9th percentile of that layer


@dataclass(frozen=True, slots=True)
class BlockReading:
    """Attention that one block received, mean over the selected layers (DESIGN: rho)."""

    ordinal: int
    tokens: int
    mass: float  # rows of the whole turn
    density: float  # rho-bar: mean of the clipped rho per token, rows of the whole turn
    mass_assistant: float  # rows that the model wrote; 0 when there are none
    density_assistant: float
    by_layer: tuple[LayerReading, ...] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of one job. `edges` holds (support, dependent, mass) above `EDGE_MASS_MIN`, by dependent, support."""

    model: str
    parameters: int  # of the model, as loaded from its weights: which rule is the default depends on it
    device: str
    dtype: str
    layers: tuple[int, ...]
    dependency_layer: int
    tokens: int  # of the served context
    tokens_computed: int  # the rest came from the cache of an earlier replay
    rows: int  # sampled positions of the whole turn
    rows_assistant: int
    unobserved: tuple[int, ...]  # ordinals that did not fit the model's context: the oldest
    seconds: float
    blocks: tuple[BlockReading, ...]
    edges: tuple[tuple[int, int, float], ...]


EDGE_MASS_MIN = 0.005  # a quarter of theta: less is not stored, so theta can be changed afterwards down to it
