"""Rows are those of eager attention, whatever the chunks and the cache; what cannot be read is refused."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from proxy_model import memory, replay  # noqa: E402  # it needs torch
from proxy_model.errors import ModelUnavailable, ReplayError  # noqa: E402
from proxy_model.loader import length_max  # noqa: E402
from proxy_model.pooling import segments_of, sums  # noqa: E402
from proxy_model.replay import RowReader, Rows  # noqa: E402
from proxy_model.sampling import RowPlan, spread  # noqa: E402
from tests.proxy_model.eager import FAMILIES, eager_rho, eager_rows, sharpened, tiny_network  # noqa: E402
from tests.proxy_model.tiny import SIZES, tiny_config  # noqa: E402
from tests.proxy_model.watch import watching  # noqa: E402

LAYERS, DEPENDENCY = (2, 5), 2  # gemma3: the layers of full attention among six
TOKENS = 230
SPANS = (((4, 40),), ((44, 90), (93, 110)), ((112, 150),), ((153, 170), (171, 228)))
TOLERANCE = 1e-5  # of a mass; the promise is 1e-4


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


def some_ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def a_plan(spans: Any = SPANS) -> RowPlan:
    """Three blocks are dependents; the turn is the last two, of which the model wrote the last part."""
    turn = spread([*spans[-2], *spans[-1]], 50)
    written = tuple(p for p in turn if p >= spans[-1][-1][0])
    return RowPlan(turn, written, tuple((b, spread(spans[b], 12)) for b in (1, 2, 3)))


def read(reader: RowReader, ids: Sequence[int], plan: RowPlan, session: int = 1, spans: Any = SPANS) -> Rows:
    return reader.read(ids, plan, segments_of(spans, len(ids)), len(spans), session)


def check_equal(found: Rows, network: Any, ids: Sequence[int], plan: RowPlan, spans: Any = SPANS) -> None:
    rows = eager_rows(network, ids, LAYERS)
    segments = segments_of(spans, len(ids))
    rho = eager_rho(rows, plan)
    assert (sums(found.rho, segments, len(spans)) - sums(rho, segments, len(spans))).abs().max() < TOLERANCE
    assert (found.rho - rho).abs().max() < TOLERANCE
    by_row = sums(rows[LAYERS.index(DEPENDENCY)], segments, len(spans))  # (N, B)
    for number, (_, places) in enumerate(plan.dependents):
        assert (found.edges[number] - by_row[list(places)].mean(0)).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunk", [512, 230, 100, 64, 50, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_eager_attention(family: str, chunk: int) -> None:
    """50: a chunk whose window reaches back to the very first token, so that both kinds of mask have one shape."""
    network, ids, plan = tiny_network(family), some_ids(TOKENS), a_plan()
    found = read(RowReader(network, LAYERS, DEPENDENCY, chunk=chunk), ids, plan)
    check_equal(found, network, ids, plan)
    assert found.computed == TOKENS
    assert found.rho.sum(-1) == pytest.approx(torch.ones(2, 2), abs=1e-5)


def test_eager_attention_of_the_tiny_networks_prefers_something() -> None:
    """Else the test above could not fail."""
    for family in FAMILIES:
        rows = eager_rows(tiny_network(family), some_ids(TOKENS), LAYERS)
        assert (rows[:, -1].max(-1).values > 5 / TOKENS).all(), family


def test_the_window_of_a_sliding_layer_matters() -> None:
    """Else the equality for gemma3 would hold without any window."""
    network, ids, plan = tiny_network("gemma3"), some_ids(TOKENS), a_plan()
    before = read(RowReader(network, LAYERS, DEPENDENCY, chunk=50), ids, plan)
    for layer in network.layers:
        layer.self_attn.sliding_window = TOKENS
    after = read(RowReader(network, LAYERS, DEPENDENCY, chunk=50), ids, plan)
    assert (before.rho - after.rho).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("batch", [1, 4 * TOKENS * 3])
def test_the_batch_of_rows_does_not_matter(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    network, ids, plan = tiny_network("qwen3"), some_ids(TOKENS), a_plan()
    monkeypatch.setattr(replay, "SCORES_MAX_ELSEWHERE", batch)
    check_equal(read(RowReader(network, LAYERS, DEPENDENCY, chunk=64), ids, plan), network, ids, plan)


def test_a_turn_that_the_model_wrote_nothing_of() -> None:
    network, ids = tiny_network("llama"), some_ids(TOKENS)
    found = read(RowReader(network, LAYERS, DEPENDENCY, chunk=64), ids, RowPlan(a_plan().turn, (), ()))
    assert found.rho[:, 1].abs().max() == 0
    assert found.edges.shape == (0, 4)


def test_one_layer_is_enough() -> None:
    network, ids, plan = tiny_network("llama"), some_ids(TOKENS), a_plan()
    found = read(RowReader(network, (0,), 0, chunk=64), ids, plan)
    assert (found.rho - eager_rho(eager_rows(network, ids, (0,)), plan)).abs().max() < TOLERANCE


def long_rope(original: int) -> Any:
    """Phi 3: one projection for queries, keys and values, and positions that are turned by the context's length."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": original, **factors}
    small = {**SIZES, "num_hidden_layers": 6, "original_max_position_embeddings": original}
    return transformers.Phi3Config(
        **{**small, "pad_token_id": 0, "rope_parameters": rope, "max_position_embeddings": 512}
    )


@pytest.mark.parametrize(("original", "fits"), [(TOKENS, True), (100, False)])
def test_positions_that_depend_on_the_length_are_read_as_far_as_they_do_not(original: int, fits: bool) -> None:
    torch.manual_seed(0)
    config = long_rope(original)
    network = sharpened(transformers.AutoModel.from_config(config).eval().requires_grad_(False))
    ids, plan = some_ids(TOKENS), a_plan()
    assert (length_max(config) >= TOKENS) is fits
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64)
    if fits:
        check_equal(read(reader, ids, plan), network, ids, plan)
    else:  # the trap is there
        with pytest.raises(AssertionError):
            check_equal(read(reader, ids, plan), network, ids, plan)


def test_the_length_that_a_model_takes() -> None:
    assert length_max(long_rope(100)) == 100
    assert length_max(tiny_config("gemma3")) == length_max(tiny_config("llama")) == SIZES["max_position_embeddings"]


# The cache


def grown(spans: Any, at: int) -> Any:
    """The next turn: two more blocks from token `at` on, the second of them 50 tokens long."""
    return (*spans, ((at, at + 20),), ((at + 24, at + 74),))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_that_goes_on_is_computed_from_its_first_row_on(family: str) -> None:
    network, first = tiny_network(family), some_ids(TOKENS)
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64)
    read(reader, first, a_plan())
    ids, spans = [*first, *some_ids(80, seed=1)], grown(SPANS, TOKENS + 2)
    turn = spread([*spans[-2], *spans[-1]], 40)
    plan = RowPlan(turn, turn[-9:], tuple((b, spread(spans[b], 9)) for b in (3, 4, 5)))
    found = read(reader, ids, plan, spans=spans)
    check_equal(found, network, ids, plan, spans)
    assert found.computed == len(ids) - SPANS[3][0][0]  # the last turn's answer is a dependent now


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts_at", [0, 1, 63, 64, 100, 229])
def test_after_a_divergence_the_rest_is_computed_anew(family: str, parts_at: int) -> None:
    network, first, plan = tiny_network(family), some_ids(TOKENS), a_plan()
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=50)
    read(reader, first, plan)
    ids = [*first[:parts_at], *((token + 1) % 256 for token in first[parts_at:])]
    found = read(reader, ids, plan)
    check_equal(found, network, ids, plan)
    assert found.computed == TOKENS - min(parts_at, plan.first)


def test_the_same_context_again_and_a_shorter_one() -> None:
    """A retried job; a session that was undone."""
    network, ids, plan = tiny_network("gemma3"), some_ids(TOKENS), a_plan()
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=50)
    read(reader, ids, plan)
    again = read(reader, ids, plan)
    check_equal(again, network, ids, plan)
    assert again.computed == TOKENS - plan.first
    spans = SPANS[:3]
    shorter = RowPlan(spread(spans[2], 20), spread(spans[2], 20), ((1, spread(spans[1], 9)),))
    found = read(reader, ids[:151], shorter, spans=spans)
    check_equal(found, network, ids[:151], shorter, spans)
    assert found.computed == 151 - SPANS[1][0][0]


def test_many_turns_in_a_row_leave_no_trace_of_the_cache() -> None:
    network = tiny_network("gemma3")
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=33)
    ids, plan, spans = some_ids(TOKENS), a_plan(), SPANS
    for turn in range(5):
        check_equal(read(reader, ids, plan, spans=spans), network, ids, plan, spans)
        spans = grown(spans, len(ids) + 2)
        ids += some_ids(80, seed=turn + 1)
        rows = spread([*spans[-2], *spans[-1]], 30)
        plan = RowPlan(rows, rows[-3:], tuple((b, spread(spans[b], 9)) for b in (len(spans) - 2, len(spans) - 1)))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(5, 90),
    st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 200), st.integers(20, 120), st.integers(0, 3)),
        min_size=2,
        max_size=5,
    ),
)
def test_whatever_was_read_before_rows_are_those_of_a_first_read(
    chunk: int, contexts: list[tuple[int, int, int, int]]
) -> None:
    """(session, tokens that stay of the last context, new ones, which new ones). Histories grow, shrink and part."""
    network = tiny_network("gemma3")
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=chunk)
    ids: list[int] = []
    for session, stays, new, seed in contexts:
        ids = ids[:stays] + some_ids(new, seed=seed)
        middle = len(ids) // 2
        spans = (((0, middle - 1),), ((middle, len(ids)),))
        plan = RowPlan(spread(spans[1], 20), spread(spans[1], 5), ((1, spread(spans[1], 9)),))
        found = read(reader, ids, plan, session, spans)
        first = read(RowReader(network, LAYERS, DEPENDENCY, chunk=512), ids, plan, session, spans)
        assert (found.rho - first.rho).abs().max() < TOLERANCE
        assert (found.edges - first.edges).abs().max() < TOLERANCE
        assert len(ids) - middle <= found.computed <= first.computed == len(ids)


def test_the_cache_is_of_one_session() -> None:
    network, ids, plan = tiny_network("llama"), some_ids(TOKENS), a_plan()
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64)
    assert [read(reader, ids, plan, session).computed for session in (1, 2, 2, 1)] == [
        TOKENS, TOKENS, TOKENS - plan.first, TOKENS,
    ]  # fmt: skip


def test_a_cache_above_the_limit_is_not_kept() -> None:
    network, ids, plan = tiny_network("llama"), some_ids(TOKENS), a_plan()
    size = (max(LAYERS) + 1) * 2 * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 4 * TOKENS
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64, kept_bytes_max=size)
    read(reader, ids, plan)
    assert reader.kept_bytes == size
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64, kept_bytes_max=size - 1)
    read(reader, ids, plan)
    assert reader.kept_bytes == 0
    assert read(reader, ids, plan).computed == TOKENS


def test_what_may_be_kept_is_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    network, ids, plan = tiny_network("llama"), some_ids(TOKENS), a_plan()
    kept = []
    for total in (None, 4 << 30, 4 << 10):
        monkeypatch.setattr(replay, "total_bytes", lambda device, total=total: total)
        reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64)
        read(reader, ids, plan)
        kept.append(reader.kept_bytes > 0)
    assert kept == [True, True, False]


@pytest.mark.parametrize("chunk", [10, 64])
def test_memory_for_a_context_is_taken_once(chunk: int) -> None:
    """A copy of all keys with every chunk would cost the square of the tokens."""
    network, plan = tiny_network("llama"), a_plan()
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=chunk)
    with watching(network) as watch:
        read(reader, some_ids(TOKENS), plan)
    assert watch.operations["aten::new_empty"] == 2 * len(network.layers)


def test_what_is_kept_can_be_freed() -> None:
    network, ids, plan = tiny_network("llama"), some_ids(TOKENS), a_plan()
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64)
    read(reader, ids, plan)
    reader.forget()
    assert reader.kept_bytes == 0
    assert read(reader, ids, plan).computed == TOKENS


# Work and memory


def counted(network: Any) -> dict[str, int]:
    """How many tokens went through each layer and each feed-forward part, by name."""
    seen: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...], values: Any = None) -> None:
            seen[name] = seen.get(name, 0) + inputs[0].shape[1]

        return hook

    for number, layer in enumerate(network.layers):
        layer.register_forward_pre_hook(count(f"layer {number}"))
        layer.mlp.register_forward_pre_hook(count(f"mlp {number}"))
    return seen


@pytest.mark.parametrize("last", [1, 3, 7])
def test_the_cost_is_linear_in_the_depth_of_the_last_layer(last: int) -> None:
    network, ids, plan = tiny_network("qwen3", layers=9), some_ids(TOKENS), a_plan()
    seen = counted(network)
    read(RowReader(network, (0, last), 0, chunk=64), ids, plan)
    assert seen == {
        **{f"layer {number}": TOKENS for number in range(last + 1)},
        **{f"mlp {number}": TOKENS for number in range(last)},
    }


def wide_network(tokens: int) -> Any:
    """Many heads that share one pair of keys and values: repeating those would be seen."""
    sizes = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 4}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**sizes, "max_position_embeddings": tokens})
    return transformers.AutoModel.from_config(config).eval().requires_grad_(False)


def watched(monkeypatch: pytest.MonkeyPatch, tokens: int) -> Any:
    """A read with 16 rows, one of them to a batch."""
    network = wide_network(tokens)
    monkeypatch.setattr(replay, "SCORES_MAX_ELSEWHERE", 8 * tokens)
    spans = (((0, tokens // 2),), ((tokens // 2, tokens),))
    plan = RowPlan(spread(spans[1], 16), spread(spans[1], 16), ((1, spread(spans[1], 16)),))
    with watching(network) as watch:
        read(RowReader(network, (1, 3), 1, chunk=16), some_ids(tokens), plan, spans=spans)
    return watch


def test_memory_grows_with_the_tokens_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = watched(monkeypatch, 512), watched(monkeypatch, 1024)
    assert short.peak < long.peak < 2.1 * short.peak
    assert long.largest < 2.1 * short.largest
    assert long.largest * 8 < 1024 * 1024 * 4  # no tensor of n x n numbers, nor an eighth of one


def test_keys_are_never_repeated_for_the_heads_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watched(monkeypatch, 512)
    assert watch.largest * 2 < 8 * 512 * 32 * 4  # (H, T, D)
    assert watch.operations["aten::_scaled_dot_product_flash_attention_for_cpu"] == 3 * 512 / 16


def test_the_watch_sees_what_eager_attention_allocates() -> None:
    """Else the two tests above could not fail."""
    network = wide_network(512)
    with watching(network) as watch:
        eager_rows(network, some_ids(512), (0,))
    assert watch.largest >= 8 * 512 * 512 * 4
    assert watch.peak > 4 * watch.largest


# Kernels and kinds of numbers


@pytest.mark.parametrize("asked", [5, 40])
def test_both_ways_to_attend_agree(asked: int) -> None:
    """The one for CUDA has a kernel of its own there; what it means is the same everywhere."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 6, asked, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    chunk = replay._Chunk(40 - asked, 40, rows=None)  # type: ignore[arg-type]
    expected = replay._grouped(query, key, value, 0.3, chunk.mask(40, None, query))
    assert (replay._flash(query, key, value, 0.3) - expected).abs().max() < 1e-6
    assert (replay._mix(query, key, value, 0.3, None, chunk) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_short_numbers_agree_with_eager_attention_in_float32(family: str, dtype: str) -> None:
    """Two or three digits of a number are kept; masses of blocks are means over many."""
    network, ids, plan = tiny_network(family), some_ids(TOKENS), a_plan()
    rho = eager_rho(eager_rows(network, ids, LAYERS), plan)
    found = read(RowReader(network.to(getattr(torch, dtype)), LAYERS, DEPENDENCY, chunk=64), ids, plan)
    segments = segments_of(SPANS, TOKENS)
    assert (sums(found.rho, segments, 4) - sums(rho, segments, 4)).abs().max() < 0.02
    assert found.rho.dtype == torch.float32


# What can go wrong


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_none_end_the_read_and_the_cache(value: str) -> None:
    network, ids, plan = tiny_network("qwen3"), some_ids(TOKENS), a_plan()
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64)
    read(reader, ids, plan)
    weight = network.layers[1].mlp.down_proj.weight
    right = weight.clone()
    weight[0, 0] = float(value)
    with pytest.raises(ReplayError, match=r"attention at layer 2 sums to nan .*float32"):
        read(reader, ids, plan)
    assert reader.kept_bytes == 0
    weight.copy_(right)
    check_equal(read(reader, ids, plan), network, ids, plan)


def test_a_row_of_a_dependent_that_is_no_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with a limit, NaN would be an edge that is not there."""
    right = replay._rows

    def rows(query: Any, key: Any, scale: float, places: Any, first: int) -> Any:
        return right(query, key, scale, places, first).where(places[:, None] > 60, float("nan"))

    monkeypatch.setattr(replay, "_rows", rows)
    with pytest.raises(ReplayError, match="attention at layer 2 sums to nan"):
        read(RowReader(tiny_network("llama"), LAYERS, DEPENDENCY, chunk=64), some_ids(TOKENS), a_plan())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "mps", "python"],
)
def test_without_memory_the_read_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    network, ids, plan = tiny_network("llama"), some_ids(TOKENS), a_plan()
    reader = RowReader(network, LAYERS, DEPENDENCY, chunk=64)
    read(reader, ids, plan)

    def fail(*args: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(replay, "_rows", fail)
        with pytest.raises(
            ReplayError, match="out of memory on cpu with 230 tokens; set attention_max_tokens below 230"
        ):
            read(reader, ids, plan)
    assert reader.kept_bytes == 0
    assert network.config._attn_implementation == "sdpa"
    check_equal(read(reader, ids, plan), network, ids, plan)


def test_a_real_lack_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert replay._is_out_of_memory(caught.value)


def test_a_context_for_which_there_is_no_memory_ends_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux promises any memory and then kills the process, which could not say why."""
    network, ids, plan = tiny_network("llama"), some_ids(TOKENS), a_plan()
    seen = counted(network)
    monkeypatch.setattr(replay, "free_bytes", lambda device: 1000)
    with pytest.raises(ReplayError, match="out of memory on cpu with 230 tokens"):
        read(RowReader(network, LAYERS, DEPENDENCY, chunk=20), ids, plan)
    assert seen["layer 0"] == 20


@pytest.mark.parametrize(
    ("text", "free"),
    [("MemTotal:  9 kB\nMemAvailable:    5 kB\n", 5 << 10), ("MemTotal: 9 kB\n", None), ("", None), (None, None)],
)
def test_free_memory_is_what_the_kernel_calls_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, free: int | None
) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.free_bytes(torch.device("cpu")) == free
    assert memory.free_bytes(torch.device("meta")) is None


def test_another_fault_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RowReader(tiny_network("llama"), LAYERS, DEPENDENCY, chunk=64)
    with pytest.raises(IndexError):
        read(reader, [*some_ids(TOKENS - 1), 5000], a_plan())
    assert reader.kept_bytes == 0


def strange_network(kind: str) -> Any:
    small = {**SIZES, "num_hidden_layers": 3}
    if kind == "bloom":  # positions as a bias in the model's own attention
        config = transformers.BloomConfig(vocab_size=288, hidden_size=32, n_layer=3, n_head=4)
    elif kind == "gemma2":  # scores are capped
        config = transformers.Gemma2Config(**small, layer_types=["full_attention"] * 3)
    else:  # sinks: a share of the attention goes to no token
        config = transformers.GptOssConfig(
            **small, layer_types=["full_attention"] * 3, num_local_experts=2, num_experts_per_tok=1
        )
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize(("kind", "reason"), [("bloom", "in its own way"), ("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_attention_of_a_kind_that_is_not_known_is_refused(kind: str, reason: str) -> None:
    network = strange_network(kind)
    usual = network.config._attn_implementation
    with pytest.raises(ModelUnavailable, match=f"{reason}.*another model"):
        read(RowReader(network, (2,), 2, chunk=64), some_ids(TOKENS), a_plan())
    assert network.config._attn_implementation == usual


def test_attention_in_both_directions_is_refused() -> None:
    network = tiny_network("llama")
    network.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelUnavailable, match="no causal order"):
        read(RowReader(network, LAYERS, DEPENDENCY, chunk=64), some_ids(TOKENS), a_plan())


def test_a_layer_that_is_never_reached_is_refused() -> None:
    with pytest.raises(ModelUnavailable, match="layer 9 of LlamaModel shows no attention"):
        read(RowReader(tiny_network("llama"), (2, 9), 2, chunk=64), some_ids(TOKENS), a_plan())


def test_a_layer_with_a_window_shows_no_rows() -> None:
    with pytest.raises(ModelUnavailable, match="layer 1 sees a window of 64 tokens only"):
        read(RowReader(tiny_network("gemma3"), (1, 5), 5, chunk=64), some_ids(TOKENS), a_plan())


def test_a_window_that_is_kept_in_a_mask_alone_is_refused() -> None:
    """Phi 3.5 MoE: our function is told of no window, and rows were off by a twentieth of all attention."""
    config = transformers.PhimoeConfig(
        **{**SIZES, "num_hidden_layers": 3, "sliding_window": 32, "num_local_experts": 2, "pad_token_id": 0}
    )
    network = transformers.AutoModel.from_config(config).eval().requires_grad_(False)
    with pytest.raises(ModelUnavailable, match=r"layer 0 does not say what it sees \(sliding_attention\)"):
        read(RowReader(network, (2,), 2, chunk=64), some_ids(TOKENS), a_plan())


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention", "one of next year"])
def test_a_layer_of_another_kind_is_refused(kind: str) -> None:
    network = tiny_network("llama")
    network.config.layer_types = ["full_attention", kind, *["full_attention"] * 4]
    with pytest.raises(ModelUnavailable, match=rf"layer 1 does not say what it sees \({kind}\)"):
        read(RowReader(network, LAYERS, DEPENDENCY, chunk=64), some_ids(TOKENS), a_plan())


def test_a_window_that_holds_the_whole_context_hides_nothing() -> None:
    network, ids, plan = tiny_network("gemma3"), some_ids(TOKENS), a_plan()
    for layer in network.layers:
        layer.self_attn.sliding_window = TOKENS
    found = read(RowReader(network, (1, 5), 5, chunk=64), ids, plan)
    usual = network.config.sliding_window
    network.config.sliding_window = TOKENS  # of eager attention's mask
    rho = eager_rho(eager_rows(network, ids, (1, 5)), plan)
    network.config.sliding_window = usual
    assert (found.rho - rho).abs().max() < TOLERANCE


def test_learned_positions_are_read_as_well() -> None:
    """Nothing here rests on rotation; that such models are refused when they are loaded is the loader's choice."""
    torch.manual_seed(0)
    config = tiny_config("gpt2")
    config.bos_token_id = config.eos_token_id = 0
    network = transformers.AutoModel.from_config(config).eval().requires_grad_(False)
    ids, plan = some_ids(TOKENS), a_plan()
    check_equal(read(RowReader(network, LAYERS, DEPENDENCY, chunk=50), ids, plan), network, ids, plan)


def test_the_networks_own_attention_is_untouched_between_reads() -> None:
    network, ids, plan = tiny_network("qwen3"), some_ids(TOKENS), a_plan()
    inputs = torch.tensor([ids])
    with torch.no_grad():
        before = network(input_ids=inputs).last_hidden_state
        read(RowReader(network, LAYERS, DEPENDENCY, chunk=64), ids, plan)
        assert torch.equal(network(input_ids=inputs).last_hidden_state, before)


def test_two_threads_read_two_networks() -> None:
    found: dict[int, Rows] = {}
    networks, ids, plan = [tiny_network("qwen3", seed=seed) for seed in (1, 2)], some_ids(TOKENS), a_plan()
    ready = threading.Barrier(2)

    def work(number: int) -> None:
        reader = RowReader(networks[number], LAYERS, DEPENDENCY, chunk=5)
        ready.wait()
        found[number] = read(reader, ids, plan)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, network in enumerate(networks):
        check_equal(found[number], network, ids, plan)
