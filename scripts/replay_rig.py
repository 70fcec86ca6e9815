"""What the checks and benchmarks of attention replays share: a network of Qwen3-0.6B's shape, contexts, a stopwatch.

The weights are random, the speed is that of the real ones. Attention is made to prefer some tokens: with plain random
weights it is even, and everything would agree with everything.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel, Qwen3Config

from proxy_model import replay
from proxy_model.layers import FULL, by_depth
from proxy_model.loader import cut_above
from proxy_model.pooling import segments_of
from proxy_model.replay import RowReader, Rows
from proxy_model.sampling import RowPlan, spread

DEPTH = 28
LAYERS = by_depth([FULL] * DEPTH).layers
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SHAPE, SMALL = (1024, 3072, 16, 8, 128), (64, 96, 4, 2, 16)
VOCABULARY = 4096  # rows of the embedding are looked up, not multiplied: fewer of them cost no less
BLOCK_TOKENS = 250
GLUE_TOKENS = 5
TURN_SHARE = 10  # a tenth of the context is the finished turn
BLOCK_ROWS = 96


def network(*, device: str, dtype: str, small: bool = False, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        **dict(zip(SIZES, SMALL if small else SHAPE, strict=True)),
        vocab_size=VOCABULARY,
        num_hidden_layers=DEPTH,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    with torch.device(device):
        made = AutoModel.from_config(config, dtype=getattr(torch, dtype))
    for name, weight in made.requires_grad_(False).named_parameters():
        if "q_norm" in name or "k_norm" in name:
            weight.add_(1)
    return made.eval()


def reader(model: PreTrainedModel, *, chunk: int, layers: tuple[int, ...] = LAYERS, cut: bool = False) -> RowReader:
    """Reads `layers`; `cut` frees those above, as the loader does."""
    if cut:
        cut_above(model, layers[-1])
    return RowReader(model, layers, layers[min(1, len(layers) - 1)], chunk=chunk, kept_bytes_max=1 << 40)


@dataclass(frozen=True, slots=True)
class Work:
    """A made-up context: blocks of `BLOCK_TOKENS` with a few tokens of a template between them."""

    ids: list[int]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    plan: RowPlan

    def read(self, by: RowReader) -> Rows:
        return by.read(self.ids, self.plan, segments_of(self.spans, len(self.ids)), len(self.spans), session=1)


def work(tokens: int, *, rows: int, turn: int | None = None) -> Work:
    """A context whose last `turn` tokens are the finished turn. A longer one begins with the same tokens."""
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    began = tokens - (turn or tokens // TURN_SHARE)
    starts = [*range(0, began, BLOCK_TOKENS), *range(began, tokens, BLOCK_TOKENS)]
    ends = [*starts[1:], tokens]
    spans = tuple(((a, max(a + 1, b - GLUE_TOKENS)),) for a, b in zip(starts, ends, strict=True))
    of_turn = [index for index, start in enumerate(starts) if start >= began]
    chosen = spread([span for index in of_turn for span in spans[index]], rows)
    return Work(ids, spans, RowPlan(chosen, chosen[1::2], tuple((i, spread(spans[i], BLOCK_ROWS)) for i in of_turn)))


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float
    collecting: float  # of these, spent on rows
    peak_bytes: int | None  # more than before; None where it cannot be told
    computed: int  # tokens


def timed(by: RowReader, what: Work, device: str) -> Timing:
    with _collecting(device) as spent, peak(device) as extra:
        began = now(device)
        rows = what.read(by)
        seconds = now(device) - began
    return Timing(seconds, spent[0], extra[0], rows.computed)


def now(device: str) -> float:
    """Seconds, when all that was asked of the device is done. On a CPU those that this process had of all cores: on a
    busy machine the time of day says little."""
    if device == "cpu":
        return time.process_time()
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


@contextmanager
def peak(device: str) -> Iterator[list[int | None]]:
    """Bytes at the highest point above those at the beginning, in a list of one."""
    found: list[int | None] = [None]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found[0] = torch.cuda.max_memory_allocated() - before
    elif device == "cpu" and _resident("VmRSS") is not None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = _resident("VmRSS") or 0
        yield found
        found[0] = (_resident("VmHWM") or 0) - before
    else:
        yield found


def _resident(field: str) -> int | None:
    """Bytes, where the kernel says so."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":")), None)


@contextmanager
def _collecting(device: str) -> Iterator[list[float]]:
    """Seconds in the collection of rows, in a list of one. On a GPU the waiting for it is counted as well."""
    spent, usual = [0.0], replay._Collector.collect

    def collect(*args: Any) -> None:
        began = now(device)
        usual(*args)
        spent[0] += now(device) - began

    replay._Collector.collect = collect  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        replay._Collector.collect = usual  # type: ignore[method-assign]


def eager_mean(model: PreTrainedModel, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """(L, N, N): all weights of all layers as transformers gives them, then the mean over heads of a few layers."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        inputs = torch.tensor([ids], device=model.device)
        weights = model(input_ids=inputs, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(usual)
    return torch.stack([weights[layer][0].float().mean(0) for layer in layers])
