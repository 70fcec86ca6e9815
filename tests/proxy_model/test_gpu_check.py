"""The check for machines with a GPU and the benchmark, in small and on the CPU: they must not fail where they count."""

import importlib.util
import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from proxy_model import replay  # noqa: E402  # it needs torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SMALL = ["--small", "--device", "cpu", "--threads", "1", "--rows", "40"]


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def threads() -> Any:
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


def test_the_check_prints_and_writes_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    assert script("gpu_check", monkeypatch).main([*SMALL, "--lengths", "150", "300", "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith("all agrees\n")
    figures = json.loads(out.read_text())
    assert figures["agreement"]["largest_mass"] > 0.05  # else any two would agree
    assert 0 < figures["agreement"]["rows_bfloat16_to_float32"]
    assert [one["tokens"] for one in figures["speed"]] == [150, 300]
    for one in figures["speed"]:
        assert 0 < one["rows_share"] < 1
        assert one["warm_tokens"] < one["tokens"]


def test_rows_that_are_not_those_of_the_model_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = replay._rows
    monkeypatch.setattr(replay, "_rows", lambda *args: right(*args).roll(40, dims=-1))
    assert script("gpu_check", monkeypatch).main([*SMALL, "--lengths", "300"]) == 1
    assert "DOES NOT AGREE" in capsys.readouterr().out


def test_a_kernel_that_hides_other_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong corner: what `is_causal` means where there are more keys than queries."""
    right = torch.nn.attention.bias.causal_upper_left
    monkeypatch.setattr(replay, "causal_lower_right", right)
    assert not script("gpu_check", monkeypatch).kernels("cpu", "float32")["agree"]


def test_no_new_length_is_begun_when_time_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("gpu_check", monkeypatch)
    monkeypatch.setattr(module, "SECONDS_MAX", -1)
    assert module.main([*SMALL, "--lengths", "150"]) == 0
    assert "left out: 150 tokens in chunks of 128: no time" in capsys.readouterr().out


def test_the_benchmark_measures_every_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which is enough to see that it works; by itself it takes one for each line."""
    module = script("bench_attention", monkeypatch)
    monkeypatch.setattr(module, "apart", lambda function, *arguments: function(*arguments))
    assert module.main([*SMALL, "--tokens", "200", "--history", "300", "--added", "60"]) == 0
    out = capsys.readouterr().out
    for name in ("times faster", "share of collecting rows", "last layer 27", "times cheaper than cold"):
        assert name in out


@pytest.mark.slow
def test_a_measurement_has_a_process_of_its_own_and_may_die_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("bench_attention", monkeypatch)
    assert module.apart(os.getpid) != os.getpid()
    with pytest.raises(SystemExit, match="no memory for it"):
        module.apart(os._exit, 1)
    assert not multiprocessing.active_children()
