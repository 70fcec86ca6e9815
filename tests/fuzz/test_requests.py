"""Request bodies of any shape: read exactly as a JSON parser reads them, or refused with a reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contexts import parts_of
from proxy.dialects.base import Dialect, DialectName, ParsedRequest, UnreadableRequest
from proxy.dialects.chat import ChatDialect
from proxy.dialects.responses import ResponsesDialect
from tests.fuzz.wild import VALUES, damaged, messages
from tests.proxy.dialects.histories import ARRAY_NAMES, bodies

MAKE: dict[DialectName, type[ChatDialect] | type[ResponsesDialect]] = {
    "chat": ChatDialect,
    "responses": ResponsesDialect,
}
MEMBERS = st.sampled_from("model stream tools functions instructions background prompt_cache_key conversation".split())


@st.composite
def odd_bodies(draw: st.DrawFn, dialect: DialectName) -> bytes:
    """Almost a request."""
    array = draw(st.lists(messages(dialect) | VALUES, max_size=6))
    value = draw(st.dictionaries(MEMBERS, VALUES, max_size=4))
    body = json.dumps({"model": "m", ARRAY_NAMES[dialect]: array} | value, ensure_ascii=draw(st.booleans()))
    return body.encode("utf-8", "surrogatepass")


def any_body(dialect: DialectName) -> st.SearchStrategy[bytes]:
    whole = bodies(dialect) | odd_bodies(dialect)
    return whole | whole.flatmap(damaged) | VALUES.map(lambda value: json.dumps(value).encode())


@pytest.mark.parametrize("dialect", MAKE)
@given(st.data())
def test_a_body_is_read_as_json_reads_it_or_refused_with_a_reason(dialect: DialectName, data: st.DataObject) -> None:
    body = data.draw(any_body(dialect))
    reader = MAKE[dialect]()
    try:
        request = reader.parse_request(body)
    except UnreadableRequest as error:
        assert str(error)
        return
    check_reading(request, body)
    check_messages(reader, request)


def check_reading(request: ParsedRequest, body: bytes) -> None:
    read = json.loads(body.decode())
    array = read[ARRAY_NAMES[request.dialect]]
    assert request.body == body
    assert request.model == mended(read["model"] if isinstance(read.get("model"), str) else "")
    assert request.stream is (read.get("stream") is True)
    if isinstance(array, str):
        assert [json.loads(body[start:end]) for start, end in request.spans] == [array] and request.opaque
    else:
        check_spans(request, array)
    known = len(request.spans) - request.leading
    assert len(request.messages) == len(request.digests) == known
    assert not any(message.role == "instruction" for message in request.messages[:1])


def check_spans(request: ParsedRequest, array: list[Any]) -> None:
    """They hold the elements, and nothing but a comma stands between two of them."""
    body, spans = request.body, request.spans
    assert [json.loads(body[start:end]) for start, end in spans] == array
    assert body[: spans[0][0]].rstrip().endswith(b"[") and body[spans[-1][1] :].lstrip().startswith(b"]")
    between = [body[end:start].strip() for (_, end), (start, _) in zip(spans, spans[1:], strict=False)]
    assert between == [b","] * (len(spans) - 1)


def check_messages(reader: Dialect, request: ParsedRequest) -> None:
    """Each says the same when it is read again from the archive; everything that is stored of it can be stored."""
    assert reader.parse_messages([request.raw(index) for index in range(len(request.messages))]) == request.messages
    for index, message in enumerate(request.messages):
        raw = request.raw(index)
        alone = reader.parse_message(raw)
        assert (alone.role, alone.calls, alone.cost) == (message.role, message.calls, message.cost)
        assert message.cost >= 0
        label = reader.label(raw)
        assert len(label) <= 160 and "\n" not in label
        for text in (label, reader.message_text(raw), reader.call_text(raw), *message.calls, *message.answers):
            text.encode()


@pytest.mark.parametrize("dialect", MAKE)
@given(st.data())
def test_a_message_of_any_bytes_has_facts_and_texts(dialect: DialectName, data: st.DataObject) -> None:
    """What the archive holds is read again, years later and by another version."""
    spelled = (messages(dialect) | VALUES).map(lambda value: json.dumps(value).encode())
    raw = data.draw(st.binary(max_size=60) | spelled | spelled.flatmap(damaged))
    reader = MAKE[dialect]()
    message = reader.parse_message(raw)
    assert message.cost >= 0
    (part,) = parts_of(reader, [raw])
    for text in (reader.label(raw), reader.message_text(raw), reader.call_text(raw), *message.edits, part.text):
        text.encode()


HALF = json.dumps({"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": '{"path": "\\udc00"}'}}]})


def test_half_a_surrogate_pair_within_arguments_can_be_stored() -> None:
    """The string spells an escape and is whole; what it spells is not."""
    assert MAKE["chat"]().label(HALF.encode()).strip() == "\ufffd"
    part = json.dumps({"role": "user", "content": [{"type": "\udc00"}]}).encode()
    assert parts_of(MAKE["chat"](), [part])[0].text == "[\ufffd]"


def mended(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
