"""Server-sent events out of bytes that arrive in any cut. No I/O; the relay forwards the same bytes untouched.

Lines end in LF, CRLF or CR. Bytes are kept until a line is complete, so a character or a line end that was cut in two
is whole again before anybody reads it.
"""

from dataclasses import dataclass

EVENT_BYTES_MAX = 64 * 2**20  # a terminal event repeats the whole response, images in base64 included

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    name: bytes  # b"" when the stream names none
    data: bytes  # its data lines joined by LF


class EventDecoder:
    """Feed it bytes as they come, then `finish`. An event above the bound is passed over and counted."""

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.oversized_count = 0
        self._event_bytes_max = event_bytes_max
        self._line: list[bytes] = []  # pieces of the line that is not complete yet
        self._line_bytes = 0
        self._name = b""
        self._data: list[bytes] = []
        self._event_bytes = 0
        self._first_line = True
        self._after_return = False  # the last byte was a CR: an LF that follows belongs to it

    def feed(self, chunk: bytes) -> list[Event]:
        """Events that `chunk` completes."""
        if not chunk:
            return []
        if self._after_return:
            chunk = chunk.removeprefix(b"\n")
        self._after_return = chunk.endswith(b"\r")
        events: list[Event] = []
        for line in chunk.splitlines(keepends=True):
            text = line.rstrip(b"\r\n")
            self._line_bytes += len(text)
            self._event_bytes += len(text)
            if not self._is_oversized:
                self._line.append(text)
            if len(text) < len(line):
                events += self._end_line()
        return events

    def finish(self) -> list[Event]:
        """The last event, when the stream ended without the empty line that closes it."""
        return [*self._end_line(), *self._end_event()]

    @property
    def _is_oversized(self) -> bool:
        return self._event_bytes > self._event_bytes_max

    def _end_line(self) -> list[Event]:
        line, is_empty = b"".join(self._line), not self._line_bytes
        self._line, self._line_bytes = [], 0
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if is_empty:
            return self._end_event()
        if not self._is_oversized:
            self._read_field(line)
        return []

    def _read_field(self, line: bytes) -> None:
        """A line without a name is a comment; `id` and `retry` mean nothing to us."""
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value

    def _end_event(self) -> list[Event]:
        self.oversized_count += self._is_oversized
        events = [Event(self._name, b"\n".join(self._data))] if self._data and not self._is_oversized else []
        self._name, self._data, self._event_bytes = b"", [], 0
        return events


def decode_events(body: bytes) -> list[Event]:
    """All events of a whole stream, in order."""
    decoder = EventDecoder()
    return [*decoder.feed(body), *decoder.finish()]
