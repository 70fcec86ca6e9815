"""The beginning of an answer with status 200: it may still be a refusal for the context's length. Pure.

Some upstreams say 200 first and look at the length afterwards: OpenAI's Responses (`response.failed`), OpenRouter,
SGLang and other gateways. Until an answer says something of its own, what would be wrong once another answer takes its
place is held back: events of a response that has only been created, a role without a word, the error itself. (A client
may check that they are of the same response as the end.) Where a refusal is unlikely only the error is: the first event
ends the watch. Comments and blank lines, by which upstreams keep a connection alive, pass.
"""

import re
from typing import Any

import msgspec

from proxy.dialects.answer import objects, read_object
from proxy.dialects.sse import Event, EventDecoder
from proxy.overflow import IN_ANSWER, overflow_of

HELD_BYTES_MAX = 1 << 20  # an event that a response begins with repeats its instructions and tools

_SILENT = frozenset({"response.created", "response.queued", "response.in_progress"})
_FIELDS = (b"data", b"event", b"id", b"retry", b":")
_ERRORS = (b'{"error"', b'{"object":"error"')  # how a JSON body begins that is nothing but an error
_COMMENT_AFTER = re.compile(rb"(?:^|[\r\n])[a-z][^\r\n]*[\r\n]+:")
_BLANK = b" \t\r\n"


class Opening:
    """Feed it an answer's bytes; what it returns may go out. `is_over`: it says something, and is looked at no more.

    `refusal`: the error, as JSON, by which it says that the context is too long; then nothing more may be fed.
    `keeps_all`: nothing passes before it is over, comments neither. `holds`: events that say nothing are held back.
    """

    def __init__(self, *, keeps_all: bool = False, holds: bool = True) -> None:
        self.is_over = False
        self.refusal: bytes | None = None
        self._keeps_all = keeps_all
        self._holds = holds
        self._held = bytearray()
        self._decoder = EventDecoder()
        self._is_silent = False  # an event that says nothing is held

    def feed(self, chunk: bytes) -> bytes:
        if self.is_over:
            return chunk
        self._held += chunk
        head = bytes(self._held[:512]).removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
        if head.startswith(b"{"):
            self._read_json(head)
        elif head and not any(head.startswith(name[: len(head)]) for name in _FIELDS):
            self.is_over = True
        else:
            self._read_events(chunk)
        if self.is_over or (self.refusal is None and self._may_pass()):
            return self.release()
        return b""

    def finish(self) -> bytes:
        """The same at the answer's end."""
        if not self.is_over:
            self._judge(self._decoder.finish())
            self.is_over = self.refusal is None
        return self.release() if self.is_over else b""

    def release(self) -> bytes:
        """What is held, to go out after all."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def _read_json(self, head: bytes) -> None:
        begin = re.sub(rb"\s", b"", head)
        is_error = any(error.startswith(begin[: len(error)]) for error in _ERRORS)
        self.is_over = not is_error or len(self._held) > HELD_BYTES_MAX
        if not self.is_over and head.rstrip().endswith(b"}"):
            error = _error_in(read_object(bytes(self._held).strip()), "")
            self.refusal, self.is_over = _refusal(error), error is not None and _refusal(error) is None

    def _read_events(self, chunk: bytes) -> None:
        self._judge(self._decoder.feed(chunk))
        # A comment after an event: this upstream has accepted the request, and waits for its model.
        waits = self._is_silent and _COMMENT_AFTER.search(self._held) is not None
        self.is_over = self.is_over or (self.refusal is None and (waits or len(self._held) > HELD_BYTES_MAX))

    def _judge(self, events: list[Event]) -> None:
        for event in events:
            name = event.name.decode(errors="replace")
            payload = read_object(event.data) if name not in _SILENT else {}
            error = _error_in(payload, name)
            if self._holds and (name in _SILENT or (error is None and _is_silent(payload))):
                self._is_silent = True
                continue
            self.refusal = _refusal(error)
            self.is_over = self.refusal is None
            return

    def _may_pass(self) -> bool:
        lines = self._held.splitlines()
        are_comments = self._held.endswith((b"\n", b"\r")) and all(not line or line[:1] == b":" for line in lines)
        return not self._keeps_all and not self._is_silent and (are_comments or not self._held.strip(_BLANK))


def _error_in(payload: dict[str, Any], name: str) -> Any:
    """What it says of an error, in either wire format; None: nothing. Other parts of it may repeat the request."""
    response = payload.get("response")
    if payload.get("error") is not None:
        return payload["error"]
    if isinstance(response, dict) and response.get("error") is not None:
        return response["error"]
    is_error = "error" in (name, payload.get("type"), payload.get("object"))
    return payload if is_error and payload else None


def _refusal(error: Any) -> bytes | None:
    raw = msgspec.json.encode(error) if error is not None else b""
    return raw if overflow_of(IN_ANSWER, raw) is not None else None


def _is_silent(payload: dict[str, Any]) -> bool:
    """No text, no call, no end: a response that was created, or the role of a message to come."""
    if payload.get("type") in _SILENT:
        return True
    choices = payload.get("choices")
    if not isinstance(choices, list) or "type" in payload:
        return False
    return not any(_says(choice) for choice in objects(choices))


def _says(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    said = [value for key, value in delta.items() if key != "role"] if isinstance(delta, dict) else []
    return any(said) or choice.get("finish_reason") is not None or bool(choice.get("message") or choice.get("text"))
