"""How a provider writes a step of the model: one JSON object or an event stream, in either dialect.

Pure functions from a `Reply` to bytes. The streams hold what real agents need and what real providers send: deltas in
several pieces, reasoning, parallel calls, usage, the closing events.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tests.fakes.model_script import Step

Json = dict[str, Any]
ToolKind = Literal["function", "custom"]

REASONING_TOKENS = 16
_DELTA_CHARS = 24
_CREATED = 1_796_000_000


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a tool was declared, which decides how a call to it is written."""

    kind: ToolKind = "function"
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """One step of the model, ready to be written.

    `seed` makes its ids, `transformations` are the reasoning items that it did not read.
    """

    seed: str
    model: str
    step: Step
    tools: dict[str, ToolForm]
    input_tokens: int
    cached_tokens: int
    sealed_reasoning: str | None  # encrypted_content; None: the model does not reason
    transformations: tuple[Json, ...] = ()

    @property
    def output_tokens(self) -> int:
        written = len(self.step.text) + sum(len(c.name) + len(c.arguments) for c in self.step.calls)
        return -(-written // 4) + (REASONING_TOKENS if self.sealed_reasoning else 0)


@dataclass(frozen=True, slots=True)
class Written:
    """A response body in the pieces in which it is sent. The last `closing` pieces end the stream properly."""

    content_type: str
    pieces: tuple[bytes, ...]
    closing: int = 0


def write_json(value: Json) -> Written:
    return Written("application/json", (json.dumps(value).encode(),))


def write_chat(reply: Reply, *, stream: bool, include_usage: bool) -> Written:
    finish = "tool_calls" if reply.step.calls else "stop"
    if not stream:
        message: Json = {"role": "assistant", "content": None if reply.step.calls else reply.step.text, "refusal": None}
        if reply.sealed_reasoning:
            message["reasoning_content"] = "Thinking."
        if reply.step.calls:
            message["tool_calls"] = [_chat_call(reply, i) for i in range(len(reply.step.calls))]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return write_json({**_chat_head(reply, "chat.completion"), "choices": [choice], "usage": _chat_usage(reply)})

    def chunk(choices: list[Json], **extra: object) -> bytes:
        return _sse({**_chat_head(reply, "chat.completion.chunk"), "choices": choices, **extra})

    def delta(value: Json, finish_reason: str | None = None) -> bytes:
        return chunk([{"index": 0, "delta": value, "finish_reason": finish_reason}])

    closing = [delta({}, finish)]
    if include_usage:
        closing.append(chunk([], usage=_chat_usage(reply)))
    closing.append(b"data: [DONE]\n\n")
    pieces = [*(delta(value) for value in _chat_deltas(reply)), *closing]
    return Written("text/event-stream", tuple(pieces), len(closing))


def _chat_head(reply: Reply, kind: str) -> Json:
    return {"id": f"chatcmpl-{reply.seed}", "object": kind, "created": _CREATED, "model": reply.model}


def _chat_call(reply: Reply, index: int) -> Json:
    call = reply.step.calls[index]
    form = reply.tools.get(call.name, ToolForm())
    head = {"id": f"call_{reply.seed}_{index}", "type": form.kind}
    if form.kind == "custom":
        return {**head, "custom": {"name": call.name, "input": call.arguments}}
    return {**head, "function": {"name": call.name, "arguments": call.arguments}}


def _chat_deltas(reply: Reply) -> Iterator[Json]:
    yield {"role": "assistant", "content": ""}
    if reply.sealed_reasoning:
        yield {"reasoning_content": "Thinking."}
    for piece in _split(reply.step.text):
        yield {"content": piece}
    for index in range(len(reply.step.calls)):
        call = _chat_call(reply, index)
        if call["type"] == "custom":
            yield {"tool_calls": [{"index": index, **call}]}
            continue
        arguments = call["function"]["arguments"]
        opening = {**call, "function": {**call["function"], "arguments": ""}}
        yield {"tool_calls": [{"index": index, **opening}]}
        for piece in _split(arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _chat_usage(reply: Reply) -> Json:
    return {
        "prompt_tokens": reply.input_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.input_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": REASONING_TOKENS if reply.sealed_reasoning else 0},
    }


def write_responses(reply: Reply, *, stream: bool, compacts: bool = False) -> Written:
    """`compacts`: the request ended in a `compaction_trigger`, so the answer is one compaction item."""
    output = _compaction(reply) if compacts else response_items(reply)
    final = _response(reply, "completed", output)
    if not stream:
        return write_json(final)
    events: list[Json] = [
        {"type": "response.created", "response": _response(reply, "in_progress", [])},
        {"type": "response.in_progress", "response": _response(reply, "in_progress", [])},
    ]
    for index, item in enumerate(output):
        events += _item_events(item, index)
    events.append({"type": "response.completed", "response": final})
    pieces = [_sse({**event, "sequence_number": n}, event["type"]) for n, event in enumerate(events)]
    return Written("text/event-stream", tuple(pieces), closing=1)


def response_items(reply: Reply) -> list[Json]:
    """The output items of a step: reasoning first, then its calls or its message."""
    items: list[Json] = []
    if reply.sealed_reasoning:
        summary = [{"type": "summary_text", "text": "Thinking."}]
        head = {"id": f"rs_{reply.seed}", "type": "reasoning", "summary": summary}
        items.append({**head, "encrypted_content": reply.sealed_reasoning})
    for index, call in enumerate(reply.step.calls):
        items.append(_response_call(reply, index, reply.tools.get(call.name, ToolForm())))
    if not reply.step.calls:
        part = {"type": "output_text", "text": reply.step.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{reply.seed}", "type": "message", "status": "completed", "role": "assistant"}
        items.append({**head, "content": [part]})
    return items


def _response_call(reply: Reply, index: int, form: ToolForm) -> Json:
    call = reply.step.calls[index]
    head: Json = {"status": "completed", "call_id": f"call_{reply.seed}_{index}", "name": call.name}
    if form.namespace:
        head["namespace"] = form.namespace
    if form.kind == "custom":
        return {"id": f"ctc_{reply.seed}_{index}", "type": "custom_tool_call", **head, "input": call.arguments}
    return {"id": f"fc_{reply.seed}_{index}", "type": "function_call", **head, "arguments": call.arguments}


def _item_events(item: Json, index: int) -> Iterator[Json]:
    where = {"item_id": item["id"], "output_index": index}
    match item["type"]:
        case "message":
            part = item["content"][0]
            yield _added(index, {**item, "status": "in_progress", "content": []})
            spot = {**where, "content_index": 0}
            yield {"type": "response.content_part.added", **spot, "part": {**part, "text": ""}}
            for piece in _split(part["text"]):
                yield {"type": "response.output_text.delta", **spot, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **spot, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **spot, "part": part}
        case "function_call":
            yield _added(index, {**item, "status": "in_progress", "arguments": ""})
            for piece in _split(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **where, "delta": piece}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **where, **done}
        case "custom_tool_call":
            yield _added(index, {**item, "status": "in_progress", "input": ""})
            for piece in _split(item["input"]):
                yield {"type": "response.custom_tool_call_input.delta", **where, "delta": piece}
            yield {"type": "response.custom_tool_call_input.done", **where, "input": item["input"]}
        case "reasoning":
            yield _added(index, {**item, "summary": []})
            spot = {**where, "summary_index": 0}
            part = item["summary"][0]
            yield {"type": "response.reasoning_summary_part.added", **spot, "part": {**part, "text": ""}}
            yield {"type": "response.reasoning_summary_text.delta", **spot, "delta": part["text"]}
            yield {"type": "response.reasoning_summary_text.done", **spot, "text": part["text"]}
            yield {"type": "response.reasoning_summary_part.done", **spot, "part": part}
        case _:
            yield _added(index, item)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _added(index: int, item: Json) -> Json:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _response(reply: Reply, status: str, output: list[Json]) -> Json:
    usage: Json | None = None
    if status == "completed":
        usage = {
            "input_tokens": reply.input_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": REASONING_TOKENS if reply.sealed_reasoning else 0},
            "total_tokens": reply.input_tokens + reply.output_tokens,
        }
    return {
        "id": f"resp_{reply.seed}",
        "object": "response",
        "created_at": _CREATED,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": reply.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "input_transformations": list(reply.transformations),
        "usage": usage,
    }


def _compaction(reply: Reply) -> list[Json]:
    sealed = base64.b64encode(f"compacted {reply.seed}".encode()).decode()
    return [{"id": f"cmp_{reply.seed}", "type": "compaction", "encrypted_content": sealed}]


def _split(text: str) -> Iterator[str]:
    for start in range(0, len(text), _DELTA_CHARS):
        yield text[start : start + _DELTA_CHARS]


def _sse(value: Json, event: str | None = None) -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
