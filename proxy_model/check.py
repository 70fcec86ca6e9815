"""Is this model fit for replays on this machine, where should it be read, and what will it cost? (`recap model check`)

Three questions, none of which needs a label:
* Agreement: a replay of a short context against the model's own eager attention.
* Copy test: the last block of a made-up context repeats one of the earlier ones. A layer that finds things gives the
  original more of its attention than its like. That says which layers retrieve, not that what they retrieve is useful.
* Cost: two lengths measured; time is a n + b n^2, and from these two a and b follow.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from proxy_model import sampling
from proxy_model.config import ReplayConfig
from proxy_model.context import ContextBlock, Part
from proxy_model.errors import ANOTHER, ModelUnavailable, ReplayError, reason_of
from proxy_model.layers import FULL
from proxy_model.loader import LoadedModel, cut_above, layer_kinds, load
from proxy_model.observe import Replayer

if TYPE_CHECKING:
    from torch import Tensor

ENTRIES = 12  # of the copy test's context: by chance a layer gives each a twelfth
COPIED = (1, 4, 6, 9)  # early and late ones, and not the first, which takes what no other wants
FOUND = 2 / ENTRIES  # share from which on a layer counts as finding: twice what chance gives
SUGGESTED_MAX = 4  # as many as the depth rule takes

AGREES = 1e-4  # float32: of any block's mass
AGREES_ROUGHLY = 0.1  # 16 bits: of all mass. Gemma 3 270M drifts by 0.02 in bfloat16, of a CPU's SDPA

SIZES = {"cpu": (512, 2560), "mps": (1024, 4096), "cuda": (2048, 8192)}  # tokens
REPEATS = 3  # of the shorter one, of which the fastest counts: its error is multiplied in an estimate
ESTIMATED = (10_000, 30_000)
SESSION = 0


@dataclass(frozen=True, slots=True)
class LayerScore:
    layer: int
    share: float  # attention a token of the copied block received, as a share of all entries'; mean of the copies
    is_readable: bool  # has full attention


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a replay without a cache: `linear` a token, `square` a pair of tokens."""

    linear: float
    square: float

    def seconds(self, tokens: int) -> float:
        return self.linear * tokens + self.square * tokens * tokens


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far masses of blocks, and edges, are from the same by eager attention."""

    largest: float  # of one
    drift: float  # sum of all differences, as a share of all there is

    def holds(self, dtype: str) -> bool:
        """In 16 bits single tokens drift apart layer by layer, whichever of two ways is right; not the whole."""
        return self.largest <= AGREES if dtype == "float32" else self.drift <= AGREES_ROUGHLY  # false for NaN


@dataclass(frozen=True, slots=True)
class Check:
    model: LoadedModel
    load_seconds: float
    agreement: Agreement
    scores: tuple[LayerScore, ...]  # one for each layer of the whole stack
    measured: tuple[tuple[int, float], ...]  # tokens, seconds
    cost: Cost
    weight_bytes: int  # of the layers that are kept
    token_bytes: int  # keys and values of one token
    peak_bytes: int | None  # of this process, or of the GPU; None where nobody counts

    @property
    def agrees(self) -> bool:
        return self.agreement.holds(self.model.dtype)

    @property
    def suggested(self) -> tuple[int, ...]:
        """The layers that find copies, ascending; empty when none does."""
        found = sorted((s for s in self.scores if s.is_readable and s.share >= FOUND), key=lambda s: -s.share)
        return tuple(sorted(s.layer for s in found[:SUGGESTED_MAX]))


def check(config: ReplayConfig, clock: Callable[[], float] = monotonic) -> Check:
    """A minute on a CPU. Raises ModelUnavailable as `load`, ReplayError as `Replayer.observe`."""
    began = clock()
    model = load(config, whole=True)
    loaded = clock() - began
    if not all(model.encode(made_up(ENTRIES, 0)).spans):
        problem = f"the check's context does not fit into {model.max_tokens} tokens"
        raise ReplayError(problem, "raise attention_max_tokens, or choose a model that takes longer contexts")
    scores = copy_scores(model)
    cut_above(model.network, model.layers[-1])
    agreement = agreement_of(model, config)
    measured = measure(model, config, clock)
    weights = model.network.parameters()
    return Check(
        model=model,
        load_seconds=loaded,
        agreement=agreement,
        scores=scores,
        measured=measured,
        cost=fit(measured),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        token_bytes=_token_bytes(model),
        peak_bytes=_peak_bytes(model.device),
    )


def made_up(entries: int, copied: int) -> list[ContextBlock]:
    """Instructions, `entries` blocks of code that nobody wrote, and an answer that repeats one of them."""
    rng = random.Random(7)
    texts = [_entry(rng) for _ in range(entries)]
    history = (ContextBlock(i, (Part("user", text),), is_dependent=True) for i, text in enumerate(texts))
    instructions = ContextBlock(None, (Part("system", "You are a coding agent."),))
    return [instructions, *history, ContextBlock(None, (Part("assistant", texts[copied]),), in_turn=True)]


def proven(model: LoadedModel, config: ReplayConfig) -> Replayer:
    """For replays with this model, after a first one of two made-up entries, which takes a second at most.

    What fails here fails with every turn, so it is the model's fault and not the turn's: ModelUnavailable.
    """
    replayer = Replayer(model, config)
    try:
        replayer.observe(made_up(2, 0), SESSION)
    except ReplayError as error:
        raise ModelUnavailable(f"{model.name} cannot replay: {error.problem}", error.remedy) from error
    except MemoryError as error:
        remedy = "free memory, or choose a smaller model with the setting attention_model"
        raise ModelUnavailable(f"{model.name} leaves no memory for a replay", remedy) from error
    except Exception as error:  # whatever a model with other shapes than it says makes torch raise
        problem = f"{model.name} cannot replay ({type(error).__name__}: {reason_of(error)})"
        raise ModelUnavailable(problem, ANOTHER) from error
    replayer.forget()
    return replayer


def copy_scores(model: LoadedModel) -> tuple[LayerScore, ...]:
    """Needs the whole stack. Memory: layers x heads x 600 x 600 x 4 bytes, 0.6 GB for Qwen3-0.6B."""
    totals: list[float] = []
    for copied in COPIED:
        blocks = made_up(ENTRIES, copied)
        encoded = model.encode(blocks)
        ((start, end),) = encoded.spans[-1]
        shares = []
        for attention in eager_attention(model, encoded.ids):
            row = attention[start:end].mean(0)  # (N,)
            density = [float(row[a:b].mean()) for ((a, b),) in encoded.spans[1:-1]]
            shares.append(density[copied] / (sum(density) or 1.0))
        totals = [a + b for a, b in zip(totals or [0.0] * len(shares), shares, strict=True)]
    kinds = layer_kinds(model.network.config)
    return tuple(LayerScore(i, total / len(COPIED), kinds[i] == FULL) for i, total in enumerate(totals))


def agreement_of(model: LoadedModel, config: ReplayConfig) -> Agreement:
    """What a replay says of a short context against what the model's eager attention says."""
    blocks = made_up(ENTRIES, COPIED[1])
    replay = Replayer(model, config).observe(blocks, SESSION)
    encoded = model.encode(blocks)
    plan = sampling.plan(blocks, encoded, rows_max=config.rows_max, block_rows_max=config.block_rows_max)
    attention = eager_attention(model, encoded.ids)
    ordinals = {block.ordinal: spans for block, spans in zip(blocks, encoded.spans, strict=True)}

    def mass(layer: int, rows: Sequence[int], ordinal: int) -> float:
        return sum(float(attention[layer][list(rows), a:b].sum(-1).mean()) for a, b in ordinals[ordinal])

    turn = [
        (r.mass, mass(r.layer, plan.turn, b.ordinal)) for b in replay.blocks for r in b.by_layer if r.group == "turn"
    ]
    rows = {blocks[index].ordinal: places for index, places in plan.dependents}
    edges = [(m, mass(model.dependency_layer, rows[b], a)) for a, b, m in replay.edges]
    differences = [abs(ours - theirs) for ours, theirs in turn + edges]
    total = sum(differences)  # NaN if one is, which max may pass over
    largest = max(differences) if total == total else total
    return Agreement(largest, total / sum(theirs for _, theirs in turn + edges))


def eager_attention(model: LoadedModel, ids: Sequence[int]) -> list["Tensor"]:
    """(N, N) for each layer, mean over the heads, on the CPU in float32. For a few hundred tokens."""
    import torch

    with _eager(model.network), torch.no_grad():
        tokens = torch.tensor([ids], device=model.device)
        found = model.network(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    if not found or any(layer is None for layer in found):
        raise ModelUnavailable(f"{model.name} shows no attention", ANOTHER)
    return [layer[0].float().mean(0).cpu() for layer in found]


def measure(model: LoadedModel, config: ReplayConfig, clock: Callable[[], float]) -> tuple[tuple[int, float], ...]:
    """Tokens and seconds of two replays without a cache, the longer one within what the model takes."""
    replayer = Replayer(model, config, clock)
    measured = []
    for size, repeats in zip(SIZES[model.device], (REPEATS, 1), strict=True):
        blocks = _of_length(model, min(size, model.max_tokens))
        replays = []
        for _ in range(repeats):
            replayer.forget()
            replays.append(replayer.observe(blocks, SESSION))
        measured.append((replays[0].tokens, min(replay.seconds for replay in replays)))
    return tuple(measured)


def fit(measured: Sequence[tuple[int, float]]) -> Cost:
    """a and b of a n + b n^2 through the first and the last point; neither is less than 0."""
    (n, s), (m, t) = measured[0], measured[-1]
    square = max(0.0, (t / m - s / n) / (m - n)) if m > n else 0.0
    return Cost(max(0.0, t / m - square * m), square)


def _of_length(model: LoadedModel, tokens: int) -> list[ContextBlock]:
    """As many blocks as fit into `tokens`, with one of them repeated at the end."""
    few = len(model.encode(made_up(2, 0)).ids)
    each = (len(model.encode(made_up(ENTRIES, 0)).ids) - few) / (ENTRIES - 2)
    return made_up(max(2, 2 + int((tokens - few) / each * 0.95)), 0)  # entries differ somewhat in length


def _entry(rng: random.Random) -> str:
    def word() -> str:
        return "".join(rng.choice("ba ce di fo gu ka le mi no pu ra se ti vo wu za".split()) for _ in range(3))

    return (
        f"def {word()}_{word()}({word()}):\n    {word()} = {word()}({word()}, {rng.randint(10, 99)})\n"
        f"    return {word()}.{word()}"
    )


@contextmanager
def _eager(network: Any) -> Iterator[None]:
    usual = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(usual)


def _token_bytes(model: LoadedModel) -> int:
    """Keys and values of one token in all layers that are kept."""
    settings = model.network.config
    size = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    bytes_each: int = next(model.network.parameters()).element_size()
    heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    return int(2 * heads * size * len(model.network.layers) * bytes_each)


def _peak_bytes(device: str) -> int | None:
    import torch

    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
