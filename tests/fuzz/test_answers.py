"""Answers of any shape, in any cut: the decoder agrees with the standard, and what it makes of them can be kept."""

import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import DIALECTS
from proxy.dialects.base import Answer, DialectName
from proxy.dialects.sse import Event, EventDecoder
from tests.fuzz.wild import VALUES, cut, damaged, messages

NAMES: list[DialectName] = ["chat", "responses"]
LINES = st.sampled_from(
    [
        b"data: a",
        b"data",
        b"data:",
        b"data:  b",
        b"event: e",
        b"event",
        b"id: 1",
        b": c",
        b"",
        b"\xef\xbb\xbf",
        b"x\x00",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])
STREAMS = st.lists(st.tuples(LINES | st.binary(max_size=6), ENDS).map(b"".join), max_size=20).map(b"".join)


def by_the_standard(stream: bytes) -> list[Event]:
    """HTML, 9.2.6, line by line; but data may be empty, and the last event need not be closed."""
    events, name, data = [], b"", list[bytes]()
    for line in [*re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf")), b""]:
        if not line:
            events += [Event(name, b"\n".join(data))] if data else []
            name, data = b"", []
        key, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if key == b"data":
            data.append(value)
        elif key == b"event":
            name = value
    return events


@given(STREAMS | STREAMS.flatmap(damaged), st.data())
def test_any_cut_of_any_stream_gives_the_events_of_the_standard(stream: bytes, data: st.DataObject) -> None:
    decoder = EventDecoder()
    events = [event for piece in data.draw(cut(stream)) for event in decoder.feed(piece)] + decoder.finish()
    assert events == by_the_standard(stream)
    assert decoder.oversized_count == 0


@given(STREAMS, st.data(), st.integers(0, 12))
def test_what_is_passed_over_does_not_depend_on_the_cut(stream: bytes, data: st.DataObject, limit: int) -> None:
    def read(pieces: list[bytes]) -> tuple[list[Event], int]:
        decoder = EventDecoder(event_bytes_max=limit)
        events = [event for piece in pieces for event in decoder.feed(piece)] + decoder.finish()
        return events, decoder.oversized_count

    events, passed_over = found = read(data.draw(cut(stream)))
    assert found == read([stream])
    everything = iter(by_the_standard(stream))
    assert all(event in everything for event in events), "in order, and nothing else"
    assert len(events) + passed_over >= len(by_the_standard(stream))


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 2**16, b"data: " + b"x" * 2**16 + b"\n", b": x" * 2**14])
def test_an_event_that_never_ends_is_not_held(piece: bytes) -> None:
    decoder = EventDecoder(event_bytes_max=2**18)
    tracemalloc.start()
    try:
        for _ in range(100):
            assert decoder.feed(piece) == []
        assert tracemalloc.get_traced_memory()[1] < 2**20, "of 6 MiB"
    finally:
        tracemalloc.stop()


@st.composite
def odd_streams(draw: st.DrawFn, dialect: DialectName) -> bytes:
    """Events and chunks of almost the right form."""
    item = messages(dialect) | VALUES
    if dialect == "chat":
        choice = st.fixed_dictionaries(
            {}, optional={"index": st.just(0) | VALUES, "delta": item, "finish_reason": VALUES}
        )
        payload = st.fixed_dictionaries(
            {"choices": st.lists(choice, max_size=2)}, optional={"usage": VALUES, "id": VALUES, "error": VALUES}
        )
    else:
        response = st.fixed_dictionaries(
            {}, optional={"output": st.lists(item, max_size=2), "usage": VALUES, "status": VALUES, "error": VALUES}
        )
        payload = st.fixed_dictionaries(
            {"type": st.sampled_from(["response.completed", "response.output_item.done", "error"]) | VALUES},
            optional={"item": item, "response": response | VALUES},
        )
    events = [f"data: {json.dumps(value)}\n\n".encode() for value in draw(st.lists(payload | VALUES, max_size=5))]
    return b"".join(events) + draw(st.sampled_from([b"", b"data: [DONE]\n\n", b"event: error\ndata: {}\n\n"]))


@pytest.mark.parametrize("dialect", NAMES)
@given(st.data())
def test_whatever_an_answer_says_can_be_kept_and_sent_back(dialect: DialectName, data: st.DataObject) -> None:
    stream = odd_streams(dialect)
    body = data.draw(stream | stream.flatmap(damaged) | VALUES.map(lambda value: json.dumps(value).encode()))
    content_type = data.draw(st.sampled_from(["text/event-stream", "application/json", ""]))
    check_answer(DIALECTS[dialect].parse_answer(body, content_type), dialect)


def check_answer(answer: Answer, dialect: DialectName) -> None:
    assert not answer.ends_turn or (answer.complete and answer.error is None and answer.messages)
    for text in (answer.text, answer.usage_raw, answer.response_id, answer.error):
        (text or "").encode()
    counts = (answer.usage.input, answer.usage.cached, answer.usage.cache_write, answer.usage.output)
    assert all(count is None or 0 <= count < 2**56 for count in counts)
    for raw in answer.messages:
        value: Any = json.loads(raw.decode())
        assert isinstance(value, dict) or dialect == "responses"
        DIALECTS[dialect].parse_message(raw)
