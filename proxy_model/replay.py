"""Token ids through the network, and out of it the attention of a few rows. Nothing n x n exists at any time.

The network runs in chunks against a cache of keys and values. At a selected layer the softmax rows of the sampled
query positions alone are computed, exactly and in float32, and reduced at once: to a mean per token for each row group,
and at the dependency layer to a mean per block for each dependent. The attention that the network goes on with comes
from SDPA, which shows no weights. Above the last selected layer nothing is computed.

How it gets in: transformers hands queries and keys, positions applied, to a function that a configuration names. Ours
is named for the time of a read only, so the same network can be run eagerly in between.

Shapes: L selected layers, G row groups, W rows of a batch, H heads, K heads of keys and values, Q query tokens of a
chunk, T tokens so far, N tokens of the context, D head size, B blocks, E dependent blocks.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from proxy_model.cache import ContextCache
from proxy_model.errors import ANOTHER, ModelUnavailable, ReplayError
from proxy_model.layers import FULL
from proxy_model.loader import READABLE, layer_kinds
from proxy_model.memory import free_bytes, total_bytes
from proxy_model.sampling import GROUPS, RowPlan

KEPT_SHARE = 4  # a quarter of the memory; 32k tokens of Qwen3-0.6B take 3 GiB in bfloat16, 6 in float32
KEPT_BYTES_MAX = 2 << 30  # where nobody says how much memory there is
SCORES_MAX = {"cuda": 1 << 25}  # numbers of one batch of rows: 128 MiB in float32; few launches matter there
SCORES_MAX_ELSEWHERE = 1 << 21  # 8 MiB: stays near the caches of a CPU
NAME = "recap_rows"
BENDING = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "indices",
    "block_indices",
)  # change the weights, unknown to us


@dataclass(frozen=True, slots=True)
class Rows:
    """What the sampled rows say, on the CPU in float32."""

    rho: Tensor  # (L, G, N) mean over heads and the group's rows; sums to 1, or is 0 for a group without rows
    edges: Tensor  # (E, B) mean over heads and the dependent's rows of the mass on a block, at the dependency layer
    computed: int  # tokens; the others came from the cache


class RowReader:
    """Reads rows of one network. Keeps the keys and values of the last session that it read.

    Not for several threads. A read that fails leaves no cache behind.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        layers: Sequence[int],
        dependency_layer: int,
        *,
        chunk: int,
        kept_bytes_max: int | None = None,
    ) -> None:
        """`kept_bytes_max`: what may stay between two reads; a share of the device's memory if not said."""
        assert dependency_layer in layers
        self._network = network
        self._kinds = layer_kinds(network.config)
        self._layers = tuple(sorted(layers))
        self._dependency_layer = dependency_layer
        self._chunk = chunk
        if kept_bytes_max is None:
            total = total_bytes(network.device)
            kept_bytes_max = KEPT_BYTES_MAX if total is None else total // KEPT_SHARE
        self._kept_bytes_max = kept_bytes_max
        self._kept: _Kept | None = None

    @property
    def kept_bytes(self) -> int:
        return self._kept.cache.bytes if self._kept else 0

    def forget(self) -> None:
        """Frees what is kept."""
        self._kept = None

    def read(self, ids: Sequence[int], plan: RowPlan, segments: Tensor, blocks: int, session: int) -> Rows:
        """`segments` (N,) says which block each token belongs to, `blocks` (their number) that it belongs to none.

        Tokens that begin the last context of the same session as well are not computed again, up to the first row.
        Raises ReplayError: no memory, or weights that are no numbers. ModelUnavailable: attention that cannot be read.
        """
        try:
            return self._read(tuple(ids), plan, segments, blocks, session)
        except (MemoryError, RuntimeError) as exc:
            if not _is_out_of_memory(exc):
                raise
            problem = f"out of memory on {self._network.device.type} with {len(ids)} tokens"
        self.forget()  # here the traceback, and with it every tensor of the read, is gone
        if self._network.device.type == "cuda":
            torch.cuda.empty_cache()
        raise ReplayError(problem, f"set attention_max_tokens below {len(ids)}, or choose a smaller model")

    def _read(self, ids: tuple[int, ...], plan: RowPlan, segments: Tensor, blocks: int, session: int) -> Rows:
        cache, keep = self._continued(ids, plan, session)
        device = self._network.device
        had = cache.bytes
        rows = _Collector(plan, segments, blocks, self._layers, self._dependency_layer, device)
        tokens = torch.tensor(ids, device=device)[None]  # (1, N)
        with _attention(self._network), torch.no_grad():
            for start in range(keep, len(ids), self._chunk):
                self._step(tokens, start, cache, rows)
                if start == keep:  # all of it is asked for with the first tokens
                    _check_room(cache.bytes - had, device)
        found = rows.result(len(ids) - keep)
        if cache.bytes <= self._kept_bytes_max:
            self._kept = _Kept(session, ids, cache)
        return found

    def _continued(self, ids: tuple[int, ...], plan: RowPlan, session: int) -> tuple[ContextCache, int]:
        """A cache and how many of its tokens hold. It is not kept from here on, until the read has succeeded."""
        kept, self._kept = self._kept, None
        keep = min(_common(kept.ids, ids), plan.first) if kept and kept.session == session else 0
        cache = kept.cache if kept and keep else ContextCache(self._layers[-1] + 1)
        cache.prepare(keep, len(ids))
        return cache, keep

    def _step(self, tokens: Tensor, start: int, cache: ContextCache, rows: "_Collector") -> None:
        ids = tokens[:, start : start + self._chunk]
        chunk = _Chunk(start, start + ids.shape[1], rows, self._kinds)
        mine = _chunk.set(chunk)
        try:
            positions = torch.arange(chunk.start, chunk.end, device=ids.device)[None]
            self._network(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
        except _Read:
            return
        finally:
            _chunk.reset(mine)
        raise ModelUnavailable(f"layer {self._layers[-1]} of {_kind(self._network)} shows no attention", ANOTHER)


@dataclass(frozen=True, slots=True)
class _Kept:
    session: int
    ids: tuple[int, ...]
    cache: ContextCache


class _Read(Exception):
    """All rows of a chunk are read: leaves the network from within its last selected layer."""


@dataclass(slots=True)
class _Chunk:
    """The tokens `start` to `end` on their way through the network."""

    start: int
    end: int
    rows: "_Collector"
    kinds: Sequence[str] = ()  # of attention, by layer
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, seen: int, window: int | None, like: Tensor) -> Tensor:
        """(Q, T) of 0 and -inf for the last `seen` keys, the same for all layers of one kind. A bool mask would be
        turned into this one at every layer."""
        kind = seen, window
        if kind not in self._masks:
            query = torch.arange(self.start, self.end, device=like.device)[:, None]
            key = torch.arange(self.end - seen, self.end, device=like.device)[None]
            hidden = key > query
            if window:
                hidden |= key <= query - window
            zeros = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[kind] = zeros.masked_fill_(hidden, float("-inf"))
        return self._masks[kind]


_chunk: ContextVar[_Chunk] = ContextVar("chunk")  # transformers lets no argument of ours through to every model


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers: query (1, H, Q, D), key and value (1, K, T, D) -> (1, Q, H, D).

    transformers makes no mask for a function that it does not know: what is visible is decided here.
    """
    chunk = _chunk.get()
    layer = _number(module, attention_mask, extra)
    _check_window(layer, sliding_window, chunk)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if key.shape[2] != chunk.end:
        raise ModelUnavailable(f"layer {layer} keeps {key.shape[2]} keys of {chunk.end} tokens", ANOTHER)
    if layer in chunk.rows.layers:
        chunk.rows.collect(layer, query, key, scale, chunk.start)
        if layer == chunk.rows.layers[-1]:
            raise _Read
    return _mix(query, key, value, scale, sliding_window, chunk).transpose(1, 2).contiguous(), None


def _mix(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, chunk: _Chunk) -> Tensor:
    """(1, H, Q, D) x (1, K, T, D) -> (1, H, Q, D), causal."""
    seen, asked = key.shape[2], query.shape[2]
    if window and seen > window:
        seen = min(seen, asked + window - 1)  # no query of this chunk looks further back
        key, value = key[:, :, -seen:], value[:, :, -seen:]
        return _grouped(query, key, value, scale, chunk.mask(seen, window, query))
    if query.is_cuda and query.dtype != torch.float32:
        return _flash(query, key, value, scale)
    return _grouped(query, key, value, scale, None if seen == asked else chunk.mask(seen, None, query))


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The last query sees the last key; neither a mask nor a copy of the keys for each group of heads."""
    visible = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=True)


def _grouped(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Heads that share keys become (K, H/K, Q, D); the keys are shared by a stride of 0, for any kernel, uncopied."""
    _, heads, asked, size = query.shape
    shared, seen = key.shape[1], key.shape[2]
    group = heads // shared
    mixed = scaled_dot_product_attention(
        query.reshape(shared, group, asked, size),
        key[0, :, None].expand(shared, group, seen, size),
        value[0, :, None].expand(shared, group, seen, value.shape[-1]),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return mixed.reshape(1, heads, asked, value.shape[-1])


def _number(module: nn.Module, mask: Tensor | None, extra: dict[str, Any]) -> int:
    """The layer's index. ModelUnavailable when more than queries, keys and the order decides on its attention."""
    layer: int | None = getattr(module, "layer_idx", None)
    bent = [name for name in BENDING if extra.get(name) is not None]
    if mask is not None:
        bent.append("a mask of its own")
    if not getattr(module, "is_causal", True):
        bent.append("no causal order")
    if bent or layer is None:
        raise ModelUnavailable(f"{type(module).__name__} has {', '.join(bent) or 'no index'}", ANOTHER)
    return layer


def _check_window(layer: int, window: int | None, chunk: _Chunk) -> None:
    """Some models keep their window in a mask of transformers' alone, which is not made for us."""
    kind = chunk.kinds[layer] if layer < len(chunk.kinds) else FULL
    if kind not in READABLE or (kind != FULL and not window):
        raise ModelUnavailable(f"layer {layer} does not say what it sees ({kind})", ANOTHER)
    if window and layer in chunk.rows.layers and window < chunk.rows.tokens:
        raise ModelUnavailable(f"layer {layer} sees a window of {window} tokens only", "name other layers")


class _Collector:
    """Rows of all selected layers, summed up as they come. Memory: (L, G, N), (E, B) and one batch of scores."""

    def __init__(
        self,
        plan: RowPlan,
        segments: Tensor,
        blocks: int,
        layers: Sequence[int],
        dependency_layer: int,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.tokens = len(segments)
        self._dependency_layer = dependency_layer
        self._segments = segments.to(device)
        self._rho = torch.zeros(len(layers), len(GROUPS), len(segments), device=device)
        self._edges = torch.zeros(len(plan.dependents), blocks + 1, device=device)  # the last column: no block
        self._wanted = [bool(plan.turn), bool(plan.assistant)]
        turn = _Sampled(plan, with_dependents=False, device=device)
        self._sampled = dict.fromkeys(layers, turn)
        self._sampled[dependency_layer] = _Sampled(plan, with_dependents=True, device=device)

    def collect(self, layer: int, query: Tensor, key: Tensor, scale: float, start: int) -> None:
        """Adds the rows of the chunk that begins at `start`. Query (1, H, Q, D), key (1, K, T, D)."""
        sampled = self._sampled[layer]
        begin, end = (bisect_left(sampled.positions, place) for place in (start, key.shape[2]))
        most = SCORES_MAX.get(query.device.type, SCORES_MAX_ELSEWHERE) // (query.shape[1] * key.shape[2])
        for low in range(begin, end, max(1, most)):
            batch = slice(low, min(end, low + max(1, most)))
            first, last = sampled.positions[batch.start], sampled.positions[batch.stop - 1]
            places = sampled.places[batch]  # (W,)
            rows = _rows(query[0, :, places - start], key[0, :, : last + 1], scale, places, first)  # (W, T')
            groups = self._rho[self.layers.index(layer)]  # (G, N)
            groups[:, : last + 1] += sampled.share[:, batch] @ rows  # (G, W) (W, T') -> (G, T')
            if layer == self._dependency_layer:
                self._link(sampled, batch, rows)

    def _link(self, sampled: "_Sampled", batch: slice, rows: Tensor) -> None:
        dependents = [d for d in sampled.dependent[batch] if d is not None]
        if not dependents:
            return
        some = slice(dependents[0], dependents[-1] + 1)
        numbers = torch.arange(some.start, some.stop, device=rows.device)[:, None]
        share = (sampled.number[batch] == numbers) * sampled.weight[batch]  # (E', W), rows sum to 1 over all batches
        self._edges[some].index_add_(1, self._segments[: rows.shape[1]], share @ rows)  # (E', T') -> (E', B + 1)

    def result(self, computed: int) -> Rows:
        rho, edges = self._rho.cpu(), self._edges.cpu()
        for layer, shares in zip(self.layers, rho.sum(-1).tolist(), strict=True):
            _check_shares(layer, [share for share, wanted in zip(shares, self._wanted, strict=True) if wanted])
        _check_shares(self._dependency_layer, edges.sum(-1).tolist())
        return Rows(rho, edges[:, :-1], computed)


class _Sampled:
    """Sampled positions of one layer, as numbers here and as tensors on the device."""

    def __init__(self, plan: RowPlan, *, with_dependents: bool, device: torch.device) -> None:
        of = {place: (d, 1 / len(places)) for d, (_, places) in enumerate(plan.dependents) for place in places}
        of = of if with_dependents else {}
        groups = [dict.fromkeys(places, 1 / max(1, len(places))) for places in (plan.turn, plan.assistant)]
        self.positions = sorted({*plan.turn, *plan.assistant, *of})
        self.dependent = [of[place][0] if place in of else None for place in self.positions]
        self.places = torch.tensor(self.positions, dtype=torch.int64, device=device)  # (W,)
        self.number = torch.tensor([-1 if d is None else d for d in self.dependent], device=device)  # (W,)
        self.weight = torch.tensor([of.get(place, (None, 0.0))[1] for place in self.positions], device=device)  # (W,)
        self.share = torch.tensor([[g.get(p, 0.0) for p in self.positions] for g in groups], device=device)  # (G, W)


def _rows(query: Tensor, key: Tensor, scale: float, places: Tensor, first: int) -> Tensor:
    """Softmax over the keys, mean over the heads: query (H, W, D), key (K, T, D) -> (W, T) float32, rows sum to 1.

    `first` is the smallest of `places` (W,): keys up to it are visible to all rows.
    """
    heads, count, size = query.shape
    shared, seen, _ = key.shape
    query = (query.float() * scale).to(key.dtype)  # before the product: float16 holds no large one
    scores = torch.matmul(query.reshape(shared, -1, size), key.transpose(1, 2))  # (K, H/K * W, T)
    scores = scores.float().view(heads, count, seen)
    later = torch.arange(first + 1, seen, device=key.device) > places[:, None]  # (W, T - first - 1)
    scores[..., first + 1 :].masked_fill_(later, float("-inf"))
    return scores.softmax(-1).mean(0)


def _check_shares(layer: int, shares: Sequence[float]) -> None:
    """Each row is a distribution, so a mean of rows is one. NaN fails every comparison."""
    for share in shares:
        if not abs(share - 1) < 0.01:
            problem = f"attention at layer {layer} sums to {share:g} instead of 1"
            raise ReplayError(problem, "set attention_dtype to float32, or choose another model")


def _check_room(wanted: int, device: torch.device) -> None:
    """MemoryError while there is one to raise: Linux promises any memory, and kills who uses it."""
    free = free_bytes(device)
    if free is not None and wanted > free:
        raise MemoryError


@contextmanager
def _attention(network: PreTrainedModel) -> Iterator[None]:
    """Our function in the place of the model's own, for a while."""
    AttentionInterface.register(NAME, _attend)
    usual = network.config._attn_implementation
    if not network._can_set_attn_implementation():
        raise ModelUnavailable(f"{_kind(network)} computes attention in its own way", ANOTHER)
    network.set_attn_implementation(NAME)
    try:
        yield
    finally:
        network.set_attn_implementation(usual)


def _kind(network: PreTrainedModel) -> str:
    return type(network).__name__


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _is_out_of_memory(exc: BaseException) -> bool:
    """The CPU and MPS allocators say it in words only."""
    text = str(exc).lower()
    return isinstance(exc, MemoryError | torch.OutOfMemoryError) or "out of memory" in text or "can't allocate" in text
