"""The event decoder, cut at every byte and with every line end that servers use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.sse import Event, EventDecoder, decode_events

STREAM = (
    "\ufeffevent: first\ndata: 漢字 😀\ndata:no space\n\n"
    ": a comment\n\n"
    "id: 7\nretry: 5\nnonsense\ndata\n\n"
    "data:  two spaces\nevent: second\n\n\n"
    'data: {"a": "b:c"}\n\n'
    "data: last"
)
EVENTS = [
    Event(b"first", "漢字 😀\nno space".encode()),
    Event(b"", b""),
    Event(b"second", b" two spaces"),
    Event(b"", b'{"a": "b:c"}'),
    Event(b"", b"last"),
]


def decode(chunks: list[bytes], **limits: int) -> list[Event]:
    decoder = EventDecoder(**limits)
    return [event for chunk in chunks for event in decoder.feed(chunk)] + decoder.finish()


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_every_cut_gives_the_same_events(line_end: str) -> None:
    """Parsers that looked for LF LF saw no event in a CRLF stream; characters cut in two became U+FFFD."""
    stream = STREAM.replace("\n", line_end).encode()
    assert decode_events(stream) == EVENTS
    assert decode([bytes([byte]) for byte in stream]) == EVENTS
    for cut in range(len(stream) + 1):
        assert decode([stream[:cut], b"", stream[cut:]]) == EVENTS


@given(
    st.lists(st.sampled_from([b"data: a", b"event:b", b"\r", b"\n", b"\r\n", b":", b"data"]), max_size=30), st.data()
)
def test_the_cut_never_matters(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=6)))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decode(chunks) == decode_events(stream)


def test_an_event_is_there_as_soon_as_its_empty_line_is() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\r\n") == []
    assert decoder.feed(b"\r") == [Event(b"", b"a")]
    assert decoder.feed(b"\ndata: b\n\n") == [Event(b"", b"b")]
    assert decoder.finish() == []


def test_nothing_gives_nothing() -> None:
    assert decode_events(b"") == decode_events(b"\xef\xbb\xbf") == decode_events(b"\n\r\n") == []


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_event_above_the_bound_is_passed_over(size: int) -> None:
    stream = b"data: a\n\ndata: " + b"x" * 500 + b"\ndata: y\n\ndata: b\n\n" + b"data: z\n" * 100 + b"\ndata: c\n\n"
    decoder = EventDecoder(event_bytes_max=100)
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    events = [event for chunk in chunks for event in decoder.feed(chunk)] + decoder.finish()
    assert [event.data for event in events] == [b"a", b"b", b"c"]
    assert decoder.oversized_count == 2
