"""Attention the plain way: all weights of all layers, n x n, from transformers' own eager code."""

from collections.abc import Sequence
from typing import Any

from proxy_model.sampling import GROUPS, RowPlan

FAMILIES = ("qwen3", "llama", "gemma3")


def tiny_network(family: str, layers: int = 6, seed: int = 0) -> Any:
    """A decoder of random weights."""
    import torch
    from transformers import AutoModel

    from tests.proxy_model.tiny import tiny_config

    torch.manual_seed(seed)
    return sharpened(AutoModel.from_config(tiny_config(family, layers)).eval().requires_grad_(False))


def sharpened(network: Any) -> Any:
    """Random weights attend evenly to all, which too much would agree with: these attend to something."""
    for name, weight in network.named_parameters():
        if "q_norm" in name or "k_norm" in name:  # they undo what the projections are multiplied by
            weight.add_(1)
        elif "q_proj" in name or "k_proj" in name or "qkv_proj" in name or "embed_tokens" in name:
            weight.mul_(12)
    return network


def eager_rows(network: Any, ids: Sequence[int], layers: Sequence[int]) -> Any:
    """(L, N, N) mean over heads, float32."""
    import torch

    usual = network.config._attn_implementation
    network.set_attn_implementation("eager")
    with torch.no_grad():
        seen = network(
            input_ids=torch.tensor([list(ids)], device=network.device), output_attentions=True, use_cache=False
        )
    network.set_attn_implementation(usual)
    return torch.stack([seen.attentions[layer][0].float().mean(0) for layer in layers])


def eager_rho(rows: Any, plan: RowPlan) -> Any:
    """(L, N, N) -> (L, G, N)."""
    import torch

    groups = dict(zip(GROUPS, (plan.turn, plan.assistant), strict=True))
    return torch.stack([rows[:, list(places)].mean(1) for places in groups.values()], dim=1)
