"""Messages as a client would write them, in either dialect: raw JSON, one `bytes` a message or item."""

import json
from collections.abc import Sequence
from typing import Any

from proxy.dialects.base import DialectName

Json = dict[str, Any]
PATHS: dict[DialectName, str] = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}
FIELDS: dict[DialectName, str] = {"chat": "messages", "responses": "input"}
_TEXT = {"user": "input_text", "developer": "input_text", "assistant": "output_text"}


def encoded(message: Json) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def user(dialect: DialectName, text: str) -> bytes:
    return _spoken(dialect, "user", text)


def said(dialect: DialectName, text: str) -> bytes:
    return _spoken(dialect, "assistant", text)


def note(dialect: DialectName, text: str) -> bytes:
    """Instructions that a client puts into the middle of its history."""
    return _spoken(dialect, "developer", text)


def _spoken(dialect: DialectName, role: str, text: str) -> bytes:
    if dialect == "chat":
        return encoded({"role": role, "content": text})
    return encoded({"type": "message", "role": role, "content": [{"type": _TEXT[role], "text": text}]})


def step(dialect: DialectName, tool: str, arguments: Json, result: str, call_id: str) -> tuple[bytes, bytes]:
    """A tool call and its result."""
    given = json.dumps(arguments)
    if dialect == "chat":
        call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": given}}
        return (
            encoded({"role": "assistant", "content": None, "tool_calls": [call]}),
            encoded({"role": "tool", "tool_call_id": call_id, "content": result}),
        )
    return (
        encoded({"type": "function_call", "call_id": call_id, "name": tool, "arguments": given}),
        encoded({"type": "function_call_output", "call_id": call_id, "output": result}),
    )


def tools_of(dialect: DialectName, names: Sequence[str]) -> list[Json]:
    """Definitions that take any arguments."""
    anything = {"type": "object", "properties": {}, "additionalProperties": True}
    functions = [{"name": name, "description": f"The tool {name}.", "parameters": anything} for name in names]
    if dialect == "chat":
        return [{"type": "function", "function": function} for function in functions]
    return [{"type": "function", **function} for function in functions]


def answer_body(dialect: DialectName, answer: Sequence[bytes]) -> bytes:
    """A complete response whose message or items these are."""
    if dialect == "chat":
        choice = b'{"index":0,"finish_reason":"stop","message":' + answer[0] + b"}"
        return b'{"id":"a","object":"chat.completion","choices":[' + choice + b"]}"
    return b'{"id":"a","object":"response","status":"completed","output":[' + b",".join(answer) + b"]}"
