"""Chat completions: what a response says, as the one assistant message that the client would send back.

Of several choices only the first is read: agents ask for one.
"""

from typing import Any

from proxy.dialects.answer import (
    Members,
    body_error,
    build_answer,
    elements,
    error_text,
    is_event_stream,
    members,
    objects,
    read_object,
    text_or_none,
)
from proxy.dialects.base import Answer
from proxy.dialects.content import content_texts, join_texts
from proxy.dialects.scan import render_value
from proxy.dialects.sse import Event, decode_events

_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")  # delta fields that are pieces of one text


def parse_chat_answer(body: bytes, content_type: str) -> Answer:
    if is_event_stream(body, content_type):
        return _read_stream(decode_events(body))
    return _read_json(body)


def _read_json(body: bytes) -> Answer:
    raw = members(body)
    choices = map(members, elements(raw.get("choices", b"")))
    message_raw = next((choice.get("message") for choice in choices if choice.get("index", b"0") == b"0"), None)
    answer, message = read_object(body), read_object(message_raw)
    return build_answer(
        [message_raw] if message_raw and message else [],
        text=join_texts([*content_texts(message.get("content")), *content_texts(message.get("refusal"))]),
        complete=bool(message),
        waits_for_result=bool(message.get("tool_calls") or message.get("function_call")),
        usage=_usage(raw),
        response_id=text_or_none(answer.get("id")),
        error=body_error(answer),
    )


def _read_stream(events: list[Event]) -> Answer:
    reply = _Reply()
    usage: bytes | None = None
    response_id: str | None = None
    error: str | None = None
    is_closed = False
    for event in events:
        if event.data.strip() == b"[DONE]":
            is_closed = True
            continue
        chunk = read_object(event.data)
        error = error or body_error(chunk)
        if error is None and event.name == b"error":
            error = error_text(chunk or event.data.decode(errors="replace"))
        response_id = response_id or text_or_none(chunk.get("id"))
        if b'"usage"' in event.data:
            usage = _usage(members(event.data)) or usage
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) == 0:
                reply.add(choice.get("delta"))
                is_closed = is_closed or choice.get("finish_reason") is not None
    return build_answer(
        reply.render(),
        text=reply.text,
        complete=is_closed,
        waits_for_result=reply.waits_for_result,
        usage=usage,
        response_id=response_id,
        error=error,
    )


def _usage(raw: Members) -> bytes | None:
    """An object that counts something: beside the choices, or where Moonshot's and Groq's streams have it."""
    places = (
        raw.get("usage", b""),
        *(members(choice).get("usage", b"") for choice in elements(raw.get("choices", b""))),
        members(raw.get("x_groq", b"")).get("usage", b""),
    )
    return next((place for place in places if members(place)), None)


class _Reply:
    """An assistant message that grows by deltas."""

    def __init__(self) -> None:
        self._seen = False
        self._texts: dict[str, list[str]] = {}
        self._lists: dict[str, list[Any]] = {}
        self._calls: dict[Any, dict[str, Any]] = {}  # by index; parallel calls may arrive interleaved
        self._function: dict[str, Any] = {}

    def add(self, delta: Any) -> None:
        if not isinstance(delta, dict):
            return
        self._seen = True
        for key in _TEXTS:
            self._texts.setdefault(key, []).extend(content_texts(delta.get(key)))
        if isinstance(delta.get("reasoning_details"), list):
            self._lists.setdefault("reasoning_details", []).extend(delta["reasoning_details"])
        if isinstance(delta.get("function_call"), dict):
            _grow(self._function, delta["function_call"])
        for piece in objects(delta.get("tool_calls")):
            self._add_call(piece)

    def _add_call(self, piece: dict[str, Any]) -> None:
        """Some upstreams give no index, or 0 to all parallel calls: another id then begins another call."""
        last = next(reversed(self._calls), None)
        index = piece.get("index")
        index = index if type(index) is int else last
        known = self._calls.get(index, {}).get("id")
        if index is None or (piece.get("id") and known and piece["id"] != known):
            index = ("extra", len(self._calls))
        elif isinstance(last, tuple) and not piece.get("id"):
            index = last
        _grow(self._calls.setdefault(index, {}), {key: value for key, value in piece.items() if key != "index"})

    @property
    def waits_for_result(self) -> bool:
        return bool(self._calls or self._function)

    @property
    def text(self) -> str:
        return "".join(self._texts.get("content", ())) or "".join(self._texts.get("refusal", ()))

    def render(self) -> list[bytes]:
        """The message, or nothing when no delta came."""
        if not self._seen:
            return []
        texts = {key: "".join(pieces) for key, pieces in self._texts.items()}
        content = texts.pop("content", "")
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self.waits_for_result else "")}
        message |= {key: text for key, text in texts.items() if text} | self._lists
        if self._calls:
            message["tool_calls"] = list(self._calls.values())
        if self._function:
            message["function_call"] = self._function
        return [render_value(message)]


def _grow(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a delta: `arguments` and `input` are pieces of one text, everything else is said once."""
    for key, value in piece.items():
        known = whole.get(key)
        if key in ("arguments", "input") and isinstance(known, str) and isinstance(value, str):
            whole[key] = known + value
        elif isinstance(known, dict) and isinstance(value, dict):
            _grow(known, value)
        elif not known:
            whole[key] = value
