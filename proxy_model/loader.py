"""The local model, ready for replays: weights, tokenizer, the template's glue, the layers to read.

What cannot be replayed with is refused here, with a sentence that says what to do, and not in the middle of a replay.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy_model.config import ReplayConfig
from proxy_model.context import ContextBlock
from proxy_model.conversion import converted
from proxy_model.errors import ANOTHER, INSTALL, ModelUnavailable, reason_of
from proxy_model.glue import Glue, glue_of
from proxy_model.layers import FULL, Choice, by_depth, chosen
from proxy_model.spans import Encoded, TokenCache, encode

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

READABLE = frozenset({FULL, "sliding_attention"})
TOKENS_MIN = 64  # of a model or a setting: with fewer no turn fits


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
    known: TokenCache = field(default_factory=TokenCache, repr=False, compare=False)

    def encode(self, blocks: Sequence[ContextBlock]) -> Encoded:
        """The context as this model reads it, within `max_tokens`."""
        return encode(blocks, self.tokenizer, self.glue, self.max_tokens, self.known)


def load(config: ReplayConfig, *, whole: bool = False) -> LoadedModel:
    """Loads once; seconds to minutes. `whole` keeps the layers above the last selected one.

    Raises ModelUnavailable: no torch, no weights, corrupt weights, a model whose attention cannot be read.
    """
    torch = _libraries()
    if config.threads is not None:
        torch.set_num_threads(min(config.threads, os.cpu_count() or 1))  # more of them than processors kill it
    device = _device(config, torch)
    dtype = _dtype(config, device, torch)
    source = _source(config.model)
    settings = _settings(config, source)
    tokenizer = _tokenizer(config, source)
    network = _network(config, source, getattr(torch, dtype), settings)
    choice = _layers(config, network.config)
    _check_vocabulary(config, tokenizer, network)
    parameters = sum(weight.numel() for weight in network.parameters())
    if not whole:
        cut_above(network, choice.layers[-1])
    return LoadedModel(
        name=config.model,
        network=_placed(config, network, device),
        tokenizer=tokenizer,
        glue=glue_of(tokenizer),
        layers=choice.layers,
        dependency_layer=choice.dependency_layer,
        max_tokens=min(config.max_tokens, length_max(network.config)),
        parameters=parameters,
        device=device,
        dtype=dtype,
    )


def cut_above(network: "PreTrainedModel", layer: int) -> None:
    """Frees the layers above `layer`: nothing that is read depends on them."""
    network.layers = network.layers[: layer + 1]
    network.config.num_hidden_layers = layer + 1


def layer_kinds(config: "PreTrainedConfig") -> list[str]:
    """What kind of attention each layer has, in the words of transformers."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    windowed = window and window < config.max_position_embeddings  # Phi 3.5 has one that holds every context
    return ["sliding_attention" if windowed else FULL] * config.num_hidden_layers


def length_max(config: "PreTrainedConfig") -> int:
    """Tokens the model takes. LongRoPE turns every position in another way once a context exceeds its first length, but
    keys in the cache are turned already: up to there it is one model, beyond it chunks would not fit together."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # one for all layers, or by their kind
    first = [one["original_max_position_embeddings"] for one in kinds if one.get("rope_type") == "longrope"]
    return int(min([config.max_position_embeddings, *first]))


def _libraries() -> Any:
    try:
        import torch
        from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
        from huggingface_hub.utils import logging as hub_logging
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error
    except (ImportError, OSError) as exc:  # OSError: a shared library of torch's cannot be loaded
        raise ModelUnavailable(f"torch and transformers cannot be imported ({reason_of(exc)})", INSTALL) from exc
    hub_logging.set_verbosity_error()  # each of its tries, twice over; how they ended we say ourselves
    set_verbosity_error()  # it warns of the output head that is left out, and what else it warns of is refused here
    if not are_progress_bars_disabled():
        disable_progress_bar()  # of reading weights: half a second
        enable_progress_bars()  # of fetching them: minutes
    return torch


def _device(config: ReplayConfig, torch: Any) -> str:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if config.device == "auto":
        return next(name for name, present in there.items() if present)
    if not there[config.device]:
        raise ModelUnavailable(f"this machine has no {config.device} device", "set attention_device to auto")
    return config.device


def _dtype(config: ReplayConfig, device: str, torch: Any) -> str:
    """bfloat16 where the hardware multiplies it; emulated it is about three times slower than float32."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cuda":
        fast = bool(torch.cuda.is_bf16_supported(including_emulation=False))
    else:
        flags: Mapping[str, object] = torch.cpu.get_capabilities() if device == "cpu" else {}
        fast = bool(flags.get("avx512_bf16") or flags.get("amx_bf16"))
    return "bfloat16" if fast else "float32"


def _source(model: str) -> str:
    """What transformers takes: a folder that exists, or a name for the hub."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelUnavailable(f"there is no file {path}", "correct the setting attention_model")
        return str(converted(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(f"{path} has no config.json", "name a model's folder or a .gguf file")
        return str(path)
    if path.is_file():
        raise ModelUnavailable(f"{path} is a file, and no .gguf", "name a model's folder or a .gguf file")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelUnavailable(f"there is no folder {path}", "correct the setting attention_model")
    return model


def _access(config: ReplayConfig) -> dict[str, bool]:
    """Code that comes with a model is never run, and nobody is asked at a terminal whether it may be."""
    return {"local_files_only": config.offline, "trust_remote_code": False}


def _tokenizer(config: ReplayConfig, source: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **_access(config))
    except Exception as exc:  # whatever a damaged or foreign file makes the libraries raise
        raise _unavailable(config, source, "tokenizer", exc) from exc
    word = "words"  # of a folder without a vocabulary transformers makes a tokenizer that knows none
    if word not in tokenizer.decode(tokenizer(word)["input_ids"], skip_special_tokens=True):
        raise ModelUnavailable(f"{config.model}: its tokenizer has no vocabulary", _again(source))
    tokenizer.model_max_length = 2**31  # else every long text is warned of; the limit is ours
    return tokenizer


def _settings(config: ReplayConfig, source: str) -> "PreTrainedConfig":
    """Read before everything else: what is wrong with it breaks the tokenizer too."""
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(source, **_access(config))
        _refuse_unreadable(config, settings.get_text_config(decoder=True))
    except ModelUnavailable:
        raise
    except Exception as exc:
        raise _unavailable(config, source, "configuration", exc) from exc
    return settings


def _network(
    config: ReplayConfig, source: str, dtype: "torch.dtype", settings: "PreTrainedConfig"
) -> "PreTrainedModel":
    from transformers import AutoModel

    try:
        network, report = AutoModel.from_pretrained(
            source, config=settings, dtype=dtype, output_loading_info=True, **_access(config)
        )
    except Exception as exc:
        raise _unavailable(config, source, "weights", exc) from exc
    network = getattr(network, "language_model", network)
    absent = report.get("missing_keys") or report.get("mismatched_keys")
    if absent:  # transformers fills them with random numbers and goes on
        example = sorted(map(str, absent))[0]
        problem = f"{config.model}: {len(absent)} of its weights are missing, {example} for one"
        raise ModelUnavailable(problem, f"{_again(source)}; or {ANOTHER}")
    if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
        raise ModelUnavailable(f"{config.model}: its weights hold values that are no numbers", _again(source))
    if not hasattr(network, "layers") or not hasattr(network, "rotary_emb"):
        raise ModelUnavailable(f"{config.model} has no rotary attention, which the replay needs", ANOTHER)
    if any(hasattr(getattr(layer, "self_attn", None), "sinks") for layer in network.layers):
        raise ModelUnavailable(
            f"{config.model} has attention sinks of its own, which the replay does not know", ANOTHER
        )
    return network.eval().requires_grad_(False)


def _refuse_unreadable(config: ReplayConfig, settings: "PreTrainedConfig") -> None:
    """What the configuration alone gives away, before gigabytes are read."""
    strange = set(layer_kinds(settings)) - READABLE
    if strange:
        raise ModelUnavailable(
            f"{config.model} has layers that are not attention ({', '.join(sorted(strange))})", ANOTHER
        )
    if length_max(settings) < TOKENS_MIN:
        raise ModelUnavailable(f"{config.model} takes {length_max(settings)} tokens, too few for a turn", ANOTHER)
    if getattr(settings, "attn_logit_softcapping", None):
        raise ModelUnavailable(f"{config.model} caps its attention, which the replay does not know", ANOTHER)


def _layers(config: ReplayConfig, settings: "PreTrainedConfig") -> Choice:
    kinds = layer_kinds(settings)
    try:
        return chosen(config.layers, kinds) if config.layers else by_depth(kinds)
    except ValueError as exc:
        raise ModelUnavailable(f"{config.model}: {exc}", "leave the layers to the depth rule, or name others") from exc


def _check_vocabulary(config: ReplayConfig, tokenizer: "PreTrainedTokenizerBase", network: "PreTrainedModel") -> None:
    rows = network.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        problem = f"{config.model}: the tokenizer has {len(tokenizer)} tokens and the network knows {rows}"
        raise ModelUnavailable(problem, "they belong to different models: load it again")


def _placed(config: ReplayConfig, network: "PreTrainedModel", device: str) -> "PreTrainedModel":
    try:
        return network.to(device)
    except RuntimeError as exc:  # out of memory is one
        problem = f"{config.model} does not fit on {device} ({reason_of(exc)})"
        raise ModelUnavailable(problem, "free memory, choose a smaller model, or set attention_device to cpu") from exc


def _unavailable(config: ReplayConfig, source: str, what: str, exc: Exception) -> ModelUnavailable:
    reason = reason_of(exc)
    if Path(source).is_dir():
        return ModelUnavailable(
            f"{config.model}: its {what} cannot be read ({reason})", f"{_again(source)}; or {ANOTHER}"
        )
    if config.offline or _hub_is_offline():
        return ModelUnavailable(
            f"{config.model} is not in the local cache and offline is set",
            "fetch it once without attention_offline and HF_HUB_OFFLINE, or name a folder or a .gguf file",
        )
    return ModelUnavailable(
        f"{config.model} is not in the local cache and its {what} could not be fetched ({reason})",
        "check the name and the network, or name a folder or a .gguf file with attention_model",
    )


def _hub_is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _again(source: str) -> str:
    return f"fetch the model again if {source} is damaged or incomplete"
