"""A request that goes on where another ended reads exactly as if it had been read from its start."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.base import Dialect, ParsedRequest, UnreadableRequest
from proxy.dialects.chat import ChatDialect
from proxy.dialects.responses import ResponsesDialect

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "grüße \ud83d half"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "]},{"},
    {"role": "assistant", "content": "done", "n": 10**30},
    {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "d", "output": "x"},
    {"role": "developer", "content": "mid"},
]
HISTORIES = st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=8)
HEADS = st.sampled_from(['{"model":"m",', '{ "stream" : true, ', "{"])
TAILS = st.sampled_from(["}", ',"tools":[{"x":1}]}', ',"messages":[]}', ',"input":[]}', " , 7}", ""])
COMMAS = st.sampled_from([",", ", ", " \n,\t"])


def read(dialect: Dialect, body: bytes) -> ParsedRequest | str:
    try:
        return dialect.parse_request(body)
    except UnreadableRequest as error:
        return str(error)


@pytest.mark.parametrize(("make", "name"), [(ChatDialect, "messages"), (ResponsesDialect, "input")])
@given(st.lists(st.tuples(HISTORIES, HEADS, TAILS, COMMAS), min_size=2, max_size=6), HISTORIES)
def test_memory_changes_nothing(
    make: type[ChatDialect] | type[ResponsesDialect],
    name: str,
    requests: list[tuple[list[dict[str, Any]], str, str, str]],
    common: list[dict[str, Any]],
) -> None:
    remembering = make()
    for history, head, tail, comma in requests:
        array = comma.join(json.dumps(message) for message in [*common, *history])
        body = f'{head}"{name}":[{array}]{tail}'.encode()
        assert read(remembering, body) == read(make(), body)


@pytest.mark.parametrize("first", ["hello", "hello, world"])
def test_a_string_input_is_not_the_beginning_of_an_array(first: str) -> None:
    dialect = ResponsesDialect()
    for body in (json.dumps({"input": first}), json.dumps({"input": "hello"}), json.dumps({"input": [MESSAGES[1]]})):
        assert read(dialect, body.encode()) == read(ResponsesDialect(), body.encode())
