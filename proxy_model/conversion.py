"""A .gguf file as a folder of safetensors and tokenizer, made once and kept in the user's cache.

Reading a quantized file takes many times longer and more memory than reading what it holds as bfloat16; which is as
exact as four bits ever were. Refuses to know which model it is.
"""

import hashlib
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from platformdirs import user_cache_path

from proxy_model.errors import ModelUnavailable, reason_of

READER = "1"  # of the folder's form: a new one makes old folders unused


def converted(path: Path, cache: Path | None = None) -> Path:
    """The folder for this file, converted now if it has not been. A changed file is another file.

    Raises ModelUnavailable: not a GGUF file that transformers can read, no room.
    """
    folder = (cache or user_cache_path("recap") / "models") / f"{path.stem}-{_fingerprint(path)}"
    if not (folder / "config.json").exists():
        convert(path, folder)
    return folder


def convert(path: Path, folder: Path) -> None:
    """Reads `path`, writes `folder` whole or not at all. About 20 s and 1 GB of memory for 135 M parameters."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
            made = Path(scratch) / "model"
            _convert(path, made)
            _publish(made, folder)
    except OSError as exc:
        raise ModelUnavailable(f"{path} could not be converted: {exc}", "look at the file and the free space") from exc
    except Exception as exc:  # whatever a damaged or foreign file makes the libraries raise
        problem = f"{path} is no GGUF file that transformers can read ({reason_of(exc)})"
        raise ModelUnavailable(problem, "fetch it again if it is cut short, or name a folder with safetensors") from exc


def _convert(path: Path, folder: Path) -> None:
    import torch
    from tqdm.auto import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    modeling_gguf_pytorch_utils.tqdm = partial(tqdm, disable=None)  # in a terminal alone: a log has no use for bars
    location = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    AutoTokenizer.from_pretrained(**location).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.bfloat16)
    model.hf_quantizer = None  # or transformers refuses to save what was quantized
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


def _publish(made: Path, folder: Path) -> None:
    try:
        os.replace(made, folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another process was faster
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)


def _fingerprint(path: Path) -> str:
    stat = path.stat()
    text = f"{READER}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
