"""Does the replay do on this device what it does elsewhere, and how fast? At most five minutes on a GPU.

1. Agreement: masses of blocks from rows in 16 bits and from eager attention in 16 bits, each against eager attention in
   float32. Rows may be no further off than eager attention is, by a factor of `SLACK`.
2. Both kernels: the one for full attention on CUDA against the masked one that every device has.
3. Speed at several lengths: tokens a second, peak memory, the share of collecting rows, and a turn on a warm cache.

Qwen3-0.6B's shape with random weights, so nothing is fetched. From the root of the repository:
    PYTHONPATH=. python scripts/gpu_check.py --out result.json
Without a GPU: --small, on the CPU. Exit status 1: something does not agree.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from replay_rig import LAYERS, Work, eager_mean, network, reader, timed, work
from transformers import PreTrainedModel

from proxy_model import replay
from proxy_model.pooling import segments_of, sums

SLACK = 2.0
FLOOR = 1e-4  # of a block's mass: below it nothing is different
KERNELS_MAX = 0.02  # values of unit variance, in 16 bits
SECONDS_MAX = 270  # no new length is begun after this


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a tiny network and short contexts")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens (default 2000 10000 30000; small: 300 600)")
    parser.add_argument("--chunks", type=int, nargs="+", help="prefill steps (default 512 2048; small: 128)")
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    asked = parser.parse_args(arguments)
    lengths = asked.lengths or ([300, 600] if asked.small else [2000, 10_000, 30_000])
    chunks = asked.chunks or ([128] if asked.small else [512, 2048])

    if asked.threads:
        torch.set_num_threads(asked.threads)
    began = time.monotonic()
    result: dict[str, Any] = {"machine": machine(asked.device), "dtype": asked.dtype, "small": asked.small}
    print(json.dumps(result["machine"]))
    model = network(device=asked.device, dtype=asked.dtype, small=asked.small)
    result["agreement"] = agreement(model, asked.device, asked.dtype, work(lengths[0], rows=asked.rows), asked.small)
    print(f"agreement: {json.dumps(result['agreement'])}", flush=True)
    result["kernels"] = kernels(asked.device, asked.dtype)
    print(f"kernels: {json.dumps(result['kernels'])}", flush=True)
    result["speed"] = []
    for tokens in lengths:
        for chunk in chunks:
            if time.monotonic() - began > SECONDS_MAX:
                print(f"left out: {tokens} tokens in chunks of {chunk}: no time")
                continue
            figures = speed(model, asked.device, tokens, chunk, asked.rows)
            result["speed"].append(figures)
            print(json.dumps(figures), flush=True)
    result["seconds"] = round(time.monotonic() - began, 1)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    fine = result["agreement"]["agrees"] and result["kernels"]["agree"]
    print("all agrees" if fine else "DOES NOT AGREE")
    return 0 if fine else 1


def machine(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def agreement(model: PreTrainedModel, device: str, dtype: str, what: Work, small: bool) -> dict[str, Any]:
    """Largest deviation of a block's mass (mean of the turn's rows at a layer) from eager attention in float32."""
    exact = network(device=device, dtype="float32", small=small)
    exact.load_state_dict(model.state_dict())  # the same numbers, exactly: float32 holds every shorter one
    segments, blocks = segments_of(what.spans, len(what.ids)), len(what.spans)

    def masses(weights: torch.Tensor) -> torch.Tensor:  # (L, N, N) -> (L, B)
        return sums(weights[:, list(what.plan.turn)].mean(1).cpu(), segments, blocks)

    truth = masses(eager_mean(exact, what.ids, LAYERS))
    del exact
    plain = masses(eager_mean(model, what.ids, LAYERS))
    rows = sums(what.read(reader(model, chunk=512)).rho[:, 0], segments, blocks)
    off, allowed = float((rows - truth).abs().max()), float((plain - truth).abs().max())
    return {
        "tokens": len(what.ids),
        "largest_mass": round(float(truth.max()), 4),
        f"rows_{dtype}_to_float32": off,
        f"eager_{dtype}_to_float32": allowed,
        "rows_to_eager": float((rows - plain).abs().max()),
        "agrees": bool(off <= SLACK * allowed + FLOOR),
    }


def kernels(device: str, dtype: str) -> dict[str, Any]:
    """The kernel without a mask, first chunk and later ones, against the one with a mask."""
    torch.manual_seed(0)
    worst = 0.0
    for asked, seen in ((64, 64), (64, 300), (1, 300)):
        sizes = (1, 16, asked, 128), (1, 8, seen, 128), (1, 8, seen, 128)
        query, key, value = (torch.randn(*size).to(device, getattr(torch, dtype)) for size in sizes)
        chunk = replay._Chunk(seen - asked, seen, rows=None)  # type: ignore[arg-type]
        masked = replay._grouped(query, key, value, 128**-0.5, chunk.mask(seen, None, query))
        worst = max(worst, float((replay._flash(query, key, value, 128**-0.5) - masked).abs().max()))
    return {"largest_difference": worst, "agree": worst <= KERNELS_MAX}


def speed(model: PreTrainedModel, device: str, tokens: int, chunk: int, rows: int) -> dict[str, Any]:
    """A cold replay, and the next turn of a thirtieth of the context on its cache."""
    by = reader(model, chunk=chunk)
    what = work(tokens, rows=rows)
    what.read(by)  # the first pass finds its kernels
    by.forget()
    cold = timed(by, what, device)
    added = max(8, tokens // 30)
    warm = timed(by, work(tokens + added, rows=rows, turn=added), device)
    peak_bytes = cold.peak_bytes
    return {
        "tokens": tokens,
        "chunk": chunk,
        "seconds": round(cold.seconds, 4),
        "tokens_per_second": round(tokens / cold.seconds),
        "peak_mb": None if peak_bytes is None else round(peak_bytes / 1e6),
        "kept_mb": round(by.kept_bytes / 1e6),
        "rows_share": round(cold.collecting / cold.seconds, 4),
        "warm_tokens": warm.computed,
        "warm_seconds": round(warm.seconds, 4),
    }


if __name__ == "__main__":
    sys.exit(main())
