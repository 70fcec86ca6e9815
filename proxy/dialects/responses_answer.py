"""Responses: what a response says, as the output items that the client would send back, byte for byte."""

from collections.abc import Callable

from proxy.dialects.answer import (
    Members,
    body_error,
    build_answer,
    elements,
    error_text,
    is_event_stream,
    members,
    read_object,
    read_or_none,
    text_or_none,
)
from proxy.dialects.base import Answer
from proxy.dialects.content import content_texts, join_texts
from proxy.dialects.sse import decode_events

_CLOSING = frozenset({"response.completed", "response.incomplete", "response.failed"})


def parse_responses_answer(body: bytes, content_type: str, *, waits_for_result: Callable[[bytes], bool]) -> Answer:
    """`waits_for_result` tells of an output item whether the client must answer it."""
    if not is_event_stream(body, content_type):
        response = members(body)
        return _build(response, [], waits_for_result, complete="output" in response, error=_error(response))
    items: list[bytes] = []
    latest: Members = {}
    error: str | None = None
    is_closed = False
    for event in decode_events(body):
        payload = read_object(event.data)
        kind = text_or_none(payload.get("type")) or event.name.decode(errors="replace")
        if kind == "response.output_item.done":
            items += filter(None, [members(event.data).get("item")])
        elif kind == "error" or payload.get("error") is not None:  # the protocol's own event, or a gateway's
            error, is_closed = body_error(payload) or error_text(payload), True
        elif isinstance(payload.get("response"), dict):
            latest |= members(members(event.data).get("response", b""))
            is_closed = is_closed or kind in _CLOSING
            error = error or _error(latest)
    return _build(latest, items, waits_for_result, complete=is_closed, error=error)


def _build(
    response: Members,
    items: list[bytes],
    waits_for_result: Callable[[bytes], bool],
    *,
    complete: bool,
    error: str | None,
) -> Answer:
    items = items or elements(response.get("output", b""))
    return build_answer(
        items,
        text=join_texts([text for item in items for text in _said(item)]),
        complete=complete,
        waits_for_result=any(map(waits_for_result, items)),
        usage=response.get("usage"),
        response_id=text_or_none(read_or_none(response.get("id"))),
        error=error,
        transformations=_removed_count(response),
    )


def _error(response: Members) -> str | None:
    told = {name: read_or_none(response.get(name)) for name in ("error", "object", "message", "status")}
    return body_error(told) or ("the response failed" if told["status"] == "failed" else None)


def _said(raw: bytes) -> list[str]:
    item = read_object(raw)
    return content_texts(item.get("content")) if item.get("type") == "message" else []


def _removed_count(response: Members) -> int:
    """Reasoning items that the upstream kept from the model, by its own account."""
    actions = (members(entry).get("action") for entry in elements(response.get("input_transformations", b"")))
    return sum(action == b'"removed"' for action in actions)
