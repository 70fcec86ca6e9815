"""Keys and values of one session's context, which grow at the end and are cut back at the end."""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values in buffers that are allocated once for a whole context.

    transformers' own layer copies all it has with every chunk. This one keeps all tokens for layers with a sliding
    window too: cutting back to where two contexts part needs the keys before the window.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.room = 0  # tokens that the next allocation has place for
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends (1, K, Q, D); returns views (1, K, T, D) of all there is."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        had = self.get_seq_length()
        have = had + key_states.shape[-2]
        if self._buffers is None or have > self._buffers[0].shape[-2]:
            self._buffers = (
                self._moved(self.keys, key_states, had, have),
                self._moved(self.values, value_states, had, have),
            )
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., had:have, :] = new
        self.keys, self.values = (buffer[..., :have, :] for buffer in self._buffers)
        return self.keys, self.values

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers or ())

    def _moved(self, old: torch.Tensor, like: torch.Tensor, had: int, have: int) -> torch.Tensor:
        buffer = like.new_empty(*like.shape[:-2], max(have, self.room), like.shape[-1])
        if had:
            buffer[..., :had, :] = old
        return buffer


class ContextCache(Cache):  # type: ignore[misc]
    """The keys and values of the first `depth` layers."""

    def __init__(self, depth: int) -> None:
        super().__init__(layers=[RoomyLayer() for _ in range(depth)])

    def prepare(self, keep: int, tokens: int) -> None:
        """Cuts back to the first `keep` tokens and makes the next allocation one for `tokens`."""
        for layer in self.layers:
            layer.crop(min(0, keep - layer.get_seq_length()))
            layer.room = tokens

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)
