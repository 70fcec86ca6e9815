"""Responses: what stands in `input`.

Calls and results are separate items that pair by id, reasoning stands in items of its own, and some items change what
the upstream does from there on. Those, and every type that we do not know, are `other`, which nobody leaves out.
"""

from collections.abc import Sequence
from typing import Any

from graphstore.blocks import Message, Role
from graphstore.protected import edited_files
from proxy.dialects.base import Answer, DialectName, ParsedRequest
from proxy.dialects.content import (
    NOTICE,
    PART_CHARS,
    argument_text,
    call_line,
    content_chars,
    content_texts,
    join_texts,
    one_line,
    text_or_empty,
)
from proxy.dialects.facts import Facts, FactsMemory
from proxy.dialects.request import (
    Beginning,
    Beginnings,
    Fields,
    assemble_request,
    message_spans,
    read_fields,
    resolve_messages,
)
from proxy.dialects.responses_answer import parse_responses_answer
from proxy.dialects.scan import Malformed, Span, read_value, render_value, split_object

# Item type -> tool name where the item has none, and the member that holds what the tool is asked to do.
_CLIENT_CALLS = {
    "function_call": ("", "arguments"),
    "custom_tool_call": ("", "input"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
}
_SERVER_CALLS = {
    "web_search_call": ("web_search", "action"),
    "file_search_call": ("file_search", "queries"),
    "code_interpreter_call": ("code_interpreter", "code"),
    "image_generation_call": ("image_generation", "revised_prompt"),
}
_CALLS = _CLIENT_CALLS | _SERVER_CALLS
_OUTPUTS = frozenset(f"{call}_output" for call in _CLIENT_CALLS)

# Members of a body that let the upstream add history which we cannot see.
_HIDDEN_HISTORY = {
    "previous_response_id": "previous_response_id",
    "conversation": "conversation",
    "prompt": "prompt template",
}


class ResponsesDialect:
    """`part_chars` is what an image, sound or file counts in a block's cost."""

    name: DialectName = "responses"

    def __init__(self, *, part_chars: int = PART_CHARS) -> None:
        self._part_chars = part_chars
        self._memory = FactsMemory(self._read_facts)
        self._beginnings = Beginnings()

    def parse_request(self, body: bytes) -> ParsedRequest:
        fields = read_fields(body)
        opaque = next((reason for name, reason in _HIDDEN_HISTORY.items() if fields.raw(name)), None)
        beginning = self._beginnings.of(body)
        spans = _input_spans(fields, beginning)
        return assemble_request(
            self.name,
            fields,
            spans,
            self._memory,
            notice_role="developer",
            beginnings=self._beginnings,
            beginning=beginning,
            opaque=opaque,
        )

    def parse_message(self, raw: bytes) -> Message:
        return self._read_facts(raw).message

    def parse_messages(self, raws: Sequence[bytes]) -> tuple[Message, ...]:
        return resolve_messages([self._read_facts(raw) for raw in raws])

    def message_text(self, raw: bytes) -> str:
        item = _read_item(raw)
        return join_texts([*content_texts(item.get("content")), *content_texts(_output(item))] if _speaks(item) else [])

    def call_text(self, raw: bytes) -> str:
        call = _call(_read_item(raw))
        return f"{call[0]} {argument_text(call[1])}" if call else ""

    def label(self, raw: bytes) -> str:
        item = _read_item(raw)
        call = _call(item)
        said = call_line(*call) if call else self.message_text(raw)
        kind = text_or_empty(item.get("type")) or text_or_empty(item.get("role")) or "unreadable"
        return one_line(said or f"({kind})")

    def render_notice(self, role: str) -> bytes:
        return render_value({"type": "message", "role": role, "content": [{"type": "input_text", "text": NOTICE}]})

    def parse_answer(self, body: bytes, content_type: str) -> Answer:
        return parse_responses_answer(body, content_type, waits_for_result=self._waits_for_result)

    def _waits_for_result(self, raw: bytes) -> bool:
        return bool(self.parse_message(raw).calls)

    def _read_facts(self, raw: bytes) -> Facts:
        if raw.startswith(b'"'):
            message = Message("user", cost=self._cost(_read_item(raw)))
            return Facts(message, opaque="string input")
        try:
            split_object(raw)
        except Malformed:
            return Facts(Message("other"))
        item = _read_item(raw)
        cost = self._cost(item)
        kind, role = _kind(item), item.get("role")
        match kind:
            case "message" if role in ("user", "assistant"):
                return Facts(Message(role, cost=cost))
            case "reasoning":
                return Facts(Message("reasoning", cost=cost))
            case "item_reference" | "compaction_trigger":
                return Facts(Message("other", cost=cost), opaque=kind)
        if kind in _CALLS:
            return self._read_call(kind, item, cost)
        if kind in _OUTPUTS:
            return Facts(Message("output", answers=_answers(kind, item), cost=cost))
        if role in ("system", "developer"):
            brings_tools = kind == "additional_tools" and bool(item.get("tools"))
            return Facts(Message("instruction", cost=cost), wire_role=role, brings_tools=brings_tools)
        return Facts(Message("other", cost=cost))

    def _read_call(self, kind: str, item: dict[str, Any], cost: int) -> Facts:
        """A call; `other` when it is part of a program, or when nothing could answer it."""
        call = _call(item)
        edits = edited_files(*call) if call else ()
        if kind in _SERVER_CALLS:
            return Facts(Message("call", cost=cost, edits=edits))
        own, pairing = item.get("id"), item.get("call_id")
        if kind == "local_shell_call" and not pairing:
            pairing = own
        if not isinstance(pairing, str):
            return Facts(Message("other", cost=cost, edits=edits))
        role: Role = "other" if _has_program(item) else "call"
        alias = (own, pairing) if kind == "local_shell_call" and isinstance(own, str) else None
        return Facts(Message(role, calls=(pairing,), cost=cost, edits=edits), alias=alias)

    def _cost(self, item: dict[str, Any]) -> int:
        call = _call(item)
        chars = len(call[0]) + len(argument_text(call[1])) if call else 0
        chars += self._part_chars if item.get("type") == "image_generation_call" else 0
        if _speaks(item):
            chars += content_chars(item.get("content"), self._part_chars)
            chars += content_chars(_output(item), self._part_chars)
        return chars


def _input_spans(fields: Fields, beginning: Beginning | None) -> tuple[Span, ...]:
    """`input` may be a string, which stands for one user message."""
    if fields.kind("input") == b'"':
        return (fields.spans["input"],)
    return message_spans(fields, "input", beginning)


def _read_item(raw: bytes) -> dict[str, Any]:
    """The item as a value; a string reads as the user message that it stands for; empty when not readable."""
    try:
        item = read_value(raw)
    except Malformed:
        return {}
    if isinstance(item, str):
        return {"role": "user", "content": item}
    return item if isinstance(item, dict) else {}


def _kind(item: dict[str, Any]) -> str:
    """The item's type. Messages may come without one; a lone id refers to a stored item."""
    kind = item.get("type")
    if isinstance(kind, str):
        return kind
    if kind is not None:
        return ""
    if "role" in item:
        return "message"
    return "item_reference" if "id" in item else ""


def _call(item: dict[str, Any]) -> tuple[str, Any] | None:
    """Tool name and arguments as sent."""
    kind = item.get("type")
    if not isinstance(kind, str) or kind not in _CALLS:
        return None
    name, member = _CALLS[kind]
    arguments = item.get(member)
    return text_or_empty(item.get("name")) or name, "" if arguments is None else arguments


def _answers(kind: str, item: dict[str, Any]) -> tuple[str, ...]:
    """Id of the answered call. A local shell's output has it in `id`, though clients also send `call_id`."""
    answered = item.get("call_id")
    if kind == "local_shell_call_output" and not answered:
        answered = item.get("id")
    return (answered,) if isinstance(answered, str) else ()


def _has_program(item: dict[str, Any]) -> bool:
    """A call made by a program belongs to it; `direct` means that the model itself made it."""
    caller = item.get("caller")
    return caller is not None and not (isinstance(caller, dict) and caller.get("type") == "direct")


def _speaks(item: dict[str, Any]) -> bool:
    """Reasoning is not message text, in whatever form it is visible."""
    return item.get("type") != "reasoning"


def _output(item: dict[str, Any]) -> Any:
    """What a tool gave back: a string, parts, or the two streams of each shell command."""
    output = item.get("output")
    if item.get("type") != "shell_call_output" or not isinstance(output, list):
        return output
    results = [result for result in output if isinstance(result, dict)]
    return [result.get(stream) or "" for result in results for stream in ("stdout", "stderr")]
