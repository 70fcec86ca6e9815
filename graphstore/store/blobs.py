"""How a message's bytes lie in the `content` column: zstd when that pays, else as they are.

Knows nothing of tables; `codec` is stored beside the content, so a later codec needs no migration.
"""

import sys

from graphstore.identity import DIGEST_BYTES, message_digest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RAW, ZSTD = "raw", "zstd"
REDACTED = "redacted-"  # + codec: secrets were made unreadable, so the content has a digest of its own before it
LEVEL = 3  # a history of 1 MB in under 1 ms; higher levels gain a few percent for many times the work
COMPRESS_MIN_BYTES = 512  # below this the frame and its tables eat what they save


def pack(content: bytes) -> tuple[str, bytes]:
    """Codec name and the bytes to store."""
    if len(content) >= COMPRESS_MIN_BYTES:
        packed = zstd.compress(content, level=LEVEL)
        if len(packed) < len(content):
            return ZSTD, packed
    return RAW, content


def pack_redacted(content: bytes) -> tuple[str, bytes]:
    """The same for bytes that are not what the message's digest was made of."""
    codec, packed = pack(content)
    return REDACTED + codec, message_digest(content) + packed


def is_redacted(codec: str) -> bool:
    return codec.startswith(REDACTED)


def unpack(codec: str, stored: bytes) -> bytes:
    """The bytes that were stored. Raises `ValueError` for content that its codec cannot read."""
    if is_redacted(codec):
        content = unpack(codec.removeprefix(REDACTED), stored[DIGEST_BYTES:])
        if message_digest(content) != stored[:DIGEST_BYTES]:
            raise ValueError("redacted content does not have the digest that was stored with it")
        return content
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
