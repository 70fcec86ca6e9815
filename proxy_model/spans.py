"""The served context as token ids, and where each block's text lies in them.

Every text is encoded alone and joined with the template's marks, so spans are exact by construction: no search in a
rendered text, no offsets. A text never becomes a control token, whatever it spells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy_model.context import ContextBlock
from proxy_model.glue import Glue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # token positions, end excluded; start == end for an empty text


@dataclass(frozen=True, slots=True)
class Encoded:
    """`ids` is what the network reads; what lies in no span is the template's.

    `spans[i]` has one range for each part of block i, in order. A block that did not fit has none.
    `unobserved`: indexes of the blocks that did not fit, or only in part. No reading and no edge is taken for them; the
    spans of a block that fits in part cover what is left of it, so rows can be sampled there.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    unobserved: tuple[int, ...]


def encode(
    blocks: Sequence[ContextBlock], tokenizer: "PreTrainedTokenizerBase", glue: Glue, max_tokens: int
) -> Encoded:
    """At most `max_tokens` ids."""
    raise NotImplementedError
