"""Has anybody written to the archive? Asked of SQLite itself, so that it counts who runs in another process too."""

import sqlite3
import threading
from pathlib import Path

from graphstore.store.engine import explained, file_identity


class Changes:
    """One connection for one watcher: SQLite compares with what this connection saw last. Thread-safe."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).absolute()
        self._connection: sqlite3.Connection | None = None
        self._seen: int | None = None
        self._file: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def happened(self) -> bool:
        """Whether something was committed since the last call; True at the first. Raises `ArchiveUnavailable`."""
        with self._lock, explained():
            file = file_identity(self._path)
            if self._connection is not None and file != self._file:  # another one stands there now, or none
                self._drop()
            if self._connection is None:
                self._file = file
                uri = f"{self._path.as_uri()}?mode=ro"
                # Never waits for a lock: whoever closes waits for the look that is under way, on the event loop.
                self._connection = sqlite3.connect(
                    uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0
                )
            version = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
            changed, self._seen = version != self._seen, version
            return changed

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._seen = None  # versions of two connections cannot be compared
