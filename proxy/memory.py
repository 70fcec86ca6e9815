"""How this process uses memory: settings of the allocator and of the garbage collector, once at start.

They change no result. Without them a burst of large bodies would leave its pages behind, and the garbage collector
would go through everything that was ever imported while a request waits.
"""

import ctypes
import gc
import sys

# glibc's malloc.h; other C libraries have no mallopt and are left alone.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
LARGE_BYTES = 128 << 10  # bodies are larger: they get pages of their own, which go back when they are freed
ALLOCATIONS_BEFORE_COLLECTION = 50_000  # a request makes thousands of short-lived values; 700 is Python's default
SWITCH_INTERVAL_S = 0.0005  # how long the event loop may wait for a background thread


def return_freed_pages() -> None:
    """Make the C allocator give memory back. Call before threads start."""
    try:
        libc = ctypes.CDLL(None)
        for option, value in ((_M_ARENA_MAX, 1), (_M_TRIM_THRESHOLD, LARGE_BYTES), (_M_MMAP_THRESHOLD, LARGE_BYTES)):
            libc.mallopt(option, value)
    except (OSError, AttributeError, TypeError):
        pass


def settle() -> None:
    """What is loaded by now stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS_BEFORE_COLLECTION, 20, 20)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
