"""The scripted upstream keeps its own promises: strict like a provider, deterministic, and broken only when asked."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.model_script import Call, Step, parse_script
from tests.fakes.provider_rules import PrefixCache, reject_chat, reject_responses
from tests.fakes.raw_client import raw_client, request
from tests.fakes.scripted_upstream import Fault, Received, ScriptedUpstream, decode_body

TOOLS: list[Any] = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": "read", "parameters": {"type": "object"}},
    {"type": "namespace", "name": "box", "tools": [{"type": "function", "name": "open"}]},
    {"type": "custom", "name": "patch"},
]


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as running:
        yield running


@pytest.fixture
def http(upstream: ScriptedUpstream) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=upstream.base_url, timeout=20) as client:
        yield client


def chat(text: str, *more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}, *more], "tools": TOOLS, **fields}


def test_a_script_is_steps_of_calls_texts_and_faults() -> None:
    text = 'go [[read {"path":"a[0]"}]] [[a {} || b {"x":1}]] [[! {"status":429}]] [[= The end]] [[not a step!]]'
    assert parse_script(text) == (
        Step(calls=(Call("read", '{"path":"a[0]"}'),)),
        Step(calls=(Call("a", "{}"), Call("b", '{"x":1}'))),
        Step(text="The end", fault={"status": 429}),
    )
    assert parse_script(json.dumps(text)) == parse_script(text), "OpenCode's quoting is undone"


def call(identity: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": identity, "type": "function"}]}


def result(identity: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": "x"}


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER, call("c1"), USER], "did not have response messages: c1"),
        ([USER, call("c1")], "did not have response messages: c1"),
        ([USER, result("c1")], "must be a response to a preceeding message with 'tool_calls'"),
        ([USER, call("c1"), result("c1"), USER, result("c1")], "must be a response to a preceeding"),
        ([USER, {"role": "function", "name": "f", "content": "x"}], "'function_call'"),
        ([USER, {"role": "assistant", "content": None}], "expected a string, got null"),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": []}], "empty array"),
        ([{"role": "robot", "content": "x"}], "Supported values are"),
        ([USER, call("c1"), result("c1"), call("c1"), result("c1"), USER], None),
        ([USER, USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], None),
    ],
)
def test_chat_histories_are_judged_like_a_provider_does(messages: list[Any], text: str | None) -> None:
    verdict = reject_chat(messages)
    assert (verdict is None) if text is None else (verdict is not None and text in verdict["error"]["message"])


FC = {"type": "function_call", "call_id": "c1", "id": "fc_1", "name": "read", "arguments": "{}"}
FCO = {"type": "function_call_output", "call_id": "c1", "output": "x"}
RS = {"type": "reasoning", "id": "rs_1", "summary": []}


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([USER, FC], "No tool output found for function call c1."),
        ([USER, FCO], "No tool call found for function call output with call_id c1."),
        ([USER, RS, USER], "'rs_1' of type 'reasoning' was provided without its required following item."),
        ([USER, RS], "without its required following item"),
        ([USER, FC, FCO], "was provided without its required 'reasoning' item: 'rs_1'"),
        ([USER, RS, FC, FCO, RS, FC, FCO], "Duplicate item found with id rs_1"),
        ([USER, RS, FC, FCO, USER], None),
    ],
)
def test_responses_histories_are_judged_like_a_provider_does(items: list[Any], text: str | None) -> None:
    led_to = {"fc_1": "rs_1"} if text is None or "required 'reasoning'" in text else {}
    verdict = reject_responses(items, stateful=False, led_to=led_to)
    assert (verdict is None) if text is None else (verdict is not None and text in verdict["error"]["message"])


def test_outputs_may_answer_calls_that_the_server_holds() -> None:
    assert reject_responses([FCO], stateful=True, led_to={}) is None


def test_the_cache_serves_whole_steps_of_a_recent_common_prefix() -> None:
    now = 0.0
    cache = PrefixCache(lambda: now, ttl_seconds=300)
    prompt = (b"s" * 4000, b"u" * 1000)
    assert cache.serve(prompt, model="m", credential="k") == 0
    assert cache.serve((*prompt, b"more"), model="m", credential="k") == 1152  # 1250 in steps of 128
    assert cache.serve((b"s" * 4000, b"v"), model="m", credential="k") == 0, "1000 tokens are below the minimum"
    assert cache.serve(prompt, model="other", credential="k") == 0
    assert cache.serve(prompt, model="m", credential="other") == 0
    now = 301.0
    assert cache.serve(prompt, model="m", credential="k") == 0, "the prefix has expired"


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_reads_a_chat_session_to_its_end(upstream: ScriptedUpstream, stream: bool) -> None:
    client = openai.OpenAI(base_url=upstream.base_url, api_key="k")
    history: list[Any] = [{"role": "user", "content": 'go [[read {"p":1} || read {"p":2}]] [[= All read]]'}]
    for expected in (2, 0):
        if stream:
            with client.chat.completions.stream(
                model="m", messages=history, tools=TOOLS, stream_options={"include_usage": True}
            ) as events:
                completion: Any = events.get_final_completion()
        else:
            completion = client.chat.completions.create(model="m", messages=history, tools=TOOLS)
        message = completion.choices[0].message
        assert len(message.tool_calls or ()) == expected
        assert completion.usage.prompt_tokens == upstream.log[-1].input_tokens
        history.append(message.model_dump(exclude_none=True))
        history += [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in message.tool_calls or ()]
    assert message.content == "All read"
    client.close()


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_reads_a_responses_session_to_its_end(upstream: ScriptedUpstream, stream: bool) -> None:
    client = openai.OpenAI(base_url=upstream.base_url, api_key="k")
    history: list[Any] = [{"role": "user", "content": 'go [[read {} || open {}]] [[patch {"a":1}]] [[= Done]]'}]
    kinds = []
    for _ in range(3):
        arguments: dict[str, Any] = {"model": "m", "input": history, "tools": RESPONSE_TOOLS, "store": False}
        if stream:
            with client.responses.stream(**arguments) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**arguments)
        items = [item.model_dump(exclude_none=True) for item in response.output]
        kinds.append([item["type"] for item in items])
        history += items
        for item in items:
            if item["type"].endswith("_call"):
                history.append({"type": item["type"] + "_output", "call_id": item["call_id"], "output": "ok"})
    assert kinds == [
        ["reasoning", "function_call", "function_call"],
        ["reasoning", "custom_tool_call"],
        ["reasoning", "message"],
    ]
    assert history[3]["namespace"] == "box"
    assert response.output_text == "Done"
    assert response.model_extra is not None and response.model_extra.get("input_transformations", []) == []
    assert [r.rejected for r in upstream.log] == [None] * 3
    client.close()


def test_reasoning_under_another_prefix_is_reported_as_withheld(http: httpx.Client) -> None:
    head = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]
    body: dict[str, Any] = {"model": "m", "input": head, "store": False}
    body["input"] = head + http.post("/responses", json=body).json()["output"] + [{"role": "user", "content": "three"}]
    assert http.post("/responses", json=body).json()["input_transformations"] == []
    body["input"] = body["input"][2:]
    (dropped,) = http.post("/responses", json=body).json()["input_transformations"]
    assert (dropped["action"], dropped["reason"]) == ("removed", "prefix_mismatch")


def test_a_compaction_trigger_is_answered_by_one_compaction_item(http: httpx.Client) -> None:
    body = {"model": "m", "input": [USER, {"type": "compaction_trigger"}]}
    assert [item["type"] for item in http.post("/responses", json=body).json()["output"]] == ["compaction"]


def test_a_broken_history_is_refused_and_logged(upstream: ScriptedUpstream, http: httpx.Client) -> None:
    answer = http.post("/chat/completions", json=chat("hi", result("c1")))
    assert answer.status_code == 400
    assert upstream.log[0].rejected == answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "headers", "text"),
    [
        (b"{", {}, "could not parse"),
        (b"not gzip", {"content-encoding": "gzip"}, "could not parse"),
        (b'{"messages": []}', {}, "model parameter"),
        (b'{"model": "m"}', {}, "Missing required parameter: 'messages'"),
        (b'{"model": "m", "messages": []}', {}, "empty array"),
    ],
)
def test_unreadable_bodies_are_refused(http: httpx.Client, content: bytes, headers: dict[str, str], text: str) -> None:
    answer = http.post("/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400 and text in answer.text


def test_compressed_and_chunked_requests_are_understood(upstream: ScriptedUpstream, http: httpx.Client) -> None:
    plain = json.dumps(chat("hi")).encode()
    packed = gzip.compress(plain)
    assert http.post("/chat/completions", content=packed, headers={"content-encoding": "gzip"}).is_success
    assert http.post("/chat/completions", content=iter((plain[:9], plain[9:]))).is_success
    assert upstream.log[0].body == packed and upstream.log[1].body == plain


def test_other_paths_are_echoed_and_models_are_listed(upstream: ScriptedUpstream, http: httpx.Client) -> None:
    echo = http.request("DELETE", "/files/7?x=%20y", content=b"\x00\xff")
    assert (echo.content, echo.headers["x-echo"]) == (b"\x00\xff", "DELETE /v1/files/7?x=%20y")
    assert http.get("/models").json()["object"] == "list"
    assert http.get("/responses", headers={"upgrade": "websocket"}).status_code == 426
    assert upstream.conversations == []


# Faults


def test_injected_faults_befall_the_requests_they_are_meant_for(upstream: ScriptedUpstream, http: httpx.Client) -> None:
    def is_for_b(received: Received) -> bool:
        return b'"b"' in received.body

    upstream.inject(Fault(status=429, headers=(("retry-after", "3"),)), Fault(status=500, body=b"oops"), when=is_for_b)
    statuses = [http.post("/chat/completions", json=chat(text)) for text in ("a", "b", "b", "b")]
    assert [answer.status_code for answer in statuses] == [200, 429, 500, 200]
    assert statuses[1].headers["retry-after"] == "3" and statuses[2].content == b"oops"


def test_a_scripted_fault_befalls_its_step_once(http: httpx.Client) -> None:
    body = chat('[[! {"status": 503, "headers": {"retry-after": 0}}]] [[= fine]]')
    first, second = http.post("/chat/completions", json=body), http.post("/chat/completions", json=body)
    assert (first.status_code, first.headers["retry-after"], second.status_code) == (503, "0", 200)
    assert second.json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_come_compressed_and_in_single_bytes(
    upstream: ScriptedUpstream, http: httpx.Client, encoding: str, stream: bool
) -> None:
    upstream.inject(Fault(encoding=encoding, split=1))
    with http.stream("POST", "/chat/completions", json=chat("[[= grüße]]", stream=stream)) as answer:
        packed = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == encoding
    text = decode_body(packed, encoding).decode()
    assert "grüße" in (text if stream else json.loads(text)["choices"][0]["message"]["content"])


def test_a_truncated_answer_breaks_the_connection_at_its_byte(upstream: ScriptedUpstream, http: httpx.Client) -> None:
    upstream.inject(Fault(truncate_after=100))
    received = b""
    with (
        pytest.raises(httpx.TransportError),
        http.stream("POST", "/chat/completions", json=chat("hi", stream=True)) as answer,
    ):
        for chunk in answer.iter_raw():
            received += chunk
    assert len(received) == 100


def test_an_unfinished_stream_ends_cleanly_without_its_closing_events(
    upstream: ScriptedUpstream, http: httpx.Client
) -> None:
    upstream.inject(Fault(unfinished=True), Fault(unfinished=True))
    text = http.post("/chat/completions", json=chat("hi", stream=True)).text
    assert "Done after" in text and "[DONE]" not in text and '"finish_reason": "stop"' not in text
    text = http.post("/responses", json={"model": "m", "input": "hi", "stream": True}).text
    assert "response.created" in text and "response.completed" not in text


async def test_a_stalled_answer_goes_on_when_released() -> None:
    async with ScriptedUpstream() as upstream, httpx.AsyncClient(base_url=upstream.base_url, timeout=20) as client:
        upstream.inject(Fault(stall_after=40))
        async with client.stream("POST", "/chat/completions", json=chat("hi", stream=True)) as answer:
            chunks = answer.aiter_raw()
            head = await anext(chunks)
            assert len(head) <= 40 and not upstream.log[0].answered
            while len(head) < 40:
                head += await anext(chunks)
            upstream.release()
            rest = b"".join([chunk async for chunk in chunks])
        assert (head + rest).endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_is_noticed() -> None:
    async with ScriptedUpstream() as upstream, httpx.AsyncClient(base_url=upstream.base_url) as client:
        upstream.inject(Fault(stall=True))
        request = asyncio.ensure_future(client.post("/chat/completions", json=chat("hi")))
        await asyncio.to_thread(upstream.wait_for, lambda log: bool(log))
        request.cancel()
        await asyncio.to_thread(upstream.wait_for, lambda log: log[0].answered)
        assert upstream.log[0].disconnected


def test_a_title_request_without_tools_is_answered_at_once(http: httpx.Client) -> None:
    body = {"model": "small", "messages": chat("[[read {}]]")["messages"]}
    assert http.post("/chat/completions", json=body).json()["choices"][0]["finish_reason"] == "stop"


def test_usage_shows_what_the_cache_kept_until_its_clock_says_otherwise() -> None:
    now = 0.0
    with ScriptedUpstream(clock=lambda: now) as upstream, httpx.Client(base_url=upstream.base_url) as http:
        body = chat("x" * 8000)

        def cached() -> Any:
            usage = http.post("/chat/completions", json=body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert [cached(), cached()] == [0, 1920]
        now = 1000.0
        assert cached() == 0


async def test_a_connection_serves_on_after_a_stall() -> None:
    """The stall watches for the client to leave; that read must be over before the next request is read."""
    ask = request("/v1/chat/completions", json.dumps(chat("hi")).encode())
    async with ScriptedUpstream() as upstream, raw_client(upstream.port) as client:
        upstream.inject(Fault(stall=True))
        await client.send(ask)
        await asyncio.to_thread(upstream.wait_for, lambda log: len(log) == 1)
        upstream.release()
        first = await client.reply()
        await client.send(ask)
        assert (first.status, (await client.reply()).status) == (200, 200)
