"""A replay from blocks to readings and edges, against the formulas of DESIGN 5 worked out over eager attention."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from graphstore.replays import EDGE_MASS_MIN, Replay  # noqa: E402  # the other imports need torch
from proxy_model import sampling  # noqa: E402
from proxy_model.config import ReplayConfig  # noqa: E402
from proxy_model.context import ContextBlock, Part, Role  # noqa: E402
from proxy_model.errors import ReplayError  # noqa: E402
from proxy_model.loader import LoadedModel, load  # noqa: E402
from proxy_model.observe import Replayer, observe  # noqa: E402
from tests.proxy_model.eager import FAMILIES, eager_rows, sharpened  # noqa: E402
from tests.proxy_model.tiny import tiny_folder  # noqa: E402

CODE = Path(sampling.__file__).read_text()


def block(
    ordinal: int | None, *parts: tuple[Role, str], of_turn: bool = False, dependent: bool = False
) -> ContextBlock:
    return ContextBlock(ordinal, tuple(Part(*part) for part in parts), in_turn=of_turn, is_dependent=dependent)


def served(scale: int = 1) -> tuple[ContextBlock, ...]:
    """A turn that is over, and one that just ended; ordinal 3 was left out by an earlier selection."""
    return (
        block(None, ("system", "You are a coding agent. Be brief.")),
        block(0, ("user", "Where is the padding done? " * scale)),
        block(1, ("assistant", "I look."), ("tool", CODE[: 200 * scale])),
        block(2, ("assistant", "In spread, at the end of sampling.py."), dependent=True),
        block(4, ("user", "And what does spread do with an empty span?"), of_turn=True, dependent=True),
        block(5, ("assistant", ""), ("tool", CODE[200 * scale : 300 * scale]), of_turn=True, dependent=True),
        block(6, ("assistant", ""), of_turn=True, dependent=True),
        block(None, ("assistant", "Nothing: it has no token."), of_turn=True, dependent=True),
    )


def answered(scale: int = 1) -> tuple[ContextBlock, ...]:
    """The next turn of the same session: the answer has its place in the graph now."""
    old = served(scale)
    return (
        *(ContextBlock(b.ordinal, b.parts) for b in old[:-1]),
        block(7, *((part.role, part.text) for part in old[-1].parts), dependent=True),
        block(8, ("user", "Then write a test for it."), of_turn=True, dependent=True),
        block(None, ("assistant", "def test_empty(): assert spread([], 5) == ()"), of_turn=True, dependent=True),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between two values, as everybody's default is."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def check_against_eager(
    found: Replay, model: LoadedModel, blocks: Sequence[ContextBlock], config: ReplayConfig
) -> None:
    """Every number, from all n x n weights and with loops: no code of ours but the choice of positions."""
    encoded = model.encode(blocks)
    rows = eager_rows(model.network, encoded.ids, model.layers)  # (L, N, N)
    plan = sampling.plan(blocks, encoded, rows_max=config.rows_max, block_rows_max=config.block_rows_max)
    members = [i for i, b in enumerate(blocks) if b.ordinal is not None and i not in encoded.unobserved]
    tokens = {i: [t for start, end in encoded.spans[i] for t in range(start, end)] for i in range(len(blocks))}
    known = [t for i in members for t in tokens[i]]

    def density(rho: list[float], of: list[int]) -> float:
        most = percentile([rho[t] for t in known], config.clip_quantile)
        return statistics.fmean(min(rho[t], most) for t in of) if of else 0.0

    def near(value: float) -> Any:
        return pytest.approx(value, rel=1e-3, abs=1e-7)

    groups = {"turn": plan.turn, "assistant": plan.assistant}
    by_layer = {g: rows[:, list(places)].mean(1).tolist() for g, places in groups.items()}  # [L][N]
    mean = {g: rows[:, list(places)].mean(1).mean(0).tolist() for g, places in groups.items()}  # [N]
    assert [reading.ordinal for reading in found.blocks] == [blocks[i].ordinal for i in members]
    for index, reading in zip(members, found.blocks, strict=True):
        own = tokens[index]
        assert reading.tokens == len(own)
        assert reading.mass == near(sum(mean["turn"][t] for t in own))
        assert reading.density == near(density(mean["turn"], own))
        assert reading.mass_assistant == near(sum(mean["assistant"][t] for t in own))
        assert reading.density_assistant == near(density(mean["assistant"], own))
        assert [(r.layer, r.group) for r in reading.by_layer] == [(la, g) for la in model.layers for g in groups]
        for r in reading.by_layer:
            rho = by_layer[r.group][model.layers.index(r.layer)]
            assert r.mass == near(sum(rho[t] for t in own))
            assert r.density == near(density(rho, own))
    at = rows[model.layers.index(model.dependency_layer)]
    expected = []
    for b, places in plan.dependents:
        for a in (i for i in members if i < b):
            mass = float(at[list(places)].mean(0)[tokens[a]].sum())
            expected += [(blocks[a].ordinal, blocks[b].ordinal, near(mass))] if mass > EDGE_MASS_MIN else []
    assert list(found.edges) == expected


def tiny_model(folder: Path, family: str, **settings: Any) -> tuple[LoadedModel, ReplayConfig]:
    config = ReplayConfig(
        model=str(tiny_folder(folder, family)), device="cpu", dtype="float32", offline=True, chunk=70, rows_max=60,
        block_rows_max=12, threads=1, **settings,
    )  # fmt: skip
    model = load(config)
    sharpened(model.network)
    return model, config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_holds_the_numbers_of_the_formulas(tmp_path: Path, family: str) -> None:
    model, config = tiny_model(tmp_path, family)
    found = observe(model, served(), config, session=1)
    check_against_eager(found, model, served(), config)
    assert (found.rows, found.tokens_computed) == (60, found.tokens)
    assert 0 < found.rows_assistant < found.rows
    assert (found.layers, found.dependency_layer) == (model.layers, model.dependency_layer)
    assert (found.device, found.dtype, found.parameters) == ("cpu", "float32", model.parameters)
    assert found.edges
    assert found.unobserved == ()


def test_a_block_without_words_received_nothing(tmp_path: Path) -> None:
    model, config = tiny_model(tmp_path, "llama")
    empty = {reading.ordinal: reading for reading in observe(model, served(), config, session=1).blocks}[6]
    assert (empty.tokens, empty.mass, empty.density) == (0, 0.0, 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_continues_the_last_and_finds_the_same(tmp_path: Path, family: str) -> None:
    model, config = tiny_model(tmp_path, family)
    replayer = Replayer(model, config)
    replayer.observe(served(), session=1)
    found = replayer.observe(answered(), session=1)
    check_against_eager(found, model, answered(), config)
    encoded = model.encode(answered())
    assert (
        found.tokens_computed == found.tokens - encoded.spans[7][0][0]
    )  # from the answer on, which is a dependent now
    replayer.forget()
    assert replayer.observe(answered(), session=1).tokens_computed == found.tokens


def test_edges_lead_to_dependents_from_what_stands_before_them(tmp_path: Path) -> None:
    model, config = tiny_model(tmp_path, "qwen3")
    edges = observe(model, served(), config, session=1).edges
    assert {b for _, b, _ in edges} == {2, 4, 5}
    assert all(a < b and mass > EDGE_MASS_MIN for a, b, mass in edges)
    assert list(edges) == sorted(edges, key=lambda edge: (edge[1], edge[0]))


def test_what_does_not_fit_is_named_and_has_no_reading(tmp_path: Path) -> None:
    whole, config = tiny_model(tmp_path, "llama")
    room = len(whole.encode(served()).ids) - 100
    model, config = tiny_model(tmp_path, "llama", max_tokens=room)
    found = observe(model, served(), config, session=1)
    assert found.tokens <= room
    assert found.unobserved and 0 in found.unobserved
    assert {reading.ordinal for reading in found.blocks}.isdisjoint(found.unobserved)
    assert {a for a, _, _ in found.edges}.isdisjoint(found.unobserved)
    check_against_eager(found, model, served(), config)


def test_a_turn_without_words_is_no_replay(tmp_path: Path) -> None:
    model, config = tiny_model(tmp_path, "llama")
    blocks = (
        block(0, ("user", "Yes?")),
        block(1, ("user", ""), of_turn=True),
        block(None, ("assistant", ""), of_turn=True),
    )
    with pytest.raises(ReplayError, match="the finished turn has no words"):
        observe(model, blocks, config, session=1)


def test_time_is_measured_with_the_clock_that_is_given(tmp_path: Path) -> None:
    model, config = tiny_model(tmp_path, "llama")
    times = iter([5.0, 7.5])
    assert Replayer(model, config, clock=lambda: next(times)).observe(served(), session=1).seconds == 2.5


@pytest.mark.parametrize("chunk", [4096, 128])
def test_a_real_model_agrees_with_eager_attention(smollm2: Path, chunk: int) -> None:
    """Two turns, the second on the cache of the first. The promise is 1e-4 of each block's mass; this asks for more."""
    config = ReplayConfig(model=str(smollm2), device="cpu", dtype="float32", offline=True, chunk=chunk, threads=1)
    model = load(config)
    replayer = Replayer(model, config)
    for blocks in (served(4), answered(4)):
        found = replayer.observe(blocks, session=1)
        check_against_eager(found, model, blocks, config)
    assert found.tokens_computed < found.tokens / 4
    assert found.edges
