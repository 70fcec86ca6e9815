"""The served context of a finished turn as text, ready to be encoded: whose words, in which block.

Pure values. Which blocks were served is known to the archive and how their messages read to the dialects; both lie
outside this package and arrive here as these values.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Part:
    """Words of one author. An empty text still takes its place between the template's marks."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class ContextBlock:
    """Messages that stay together, in order of the served context.

    `ordinal` is None for what the graph does not know: instructions, the notice, an answer that no request has brought
    back yet. `in_turn`: its positions belong to the finished turn and are sampled for importance (W_t).
    `is_dependent`: no earlier replay sampled it, so its rows are read for edges (W_t(b)).
    """

    ordinal: int | None
    parts: tuple[Part, ...]
    in_turn: bool = False
    is_dependent: bool = False
