"""recap model check: what it prints for a model that will do, one that will not, and none."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import proxy_model.check
from proxy.cli import main
from proxy.commands.model import lines, replay_config
from proxy.settings import Settings
from proxy_model.check import Agreement, Check, Cost, LayerScore
from proxy_model.config import ReplayConfig
from proxy_model.errors import ModelUnavailable


def result(**changes: Any) -> Check:
    model: Any = SimpleNamespace(
        name="a/b", parameters=596_049_920, dtype="bfloat16", device="cuda", max_tokens=32_768,
        glue=SimpleNamespace(from_template=True), layers=(9, 14, 19, 23), dependency_layer=14,
        network=SimpleNamespace(layers=range(24)),
    )  # fmt: skip
    shares = {14: 0.5, 19: 0.4, 3: 0.17}
    values: dict[str, Any] = {
        "model": model,
        "load_seconds": 2.0,
        "agreement": Agreement(2e-3, 0.0123),
        "scores": tuple(LayerScore(i, shares.get(i, 0.08), is_readable=True) for i in range(28)),
        "measured": ((2000, 0.1), (8000, 0.8)),
        "cost": Cost(2e-5, 1e-8),
        "weight_bytes": 1_000_000_000,
        "token_bytes": 98_304,
        "peak_bytes": 2_500_000_000,
    }
    return Check(**{**values, **changes})


def printed(**changes: Any) -> str:
    return "\n".join(f"{heading:10} {text}" for heading, text in lines(result(**changes), by_rule=True))


def test_a_model_that_will_do() -> None:
    text = printed()
    assert "a/b, 596,049,920 parameters in 28 layers" in text and "bfloat16 on cuda" in text
    assert "agrees with eager attention (off by 2.0e-03 in one block, 1.2 % in all)" in text
    assert "9, 14, 19, 23 (depth rule), edges from 14; 24 of 28 are run" in text
    assert "14 50 %, 19 40 %, 3 17 %" in text and "find copies best are 3, 14, 19" in text
    assert "2,000 tokens in 100 ms (20,000 a second)" in text
    assert "10,000 tokens 1.2 s, 1,983 MB; 30,000 tokens 9.6 s, 3,949 MB" in text


def test_a_model_that_takes_less_than_the_estimate_asks_for() -> None:
    model = SimpleNamespace(**{**vars(result().model), "max_tokens": 8192})  # type: ignore[call-overload]
    assert "estimate   8,192 tokens (all it takes) " in printed(model=model)


def test_a_model_that_finds_nothing() -> None:
    scores = tuple(LayerScore(i, 0.08, is_readable=True) for i in range(28))
    assert "no layer finds copies" in printed(scores=scores)


def test_no_line_is_wider_than_a_terminal() -> None:
    assert max(len(line) for line in printed().splitlines()) <= 158


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[ReplayConfig]:
    """The check answers at once; what it was asked for."""
    asked: list[ReplayConfig] = []

    def check(config: ReplayConfig) -> Check:
        asked.append(config)
        return result(agreement=Agreement(0.5, 0.5 if config.model == "wrong" else 0.0))

    monkeypatch.setattr(proxy_model.check, "check", check)
    return asked


def test_the_exit_code_says_whether_it_agrees(checked: list[ReplayConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "check", "right"]) == 0
    assert main(["model", "check", "wrong"]) == 1
    assert "DOES NOT AGREE" in capsys.readouterr().out
    assert [config.model for config in checked] == ["right", "wrong"]


def test_the_model_of_the_setting_is_checked_by_default(checked: list[ReplayConfig]) -> None:
    main(["model", "check"])
    assert checked[0].model == ReplayConfig().model


def test_a_model_that_is_not_there_ends_the_command_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(_: ReplayConfig) -> Check:
        raise ModelUnavailable("torch is not there", "install it")

    monkeypatch.setattr(proxy_model.check, "check", check)
    assert main(["model", "check"]) == 1
    assert capsys.readouterr().err == "recap: torch is not there; install it\n"


def test_every_setting_of_a_replay_is_taken(tmp_path: Path) -> None:
    """By name, so that a field of ReplayConfig and its setting cannot part."""

    @dataclasses.dataclass
    class Given:
        attention_model: str = "a/b"
        attention_offline: bool = True
        attention: str = "auto"
        attention_threads: int = 0

    given: Any = Given()
    assert replay_config(given) == ReplayConfig(model="a/b", offline=True)
    assert replay_config(Settings(db=tmp_path / "recap.db")) == ReplayConfig()


def test_layers_are_given_with_commas(checked: list[ReplayConfig], capsys: pytest.CaptureFixture[str]) -> None:
    main(["model", "check", "--attention-layers", "5, 11"])
    assert checked[0].layers == (5, 11)
    assert "(as set)" in capsys.readouterr().out
    assert main(["model", "check", "--attention-layers", "5,x"]) == 2


def test_an_empty_name_is_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty variable of a shell must not check another model than was meant."""
    assert main(["model", "check", ""]) == 1
    assert "the model's name is empty" in capsys.readouterr().err


def test_a_fault_nobody_thought_of_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> Check:
        raise RuntimeError("size of tensor a\x1b[31m (4)")

    monkeypatch.setattr(proxy_model.check, "check", broken)
    assert main(["model", "check", "a/\x1b[31mb"]) == 1
    told = capsys.readouterr()
    assert "cannot be checked (RuntimeError: size of tensor" in told.err and "\x1b" not in told.out + told.err
