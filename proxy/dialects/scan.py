"""Where the members of a JSON object and the elements of an array stand in the client's bytes.

Nothing is rebuilt: `msgspec` validates the text and says how long each value is, and we walk forward over whitespace
and commas to learn where it begins. This module knows JSON, not what a field means.
"""

import re
from typing import Any

import msgspec

Span = tuple[int, int]  # start and end in bytes

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE = msgspec.json.Decoder()

_SPACE = re.compile(rb"[ \t\n\r]*")
_KEY = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)
_NEXT = re.compile(rb"[ \t\n\r]*([,\]}])[ \t\n\r]*")
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a proper pair
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"  # half of one
    rb"|\\.",
    re.DOTALL,
)


class Malformed(ValueError):
    """The bytes are not the JSON that was asked for. The text says why."""


def split_object(body: bytes) -> dict[str, Span]:
    """Span of every member's value. A repeated key is malformed: nobody can say which value the upstream takes."""
    spans: dict[str, Span] = {}
    follow = b"}"
    position = _after_space(body, _after_space(body, 0) + 1)
    for name, value in _decode(_MEMBERS, body).items():
        # The decoder keeps the last value of a repeated key: walking over the first one, we meet something else.
        key = _KEY.match(body, position)
        start = key.end() if key else position
        end = start + len(memoryview(value))
        step = _NEXT.match(body, end)
        if key is None or step is None or not _is_spelled(bytes(value), body, start, end):
            raise Malformed("a key is repeated")
        spans[name] = (start, end)
        position, follow = step.end(), step[1]
    if follow != b"}":
        raise Malformed("a key is repeated")
    return spans


def _is_spelled(value: bytes, body: bytes, start: int, end: int) -> bool:
    return body.startswith(value, start) or _mend_surrogates(body[start:end]) == value


def split_array(body: bytes, span: Span, known: tuple[Span, ...] = ()) -> tuple[Span, ...]:
    """Spans in `body` of the elements of the array that stands at `span`; the first ones may be `known` already."""
    start, end = span
    if known:
        step = _NEXT.match(body, known[-1][1])
        assert step is not None, "a known element is followed by a comma or the closing bracket"
        if step[1] == b"]":
            return known
        position = step.end()
        elements = _decode(_ELEMENTS, b"[" + body[position:end])
    else:
        position = _after_space(body, start + 1)
        elements = _decode(_ELEMENTS, memoryview(body)[start:end])
    spans = list(known)
    for element in elements:
        stop = position + len(memoryview(element))
        spans.append((position, stop))
        step = _NEXT.match(body, stop)
        assert step is not None, "the decoder has seen a comma or the closing bracket here"
        position = step.end()
    return tuple(spans)


def read_value(raw: bytes) -> Any:
    """The value that `raw` spells. Half a surrogate pair reads as U+FFFD, so that every text can be encoded again."""
    return _decode(_VALUE, raw)


def render_value(value: object) -> bytes:
    """Compact JSON: keys in their order, no character escaped that need not be. `null` for what nests too deeply."""
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        return b"null"


def _decode(decoder: msgspec.json.Decoder[Any], text: bytes | memoryview) -> Any:
    try:
        try:
            return decoder.decode(text)
        except msgspec.DecodeError:
            return decoder.decode(_mend_surrogates(text))
    except RecursionError as exc:
        raise Malformed("nested too deeply") from exc
    except ValueError as exc:
        raise Malformed(str(exc)) from exc


def _mend_surrogates(text: bytes | memoryview) -> bytes:
    """`text` with U+FFFD in place of every escape that is half a pair: equally long, so that spans hold for both."""
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], text)


def _after_space(text: bytes, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
