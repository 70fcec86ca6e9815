"""How this process uses memory: settings of the allocator and of the garbage collector.

They change no result. Without them a burst of large bodies would leave its pages behind for ever, every body would
cost fresh pages from the kernel, and the garbage collector would go through all imported modules while a request waits.
"""

import asyncio
import ctypes
import gc
import sys

# glibc's malloc.h; other C libraries have no mallopt or malloc_trim and are left alone.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
REUSED_BYTES = 16 << 20  # smaller bodies are put where freed ones lay; the kernel would zero new pages each time
TRIM_INTERVAL_S = 3.0
ALLOCATIONS_BEFORE_COLLECTION = 50_000  # a request makes thousands of short-lived values; 700 is Python's default
SWITCH_INTERVAL_S = 0.0005  # how long the event loop may wait for a background thread


def reuse_pages() -> None:
    """One heap for all threads, which keeps freed pages until `return_pages` asks for them. Call before threads."""
    for option, value in ((_M_ARENA_MAX, 1), (_M_TRIM_THRESHOLD, REUSED_BYTES), (_M_MMAP_THRESHOLD, REUSED_BYTES)):
        _call("mallopt", option, value)


async def return_pages() -> None:
    """Give what the last burst left behind back to the system, every few seconds, for ever."""
    while True:
        await asyncio.sleep(TRIM_INTERVAL_S)
        await asyncio.to_thread(_call, "malloc_trim", 0)


def settle() -> None:
    """What is loaded by now stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS_BEFORE_COLLECTION, 20, 20)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _call(function: str, *arguments: int) -> None:
    try:
        getattr(ctypes.CDLL(None), function)(*arguments)
    except (OSError, AttributeError, TypeError):
        pass
