"""Time attention replays against the plain way, and against themselves: ratios, side by side in one run.

Random weights in the shape of Qwen3-0.6B. Each line is measured in a process of its own, so that memory is that of one
way alone. On a CPU, seconds are those of all cores together. With everything at its default it takes some ten minutes
and 12 GB; --history 2048 halves the minutes.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from replay_rig import DEPTH, LAYERS, Timing, eager_mean, network, now, peak, reader, timed, work

WARM_TOKENS = 64  # the first pass of a process finds its kernels


@dataclass(frozen=True, slots=True)
class Setting:
    device: str
    dtype: str
    chunk: int
    threads: int | None
    small: bool


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the comparison with eager attention")
    parser.add_argument("--history", type=int, default=8192, help="tokens in the cache when a turn is added")
    parser.add_argument("--added", type=int, default=512, help="tokens of that turn")
    parser.add_argument("--rows", type=int, default=500, help="sampled positions")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--small", action="store_true", help="a tiny network, for which the goals mean nothing: to see that this works"
    )
    asked = parser.parse_args(arguments)
    setting = Setting(asked.device, asked.dtype, asked.chunk, asked.threads, asked.small)

    print(
        f"Qwen3-0.6B shape, random weights, {asked.dtype} on {asked.device}, chunks of {asked.chunk}, {asked.rows} rows"
    )
    plain = apart(eager, setting, asked.tokens, asked.rows)
    rows = apart(replayed, setting, asked.tokens, asked.rows, LAYERS)
    line(f"eager, all attentions, {asked.tokens} tokens", plain)
    line(f"rows of layers {', '.join(map(str, LAYERS))}", rows)
    verdict("times faster", plain.seconds / rows.seconds, 1.8)
    if plain.peak_bytes and rows.peak_bytes:
        verdict("times less extra memory", plain.peak_bytes / rows.peak_bytes, 14)
    verdict("share of collecting rows", rows.collecting / rows.seconds, 0.05, at_most=True)

    print("depth: seconds for a layer, which are the same at every depth")
    for depth in (DEPTH // 4, DEPTH // 2, DEPTH):
        some = apart(replayed, setting, asked.tokens, asked.rows, (depth - 1,))
        line(f"last layer {depth - 1}", some, f"{1000 * some.seconds / depth:8.1f} ms a layer")

    cold, warm = apart(continued, setting, asked.history, asked.added, asked.rows)
    line(f"cold, {cold.computed} tokens", cold)
    line(f"+{asked.added} on {asked.history}, {warm.computed} computed", warm)
    verdict("times cheaper than cold", cold.seconds / warm.seconds, 8)
    return 0


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a new process, which ends with it."""
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(there, function, arguments), daemon=True)
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise SystemExit("a measurement ended without a result: see above, or there was no memory for it") from None
    finally:
        child.join()


def _send(there: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    there.send(function(*arguments))


def made(setting: Setting) -> Any:
    if setting.threads:
        torch.set_num_threads(setting.threads)
    return network(device=setting.device, dtype=setting.dtype, small=setting.small)


def eager(setting: Setting, tokens: int, rows: int) -> Timing:
    """The naive way: everything at once, then the sampled rows of the selected layers."""
    model, what = made(setting), work(tokens, rows=rows)
    eager_mean(model, what.ids[:WARM_TOKENS], LAYERS)
    with peak(setting.device) as extra:
        began = now(setting.device)
        eager_mean(model, what.ids, LAYERS)[:, list(what.plan.turn)].mean(1)
        seconds = now(setting.device) - began
    return Timing(seconds, 0.0, extra[0], tokens)


def replayed(setting: Setting, tokens: int, rows: int, layers: tuple[int, ...]) -> Timing:
    by, turn = reader(made(setting), chunk=setting.chunk, layers=layers, cut=True), max(rows, tokens // 10)
    work(WARM_TOKENS, rows=8).read(by)
    by.forget()
    return timed(by, work(tokens, rows=rows, turn=min(tokens, turn)), setting.device)


def continued(setting: Setting, history: int, added: int, rows: int) -> tuple[Timing, Timing]:
    """One context, whose last turn is what was added: read cold, then on a cache of its history."""
    by = reader(made(setting), chunk=setting.chunk, cut=True)
    longer = work(history + added, rows=rows, turn=added)
    cold = timed(by, longer, setting.device)
    by.forget()
    work(history, rows=rows, turn=added).read(by)
    return cold, timed(by, longer, setting.device)


def line(name: str, timing: Timing, more: str = "") -> None:
    memory = f"{timing.peak_bytes / 1e6:8.0f} MB more" if timing.peak_bytes is not None else ""
    print(
        f"  {name:<42}{timing.seconds:8.2f} s{timing.computed / timing.seconds:9.0f} tokens/s{memory} {more}".rstrip()
    )


def verdict(name: str, ratio: float, goal: float, *, at_most: bool = False) -> None:
    fine = ratio <= goal if at_most else ratio >= goal
    print(f"  -> {ratio:.3g} {name} (goal {'<=' if at_most else '>='} {goal}{'' if fine else ', MISSED'})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
