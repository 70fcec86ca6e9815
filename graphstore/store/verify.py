"""Re-derives from disk what the archive claims, and names every row that disagrees.

It trusts nothing but the raw bytes: digests come from contents, chains from digests and scopes, depths from parents.
How messages form blocks is a matter of dialects; a caller that knows them passes `recut`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from sqlalchemy import ColumnElement, Connection, Select, Table, exists, func, select
from sqlalchemy.exc import DBAPIError

from graphstore.blocks import Block
from graphstore.errors import GraphIntegrityError
from graphstore.evidence import RULES
from graphstore.graph import ContextGraph
from graphstore.identity import chain_digests, message_digest
from graphstore.parameters import Parameters
from graphstore.records import NodeState, SessionRow
from graphstore.store.blobs import is_redacted, unpack
from graphstore.store.reader import Reader
from graphstore.store.schema import (
    answers,
    block_nodes,
    blocks,
    exchanges,
    messages,
    nodes,
    selection_blocks,
    selections,
    sessions,
)

TOLERANCE = 1e-9  # of importances and weights: the same sums, read back from the disk
ODD_SHOWN = 8
# What a damaged file can make of any value that is read from it: another type, another size, nothing.
UNREADABLE = (DBAPIError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)

Recut = Callable[[SessionRow, Sequence[bytes]], Sequence[Block]]  # a session and its messages -> their blocks


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement. `row` is the primary key as text, "" when it concerns the whole file."""

    table: str
    row: str
    problem: str


def verify(reader: Reader, recut: Recut | None = None) -> list[Finding]:
    """Everything that is wrong with the archive; empty when it is sound. Raises `ArchiveUnavailable`."""
    with reader.snapshot() as db:
        findings = list(_file(db))
        try:
            for check in (_messages, _nodes, _blocks, _selections, _references, _orphans):
                findings += check(db)
        except UNREADABLE as error:
            return [*findings, Finding("database", "", f"a table cannot be read: {error}")]
    findings += chain.from_iterable(_graphs(reader, session) for session in reader.list_sessions())
    if recut is not None:
        for session in reader.list_sessions():
            try:
                findings += _cuts(reader, session, recut)
            except UNREADABLE as error:
                findings.append(Finding("sessions", str(session.id), f"its messages cannot be read: {error}"))
    return findings


def _file(db: Connection) -> Iterator[Finding]:
    try:
        for (report,) in db.exec_driver_sql("PRAGMA integrity_check"):
            if report != "ok":
                yield Finding("database", "", report)
        for table, row, target, _ in db.exec_driver_sql("PRAGMA foreign_key_check"):
            yield Finding(table, str(row or ""), f"refers to a row of {target} that does not exist")
    except DBAPIError as error:
        yield Finding("database", "", str(error.orig))


def _messages(db: Connection) -> Iterator[Finding]:
    query = select(messages.c.id, messages.c.digest, messages.c.codec, messages.c.content, messages.c.size)
    for id, digest, codec, content, size in db.execute(query.execution_options(yield_per=100)):
        try:
            raw = unpack(codec, content)
        except ValueError as error:
            yield Finding("messages", str(id), str(error))
            continue
        if len(raw) != size:
            yield Finding("messages", str(id), f"has {len(raw)} bytes, not {size}")
        if not is_redacted(codec) and message_digest(raw) != digest:
            yield Finding("messages", str(id), f"its bytes have digest {message_digest(raw).hex()}, not {digest.hex()}")


def _nodes(db: Connection) -> Iterator[Finding]:
    """A node's digest is its parent's chained with its message's; at depth 0 the parent is the scope of a session."""
    scopes = list(db.scalars(select(sessions.c.scope).distinct()))
    above = nodes.alias()
    query = (
        select(nodes.c.id, nodes.c.digest, nodes.c.depth, above.c.digest, above.c.depth, messages.c.digest)
        .join(messages, messages.c.id == nodes.c.message_id)
        .outerjoin(above, above.c.id == nodes.c.parent_id)
    )
    for id, digest, depth, parent, parent_depth, message in db.execute(query.execution_options(yield_per=1000)):
        if depth != (0 if parent_depth is None else parent_depth + 1):
            yield Finding("nodes", str(id), f"has depth {depth} under a parent of depth {parent_depth}")
        if all(chain_digests(root, [message]) != [digest] for root in ([parent] if parent is not None else scopes)):
            yield Finding("nodes", str(id), f"digest {digest.hex()} does not follow from its parent and its message")


def _blocks(db: Connection) -> Iterator[Finding]:
    empty = ~exists().where(block_nodes.c.session_id == blocks.c.session_id, block_nodes.c.ordinal == blocks.c.ordinal)
    for session, ordinal in db.execute(select(blocks.c.session_id, blocks.c.ordinal).where(empty)):
        yield Finding("blocks", f"{session}/{ordinal}", "has no messages")


def _selections(db: Connection) -> Iterator[Finding]:
    known = exists().where(
        blocks.c.session_id == selections.c.session_id, blocks.c.ordinal == selection_blocks.c.ordinal
    )
    query = (
        select(selections.c.id, selection_blocks.c.ordinal, selection_blocks.c.kept)
        .join(selection_blocks, selection_blocks.c.selection_id == selections.c.id)
        .where(~known)
    )
    for id, ordinal, kept in db.execute(query):
        yield Finding("selections", str(id), f"{'keeps' if kept else 'leaves out'} block {ordinal}, which is missing")


def _references(db: Connection) -> Iterator[Finding]:
    """References without a constraint: it would close a cycle of tables."""
    for table in (sessions, exchanges):
        column = table.c.selection_id
        query = select(table.c.id, column).where(column.is_not(None), ~exists().where(selections.c.id == column))
        for id, selection in db.execute(query):
            yield Finding(table.name, str(id), f"refers to selection {selection}, which does not exist")


def _orphans(db: Connection) -> Iterator[Finding]:
    child = nodes.alias()
    used = {
        messages: [nodes.c.message_id, answers.c.message_id]
        + [table.c[name] for table in (sessions, exchanges) for name in ("instructions_id", "tools_id")],
        nodes: [child.c.parent_id, sessions.c.head_node_id, exchanges.c.head_node_id, block_nodes.c.node_id],
    }
    for table, references in used.items():
        for id in db.scalars(_unused(table, references)):
            yield Finding(table.name, str(id), "nothing refers to it")


def _unused(table: Table, references: Iterable[ColumnElement[int]]) -> Select[tuple[int]]:
    query = select(table.c.id)
    for reference in references:
        query = query.where(table.c.id.not_in(select(reference).where(reference.is_not(None))))
    return query


def _graphs(reader: Reader, session: SessionRow) -> Iterator[Finding]:
    """u, observed and stale marks and edges must follow from what the replays measured, by the session's rule."""
    rule = reader.graph_rule(session.id)
    nodes, edges = reader.load_graph(session.id)
    place = str(session.id)
    try:
        stored = {node.ordinal: node for node in nodes if node.observed or node.u or node.stale}
        if not rule:
            derived = ContextGraph()
        elif rule in RULES:
            derived = reader.derived_graph(session.id, rule, Parameters())
        else:
            yield Finding("sessions", place, f"importance was derived by {rule!r}, which is no rule")
            return
    except (GraphIntegrityError, *UNREADABLE) as error:
        yield Finding("observations", place, f"no graph follows from them: {error}")
        return
    states, links = derived.to_rows()
    known = {node.ordinal for node in nodes}
    expected = {node.ordinal: node for node in states if node.observed and node.ordinal in known}
    for ordinal in sorted(stored.keys() | expected.keys()):
        nothing = NodeState(ordinal, 0.0, False, False)
        have, want = stored.get(ordinal, nothing), expected.get(ordinal, nothing)
        if abs(have.u - want.u) > TOLERANCE or (have.observed, have.stale) != (want.observed, want.stale):
            yield Finding(
                "blocks", f"{place}/{ordinal}", f"is stored as {_state(have)}; the replays say {_state(want)}"
            )
    have_edges = [(edge.support, edge.dependent) for edge in edges]
    if have_edges != [(edge.support, edge.dependent) for edge in links]:
        odd = set(have_edges) ^ {(edge.support, edge.dependent) for edge in links}
        named = ", ".join(f"{a}-{b}" for a, b in sorted(odd)[:ODD_SHOWN]) or "their order"
        yield Finding("edges", place, f"do not follow from the replays: {named}")
        return
    for have_edge, want_edge in zip(edges, links, strict=True):
        if abs(have_edge.weight - want_edge.weight) > TOLERANCE:
            pair = f"{place}/{have_edge.support}-{have_edge.dependent}"
            yield Finding("edges", pair, f"weighs {have_edge.weight:g}; the replays say {want_edge.weight:g}")


def _state(node: NodeState) -> str:
    marks = "observed" if node.observed else "never observed"
    return f"u {node.u:.6g}, {marks}{', stale' if node.stale else ''}"


def _cuts(reader: Reader, session: SessionRow, recut: Recut) -> Iterator[Finding]:
    """Every block that the session's messages form must be stored as one block of that kind.

    The cost is compared only where the client never replaced a message: it belongs to the version written last.
    """
    if session.head_node_id is None:
        return
    path = [node for node, *_ in reader.load_path(session.head_node_id)]
    stored = [block for block, _ in reader.load_blocks(session.id)]
    owner = {node: block for block in stored for node in block.node_ids}
    replaced = _replaced(reader, session.id, {block.ordinal: len(block.node_ids) for block in stored})
    for block in recut(session, reader.path_contents(session.head_node_id)):
        found = {owner[path[i]].ordinal if path[i] in owner else None for i in block.messages}
        place = f"{session.id}/{min(block.messages)}"
        if len(found) > 1 or None in found:
            stored_as = ", ".join(sorted(map(str, found)))
            yield Finding("block_nodes", place, f"messages {block.messages} are one block, stored in {stored_as}")
            continue
        match = owner[path[block.messages[0]]]
        if match.kind != block.kind:
            yield Finding("blocks", f"{session.id}/{match.ordinal}", f"is of kind {block.kind}, stored as {match.kind}")
        if match.cost != block.cost and match.ordinal not in replaced:
            yield Finding("blocks", f"{session.id}/{match.ordinal}", f"costs {block.cost}, stored as {match.cost}")


def _replaced(reader: Reader, session_id: int, standing: dict[int, int]) -> set[int]:
    """Blocks that have more nodes than those on the present path."""
    query = select(block_nodes.c.ordinal, func.count()).where(block_nodes.c.session_id == session_id)
    with reader.snapshot() as db:
        rows = db.execute(query.group_by(block_nodes.c.ordinal))
        return {ordinal for ordinal, count in rows if count > standing.get(ordinal, 0)}
