"""Chat completions: what stands in `messages`.

A message is read once for its facts and never rebuilt. What this dialect does not understand is `other`, which nobody
leaves out.
"""

from collections.abc import Sequence
from typing import Any

from graphstore.blocks import Message
from graphstore.protected import edited_files
from proxy.dialects.base import Answer, DialectName, ParsedRequest
from proxy.dialects.chat_answer import parse_chat_answer
from proxy.dialects.content import (
    NOTICE,
    PART_CHARS,
    argument_text,
    call_line,
    calls_line,
    content_chars,
    content_texts,
    join_texts,
    one_line,
    text_or_empty,
)
from proxy.dialects.facts import Facts, FactsMemory
from proxy.dialects.request import Beginnings, assemble_request, message_spans, read_fields, resolve_messages
from proxy.dialects.scan import Malformed, read_value, render_value, split_object

Call = tuple[str, Any]  # tool name, arguments as sent


class ChatDialect:
    """`part_chars` is what an image, sound or file counts in a block's cost."""

    name: DialectName = "chat"

    def __init__(self, *, part_chars: int = PART_CHARS) -> None:
        self._part_chars = part_chars
        self._memory = FactsMemory(self._read_facts)
        self._beginnings = Beginnings()

    def parse_request(self, body: bytes) -> ParsedRequest:
        fields = read_fields(body)
        beginning = self._beginnings.of(body)
        spans = message_spans(fields, "messages", beginning)
        return assemble_request(
            self.name,
            fields,
            spans,
            self._memory,
            notice_role="system",
            beginnings=self._beginnings,
            beginning=beginning,
        )

    def parse_message(self, raw: bytes) -> Message:
        return self._read_facts(raw).message

    def parse_messages(self, raws: Sequence[bytes]) -> tuple[Message, ...]:
        return resolve_messages([self._read_facts(raw) for raw in raws])

    def message_text(self, raw: bytes) -> str:
        message = _read_message(raw)
        return join_texts([*content_texts(message.get("content")), *content_texts(message.get("refusal"))])

    def call_text(self, raw: bytes) -> str:
        return "\n".join(f"{name} {argument_text(arguments)}" for name, arguments in _calls(_read_message(raw)))

    def label(self, raw: bytes) -> str:
        message = _read_message(raw)
        calls = calls_line(call_line(name, arguments) for name, arguments in _calls(message))
        return calls or one_line(self.message_text(raw) or f"({text_or_empty(message.get('role')) or 'unreadable'})")

    def render_notice(self, role: str) -> bytes:
        return render_value({"role": role, "content": NOTICE})

    def parse_answer(self, body: bytes, content_type: str) -> Answer:
        return parse_chat_answer(body, content_type)

    def _read_facts(self, raw: bytes) -> Facts:
        try:
            split_object(raw)
        except Malformed:
            return Facts(Message("other"))
        message = _read_message(raw)
        role = message.get("role")
        cost = self._cost(message)
        match role:
            case "system" | "developer":
                return Facts(Message("instruction", cost=cost), wire_role=role)
            case "user":
                return Facts(Message("user", cost=cost))
            case "assistant":
                return Facts(_read_assistant(message, cost))
            case "tool":
                return Facts(Message("output", answers=_ids([message.get("tool_call_id")]), cost=cost))
            case "function":
                return Facts(Message("output", answers=_ids([_function_id(message)]), cost=cost))
            case _:
                return Facts(Message("other", cost=cost))

    def _cost(self, message: dict[str, Any]) -> int:
        called = (value for value in (message.get("tool_calls"), message.get("function_call")) if value)
        return (
            content_chars(message.get("content"), self._part_chars)
            + content_chars(message.get("refusal"), self._part_chars)
            + sum(len(render_value(value).decode()) for value in called)
        )


def _read_message(raw: bytes) -> dict[str, Any]:
    """The message as a value; empty when it is not readable."""
    try:
        message = read_value(raw)
    except Malformed:
        return {}
    return message if isinstance(message, dict) else {}


def _read_assistant(message: dict[str, Any], cost: int) -> Message:
    """An assistant message: `call` when it calls tools; `other` when one of its calls cannot be paired by id."""
    announced = message.get("tool_calls") or []
    legacy = message.get("function_call")
    if not isinstance(announced, list):
        return Message("other", cost=cost)
    wanted = [call.get("id") if isinstance(call, dict) else None for call in announced]
    if legacy:
        wanted.append(_function_id(legacy) if isinstance(legacy, dict) else None)
    calls = _ids(wanted)
    edits = dict.fromkeys(path for call in _calls(message) for path in edited_files(*call))
    if len(calls) < len(wanted):
        return Message("other", calls=calls, cost=cost, edits=tuple(edits))
    return Message("call" if calls else "assistant", calls=calls, cost=cost, edits=tuple(edits))


def _ids(values: list[Any]) -> tuple[str, ...]:
    return tuple(value for value in values if isinstance(value, str))


def _function_id(named: dict[str, Any]) -> str | None:
    """Legacy function calls have no id: a call and its answer share the function's name."""
    name = named.get("name")
    return f"function:{name}" if isinstance(name, str) else None


def _calls(message: dict[str, Any]) -> list[Call]:
    """Calls in order: functions, custom tools, the legacy function call; whatever has another form is passed over."""
    announced = message.get("tool_calls")
    entries = [call for call in announced if isinstance(call, dict)] if isinstance(announced, list) else []
    bodies = [entry.get("function") or entry.get("custom") for entry in entries] + [message.get("function_call")]
    return [
        (text_or_empty(body.get("name")), body.get("arguments", body.get("input", "")))
        for body in bodies
        if isinstance(body, dict)
    ]
