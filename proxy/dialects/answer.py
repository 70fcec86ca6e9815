"""The half of reading an answer that both wire formats share: JSON or events, errors, values of unknown shape."""

from typing import Any

from proxy.dialects.base import Answer, Usage
from proxy.dialects.content import argument_text
from proxy.dialects.scan import Malformed, read_value, split_array, split_object
from proxy.dialects.usage import parse_usage

Members = dict[str, bytes]  # raw value by key


def is_event_stream(body: bytes, content_type: str) -> bool:
    """By the header, unless the first bytes say otherwise: upstreams mislabel their streams and their errors."""
    head = body[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    if content_type.partition(";")[0].strip().lower() == "text/event-stream":
        return not head.startswith(b"{")
    return head.startswith((b"data:", b"event:", b"id:", b"retry:", b":"))


def members(raw: bytes) -> Members:
    """Raw members of an object; empty for anything else. A null member counts as absent."""
    try:
        spans = split_object(raw)
    except Malformed:
        return {}
    values = {name: raw[start:end] for name, (start, end) in spans.items()}
    return {name: value for name, value in values.items() if value != b"null"}


def elements(raw: bytes) -> list[bytes]:
    """Raw elements of an array; empty for anything else."""
    try:
        return [raw[start:end] for start, end in split_array(raw, (0, len(raw)))]
    except Malformed:
        return []


def read_or_none(raw: bytes | None) -> Any:
    try:
        return read_value(raw) if raw else None
    except Malformed:
        return None


def read_object(raw: bytes | None) -> dict[str, Any]:
    """The object that `raw` spells; empty for anything else."""
    value = read_or_none(raw)
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; none for anything else."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def error_text(error: Any) -> str:
    """What an error object says, with its code: `{"message", "code", "type"}`, or plain text."""
    if not isinstance(error, dict):
        return argument_text(error)
    message, code = error.get("message"), error.get("code") or error.get("type")
    told = [str(part) for part in (code, message) if part and isinstance(part, str | int)]
    return ": ".join(told) or argument_text(error)


def body_error(body: dict[str, Any]) -> str | None:
    """The error of a JSON body or event: `{"error": ...}`, or the flat `{"object": "error", "message": ...}`."""
    if body.get("error") is not None:
        return error_text(body["error"])
    if body.get("object") == "error":
        return text_or_none(body.get("message")) or "unnamed error"
    return None


def build_answer(
    messages: list[bytes],
    *,
    text: str,
    complete: bool,
    waits_for_result: bool,
    usage: bytes | None,
    response_id: str | None,
    error: str | None,
    transformations: int = 0,
) -> Answer:
    return Answer(
        messages=tuple(messages),
        text=text,
        complete=complete,
        ends_turn=complete and error is None and bool(messages) and not waits_for_result,
        usage_raw=usage.decode(errors="replace") if usage else None,
        usage=parse_usage(usage) if usage else Usage(),
        response_id=response_id,
        transformations=transformations,
        error=error,
    )
