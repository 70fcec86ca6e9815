"""A clock that tests move by hand."""

import threading


class VirtualClock:
    """Seconds since an arbitrary epoch. Thread-safe; calling it reads it, and never moves it."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
