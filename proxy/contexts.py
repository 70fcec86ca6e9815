"""The served context of a finished turn, read back from the archive: what the worker replays.

Knows the dialects and the archive, no model. Blocks stand in the order of their first message, so a result that came
late stands with its call. The tools' definitions are not part of it: no block could be observed in them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphstore.blocks import Role as MessageRole
from graphstore.identifiers import leading_identifiers
from graphstore.records import ExchangeRow
from graphstore.replays import ReplayJob
from graphstore.store.reader import Reader
from graphstore.store.report import left_out_of
from proxy.dialects import stored_dialect
from proxy.dialects.base import Dialect
from proxy.dialects.content import NOTICE
from proxy.dialects.scan import Malformed, read_value
from proxy_model.context import ContextBlock, Part, Role
from proxy_model.errors import ReplayError

ROLES: dict[MessageRole, Role] = {
    "instruction": "system",
    "user": "user",
    "assistant": "assistant",
    "call": "assistant",
    "reasoning": "assistant",
    "output": "tool",
    "other": "user",
}
LOST = "nothing is to be done: later turns are replayed as usual"


@dataclass(frozen=True, slots=True)
class Context:
    """`identifiers` are the leading identifiers of each block that the graph knows, for the stale rule."""

    blocks: tuple[ContextBlock, ...]
    identifiers: dict[int, frozenset[str]]


@dataclass(frozen=True, slots=True)
class _Served:
    """A block as it was served. `first` is the position of its first message in the whole history."""

    ordinal: int | None
    first: int
    messages: list[bytes]


def context_of(reader: Reader, job: ReplayJob) -> Context:
    """What stood in the last request of this turn and what came back. Raises ReplayError when that is not archived."""
    exchange = reader.load_exchange(job.exchange_id)
    if exchange is None or exchange.head_node_id is None:
        raise ReplayError(f"exchange {job.exchange_id} is not in the archive", LOST)
    dialect = stored_dialect(exchange.dialect)
    contents = reader.path_contents(exchange.head_node_id)
    served = _served(reader, job, exchange, contents)
    start = _turn_start(reader, job, dialect, contents)
    before = max((block.first for block in served if block.first < start), default=-1)  # what the agent said last
    blocks = [
        ContextBlock(
            ordinal=block.ordinal,
            parts=parts_of(dialect, block.messages),
            in_turn=block.first >= start,
            is_dependent=block.first >= min(start, before) if before >= 0 else block.first >= start,
        )
        for block in served
    ]
    answer = _answer(reader, exchange)
    if answer:
        blocks.append(ContextBlock(None, parts_of(dialect, answer), in_turn=True))
    words = {
        block.ordinal: leading_identifiers("\n".join(map(dialect.message_text, block.messages)))
        for block in served
        if block.ordinal is not None
    }
    return Context((*_head(reader, exchange, dialect), *blocks), words)


def _served(reader: Reader, job: ReplayJob, exchange: ExchangeRow, contents: Sequence[bytes]) -> list[_Served]:
    """The history as it was sent: without the blocks that the selection left out."""
    assert exchange.head_node_id is not None
    numbers = reader.block_ordinals(job.session_id)
    gone = left_out_of(reader, exchange)
    found: dict[int, _Served] = {}
    path = reader.load_path(exchange.head_node_id)
    for position, ((node, _, _, _), raw) in enumerate(zip(path, contents, strict=True)):
        ordinal = numbers.get(node)
        if ordinal in gone:
            continue
        key = -1 - position if ordinal is None else ordinal
        found.setdefault(key, _Served(ordinal, position, [])).messages.append(raw)
    return list(found.values())


def _turn_start(reader: Reader, job: ReplayJob, dialect: Dialect, contents: Sequence[bytes]) -> int:
    """Position of the request that opened the first turn to be replayed: the run of user messages that came last then.

    After an undo the shortest history counts: from there on nothing that stands now has been replayed. A turn of which
    the archive has only later steps begins at the last request of the history.
    """
    openings = (
        row.messages_total
        for row in reader.session_exchanges(job.session_id)
        if row.turn >= job.since_turn and row.step == 0 and row.outcome not in ("side", "opaque")
    )
    opening = min((total for total in openings if total > 0), default=len(contents))
    opening = min(opening, len(contents))
    roles = [dialect.parse_message(raw).role for raw in contents]
    end = next((i for i in range(opening - 1, -1, -1) if roles[i] == "user"), None)
    if end is None:
        return 0
    while end > 0 and roles[end - 1] == "user":
        end -= 1
    return end


def _head(reader: Reader, exchange: ExchangeRow, dialect: Dialect) -> Iterator[ContextBlock]:
    """Instructions, and the notice where one was sent."""
    texts = []
    if exchange.instructions_id is not None:
        raw = reader.message_contents([exchange.instructions_id]).get(exchange.instructions_id, b"")
        texts.append("\n\n".join(_instruction_texts(dialect, raw)))
    if exchange.blocks_left_out and exchange.selection_id is not None:
        selection = reader.load_selection(exchange.selection_id)
        if selection is not None and selection.notice:
            texts.append(NOTICE)
    text = "\n\n".join(filter(None, texts))
    if text:
        yield ContextBlock(None, (Part("system", text),))


def _instruction_texts(dialect: Dialect, raw: bytes) -> Iterator[str]:
    """Texts of JSON values that stand one after the other: strings and messages."""
    text, decoder, position = raw.decode("utf-8", "replace"), json.JSONDecoder(), 0
    while position < len(text):
        try:
            value, end = decoder.raw_decode(text, position)
        except ValueError:
            return
        yield value if isinstance(value, str) else dialect.message_text(text[position:end].encode("utf-8", "replace"))
        position = end + len(text[end:]) - len(text[end:].lstrip())


def _answer(reader: Reader, exchange: ExchangeRow) -> list[bytes]:
    ids = reader.answers_of([exchange.id]).get(exchange.id, ())
    contents = reader.message_contents(ids)
    return [contents[i] for i in ids if i in contents]


def parts_of(dialect: Dialect, messages: Sequence[bytes]) -> tuple[Part, ...]:
    """These messages as the local model reads them."""
    return tuple(Part(ROLES[dialect.parse_message(raw).role], _text(dialect, raw)) for raw in messages)


def _text(dialect: Dialect, raw: bytes) -> str:
    """Words, then calls, then a mark for each part that is neither: an image is seen to be there."""
    return "\n".join(filter(None, [dialect.message_text(raw), dialect.call_text(raw), *_marks(raw)]))


def _marks(raw: bytes) -> Iterator[str]:
    try:
        message = read_value(raw)
    except Malformed:
        return
    for name in ("content", "output"):
        parts = message.get(name) if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and not isinstance(part.get("text", part.get("refusal")), str):
                kind = part.get("type")
                yield f"[{kind if isinstance(kind, str) else 'attachment'}]"
