"""Decoding within a limit: exact at its edge, and a name for every failure."""

import gzip
import zlib

import brotli  # type: ignore[import-untyped]  # ships no types
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from proxy.encodings import Undecodable, decode_body

ENCODERS = {"zstd": zstd.compress, "gzip": gzip.compress, "br": brotli.compress, "deflate": zlib.compress}
LIMIT = 1 << 16


@given(st.binary(max_size=2000), st.lists(st.sampled_from(sorted(ENCODERS)), max_size=4))
def test_decoding_undoes_encoding_in_reverse_order(body: bytes, layers: list[str]) -> None:
    wire = body
    for layer in layers:
        wire = ENCODERS[layer](wire)
    assert decode_body(wire, [layer.encode() for layer in layers], LIMIT) == body


@pytest.mark.parametrize("coding", ENCODERS)
def test_limit_is_exact(coding: str) -> None:
    """A bomb is small on the wire: what counts is what comes out."""
    fits, bomb = ENCODERS[coding](bytes(LIMIT)), ENCODERS[coding](bytes(LIMIT + 1))
    assert len(decode_body(fits, [coding.encode()], LIMIT)) == LIMIT
    with pytest.raises(Undecodable, match=f"{coding} body of more than {LIMIT} bytes"):
        decode_body(bomb, [coding.encode()], LIMIT)


@pytest.mark.parametrize("coding", ENCODERS)
@pytest.mark.parametrize("missing", [1, 5, 12])
def test_body_that_ends_too_early_is_damaged(coding: str, missing: int) -> None:
    """Half a body must not be taken for the whole."""
    wire = ENCODERS[coding](bytes(range(256)) * 8)
    with pytest.raises(Undecodable, match=f"damaged {coding}"):
        decode_body(wire[:-missing], [coding.encode()], LIMIT)


@given(st.sampled_from(sorted(ENCODERS)), st.binary(max_size=200))
def test_any_bytes_decode_or_are_named_damaged(coding: str, body: bytes) -> None:
    try:
        decode_body(body, [coding.encode()], LIMIT)
    except Undecodable as exc:
        assert coding in str(exc)


def test_bodies_of_several_frames_are_read_whole() -> None:
    assert decode_body(zstd.compress(b"a") + zstd.compress(b"b"), [b"zstd"], LIMIT) == b"ab"
    assert decode_body(gzip.compress(b"a") + gzip.compress(b"b"), [b"gzip"], LIMIT) == b"ab"
