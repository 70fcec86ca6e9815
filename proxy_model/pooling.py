"""From attention per token to readings per block (DESIGN 5; paper, Eq. 1 and 5). Pure reductions of tensors on the CPU.

Shapes: L selected layers, G row groups, N tokens of the context, B blocks of the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxy_model.spans import Span


@dataclass(frozen=True, slots=True)
class Pooled:
    """Attention that blocks received. Mass is a share of all attention, 0 to 1; density is per token and clipped."""

    mass: Tensor  # (G, B) mean over the layers
    density: Tensor  # (G, B) rho-bar
    mass_by_layer: Tensor  # (L, G, B)
    density_by_layer: Tensor  # (L, G, B)


def segments_of(spans: Sequence[Sequence[Span]], tokens: int) -> Tensor:
    """(N,) int64: to which block a token belongs; the number of blocks stands for none."""
    segments = torch.full((tokens,), len(spans), dtype=torch.int64)
    for block, ranges in enumerate(spans):
        for start, end in ranges:
            segments[start:end] = block
    return segments


def pooled(rho: Tensor, segments: Tensor, blocks: int, *, members: Sequence[int], quantile: float) -> Pooled:
    """`rho` (L, G, N): mean over rows and heads of the attention that a token receives, by layer and row group.

    rho_t of DESIGN 5 is its mean over the layers. It is clipped at its own `quantile` over the tokens of `members`, the
    blocks of R_t; a single layer's density at that layer's. Masses are not clipped.
    """
    rho = rho.double()
    mean = rho.mean(0)  # (L, G, N) -> (G, N)
    known = torch.isin(segments, torch.tensor(members, dtype=torch.int64))  # (N,)
    sizes = torch.bincount(segments, minlength=blocks + 1)[:blocks].clamp(min=1)  # (B,)
    return Pooled(
        mass=sums(mean, segments, blocks),
        density=sums(clipped(mean, known, quantile), segments, blocks) / sizes,
        mass_by_layer=sums(rho, segments, blocks),
        density_by_layer=sums(clipped(rho, known, quantile), segments, blocks) / sizes,
    )


def clipped(rho: Tensor, known: Tensor, quantile: float) -> Tensor:
    """(..., N): no value above the quantile of those at `known` (N,), each row by itself (paper, D.1).

    Attention sinks are single tokens that take a great share whatever the content: unclipped they are all of a mean.
    """
    if not bool(known.any()):
        return rho
    return rho.minimum(torch.quantile(rho[..., known], quantile, dim=-1, keepdim=True))


def sums(values: Tensor, segments: Tensor, blocks: int) -> Tensor:
    """(..., N) -> (..., B): sum over the tokens of each block; what belongs to none is left out."""
    out = values.new_zeros(*values.shape[:-1], blocks + 1)
    return out.index_add_(-1, segments, values)[..., :blocks]
