"""Questions that people ask of the archive: figures over many rows, for the commands and the inspector.

Read-only, on top of a `Reader`. Everything is a sum over stored rows; nothing is estimated here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, case, func, select

from graphstore.records import ExchangeRow, SelectionRow, SessionRow
from graphstore.store.reader import Reader
from graphstore.store.schema import block_nodes, exchanges, messages, nodes, selection_blocks, selections


class UnknownSession(LookupError):
    """No session has this name."""


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One session with sums over its exchanges; token figures are the provider's."""

    session: SessionRow
    exchanges: int
    input_tokens: int | None
    cached_tokens: int | None
    blocks_left_out: int  # in the latest exchange


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a request by our own tokenizer: instructions, tools and messages; as it came and as it was sent."""

    full: int
    sent: int


def find_session(reader: Reader, reference: str) -> SessionRow:
    """By name or the beginning of one. Raises `UnknownSession` or `AmbiguousSession`."""
    session = reader.load_session(reference)
    if session is None:
        raise UnknownSession(f"no session is called {reference!r}; `recap sessions` lists them")
    return session


def latest_answer(reader: Reader, session: SessionRow) -> list[bytes]:
    """What the model said last and no history holds yet: clients send it along with the next request."""
    last = [row for row in reader.session_exchanges(session.id) if row.head_node_id == session.head_node_id][-1:]
    ids = [i for members in reader.answers_of([row.id for row in last]).values() for i in members]
    contents = reader.message_contents(ids)
    return [contents[i] for i in ids]


def summaries(reader: Reader) -> list[SessionSummary]:
    """All sessions, the most recently active first."""
    e = exchanges.c
    query = select(
        e.session_id, func.count(), func.sum(e.input_tokens), func.sum(e.cached_tokens), func.max(e.id)
    ).group_by(e.session_id)
    with reader.snapshot() as db:
        sums = {row[0]: row for row in db.execute(query)}
        latest = select(e.session_id, e.blocks_left_out).where(e.id.in_([row[4] for row in sums.values()]))
        left_out = dict(tuple(row) for row in db.execute(latest))
    found = []
    for session in reader.list_sessions():
        _, count, given, cached, _ = sums.get(session.id, (session.id, 0, None, None, None))
        found.append(SessionSummary(session, count, given, cached, left_out.get(session.id, 0)))
    return found


def selection_of(reader: Reader, exchange_id: int) -> SelectionRow | None:
    """The selection that was made at this exchange, if any."""
    return _selection(reader, selections.c.exchange_id == exchange_id)


def latest_selection(reader: Reader, session_id: int) -> SelectionRow | None:
    return _selection(reader, selections.c.session_id == session_id)


def _selection(reader: Reader, condition: ColumnElement[bool]) -> SelectionRow | None:
    query = select(selections.c.id).where(condition).order_by(selections.c.id.desc()).limit(1)
    with reader.snapshot() as db:
        found = db.scalar(query)
    return reader.load_selection(found) if found is not None else None


def left_out_of(reader: Reader, exchange: ExchangeRow) -> frozenset[int]:
    """Blocks that were left out of a request as it was sent."""
    if not exchange.blocks_left_out or exchange.selection_id is None:
        return frozenset()
    selection = reader.load_selection(exchange.selection_id)
    return frozenset(v.ordinal for v in selection.verdicts if not v.kept) if selection is not None else frozenset()


def exchange_tokens(reader: Reader, rows: Sequence[ExchangeRow]) -> dict[int, Tokens]:
    """Exchange id -> tokens. One walk per history, however many of these exchanges it holds."""
    with reader.snapshot() as db:
        blobs = {row.instructions_id for row in rows} | {row.tools_id for row in rows} - {None}
        fixed = dict(
            tuple(row) for row in db.execute(select(messages.c.id, messages.c.tokens).where(messages.c.id.in_(blobs)))
        )
        walks: dict[int, list[tuple[int, int]]] = {}
        result = {}
        for row in rows:
            base = sum(fixed.get(blob, 0) for blob in (row.instructions_id, row.tools_id) if blob is not None)
            if row.head_node_id is None:
                result[row.id] = Tokens(base, base)
                continue
            if row.head_node_id not in walks:
                walks[row.head_node_id] = _walk(db, row.head_node_id)
            path = walks[row.head_node_id]
            left_out = _left_out(db, row) if row.blocks_left_out else frozenset()
            full = base + sum(tokens for _, tokens in path)
            result[row.id] = Tokens(full, full - sum(tokens for node, tokens in path if node in left_out))
        return result


def _walk(db: Connection, head: int) -> list[tuple[int, int]]:
    """(node id, tokens) of every message up to a node."""
    start = select(nodes.c.id, nodes.c.parent_id, nodes.c.message_id).where(nodes.c.id == head)
    path = start.cte("path", recursive=True)
    path = path.union_all(
        select(nodes.c.id, nodes.c.parent_id, nodes.c.message_id).join(path, nodes.c.id == path.c.parent_id)
    )
    query = select(path.c.id, messages.c.tokens).join(messages, messages.c.id == path.c.message_id)
    return [(node, tokens) for node, tokens in db.execute(query)]


def _left_out(db: Connection, row: ExchangeRow) -> frozenset[int]:
    """Nodes of the blocks that the exchange's selection left out."""
    verdict = selection_blocks.c
    query = (
        select(block_nodes.c.node_id)
        .join(selection_blocks, verdict.ordinal == block_nodes.c.ordinal)
        .where(block_nodes.c.session_id == row.session_id, verdict.selection_id == row.selection_id)
        .where(case((verdict.kept, 0), else_=1) == 1)
    )
    return frozenset(db.scalars(query))
