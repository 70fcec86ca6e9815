"""What holds for every test, and which weights this machine has."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Hypothesis fails an example that takes longer than 200 ms. On a busy machine that says nothing of the code.
settings.register_profile("recap", deadline=None)
settings.register_profile(  # for an hour: make fuzz
    "fuzz",
    deadline=None,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", 20_000)),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("recap")

os.environ["COLUMNS"] = "160"  # tables are as wide as the terminal

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, which `make models` fetches; TEST_MODELS_DIR names another place.

    `TEST_MODELS_REQUIRED=1` turns a missing model into a failure.
    """
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
