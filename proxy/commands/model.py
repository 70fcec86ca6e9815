"""recap model check: would the local model do here? Agreement, layers, speed, memory, and what a replay would take.

Loads the model as the worker does and needs no archive and no running proxy.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from proxy.commands.text import duration, number, plain
from proxy.errors import RecapError
from proxy.settings import Settings
from proxy_model.config import ReplayConfig
from proxy_model.errors import ReplayError

if TYPE_CHECKING:
    from proxy_model.check import Check


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("model", help="check the local model: agreement, layers, speed, memory")
    parser.add_argument("action", choices=["check"], help="load it and report")
    parser.add_argument("name", nargs="?", help="a Hugging Face name, a folder or a .gguf file (default: the setting)")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from proxy_model.check import check  # loads torch

    config = replay_config(settings)
    if arguments.name == "":
        raise RecapError("the model's name is empty: give a Hugging Face name, a folder or a .gguf file, or nothing")
    if arguments.name is not None:
        config = dataclasses.replace(config, model=arguments.name)
    print(f"checking {plain(config.model)}: about a minute on a CPU, less on a GPU", flush=True)
    try:
        result = check(config)
    except ReplayError as exc:
        raise RecapError(plain(str(exc))) from exc
    except Exception as exc:  # a model of another shape than it says
        reason = plain(f"{type(exc).__name__}: {exc}")
        raise RecapError(f"{plain(config.model)} cannot be checked ({reason}); choose another model") from exc
    for heading, text in lines(result, by_rule=not config.layers):
        print(f"{heading:10} {text}")
    return 0 if result.agrees else 1


def replay_config(settings: Settings) -> ReplayConfig:
    """What is set: a setting `attention_x` for a field x of ReplayConfig."""
    names = [field.name for field in dataclasses.fields(ReplayConfig)]
    given: dict[str, Any] = {
        n: getattr(settings, f"attention_{n}") for n in names if hasattr(settings, f"attention_{n}")
    }
    return ReplayConfig(**given | {"threads": settings.attention_threads or None})


def lines(result: "Check", *, by_rule: bool) -> Iterator[tuple[str, str]]:
    """What is printed: a heading or none, and a line."""
    model = result.model
    depth = len(result.scores)
    yield "model", f"{model.name}, {number(model.parameters)} parameters in {depth} layers"
    yield "here", f"{model.dtype} on {model.device}, loaded in {duration(result.load_seconds)}"
    yield "context", f"{number(model.max_tokens)} tokens at most; longer ones lose their oldest blocks"
    yield (
        "words",
        "its own chat template" if model.glue.from_template else "no chat template that can be used: headings",
    )
    verdict = "agrees" if result.agrees else "DOES NOT AGREE"
    off = f"off by {result.agreement.largest:.1e} in one block, {100 * result.agreement.drift:.2g} % in all"
    yield "agreement", f"{verdict} with eager attention ({off})"
    rule = "depth rule" if by_rule else "as set"
    kept = len(model.network.layers)
    yield "layers", f"{_listed(model.layers)} ({rule}), edges from {model.dependency_layer}; {kept} of {depth} are run"
    yield "", f"attention that finds a copy, a layer: {_found(result)}"
    yield "", _advice(result)
    yield "speed", "; ".join(f"{number(n)} tokens in {duration(s)} ({n / s:,.0f} a second)" for n, s in result.measured)
    peak = f", at most {_megabytes(result.peak_bytes)} in this check" if result.peak_bytes else ""
    yield (
        "memory",
        f"weights {_megabytes(result.weight_bytes)}, keys and values {number(result.token_bytes)} bytes a token{peak}",
    )
    yield "estimate", "; ".join(_estimate(result, tokens) for tokens in _estimated(model.max_tokens))
    yield "", "from nothing; a turn that continues a session pays for its new tokens only"


def _found(result: "Check") -> str:
    readable = (s for s in result.scores if s.is_readable)
    best = sorted(readable, key=lambda s: -s.share)[:8]
    return ", ".join(f"{s.layer} {100 * s.share:.0f} %" for s in best)


def _advice(result: "Check") -> str:
    if not result.suggested:
        return "no layer finds copies: this model's attention says little"
    if result.suggested == result.model.layers:
        return "these are the layers that find copies best"
    listed = _listed(result.suggested)
    flag = listed.replace(" ", "")
    return f"those that find copies best are {listed}: --attention-layers {flag}"


def _estimate(result: "Check", tokens: int) -> str:
    size = result.weight_bytes + tokens * result.token_bytes
    most = " (all it takes)" if tokens == result.model.max_tokens else ""
    return f"{number(tokens)} tokens{most} {duration(result.cost.seconds(tokens))}, {_megabytes(size)}"


def _estimated(max_tokens: int) -> list[int]:
    from proxy_model.check import ESTIMATED

    return sorted({min(tokens, max_tokens) for tokens in ESTIMATED})


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
