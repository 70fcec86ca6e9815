"""The half of reading a request that both wire formats share: from bytes to spans, digests and remembered facts."""

from dataclasses import dataclass, replace
from itertools import takewhile

from graphstore.blocks import Message
from graphstore.identity import message_digest
from proxy.dialects.base import DialectName, ParsedRequest, UnreadableRequest
from proxy.dialects.facts import Facts, FactsMemory
from proxy.dialects.scan import Malformed, Span, read_value, split_array, split_object


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


def message_spans(fields: Fields, name: str) -> tuple[Span, ...]:
    """Spans of the objects in the array member `name`, at least one."""
    if fields.kind(name) != b"[":
        raise UnreadableRequest(f"`{name}` is not an array" if name in fields.spans else f"`{name}` is missing")
    try:
        spans = split_array(fields.body, fields.spans[name])
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
    opaque: str | None = None,
) -> ParsedRequest:
    """Put the request together. `notice_role` is the default, where the client sends no instructions of its own."""
    body = fields.body
    _check_utf8(body[: spans[0][0]])
    _check_utf8(body[spans[-1][1] :])
    view = memoryview(body)
    digests = [message_digest(view[start:end]) for start, end in spans]
    facts = [
        memory.get(digest) or memory.put(digest, _check_utf8(body[start:end]))
        for digest, (start, end) in zip(digests, spans, strict=True)
    ]
    aliases = dict(fact.alias for fact in facts if fact.alias)
    leading = sum(1 for _ in takewhile(lambda fact: fact.message.role == "instruction", facts))
    heads = [body[start:end] for start, end in spans[:leading]]
    return ParsedRequest(
        dialect=dialect,
        body=body,
        model=fields.text("model") or "",
        stream=fields.flag("stream"),
        spans=spans,
        leading=leading,
        messages=tuple(_with_call_id(fact.message, aliases) if aliases else fact.message for fact in facts[leading:]),
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


def _with_call_id(message: Message, aliases: dict[str, str]) -> Message:
    return replace(message, answers=tuple(aliases.get(answer, answer) for answer in message.answers))


def _tools_among(facts: list[Facts], heads: list[bytes]) -> bytes:
    return b"\n".join(head for fact, head in zip(facts, heads, strict=True) if fact.brings_tools)
