"""Content encodings of any bytes: the body as it was, or a refusal; never a part of it, never more than the limit."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import brotli  # type: ignore[import-untyped]  # ships no types
import pytest
from backports import zstd
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.encodings import Undecodable, decode_body
from tests.fuzz.wild import damaged


def bare_deflate(body: bytes) -> bytes:
    return zlib.compress(body, wbits=-zlib.MAX_WBITS)


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstd.compress, "gzip": gzip.compress, "x-gzip": gzip.compress, "br": brotli.compress,
    "deflate": zlib.compress,
}  # fmt: skip
CODINGS = st.sampled_from(sorted(ENCODERS))
LAYERS = st.lists(CODINGS, min_size=1, max_size=4)
PLAIN = st.binary(max_size=40) | st.builds(
    lambda part, times: part * times, st.binary(max_size=9), st.integers(0, 9000)
)
LIMIT = 1 << 17


def encoded(body: bytes, layers: list[str]) -> bytes:
    for layer in layers:
        body = ENCODERS[layer](body)
    return body


def decoded(wire: bytes, layers: list[str], limit: int = LIMIT) -> bytes | None:
    """None: refused, and the reason names the coding."""
    try:
        return decode_body(wire, [layer.encode() for layer in layers], limit)
    except Undecodable as error:
        assert any(layer in str(error) for layer in layers)
        return None


@given(PLAIN, LAYERS, st.integers(0, LIMIT))
def test_a_body_comes_whole_or_is_refused_for_its_size(plain: bytes, layers: list[str], limit: int) -> None:
    """A layer may be longer than what it holds, and is measured too."""
    wire, sizes = plain, [len(plain)]
    for layer in layers:
        wire = ENCODERS[layer](wire)
        sizes.append(len(wire))
    assert decoded(wire, layers, limit) == (plain if max(sizes[:-1]) <= limit else None)


@given(PLAIN, LAYERS, st.data())
@example(plain=b"", layers=["gzip"], data=None)
def test_a_body_that_was_cut_is_refused(plain: bytes, layers: list[str], data: st.DataObject | None) -> None:
    wire = encoded(plain, layers)
    end = data.draw(st.integers(0, len(wire) - 1)) if data is not None else 0
    assert decoded(wire[:end], layers) is None


@given(PLAIN, LAYERS, st.binary(min_size=1, max_size=8))
@example(plain=b"abc", layers=["deflate"], more=b"x")
@example(plain=b"abc", layers=["gzip"], more=b"\0\0")
def test_what_follows_a_body_is_not_passed_over(plain: bytes, layers: list[str], more: bytes) -> None:
    """Zeros may pad gzip; whatever else follows, another reader may see another body there."""
    padded = layers[-1].endswith("gzip") and not more.strip(b"\0")
    assert decoded(encoded(plain, layers) + more, layers) == (plain if padded else None)


@given(PLAIN, st.binary(max_size=8))
def test_bare_deflate_is_read_whole_or_not(plain: bytes, more: bytes) -> None:
    found = decoded(bare_deflate(plain) + more, ["deflate"])
    assert found == (None if more else plain)


@given(PLAIN, LAYERS, LAYERS, st.data())
def test_damaged_and_mislabelled_bodies_never_grow_past_the_limit(
    plain: bytes, layers: list[str], named: list[str], data: st.DataObject
) -> None:
    found = decoded(data.draw(damaged(encoded(plain, layers))), named, 1000)
    assert found is None or len(found) <= 1000


@pytest.mark.parametrize("outer", [[], *([coding] for coding in ENCODERS), ["gzip", "zstd", "br"]], ids=str)
@pytest.mark.parametrize("inner", ENCODERS)
def test_a_bomb_is_never_unpacked(inner: str, outer: list[str]) -> None:
    """16 MB of nothing, wrapped again: what is held stays near the limit."""
    layers = [inner, *outer]
    wire = encoded(bytes(1 << 24), layers)
    tracemalloc.start()
    try:
        assert decoded(wire, layers) is None
        assert tracemalloc.get_traced_memory()[1] < 8 * LIMIT + 2 * len(wire)
    finally:
        tracemalloc.stop()
