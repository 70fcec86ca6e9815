"""The half of reading a request that both wire formats share: from bytes to spans, digests and remembered facts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from graphstore.blocks import Message
from graphstore.identity import message_digest
from proxy.dialects.base import DialectName, ParsedRequest, UnreadableRequest
from proxy.dialects.facts import Facts, FactsMemory
from proxy.dialects.scan import Malformed, Span, read_value, split_array, split_object

BEGINNINGS_COUNT = 32
BEGINNINGS_BYTES = 4 << 20  # of bodies; some twenty of a usual length


@dataclass(frozen=True, slots=True)
class Fields:
    """Top-level members of a body, read one by one where they are needed."""

    body: bytes
    spans: dict[str, Span]

    def raw(self, name: str) -> bytes:
        """Raw bytes of the member; b"" when it is absent or null, which mean the same to every upstream."""
        start, end = self.spans.get(name, (0, 0))
        value = self.body[start:end]
        return b"" if value == b"null" else value

    def kind(self, name: str) -> bytes:
        """First byte of the member's value, which tells its type."""
        start, _ = self.spans.get(name, (0, 0))
        return self.body[start : start + 1] if name in self.spans else b""

    def text(self, name: str) -> str | None:
        """The member's string; None for anything else."""
        return read_value(self.raw(name)) if self.kind(name) == b'"' else None

    def flag(self, name: str) -> bool:
        return self.raw(name) == b"true"

    def array(self, name: str) -> bytes:
        """Raw bytes of the member; b"" also for an empty array."""
        raw = self.raw(name)
        return b"" if raw.startswith(b"[") and not raw[1:-1].strip() else raw


def read_fields(body: bytes) -> Fields:
    try:
        return Fields(body, split_object(body))
    except Malformed as exc:
        raise UnreadableRequest(f"the body is not a JSON object: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Beginning:
    """A body up to the end of its last message, and what was found in it."""

    head: bytes
    spans: tuple[Span, ...]
    digests: Sequence[bytes]
    facts: Sequence[Facts]


class Beginnings:
    """Requests read lately, so that one that goes on where another ended is read from there on.

    An agent resends its whole history with every request. Bytes that are equal have equal spans, digests and facts; one
    comparison of memory is two orders of magnitude cheaper than finding them again. Small and bounded: a request that
    is not remembered is only read more slowly. Threads may share it: every step works on the one tuple it has taken.
    """

    def __init__(self) -> None:
        self._kept: tuple[Beginning, ...] = ()  # the latest first

    def of(self, body: bytes) -> Beginning | None:
        """The longest remembered beginning of `body`."""
        found = (kept for kept in self._kept if body.startswith(kept.head))
        return max(found, key=lambda kept: len(kept.head), default=None)

    def keep(self, beginning: Beginning) -> None:
        others = (kept for kept in self._kept if not beginning.head.startswith(kept.head))
        kept, room = [beginning], BEGINNINGS_BYTES - len(beginning.head)
        for other in others:
            room -= len(other.head)
            if room < 0 or len(kept) == BEGINNINGS_COUNT:
                break
            kept.append(other)
        self._kept = tuple(kept)


def message_spans(fields: Fields, name: str, beginning: Beginning | None) -> tuple[Span, ...]:
    """Spans of the objects in the array member `name`, at least one. Those of `beginning` are known."""
    if fields.kind(name) != b"[":
        raise UnreadableRequest(f"`{name}` is not an array" if name in fields.spans else f"`{name}` is missing")
    try:
        spans = split_array(fields.body, fields.spans[name], beginning.spans if beginning is not None else ())
    except Malformed as exc:
        raise UnreadableRequest(f"`{name}` is not readable: {exc}") from exc
    if not spans:
        raise UnreadableRequest(f"`{name}` is empty")
    for index, (start, _) in enumerate(spans):
        if fields.body[start : start + 1] != b"{":
            raise UnreadableRequest(f"`{name}[{index}]` is not an object")
    return spans


def assemble_request(
    dialect: DialectName,
    fields: Fields,
    spans: tuple[Span, ...],
    memory: FactsMemory,
    *,
    notice_role: str,
    beginnings: Beginnings,
    beginning: Beginning | None,
    opaque: str | None = None,
) -> ParsedRequest:
    """Put the request together. `notice_role` is the default, where the client sends no instructions of its own."""
    body = fields.body
    _check_utf8(body[: spans[0][0]])
    _check_utf8(body[spans[-1][1] :])
    digests = list(beginning.digests) if beginning is not None else []
    facts = list(beginning.facts) if beginning is not None else []
    view = memoryview(body)
    for start, end in spans[len(digests) :]:
        digest = message_digest(view[start:end])
        digests.append(digest)
        facts.append(memory.get(digest) or memory.put(digest, _check_utf8(body[start:end])))
    beginnings.keep(Beginning(body[: spans[-1][1]], spans, digests, facts))
    leading = sum(1 for _ in takewhile(lambda fact: fact.message.role == "instruction", facts))
    heads = [body[start:end] for start, end in spans[:leading]]
    return ParsedRequest(
        dialect=dialect,
        body=body,
        model=fields.text("model") or "",
        stream=fields.flag("stream"),
        spans=spans,
        leading=leading,
        messages=resolve_messages(facts[leading:]),
        digests=tuple(digests[leading:]),
        instructions=b"\n".join(filter(None, [fields.raw("instructions"), *heads])),
        tools=fields.array("tools") or fields.array("functions") or _tools_among(facts[:leading], heads),
        notice_role=facts[leading - 1].wire_role if leading else notice_role,
        opaque=opaque or next((fact.opaque for fact in facts if fact.opaque), None),
        background=fields.flag("background"),
        cache_key=fields.text("prompt_cache_key"),
    )


def _check_utf8(raw: bytes) -> bytes:
    """`raw` itself. A message is checked when it is first read; its digest then vouches for it."""
    try:
        raw.decode()
    except UnicodeDecodeError as exc:
        raise UnreadableRequest("the body is not UTF-8") from exc
    return raw


def resolve_messages(facts: Sequence[Facts]) -> tuple[Message, ...]:
    """The messages of one history, each result under the id of its call: some may be answered by another one too."""
    if not any(fact.alias for fact in facts):
        return tuple(fact.message for fact in facts)
    aliases: dict[str, str] = {}
    messages = []
    for fact in facts:
        message = fact.message
        messages.append(replace(message, answers=tuple(aliases.get(answer, answer) for answer in message.answers)))
        for call in message.calls:  # the nearest call of an id is the one that is answered
            aliases.pop(call, None)
        if fact.alias:
            aliases[fact.alias[0]] = fact.alias[1]
    return tuple(messages)


def _tools_among(facts: list[Facts], heads: list[bytes]) -> bytes:
    return b"\n".join(head for fact, head in zip(facts, heads, strict=True) if fact.brings_tools)
