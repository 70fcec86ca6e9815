"""What `recap model check` finds out: agreement, layers that find things, cost."""

import dataclasses
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from proxy_model import check as checking
from proxy_model.check import FOUND, Agreement, Check, Cost, LayerScore, check, copy_scores, fit, made_up, proven
from proxy_model.config import ReplayConfig
from proxy_model.errors import ModelUnavailable, ReplayError
from proxy_model.loader import LoadedModel, load
from tests.proxy_model.templates import QWEN3
from tests.proxy_model.tiny import needs_torch, tiny_folder

pytestmark = needs_torch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer blocks and shorter lengths, of which one token a byte makes many tokens."""
    monkeypatch.setattr(checking, "ENTRIES", 4)
    monkeypatch.setattr(checking, "COPIED", (1, 2))
    monkeypatch.setattr(checking, "FOUND", 2 / 4)
    monkeypatch.setattr(checking, "SIZES", {"cpu": (600, 1200)})


def checked(folder: Path, **settings: Any) -> Check:
    ticks = count()
    return check(ReplayConfig(model=str(folder), device="cpu", **settings), clock=lambda: float(next(ticks)))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_a_model_is_checked_from_end_to_end(tmp_path: Path, family: str, quick: None) -> None:
    result = checked(tiny_folder(tmp_path, family, template=QWEN3), dtype="float32")
    assert result.agrees and result.agreement.largest < 1e-5
    assert [score.layer for score in result.scores] == list(range(6))  # also those above the last that is read
    assert [score.layer for score in result.scores if score.is_readable] == (
        [2, 5] if family == "gemma3" else [*range(6)]
    )
    assert result.suggested == ()  # weights that were never trained find nothing
    assert 400 < result.measured[0][0] <= 600 and 900 < result.measured[1][0] <= 1200
    kept = len(result.model.network.layers)
    assert result.token_bytes == 2 * 2 * 8 * kept * 4 and result.weight_bytes < result.model.parameters * 4 + 1
    assert result.peak_bytes is None or result.peak_bytes > 0


def test_sixteen_bits_are_checked_too(tmp_path: Path, quick: None) -> None:
    result = checked(tiny_folder(tmp_path, "llama"), dtype="bfloat16")
    assert result.agrees and result.model.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_that_is_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, dtype: str
) -> None:
    from proxy_model import replay

    right = replay._rows
    monkeypatch.setattr(replay, "_rows", lambda *inputs: right(*inputs).flip(-1))
    assert not checked(tiny_folder(tmp_path, "llama"), dtype=dtype).agrees


def test_attention_that_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(ReplayConfig(model=str(tiny_folder(tmp_path, "llama")), device="cpu"), whole=True)
    forward = type(model.network).forward

    def silent(*inputs: Any, **options: Any) -> Any:
        return forward(*inputs, **{**options, "output_attentions": False})

    monkeypatch.setattr(type(model.network), "forward", silent)
    with pytest.raises(ModelUnavailable, match="shows no attention"):
        copy_scores(model)


def test_the_network_is_left_as_it_was(tmp_path: Path) -> None:
    model = load(ReplayConfig(model=str(tiny_folder(tmp_path, "llama")), device="cpu"))
    before = model.network.config._attn_implementation
    checking.eager_attention(model, [1, 2, 3])
    assert model.network.config._attn_implementation == before != "eager"


@pytest.fixture(scope="module")
def smollm2_model(smollm2: Path) -> LoadedModel:
    return load(ReplayConfig(model=str(smollm2), device="cpu", dtype="float32"), whole=True)


def test_the_copy_test_names_the_layers_of_smollm2_that_find_things(smollm2_model: LoadedModel) -> None:
    """On a made-up session with known answers the best of its layers were 18, 20, 23, 17, 21 and 14."""
    scores = copy_scores(smollm2_model)
    assert {18, 20, 23} <= {s.layer for s in sorted(scores, key=lambda s: -s.share)[:4]}
    assert all(score.share < FOUND for score in scores if score.layer < 7)


def test_replays_of_smollm2_agree_with_its_eager_attention(smollm2_model: LoadedModel) -> None:
    assert checking.agreement_of(smollm2_model, ReplayConfig()).largest < 1e-5


# Pure


def test_time_is_fitted_through_two_lengths() -> None:
    cost = Cost(linear=0.003, square=1e-6)
    found = fit([(500, cost.seconds(500)), (2000, cost.seconds(2000))])
    assert found.linear == pytest.approx(0.003) and found.square == pytest.approx(1e-6)
    assert found.seconds(10_000) == pytest.approx(130)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([(500, 3.0), (1000, 4.0)], Cost(0.004, 0.0)),  # faster a token when longer: no square term
        ([(100, 1.0), (100, 1.0)], Cost(0.01, 0.0)),  # a model that takes no more
        ([(100, 0.1), (200, 4.0)], Cost(0.0, 0.00019)),  # noise: never less than nothing
    ],
)
def test_noise_makes_no_estimate_absurd(measured: list[tuple[int, float]], expected: Cost) -> None:
    cost = fit(measured)
    assert cost.linear == pytest.approx(expected.linear, abs=1e-9)
    assert cost.square == pytest.approx(expected.square, abs=1e-9)


def result_with(**fields: Any) -> Check:
    values = {field.name: None for field in dataclasses.fields(Check)}
    return Check(**{**values, **fields})


def test_layers_are_suggested_by_what_they_find() -> None:
    shares = [0.1, 0.9, 0.3, 0.2, 0.8, 0.5, 0.4]
    scores = tuple(LayerScore(i, share, is_readable=i != 4) for i, share in enumerate(shares))
    assert result_with(scores=scores).suggested == (1, 2, 5, 6)
    assert result_with(scores=scores[:1]).suggested == ()


def test_what_is_no_number_does_not_agree() -> None:
    nan = float("nan")
    for dtype in ("float32", "bfloat16"):
        assert not Agreement(nan, nan).holds(dtype)
        assert Agreement(1e-5, 1e-5).holds(dtype)


def test_in_sixteen_bits_one_block_may_be_far_off_and_all_may_not() -> None:
    assert Agreement(largest=0.02, drift=0.02).holds("bfloat16")
    assert not Agreement(largest=0.02, drift=0.02).holds("float32")
    assert not Agreement(largest=0.02, drift=0.3).holds("bfloat16")


def test_the_last_block_repeats_an_earlier_one() -> None:
    blocks = made_up(5, 2)
    assert [block.ordinal for block in blocks] == [None, 0, 1, 2, 3, 4, None]
    assert blocks[-1].parts[0].text == blocks[3].parts[0].text and blocks[-1].in_turn
    assert len({block.parts[0].text for block in blocks}) == 6


@pytest.mark.parametrize(("how", "said"), [("overflow", "sums to nan"), ("shape", "RuntimeError: ")])
def test_a_model_that_fails_with_every_turn_is_refused_before_the_first(tmp_path: Path, how: str, said: str) -> None:
    """Booked on the turns, its fault would cost each of them its replay, and health would call the model well."""
    import torch

    config = ReplayConfig(model=str(tiny_folder(tmp_path, "llama", template=QWEN3)), dtype="float32")
    model = load(config)
    weight = model.network.layers[1].self_attn.q_proj.weight
    weight.data = torch.full_like(weight, 3e38) if how == "overflow" else torch.ones(3, 3)
    with pytest.raises(ModelUnavailable) as error:
        proven(model, config)
    assert said in error.value.problem and "choose another model" in error.value.remedy


def test_a_model_that_does_is_ready(tmp_path: Path) -> None:
    config = ReplayConfig(model=str(tiny_folder(tmp_path, "llama", template=QWEN3)), dtype="float32", max_tokens=64)
    assert proven(load(config), config).observe(made_up(2, 0), 1).tokens <= 64


def test_a_context_too_short_for_the_check_is_a_sentence(tmp_path: Path, quick: None) -> None:
    with pytest.raises(ReplayError, match="does not fit into 64 tokens; raise attention_max_tokens"):
        checked(tiny_folder(tmp_path, "llama"), max_tokens=64)
