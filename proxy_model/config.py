"""How to replay, as one value. Knows no settings and no environment."""

from dataclasses import dataclass
from typing import Literal

Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Constants of DESIGN section 5 (paper, D.1); lengths in tokens."""

    model: str = "Qwen/Qwen3-0.6B"  # a Hugging Face name, a folder, or a .gguf file
    device: Device = "auto"
    dtype: Precision = "auto"
    max_tokens: int = 32_768  # a longer context loses its oldest blocks, or earlier if the model takes less
    chunk: int = 512  # prefill step
    rows_max: int = 640  # sampled positions of the finished turn
    block_rows_max: int = 96  # ... and of one dependent block
    clip_quantile: float = 0.999
    layers: tuple[int, ...] = ()  # empty: by the depth rule
    offline: bool = False
    threads: int | None = None
