"""Every model that cannot be replayed with is refused with what to do; every other one comes ready."""

import builtins
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from proxy_model import conversion, loader
from proxy_model.config import ReplayConfig
from proxy_model.context import ContextBlock, Part
from proxy_model.errors import ModelUnavailable
from proxy_model.loader import LoadedModel, load
from tests.proxy_model.templates import QWEN3
from tests.proxy_model.tiny import byte_tokenizer, needs_torch, tiny_folder

pytestmark = needs_torch


def loaded(folder: Path, **settings: Any) -> LoadedModel:
    return load(ReplayConfig(model=str(folder), device="cpu", **settings))


def refused(config: ReplayConfig) -> ModelUnavailable:
    with pytest.raises(ModelUnavailable) as caught:
        load(config)
    assert "\n" not in str(caught.value) and caught.value.remedy
    return caught.value


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", template=QWEN3, layers=12)


@pytest.fixture
def copy(qwen: Path, tmp_path: Path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(qwen, tmp_path / "model"))


def test_a_folder(qwen: Path) -> None:
    model = loaded(qwen, dtype="float32")
    assert (model.layers, model.dependency_layer) == ((4, 6, 8, 10), 6)
    assert (model.name, model.device, model.dtype, model.max_tokens) == (str(qwen), "cpu", "float32", 4096)
    assert model.glue.from_template and not model.network.training
    assert not any(weight.requires_grad for weight in model.network.parameters())


def test_layers_above_the_last_that_is_read_are_freed_and_yet_counted(qwen: Path) -> None:
    cut, whole = loaded(qwen), load(ReplayConfig(model=str(qwen), device="cpu"), whole=True)
    assert (len(cut.network.layers), len(whole.network.layers)) == (11, 12)
    assert cut.network.config.num_hidden_layers == 11
    held = sum(weight.numel() for weight in whole.network.parameters())
    assert cut.parameters == whole.parameters == held > sum(weight.numel() for weight in cut.network.parameters())


def test_what_is_cut_off_changes_nothing_below(qwen: Path) -> None:
    import torch

    ids = torch.arange(20)[None]
    with torch.no_grad():
        states = [
            load(ReplayConfig(model=str(qwen), device="cpu"), whole=whole)
            .network(input_ids=ids, output_hidden_states=True)
            .hidden_states[10]
            for whole in (False, True)
        ]
    assert torch.equal(*states)


def test_a_model_with_windows_is_read_at_its_full_layers(tmp_path: Path) -> None:
    model = loaded(tiny_folder(tmp_path, "gemma3", layers=9))
    assert model.layers == (2, 5, 8) and model.dependency_layer == 5
    assert not model.glue.from_template  # this one has no template


def test_layers_may_be_set(qwen: Path) -> None:
    model = loaded(qwen, layers=(2, 5))
    assert (model.layers, model.dependency_layer, len(model.network.layers)) == ((2, 5), 5, 6)
    assert "layer 12 is none of full attention" in str(refused(ReplayConfig(model=str(qwen), layers=(12,))))


def test_the_configured_length_is_kept_to(qwen: Path) -> None:
    model = loaded(qwen, max_tokens=100)
    encoded = model.encode([ContextBlock(i, (Part("user", "x" * 40),)) for i in range(9)])
    assert model.max_tokens == 100 and len(encoded.ids) <= 100 and encoded.unobserved


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({}, "float32"),
        ({"avx2": True, "avx512_f": True}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
    ],
)
def test_bfloat16_only_where_the_processor_multiplies_it(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], dtype: str
) -> None:
    """Emulated it took 29.5 s where float32 took 9.5 s."""
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    model = loaded(qwen)
    assert model.dtype == dtype and model.network.dtype == getattr(torch, dtype)
    assert loaded(qwen, dtype="float16").dtype == "float16"


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    error = refused(ReplayConfig())
    assert "No module named 'torch'" in error.problem and "make attention" in error.remedy


def test_a_device_that_is_not_there(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refused(ReplayConfig(model=str(qwen), device="cuda"))
    assert "no cuda device" in error.problem and "attention_device" in error.remedy


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nothing", "~/nothing", "a/b/c", "/nowhere/model.gguf"])
def test_a_path_that_is_not_there_is_no_name_for_the_hub(name: str) -> None:
    assert "there is no" in refused(ReplayConfig(model=name)).problem


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "has no config.json" in refused(ReplayConfig(model=str(tmp_path))).problem


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    error = refused(ReplayConfig(model=str(tmp_path / "notes.txt")))
    assert "is a file, and no .gguf" in error.problem


@pytest.mark.parametrize("by", ["attention_offline", "HF_HUB_OFFLINE"])
def test_a_name_that_is_not_in_the_cache_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by == "HF_HUB_OFFLINE")
    error = refused(ReplayConfig(model="nobody/nothing-of-that-name", offline=by == "attention_offline"))
    assert "not in the local cache and offline is set" in error.problem and by in error.remedy


def test_a_model_without_room_for_a_turn(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 32}))
    assert "takes 32 tokens, too few" in refused(ReplayConfig(model=str(folder))).problem


def test_more_threads_than_processors_are_not_made(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand of them abort the process."""
    import torch

    made: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", made.append)
    loaded(qwen, threads=100_000)
    assert made == [os.cpu_count()]


def test_a_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("It failed:\nWe couldn't connect\nmore of it")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    error = refused(ReplayConfig(model="nobody/nothing-of-that-name"))
    assert "(It failed: We couldn't connect)" in error.problem and "a folder or a .gguf file" in error.remedy


# Damage of a model on disk


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, tuple[str, Any]] = {
    "weights cut short": ("weights cannot be read", lambda f: shorten(f / "model.safetensors")),
    "weights of zero bytes": ("weights cannot be read", lambda f: (f / "model.safetensors").write_bytes(b"")),
    "no weights": ("weights cannot be read", lambda f: (f / "model.safetensors").unlink()),
    "configuration is no JSON": ("cannot be read", lambda f: (f / "config.json").write_text("{")),
    "an unknown kind of model": (
        "cannot be read",
        lambda f: (f / "config.json").write_text('{"model_type": "abacus"}'),
    ),
    "tokenizer cut short": ("tokenizer cannot be read", lambda f: shorten(f / "tokenizer.json")),
    "no tokenizer": ("no vocabulary", lambda f: [path.unlink() for path in f.glob("tokenizer*")]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("problem", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder(copy: Path, problem: str, damage: Any) -> None:
    damage(copy)
    error = refused(ReplayConfig(model=str(copy), offline=True))
    assert problem in error.problem and str(copy) in str(error)


@pytest.mark.filterwarnings("ignore")
def test_code_that_comes_with_a_model_is_not_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself transformers asks at the terminal whether it may, and waits."""
    ran = copy / "ran"
    code = f"from pathlib import Path\nPath({str(ran)!r}).touch()\nclass Mine: ...\n"
    (copy / "mine.py").write_text(code)
    classes = {"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine", "AutoTokenizer": ["mine.Mine", "mine.Mine"]}
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**settings, "auto_map": classes, "model_type": "mine"}))

    asked = []

    def yes(prompt: str) -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr(builtins, "input", yes)
    refused(ReplayConfig(model=str(copy)))
    assert not asked and not ran.exists()


def rewrite(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_tensor_is_not_made_up(copy: Path) -> None:
    """transformers fills it with random numbers, says so in a log, and goes on."""
    rewrite(copy, lambda tensors: tensors.pop("model.layers.3.self_attn.q_proj.weight"))
    error = refused(ReplayConfig(model=str(copy)))
    assert "1 of its weights are missing" in error.problem and "layers.3.self_attn.q_proj" in error.problem


def test_weights_that_are_no_numbers(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors["model.layers.3.mlp.up_proj.weight"].fill_(float("nan")))
    assert "no numbers" in refused(ReplayConfig(model=str(copy))).problem


def test_a_shape_of_another_model(copy: Path) -> None:
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "intermediate_size": 64}))
    refused(ReplayConfig(model=str(copy)))


def test_a_tokenizer_of_another_model(copy: Path) -> None:
    """An id beyond the embedding would end the process in the middle of a replay, on a GPU beyond repair."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(100)])
    tokenizer.save_pretrained(copy)
    assert "the network knows 288" in refused(ReplayConfig(model=str(copy))).problem


def test_a_model_without_rotary_attention(tmp_path: Path) -> None:
    error = refused(ReplayConfig(model=str(tiny_folder(tmp_path, "gpt2"))))
    assert "no rotary attention" in error.problem and "attention_model" in error.remedy


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 6}, "not attention (linear_attention)"),
        ({"layer_types": ["sliding_attention"] * 12}, "no layer of full attention"),
        ({"attn_logit_softcapping": 50.0}, "caps its attention"),
    ],
)
def test_attention_that_cannot_be_read(copy: Path, change: dict[str, Any], problem: str) -> None:
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, **change}))
    assert problem in refused(ReplayConfig(model=str(copy))).problem


def test_a_model_that_does_not_fit_the_device(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", no_room)
    assert "does not fit on cpu (CUDA out of memory" in refused(ReplayConfig(model=str(qwen))).problem


# .gguf files


def test_a_gguf_file_is_converted_once(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "small.gguf", []
    path.write_bytes(b"GGUF")

    def convert(source: Path, folder: Path) -> None:
        asked.append(source)
        shutil.copytree(qwen, folder)

    monkeypatch.setattr(conversion, "convert", convert)
    monkeypatch.setattr(conversion, "user_cache_path", lambda _: tmp_path / "cache")
    assert [loaded(path).parameters for _ in range(2)] and asked == [path]
    path.write_bytes(b"GGUF of another size")
    loaded(path)
    assert asked == [path, path]


@pytest.mark.parametrize(
    "content", [b"", b"no GGUF at all", b"GGUF\3\0\0\0" + b"\xff" * 64], ids=["empty", "other", "cut"]
)
def test_a_file_that_only_ends_in_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    monkeypatch.setattr(conversion, "user_cache_path", lambda _: tmp_path / "cache")
    assert "model.gguf" in refused(ReplayConfig(model=str(path))).problem
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]  # nothing half made is left


def test_a_conversion_draws_no_bar_into_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils

    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelUnavailable):
        conversion.convert(tmp_path / "model.gguf", tmp_path / "made")
    assert list(modeling_gguf_pytorch_utils.tqdm(range(3))) == [0, 1, 2]
    assert capfd.readouterr().err == ""


def test_two_processes_may_convert_at_once(tmp_path: Path) -> None:
    """The slower one finds the folder there and leaves it."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        conversion._publish(tmp_path / name, tmp_path / "model")
    assert (tmp_path / "model/config.json").read_text() == "first"


# Real weights


def test_smollm2_comes_ready(smollm2: Path) -> None:
    model = loaded(smollm2)
    assert (model.layers, model.dependency_layer) == ((10, 15, 20, 25), 15)
    assert model.parameters == 134_515_008 and model.max_tokens == 8192 and len(model.network.layers) == 26
    assert model.glue.from_template


def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    """Weights, tokenizer and glue belong together: with one of them wrong the next word is another."""
    import torch

    model = load(ReplayConfig(model=str(smollm2), device="cpu"), whole=True)
    question = [
        ContextBlock(None, (Part("system", "You answer in one sentence."),)),
        ContextBlock(0, (Part("user", "What is the capital of France?"),)),
        ContextBlock(None, (Part("assistant", "The capital of France is"),)),
    ]
    encoded = model.encode(question)
    end = encoded.spans[-1][0][1]
    with torch.no_grad():
        last = model.network(input_ids=torch.tensor([encoded.ids[:end]])).last_hidden_state[0, -1]
    scores = model.network.get_input_embeddings().weight @ last  # its output head is its embedding
    assert model.tokenizer.decode([int(scores.argmax())]) == " Paris"


def test_kinds_of_layers_without_a_list_of_them(qwen: Path) -> None:
    from transformers import MistralConfig

    assert loader.layer_kinds(MistralConfig(num_hidden_layers=2, sliding_window=None)) == ["full_attention"] * 2
    assert loader.layer_kinds(MistralConfig(num_hidden_layers=2, sliding_window=64)) == ["sliding_attention"] * 2
    roomy = MistralConfig(num_hidden_layers=2, sliding_window=4096, max_position_embeddings=4096)
    assert loader.layer_kinds(roomy) == ["full_attention"] * 2
