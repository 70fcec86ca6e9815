"""What responses say, in both dialects, as JSON and as event streams, whole and broken."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import DIALECTS
from proxy.dialects.base import Answer, DialectName, Usage
from proxy.dialects.usage import parse_usage

SSE = "text/event-stream; charset=utf-8"
USAGE = '{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens": 2, "cost": 1e-3}'


def answer(body: str | bytes, content_type: str = SSE, dialect: DialectName = "chat") -> Answer:
    return DIALECTS[dialect].parse_answer(body.encode() if isinstance(body, str) else body, content_type)


def chunks(*deltas: dict[str, Any], finish: str | None = "stop", done: bool = True, usage: str | None = None) -> str:
    events = [{"id": "cc_1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if finish:
        events.append({"id": "cc_1", "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    lines = [json.dumps(event, ensure_ascii=False) for event in events]
    lines += [f'{{"id": "cc_1", "choices": [], "usage": {usage}}}'] if usage else []
    return "".join(f"data: {line}\n\n" for line in lines + ["[DONE]"] * done)


def events(*payloads: str | dict[str, Any]) -> str:
    texts = [payload if isinstance(payload, str) else json.dumps(payload) for payload in payloads]
    return "".join(f"event: {json.loads(text)['type']}\ndata: {text}\n\n" for text in texts)


def piece(index: int | None, arguments: str = "", **fields: Any) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": fields.pop("name")} if "name" in fields else {})
    return ({} if index is None else {"index": index}) | fields | {"function": function}


# Chat completions


def test_a_json_answer_keeps_the_message_as_it_came() -> None:
    message = '{"role":"assistant", "content":"\\u00e9", "annotations":[], "refusal":null}'
    body = f'{{"id":"cc_1","choices":[{{"index":0,"message":{message},"finish_reason":"stop"}}],"usage":{USAGE}}}'
    assert answer(body, "application/json") == Answer(
        messages=(message.encode(),),
        text="é",
        complete=True,
        ends_turn=True,
        usage_raw=USAGE,
        usage=Usage(input=9, cached=4, output=2),
        response_id="cc_1",
        transformations=0,
        error=None,
    )


@pytest.mark.parametrize("calls", ['"tool_calls":[{"id":"c"}]', '"function_call":{"name":"f"}'])
def test_a_json_answer_that_calls_does_not_end_the_turn(calls: str) -> None:
    body = f'{{"choices":[{{"message":{{"role":"assistant","content":null,{calls}}}}}]}}'
    assert (answer(body, "").complete, answer(body, "").ends_turn) == (True, False)


def test_a_stream_becomes_one_message() -> None:
    told = answer(
        chunks(
            {"role": "assistant", "content": ""},
            {"reasoning_content": "hm"},
            {"reasoning_content": "m", "content": None},
            {"content": "漢"},
            {"content": "字 😀"},
            usage=USAGE,
        )
    )
    assert told.messages == ('{"role":"assistant","content":"漢字 😀","reasoning_content":"hmm"}'.encode(),)
    assert (told.text, told.complete, told.ends_turn, told.response_id) == ("漢字 😀", True, True, "cc_1")
    assert (told.usage_raw, told.usage.cached) == (USAGE, 4)


def test_interleaved_parallel_calls_are_put_together_by_index() -> None:
    told = answer(
        chunks(
            {"role": "assistant", "content": None, "tool_calls": [piece(0, id="a", type="function", name="read")]},
            {"tool_calls": [piece(1, '{"x"', id="b", type="function", name="edit")]},
            {"tool_calls": [piece(0, '{"p":'), piece(1, ":2}")]},
            {"tool_calls": [piece(0, "1}")]},
            finish="tool_calls",
        )
    )
    assert json.loads(told.messages[0]) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"p":1}'}},
            {"id": "b", "type": "function", "function": {"name": "edit", "arguments": '{"x":2}'}},
        ],
    }
    assert (told.complete, told.ends_turn) == (True, False)


@pytest.mark.parametrize("index", [0, None])
def test_calls_are_kept_apart_although_the_upstream_numbers_them_badly(index: int | None) -> None:
    told = answer(
        chunks(
            {"tool_calls": [piece(index, "1", id="a", name="f")]},
            {"tool_calls": [piece(index, "2", id="a")]},
            {"tool_calls": [piece(index, "3", id="b", name="g")]},
            {"tool_calls": [piece(index, "4")]},
            {"tool_calls": [piece(index, "5", id="c", name="h")]},
        )
    )
    calls = json.loads(told.messages[0])["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("a", "12"), ("b", "34"), ("c", "5")]


def test_custom_tools_and_vendor_fields_of_calls_survive_in_the_message() -> None:
    signature = {"google": {"thought_signature": "x"}}
    first = {
        "index": 0,
        "id": "a",
        "type": "custom",
        "custom": {"name": "exec", "input": "l"},
        "extra_content": signature,
    }
    told = answer(chunks({"tool_calls": [first]}, {"tool_calls": [{"index": 0, "custom": {"input": "s"}}]}))
    assert json.loads(told.messages[0])["tool_calls"] == [
        {"id": "a", "type": "custom", "custom": {"name": "exec", "input": "ls"}, "extra_content": signature}
    ]


def test_a_legacy_function_call_in_a_stream() -> None:
    told = answer(chunks({"function_call": {"name": "f", "arguments": "{"}}, {"function_call": {"arguments": "}"}}))
    assert told.messages == (b'{"role":"assistant","content":null,"function_call":{"name":"f","arguments":"{}"}}',)
    assert not told.ends_turn


def test_a_refusal_is_text_and_ends_the_turn() -> None:
    told = answer(chunks({"refusal": "I "}, {"refusal": "won't"}))
    assert told.messages == (b'{"role":"assistant","content":"","refusal":"I won\'t"}',)
    assert (told.text, told.ends_turn) == ("I won't", True)


@pytest.mark.parametrize(
    ("finish", "done", "complete"), [("stop", False, True), (None, True, True), (None, False, False)]
)
def test_a_stream_without_its_end_is_incomplete(finish: str | None, done: bool, complete: bool) -> None:
    told = answer(chunks({"content": "half"}, finish=finish, done=done))
    assert (told.complete, told.ends_turn, told.text) == (complete, complete, "half")


def test_usage_is_read_from_any_chunk_and_the_last_one_wins() -> None:
    """Usage was recognised only beside empty choices; other shapes lost their cached tokens."""
    beside = '{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":1}}'
    told = answer(f"data: {beside}\n\n" + chunks({"content": "b"}, usage=USAGE))
    assert (told.text, told.usage_raw, told.usage.cached) == ("ab", USAGE, 4)
    assert answer(f"data: {beside}\n\n" + chunks({"content": "b"}, usage="null")).usage.input == 1


@pytest.mark.parametrize(
    "last",
    [
        f'{{"choices":[{{"index":0,"delta":{{}},"finish_reason":"stop","usage":{USAGE}}}]}}',
        f'{{"choices":[{{"index":0,"delta":{{}},"finish_reason":"stop"}}],"x_groq":{{"id":"r","usage":{USAGE}}}}}',
        f'{{"choices":[],"usage":{USAGE}}}\n\ndata: {{"choices":[],"usage":"none"}}\n\ndata: {{"usage":{{}}}}',
    ],
)
def test_usage_is_found_where_some_streams_have_it(last: str) -> None:
    told = answer(f"data: {last}\n\n" + chunks({"content": "b"}))
    assert (told.usage_raw, told.usage.cached) == (USAGE, 4)


def test_a_chunk_without_choices_or_with_a_second_choice_changes_nothing() -> None:
    second = '{"choices":[{"index":1,"delta":{"content":"second"}}]}'
    others = "".join(f"data: {line}\n\n" for line in (second, '{"moderation":{}}', "7", "{"))
    assert answer(others + chunks({"content": "first"})).text == "first"


@pytest.mark.parametrize(
    ("body", "content_type", "error"),
    [
        ('{"error":{"message":"no","type":"invalid_request_error","code":null}}', "", "invalid_request_error: no"),
        ('{"error":{"message":"no","code":400}}', "application/json", "400: no"),
        ('{"error":"plain"}', "", "plain"),
        ('{"object":"error","message":"old vLLM","code":40001}', "", "old vLLM"),
        ('{"error":{"message":"refused"}}', SSE, "refused"),
        ('data: {"error":{"message":"broke"}}\n\n', SSE, "broke"),
        ("event: error\ndata: overloaded\n\n", SSE, "overloaded"),
    ],
)
def test_errors_are_told(body: str, content_type: str, error: str) -> None:
    told = answer(body, content_type)
    assert (told.error, told.ends_turn, told.messages) == (error, False, ())


def test_an_error_in_mid_stream_keeps_what_came_before() -> None:
    told = answer(chunks({"content": "half"}, finish=None, done=False) + 'data: {"error":{"message":"broke"}}\n\n')
    assert (told.text, told.error, told.complete, told.ends_turn) == ("half", "broke", False, False)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/octet-stream"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_stream_is_known_by_its_bytes_too(content_type: str, line_end: str) -> None:
    """A CRLF stream never produced an event, so the client sent its request again without streaming."""
    body = (": ping\n\n" + chunks({"content": "a"})).replace("\n", line_end).replace("data: ", "data:")
    assert answer(body, content_type).text == "a"


# Responses

MESSAGE = '{"type":"message", "id":"msg_1","role":"assistant","content":[{"type":"output_text","text":"\\u6f22"}]}'
REASON = '{"type":"reasoning","id":"rs_1","summary":[],"encrypted_content":"gAAA"}'
CALLED = '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}'
RUSAGE = '{"input_tokens":9,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":3},"output_tokens":2}'


def done(*items: str) -> list[str]:
    return [f'{{"type":"response.output_item.done","output_index":0,"item":{item}}}' for item in items]


def closing(kind: str = "completed", output: str = "[]", more: str = "") -> str:
    response = f'"id":"resp_1","status":"{kind}","output":{output},"usage":{RUSAGE}{more}'
    return f'{{"type":"response.{kind}","response":{{{response}}}}}'


def responses(*payloads: str | dict[str, Any]) -> Answer:
    return answer(events(*payloads), SSE, "responses")


def test_items_are_kept_as_they_came() -> None:
    """A reasoning item that lost its empty summary was refused in the next turn."""
    created = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "usage": None}}
    told = responses(created, *done(REASON, MESSAGE), closing())
    assert told == Answer(
        messages=(REASON.encode(), MESSAGE.encode()),
        text="漢",
        complete=True,
        ends_turn=True,
        usage_raw=RUSAGE,
        usage=Usage(input=9, cached=4, cache_write=3, output=2),
        response_id="resp_1",
        transformations=0,
        error=None,
    )


def test_the_closing_event_has_the_items_when_no_other_event_had() -> None:
    told = responses(closing(output=f"[{REASON} , {CALLED}]"))
    assert told.messages == (REASON.encode(), CALLED.encode())
    assert (told.complete, told.ends_turn) == (True, False)


def test_a_json_response() -> None:
    body = f'{{"id":"resp_1","status":"completed","error":null,"output":[{MESSAGE}],"usage":{RUSAGE}}}'
    told = answer(body, "application/json", "responses")
    assert (told.messages, told.text, told.complete, told.ends_turn) == ((MESSAGE.encode(),), "漢", True, True)
    assert (told.usage_raw, told.response_id, told.error) == (RUSAGE, "resp_1", None)


@pytest.mark.parametrize(
    ("item", "ends_turn"),
    [
        (CALLED, False),
        ('{"type":"custom_tool_call","call_id":"c","name":"f","input":""}', False),
        ('{"type":"local_shell_call","id":"c","action":{}}', False),
        ('{"type":"web_search_call","id":"ws_1"}', True),
        ('{"type":"compaction","encrypted_content":"gAAA"}', True),
    ],
)
def test_a_turn_ends_when_nothing_waits_for_the_client(item: str, ends_turn: bool) -> None:
    assert responses(*done(MESSAGE, item), closing()).ends_turn is ends_turn


def test_removed_reasoning_is_counted() -> None:
    more = ',"input_transformations":[{"action":"removed","id":"rs_1"},{"action":"kept"},{"action":"removed"},7]'
    assert responses(*done(MESSAGE), closing(more=more)).transformations == 2
    assert responses(*done(MESSAGE), closing(more=',"input_transformations":null')).transformations == 0


def test_a_response_that_stopped_early_is_complete() -> None:
    assert responses(*done(MESSAGE), closing("incomplete")).complete


def test_a_stream_without_its_closing_event_is_incomplete() -> None:
    told = responses({"type": "response.created", "response": {"id": "resp_1"}}, *done(MESSAGE))
    assert (told.complete, told.ends_turn, told.text, told.response_id) == (False, False, "漢", "resp_1")


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (closing("failed", more=',"error":{"code":"server_error","message":"broke"}'), "server_error: broke"),
        (closing("failed"), "the response failed"),
        ('{"type":"error","code":"rate_limit","message":"slow down"}', "rate_limit: slow down"),
        ('{"type":"error","error":{"message":"slow down"}}', "slow down"),
    ],
)
def test_a_failed_response_says_why(payload: str, error: str) -> None:
    told = responses(payload)
    assert (told.error, told.complete, told.ends_turn) == (error, True, False)


def test_an_error_body() -> None:
    told = answer('{"error":{"message":"no","code":"invalid"}}', "application/json", "responses")
    assert (told.error, told.complete, told.messages) == ("invalid: no", False, ())


# Usage


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {
                "prompt_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 2},
                "completion_tokens": 5,
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(10, 6, 2, 5, 3),
        ),
        (
            {
                "input_tokens": 10,
                "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 2},
                "output_tokens": 5,
                "output_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(10, 6, 2, 5, 3),
        ),
        (
            {"input_tokens": 2, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 2, "output_tokens": 5},
            Usage(10, 6, 2, 5),
        ),
        ({"prompt_tokens": 10, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 2}, Usage(10, 6, 2)),
        (
            {"prompt_tokens": 10, "prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 4, "completion_tokens": 5},
            Usage(10, 6, None, 5),
        ),
        ({"prompt_tokens": 10, "cached_tokens": 6, "completion_tokens": 5}, Usage(10, 6, None, 5)),
        ({"prompt_tokens": 10, "prompt_tokens_details": None, "completion_tokens": 0}, Usage(10, None, None, 0)),
        (
            {"promptTokenCount": 10, "cachedContentTokenCount": 6, "candidatesTokenCount": 5, "thoughtsTokenCount": 3},
            Usage(10, 6, None, 8, 3),
        ),
        ({"prompt_tokens": True, "completion_tokens": -1, "input_tokens": "7", "output_tokens": 10**30}, Usage()),
        ([], Usage()),
    ],
)
def test_every_providers_usage_means_the_same(usage: Any, expected: Usage) -> None:
    assert parse_usage(json.dumps(usage).encode()) == expected


# Total


STREAMS: dict[DialectName, str] = {
    "chat": chunks({"content": "漢字"}, {"content": "😀"}, usage=USAGE),
    "responses": events(*done(MESSAGE.replace("\\u6f22", "漢字😀")), closing()),
}


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_a_stream_cut_at_any_byte_is_read_as_far_as_it_goes(dialect: DialectName) -> None:
    whole = STREAMS[dialect].encode()
    assert answer(whole, SSE, dialect).text == "漢字😀"
    for cut in range(len(whole)):
        told = answer(whole[:cut], SSE, dialect)
        assert "漢字😀".startswith(told.text)
        assert "\ufffd" not in told.text


KEYS = (
    "id type error usage choices index delta message tool_calls function name arguments content output item response "
    "status finish_reason input_transformations function_call text code"
).split()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(st.lists(VALUES, max_size=3), st.sampled_from(sorted(DIALECTS)), st.sampled_from(["", "event: error\n"]))
def test_an_answer_of_any_shape_is_read_without_raising(values: list[Any], dialect: DialectName, name: str) -> None:
    lines = [json.dumps(value) for value in values]
    stream = "".join(f"{name}data: {line}\n\n" for line in lines)
    for body, content_type in [(stream, SSE), *((line, "application/json") for line in lines)]:
        told = answer(body, content_type, dialect)
        assert not (told.ends_turn and told.error)


@given(st.binary(max_size=60), st.sampled_from(sorted(DIALECTS)), st.sampled_from(["", SSE]))
def test_an_answer_of_any_bytes_is_read_without_raising(body: bytes, dialect: DialectName, content_type: str) -> None:
    assert not answer(body, content_type, dialect).ends_turn


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize(
    "event",
    [
        '{"usage":{"a":1},"usage":{"a":2}}',
        '{"type":["x"],"response":{"status":[]}}',
        '{"type":"response.output_item.done","item":{},"item":[]}',
        '{"type":"response.completed","response":{"output":{},"output":[],"usage":7,"id":{}}}',
        '{"type":"response.completed","response":{"output":[7,[],{"type":"message","content":7}],"usage":{"a":{}}}}',
        '{"choices":[{"index":[],"delta":{"tool_calls":[{"index":[],"id":[],"function":7}]},"finish_reason":[]}]}',
        '{"choices":[{"delta":{"tool_calls":[{"index":0,"id":["a"]},{"index":0,"id":{}}]}}],"id":["x"]}',
        '{"choices":[{"delta":{"content":"\\ud83d","reasoning_details":[7]}}]}',
    ],
)
def test_an_event_of_odd_types_is_read_without_raising(event: str, dialect: DialectName) -> None:
    told = answer(f"data: {event}\n\n", SSE, dialect)
    assert told.error is None and told.usage == Usage()
    told.text.encode()


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("content_type", ["", SSE])
def test_a_deeply_nested_answer_is_read_without_raising(dialect: DialectName, content_type: str) -> None:
    deep = "[" * 900 + "]" * 900
    body = f'{{"error":{{"message":{deep}}},"choices":[{{"delta":{{"tool_calls":[{{"function":{{"x":{deep}}}}}]}}}}]}}'
    assert answer(f"data: {body}\n\n" if content_type else body, content_type, dialect).error
