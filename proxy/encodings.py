"""Undo the content encodings of a request body, within a size limit.

Pure functions over whole bodies; what cannot be undone is named, never guessed at. The caller keeps the encoded bytes
and forwards those.
"""

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Sequence

import brotli  # type: ignore[import-untyped]  # ships no types

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LAYERS_MAX = 4  # more is an attack or a mistake: nobody compresses twice on purpose


class Undecodable(ValueError):
    """The text says which encoding, and what is wrong with it."""


def decode_body(body: bytes, encodings: Sequence[bytes], limit_bytes: int) -> bytes:
    """Undo `encodings` (tokens of Content-Encoding, in the order in which they were applied).

    Raises Undecodable for an unknown coding, a damaged or cut-off body, and one that grows past `limit_bytes`: a little
    more than that is all that is ever held.
    """
    layers = [coding.decode("latin-1") for coding in reversed(encodings) if coding != b"identity"]
    if len(layers) > LAYERS_MAX:
        raise Undecodable(f"{len(layers)} content encodings on top of each other; at most {LAYERS_MAX} are undone")
    for coding in layers:
        decode = _DECODERS.get(coding)
        if decode is None:
            raise Undecodable(f"unknown content encoding {coding!r}")
        try:
            body = decode(body, limit_bytes + 1)
        except (OSError, EOFError, zlib.error, brotli.error, zstd.ZstdError) as exc:
            raise Undecodable(f"damaged {coding} body: {exc}") from exc
        if len(body) > limit_bytes:
            raise Undecodable(f"{coding} body of more than {limit_bytes} bytes when decoded")
    return body


# Each returns `size` bytes (brotli: up to twice as many) or all there are, and raises for a body that ends too early
# or is followed by something else.


def _zstd(body: bytes, size: int) -> bytes:
    with zstd.ZstdFile(io.BytesIO(body)) as file:
        return file.read(size)


def _gzip(body: bytes, size: int) -> bytes:
    if not body:
        raise EOFError("it is empty")
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
        return file.read(size)


def _brotli(body: bytes, size: int) -> bytes:
    decoder = brotli.Decompressor()
    decoded: bytes = decoder.process(body, output_buffer_limit=size)
    if len(decoded) < size and not decoder.is_finished():
        raise EOFError("it ends too early")
    return decoded


def _deflate(body: bytes, size: int) -> bytes:
    """`deflate` means zlib by the standard, and a bare stream in the habit of old clients."""
    try:
        return _inflate(body, size, zlib.MAX_WBITS)
    except zlib.error:
        return _inflate(body, size, -zlib.MAX_WBITS)


def _inflate(body: bytes, size: int, wbits: int) -> bytes:
    decoder = zlib.decompressobj(wbits)
    decoded = decoder.decompress(body, size)
    if len(decoded) < size and not decoder.eof:
        raise EOFError("it ends too early")
    if decoder.unused_data:
        raise OSError("something follows it")
    return decoded


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "zstd": _zstd,
    "gzip": _gzip,
    "x-gzip": _gzip,
    "br": _brotli,
    "deflate": _deflate,
}
