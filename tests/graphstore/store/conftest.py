"""An archive in a temporary folder whose token counts are words: the real table takes a second to load."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphstore.store.archive import Archive
from tests.graphstore.store.history import START


def count_words(text: str) -> int:
    return len(text.split())


def open_archive(path: Path) -> Archive:
    return Archive.open(path, clock=lambda: START, count_tokens=count_words)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "recap.db"


@pytest.fixture
def archive(path: Path) -> Iterator[Archive]:
    with open_archive(path) as opened:
        yield opened
