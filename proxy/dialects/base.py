"""What the rest of the proxy knows of a wire format: two values and one protocol.

A `ParsedRequest` keeps the client's bytes and points into them; nothing is rebuilt from it. An `Answer` is what one
response says, whatever its transport (JSON or an event stream, compressed or not).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from graphstore.blocks import Message

DialectName = Literal["chat", "responses"]


class UnreadableRequest(ValueError):
    """The body is not what this dialect expects; it is forwarded untouched. The text says why, for the record."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request body, cut at message boundaries.

    `spans` are byte ranges (start, end) of every element of `messages`/`input` in `body`, the first `leading` of which
    are instructions. `messages` and `digests` describe `spans[leading:]`, the history plus the current turn.
    `opaque` names the reason why this request is never rewritten, or is None.
    """

    dialect: DialectName
    body: bytes
    model: str
    stream: bool
    spans: tuple[tuple[int, int], ...]
    leading: int
    messages: tuple[Message, ...]
    digests: tuple[bytes, ...]
    instructions: bytes  # raw bytes of the leading instruction messages and the `instructions` field
    tools: bytes  # raw bytes of the `tools` value, b"" when absent or empty
    notice_role: str  # role for a notice message: the one that the client uses for its instructions
    opaque: str | None
    background: bool  # responses only: the client may leave while the upstream goes on
    cache_key: str | None  # prompt_cache_key

    def raw(self, index: int) -> bytes:
        """Raw JSON bytes of history message `index` (instructions not counted)."""
        start, end = self.spans[self.leading + index]
        return self.body[start:end]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts by the provider, normalised: `input` includes cached and written tokens. None: not reported."""

    input: int | None = None
    cached: int | None = None
    cache_write: int | None = None
    output: int | None = None
    reasoning: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a response said. `complete` is False for a stream that ended without its closing event."""

    messages: tuple[bytes, ...]  # raw JSON: one assistant message (chat) or the output items (responses)
    text: str
    complete: bool
    ends_turn: bool  # no tool call is waiting for a result
    usage_raw: str | None
    usage: Usage
    response_id: str | None
    transformations: int  # items in `input_transformations` with action "removed"
    error: str | None


class Dialect(Protocol):
    """One wire format. All methods are pure; only `parse_request` may raise, and only `UnreadableRequest`."""

    name: DialectName

    def parse_request(self, body: bytes) -> ParsedRequest: ...

    def parse_message(self, raw: bytes) -> Message:
        """Facts of one message. Total: what is not understood has role `other`."""

    def parse_messages(self, raws: Sequence[bytes]) -> tuple[Message, ...]:
        """Facts of a whole history, results under the ids of their calls, as `parse_request` gives them. Total."""

    def message_text(self, raw: bytes) -> str:
        """Text for identifiers, search and token counts: message text only, not call arguments, never base64."""

    def call_text(self, raw: bytes) -> str:
        """Names and arguments of the calls in one message; '' when it makes none."""

    def label(self, raw: bytes) -> str:
        """One line for people, at most 160 characters: tool names with their file or command, or the first words."""

    def render_notice(self, role: str) -> bytes:
        """The constant message that says that earlier messages are not shown."""

    def parse_answer(self, body: bytes, content_type: str) -> Answer:
        """Read a response body (already decompressed): JSON or an event stream. Total."""
