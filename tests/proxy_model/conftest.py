"""Which weights this machine has. `TEST_MODELS_REQUIRED=1` turns missing ones into a failure."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, which `make models` fetches; TEST_MODELS_DIR names another place."""
    folder = Path(os.environ.get("TEST_MODELS_DIR") or ROOT / ".models") / "SmolLM2-135M-Instruct"
    absent = None
    if find_spec("torch") is None or find_spec("transformers") is None:
        absent = "torch and transformers are not installed"
    elif not (folder / "config.json").exists():
        absent = "its weights are not there: make models"
    if absent:
        if os.environ.get("TEST_MODELS_REQUIRED"):
            pytest.fail(f"SmolLM2 is required here, but {absent}")
        pytest.skip(f"SmolLM2: {absent}")
    return folder


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)
