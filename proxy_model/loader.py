"""The local model, ready for replays: weights, tokenizer, the template's glue, the layers to read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy_model.config import ReplayConfig
from proxy_model.context import ContextBlock
from proxy_model.glue import Glue
from proxy_model.spans import Encoded, encode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`network` is the decoder without its output head, in eval mode, cut off above the last of `layers`."""

    name: str  # as configured
    network: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    glue: Glue
    layers: tuple[int, ...]  # ascending; all of full attention
    dependency_layer: int  # one of `layers`
    max_tokens: int  # the smaller of what is configured and what the model takes
    parameters: int  # before the cut, embedding included
    device: str  # "cpu", "cuda", "mps"
    dtype: str  # "float32", "bfloat16", "float16"

    def encode(self, blocks: Sequence[ContextBlock]) -> Encoded:
        """The context as this model reads it, within `max_tokens`."""
        return encode(blocks, self.tokenizer, self.glue, self.max_tokens)


def load(config: ReplayConfig) -> LoadedModel:
    """Loads once; seconds to minutes.

    Raises ModelUnavailable: no torch, no weights, corrupt weights, a model whose attention cannot be read.
    """
    raise NotImplementedError
