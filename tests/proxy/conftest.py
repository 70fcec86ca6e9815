"""Nothing of the machine leaks into these tests: no settings, no proxies."""

import os

import pytest


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("RECAP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
