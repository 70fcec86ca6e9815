"""An archive as a first start leaves it, without its migration: one is made in each run, and copied.

The migration itself is tested in `tests/migrations` and `tests/graphstore/store/test_archive.py`.
"""

import tempfile
from functools import cache
from pathlib import Path

from graphstore.store.archive import Archive


@cache
def _made() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recap.db"
        Archive.open(path).close()
        return path.read_bytes()


def lay_out_archive(path: Path) -> None:
    """Put an empty archive where there is no file yet."""
    if not path.exists():
        path.write_bytes(_made())
