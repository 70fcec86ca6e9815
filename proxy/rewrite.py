"""Leaving messages out of a request without touching a byte of what stays, and proof that nothing else happened.

This knows where messages stand and which belong together; it never looks inside one and does not choose what to leave
out.
"""

from collections.abc import Collection

from graphstore.blocks import Block, Cut, cut_blocks
from proxy.dialects import DIALECTS
from proxy.dialects.base import ParsedRequest, UnreadableRequest


class GuardFailure(Exception):
    """The outgoing body must not be sent; the original goes instead. The text says what does not hold."""


def render_rewritten(request: ParsedRequest, left_out: Collection[int], notice: bytes | None) -> bytes:
    """The client's bytes without the messages `left_out`, with `notice` directly after the instructions.

    `left_out` indexes `request.messages`. Every kept message brings the separator before it, so the array of a request
    that the client only appended to is an extension of this one.
    """
    if not left_out and notice is None:
        return request.body
    body, spans, leading = request.body, request.spans, request.leading
    dropped = {leading + index for index in left_out}
    ends = [end for _, end in spans]
    separators = [b","] + [body[end:start] for end, (start, _) in zip(ends, spans[1:], strict=False)]
    pieces = [
        (separator, body[start:end])
        for index, (separator, (start, end)) in enumerate(zip(separators, spans, strict=True))
        if index not in dropped
    ]
    if notice is not None:
        pieces.insert(leading, (b",", notice))
    array = b"".join(part for piece in pieces for part in piece).removeprefix(pieces[0][0] if pieces else b"")
    return body[: spans[0][0]] + array + body[ends[-1] :]


def check_rewritten(
    request: ParsedRequest,
    body: bytes,
    left_out: Collection[int],
    notice: bytes | None,
    into_turn: bool = False,
) -> None:
    """Read `body` as the upstream will; raise `GuardFailure` unless it is `request` without whole, expendable blocks.

    Pairs complete, order kept, every user and pinned block present, the current turn and everything outside the array
    untouched. `into_turn`: under pressure, of the current turn only the newest steps are untouched.
    """
    if not left_out and notice is None:
        _require(body == request.body, "nothing is left out, but the body changed")
        return
    _require(request.opaque is None, f"the request is opaque: {request.opaque}")
    cut = cut_blocks(request.messages)
    _require(not cut.open_calls, "a tool call has no result yet")
    _check_choice(cut, frozenset(left_out), cut.steps_start if into_turn else cut.turn_start)
    _check_bytes(request, body, frozenset(left_out), notice)
    _check_pairs(request, cut, frozenset(left_out))


def _check_choice(cut: Cut, left_out: frozenset[int], end: int) -> None:
    """Only whole blocks that may be left out, all of them before block `end`."""
    known = {index for block in cut.blocks for index in block.messages}
    _require(left_out <= known, "a message is left out that does not exist")
    for ordinal, block in enumerate(cut.blocks):
        gone = left_out.intersection(block.messages)
        if gone:
            _require(len(gone) == len(block.messages), f"block {ordinal} is split")
            _require(block.kind not in ("user", "pinned"), f"block {ordinal} is {block.kind} and must stay")
            _require(ordinal < end, f"block {ordinal} belongs to the current turn")


def _check_bytes(request: ParsedRequest, body: bytes, left_out: frozenset[int], notice: bytes | None) -> None:
    """The array holds exactly the kept messages in their order, and nothing around it changed."""
    try:
        outgoing = DIALECTS[request.dialect].parse_request(body)
    except UnreadableRequest as exc:
        raise GuardFailure(f"the outgoing body is not readable: {exc}") from exc
    expected = [request.body[start:end] for start, end in request.spans[: request.leading]]
    expected += [notice] if notice is not None else []
    expected += [request.raw(index) for index in range(len(request.messages)) if index not in left_out]
    _require([body[start:end] for start, end in outgoing.spans] == expected, "the kept messages are not the client's")
    _require(_around(outgoing) == _around(request), "bytes outside the messages changed")


def _around(request: ParsedRequest) -> tuple[bytes, bytes]:
    return request.body[: request.spans[0][0]], request.body[request.spans[-1][1] :]


def _check_pairs(request: ParsedRequest, cut: Cut, left_out: frozenset[int]) -> None:
    """What is sent falls into the very blocks that were kept: no result lost its call, no reasoning what it led to."""
    kept = [index for index in range(len(request.messages)) if index not in left_out]
    sent = cut_blocks([request.messages[index] for index in kept])
    stayed = [block for block in cut.blocks if not left_out.intersection(block.messages)]
    _require(not sent.open_calls, "a kept tool call lost its result")
    _require([_renumbered(block, kept) for block in sent.blocks] == stayed, "the kept messages form other blocks")


def _renumbered(block: Block, kept: list[int]) -> Block:
    return Block(block.kind, tuple(kept[index] for index in block.messages), block.cost, block.edits)


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise GuardFailure(reason)
