"""How a message's bytes lie in the `content` column: zstd when that pays, else as they are.

Knows nothing of tables; `codec` is stored beside the content, so a later codec needs no migration.
"""

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RAW, ZSTD = "raw", "zstd"
LEVEL = 3  # a history of 1 MB in under 1 ms; higher levels gain a few percent for many times the work
COMPRESS_MIN_BYTES = 512  # below this the frame and its tables eat what they save


def pack(content: bytes) -> tuple[str, bytes]:
    """Codec name and the bytes to store."""
    if len(content) >= COMPRESS_MIN_BYTES:
        packed = zstd.compress(content, level=LEVEL)
        if len(packed) < len(content):
            return ZSTD, packed
    return RAW, content


def unpack(codec: str, stored: bytes) -> bytes:
    """The original bytes. Raises `ValueError` for content that its codec cannot read."""
    match codec:
        case "raw":
            return stored
        case "zstd":
            try:
                return zstd.decompress(stored)
            except zstd.ZstdError as error:
                raise ValueError(f"content is not a zstd frame: {error}") from error
        case _:
            raise ValueError(f"unknown codec {codec!r}")
