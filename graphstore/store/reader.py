"""Queries over the archive; every answer is a value of `graphstore.records` or plain bytes, never a database row.

Connections are read-only and each query runs in a transaction of its own, so a reader may live in any thread or in
another process while the writer works. All methods raise `ArchiveUnavailable` when the file fails.
"""

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, Table, func, or_, select

from graphstore.evidence import OF_MASS, Rule, StoredObservation, default_rule
from graphstore.graph import ContextGraph
from graphstore.parameters import Parameters
from graphstore.records import (
    BlockRow,
    EdgeRow,
    ExchangeRow,
    JobRow,
    Mark,
    NodeState,
    ReplayRow,
    SelectionRow,
    SessionRow,
    VerdictRow,
    WorkerStatus,
)
from graphstore.store import replays
from graphstore.store.blobs import unpack
from graphstore.store.engine import explained
from graphstore.store.marks import load_marks
from graphstore.store.paths import among, load_paths, path_to
from graphstore.store.schema import (
    answers,
    block_nodes,
    blocks,
    edges,
    exchanges,
    messages,
    nodes,
    selection_blocks,
    selections,
    sessions,
)

NAMES_SHOWN = 8  # of an ambiguous reference: one line of a terminal


class AmbiguousSession(LookupError):
    """A short name that several sessions share; `names` are theirs."""

    def __init__(self, reference: str, names: Sequence[str]) -> None:
        more = f" or {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        super().__init__(f"{reference!r} may be {', '.join(names[:NAMES_SHOWN])}{more}; type more of the name")
        self.names = tuple(names)


@dataclass(frozen=True, slots=True)
class NextIds:
    """First free id of the rows that are numbered; messages and nodes take theirs from their digest (`row_id`)."""

    sessions: int
    exchanges: int
    selections: int


class Reader:
    """Read access to one archive. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """One consistent view of the archive, for callers with queries of their own."""
        with explained(), self._engine.connect() as connection:
            yield connection

    # -- ids and content ----------------------------------------------------------------------------------------

    def next_ids(self) -> NextIds:
        with self.snapshot() as db:
            return NextIds(*(_next_id(db, table) for table in (sessions, exchanges, selections)))

    def bytes_used(self) -> int:
        """Size of the database without the pages that are free."""
        with self.snapshot() as db:
            pages, free, size = (
                int(db.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)
                for name in ("page_count", "freelist_count", "page_size")
            )
        return (pages - free) * size

    def find_nodes(self, digests: Iterable[bytes]) -> dict[bytes, tuple[int, int, int]]:
        """Digest -> (node id, depth, message id) of the chain nodes that are stored."""
        query = select(nodes.c.digest, nodes.c.id, nodes.c.depth, nodes.c.message_id)
        with self.snapshot() as db:
            rows = among(db, query, nodes.c.digest, digests)
            return {row.digest: (row.id, row.depth, row.message_id) for row in rows}

    def find_messages(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """Digest -> id of the messages that are stored."""
        with self.snapshot() as db:
            rows = among(db, select(messages.c.digest, messages.c.id), messages.c.digest, digests)
            return {row.digest: row.id for row in rows}

    def message_contents(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Id -> raw bytes of the messages that are stored."""
        query = select(messages.c.id, messages.c.codec, messages.c.content)
        with self.snapshot() as db:
            return {row.id: unpack(row.codec, row.content) for row in among(db, query, messages.c.id, ids)}

    # -- sessions -----------------------------------------------------------------------------------------------

    def list_sessions(self) -> list[SessionRow]:
        """All sessions, the most recently active first."""
        return self._sessions()

    def recent_sessions(self, scope: bytes, limit: int) -> list[SessionRow]:
        return self._sessions(sessions.c.scope == scope, limit=limit)

    def sessions_by_client_id(self, scope: bytes, client_id: str) -> list[SessionRow]:
        """Sessions that the client itself calls so, the most recently active first."""
        return self._sessions(sessions.c.scope == scope, sessions.c.client_id == client_id)

    def sessions_by_heads(self, node_ids: Iterable[int]) -> list[SessionRow]:
        """Sessions whose history ends at one of these nodes, the most recently active first."""
        return self._sessions_among(select(sessions), sessions.c.head_node_id, node_ids)

    def sessions_through(self, node_ids: Iterable[int]) -> list[SessionRow]:
        """Sessions one of whose blocks stands or once stood at one of these nodes, the most recently active first."""
        query = select(sessions).join(block_nodes, block_nodes.c.session_id == sessions.c.id).distinct()
        return self._sessions_among(query, block_nodes.c.node_id, node_ids)

    def load_session(self, reference: int | str) -> SessionRow | None:
        """By id, by name, or by the beginning of a name. Raises `AmbiguousSession`."""
        if isinstance(reference, int):
            found = self._sessions(sessions.c.id == reference)
            return found[0] if found else None
        found = self._sessions(sessions.c.name.startswith(reference, autoescape=True))
        found = [row for row in found if row.name == reference] or found
        if len(found) > 1:
            raise AmbiguousSession(reference, [row.name for row in found])
        return found[0] if found else None

    def _sessions(self, *conditions: ColumnElement[bool], limit: int | None = None) -> list[SessionRow]:
        query = select(sessions).where(*conditions).order_by(sessions.c.last_active_at.desc(), sessions.c.id.desc())
        with self.snapshot() as db:
            return [_session(row) for row in db.execute(query.limit(limit))]

    def _sessions_among(
        self, query: Select[Any], column: ColumnElement[Any], node_ids: Iterable[int]
    ) -> list[SessionRow]:
        with self.snapshot() as db:
            found = {row.id: row for row in (_session(row) for row in among(db, query, column, node_ids))}
        return sorted(found.values(), key=lambda row: (row.last_active_at, row.id), reverse=True)

    # -- histories ----------------------------------------------------------------------------------------------

    def load_path(self, head_node_id: int) -> list[tuple[int, bytes, int, bytes]]:
        """(node id, node digest, message id, message digest) of every position up to this node, the first one first."""
        path = path_to(head_node_id)
        query = (
            select(path.c.id, path.c.digest, messages.c.id, messages.c.digest)
            .join(messages, messages.c.id == path.c.message_id)
            .order_by(path.c.depth)
        )
        with self.snapshot() as db:
            return [(node, digest, message, raw) for node, digest, message, raw in db.execute(query)]

    def path_contents(self, head_node_id: int) -> list[bytes]:
        """Raw bytes of every message up to this node, the first one first."""
        path = path_to(head_node_id)
        query = (
            select(messages.c.codec, messages.c.content)
            .join(path, messages.c.id == path.c.message_id)
            .order_by(path.c.depth)
        )
        with self.snapshot() as db:
            return [unpack(codec, content) for codec, content in db.execute(query)]

    def node_contents(self, node_ids: Sequence[int]) -> list[bytes]:
        """Raw bytes of the messages that stand at these nodes, in the order given."""
        query = select(nodes.c.id, messages.c.codec, messages.c.content)
        query = query.join(messages, messages.c.id == nodes.c.message_id)
        with self.snapshot() as db:
            found = {row.id: unpack(row.codec, row.content) for row in among(db, query, nodes.c.id, node_ids)}
        return [found[node] for node in node_ids if node in found]

    def load_blocks(self, session_id: int, head_node_id: int | None = None) -> list[tuple[BlockRow, NodeState]]:
        """Blocks in order. `node_ids` are those in the history that ends at this node (None: the session's present
        one); of a block that does not stand there, those of the last request that it stood in."""
        query = select(blocks).where(blocks.c.session_id == session_id).order_by(blocks.c.ordinal)
        with self.snapshot() as db:
            standing = _standing_nodes(db, session_id, head_node_id)
            return [_block(row, standing.get(row.ordinal, ())) for row in db.execute(query)]

    def block_ordinals(self, session_id: int) -> dict[int, int]:
        """Node id -> ordinal of the block that stands or once stood there."""
        query = select(block_nodes.c.node_id, block_nodes.c.ordinal).where(block_nodes.c.session_id == session_id)
        with self.snapshot() as db:
            return {row.node_id: row.ordinal for row in db.execute(query)}

    def block_messages(self, session_id: int) -> dict[int, dict[int, int]]:
        """Ordinal -> message id by node id, of every place that the block stands or once stood at."""
        query = select(block_nodes.c.ordinal, nodes.c.id, nodes.c.message_id)
        query = query.join(nodes, nodes.c.id == block_nodes.c.node_id).where(block_nodes.c.session_id == session_id)
        found: dict[int, dict[int, int]] = {}
        with self.snapshot() as db:
            for ordinal, node, message in db.execute(query.order_by(nodes.c.depth, nodes.c.id)):
                found.setdefault(ordinal, {})[node] = message
        return found

    def block_tokens(self, session_id: int, head_node_id: int | None = None) -> dict[int, int]:
        """Ordinal -> tokens of the messages that `load_blocks` names."""
        with self.snapshot() as db:
            standing = _standing_nodes(db, session_id, head_node_id)
            query = select(nodes.c.id, messages.c.tokens).join(messages, messages.c.id == nodes.c.message_id)
            ids = (node for nodes_of_block in standing.values() for node in nodes_of_block)
            tokens = dict(tuple(row) for row in among(db, query, nodes.c.id, ids))
        return {ordinal: sum(tokens[node] for node in members) for ordinal, members in standing.items()}

    def load_edges(self, session_id: int) -> list[EdgeRow]:
        """Edges in the order in which they were first stored."""
        query = (
            select(edges.c.support, edges.c.dependent, edges.c.weight, edges.c.position)
            .where(edges.c.session_id == session_id)
            .order_by(edges.c.position)
        )
        with self.snapshot() as db:
            return [EdgeRow(*row) for row in db.execute(query)]

    def marks(self, session_id: int) -> dict[int, Mark]:
        """Ordinal -> what a person said of the block."""
        with self.snapshot() as db:
            return load_marks(db, session_id)

    # -- attention ----------------------------------------------------------------------------------------------

    def load_graph(self, session_id: int) -> tuple[list[NodeState], list[EdgeRow]]:
        with self.snapshot() as db:
            return replays.load_graph(db, session_id)

    def derived_graph(
        self, session_id: int, rule: Rule, parameters: Parameters, *, until_turn: int | None = None
    ) -> ContextGraph:
        """The graph under a rule, from what the replays measured: all of them, or those of turns up to one."""
        with self.snapshot() as db:
            return replays.derive_session(db, session_id, rule, parameters, until_turn=until_turn)

    def graph_rule(self, session_id: int) -> str:
        """The rule by which the stored importances were derived; "" when nothing has been observed."""
        with self.snapshot() as db:
            return db.scalar(select(sessions.c.evidence).where(sessions.c.id == session_id)) or ""

    def last_observed(self, session_id: int) -> tuple[int, int] | None:
        """Turn of the latest observation, inherited or own, and the parameters of its model."""
        with self.snapshot() as db:
            return replays.last_observed(db, session_id)

    def load_observations(self, session_id: int) -> list[StoredObservation]:
        """The session's own observations in order of turns."""
        with self.snapshot() as db:
            return replays.load_observations(db, session_id)

    def load_replays(self, session_id: int) -> list[ReplayRow]:
        """The same without what was measured of each block: quick, however long the session."""
        with self.snapshot() as db:
            return replays.load_replays(db, session_id)

    def load_jobs(self, session_id: int) -> list[JobRow]:
        with self.snapshot() as db:
            return replays.load_jobs(db, session_id)

    def count_jobs(self) -> dict[str, int]:
        """State -> number of replay jobs."""
        with self.snapshot() as db:
            return replays.count_jobs(db)

    def last_failed_job(self) -> JobRow | None:
        with self.snapshot() as db:
            return replays.last_failure(db)

    def worker_status(self) -> WorkerStatus | None:
        with self.snapshot() as db:
            return replays.load_status(db)

    # -- exchanges and decisions --------------------------------------------------------------------------------

    def session_exchanges(self, session_id: int | None) -> list[ExchangeRow]:
        """In order. None: those that belong to no session."""
        query = select(exchanges).where(exchanges.c.session_id == session_id).order_by(exchanges.c.id)
        with self.snapshot() as db:
            return [_exchange(row) for row in db.execute(query)]

    def load_exchange(self, exchange_id: int) -> ExchangeRow | None:
        return self._first_exchange(select(exchanges).where(exchanges.c.id == exchange_id))

    def last_exchange(self, session_id: int | None = None) -> ExchangeRow | None:
        """The newest of a session; None: of all sessions."""
        query = select(exchanges).order_by(exchanges.c.id.desc()).limit(1)
        return self._first_exchange(query if session_id is None else query.where(exchanges.c.session_id == session_id))

    def _first_exchange(self, query: Select[Any]) -> ExchangeRow | None:
        with self.snapshot() as db:
            row = db.execute(query).first()
            return None if row is None else _exchange(row)

    def answers_of(self, exchange_ids: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Exchange id -> message ids of its response, in order."""
        query = select(answers.c.exchange_id, answers.c.position, answers.c.message_id)
        found: dict[int, list[int]] = {}
        with self.snapshot() as db:
            for exchange, _, message in sorted(map(tuple, among(db, query, answers.c.exchange_id, exchange_ids))):
                found.setdefault(exchange, []).append(message)
        return {exchange: tuple(members) for exchange, members in found.items()}

    def recent_answer_contents(
        self, limit: int, *, scope: bytes | None = None, session_ids: Sequence[int] = ()
    ) -> list[tuple[int, bytes]]:
        """(session id, raw bytes) of the newest answers of these sessions or of all sessions in a scope."""
        query = (
            select(exchanges.c.session_id, messages.c.codec, messages.c.content)
            .join(answers, answers.c.exchange_id == exchanges.c.id)
            .join(messages, messages.c.id == answers.c.message_id)
            .join(sessions, sessions.c.id == exchanges.c.session_id)
            .where(or_(sessions.c.scope == scope, sessions.c.id.in_(session_ids)))
            .order_by(exchanges.c.id.desc(), answers.c.position.desc())
            .limit(limit)
        )
        with self.snapshot() as db:
            return [(session, unpack(codec, content)) for session, codec, content in db.execute(query)]

    def load_selection(self, selection_id: int) -> SelectionRow | None:
        verdicts = (
            select(selection_blocks)
            .where(selection_blocks.c.selection_id == selection_id)
            .order_by(selection_blocks.c.ordinal)
        )
        with self.snapshot() as db:
            row = db.execute(select(selections).where(selections.c.id == selection_id)).mappings().first()
            if row is None:
                return None
            found = tuple(
                VerdictRow(**{name: value for name, value in verdict.items() if name != "selection_id"})
                for verdict in db.execute(verdicts).mappings()
            )
            return SelectionRow(**row, verdicts=found)


def load_evidence(
    reader: Reader, session_id: int, wanted: Rule | None, parameters: Parameters
) -> tuple[Rule, ContextGraph]:
    """The rule of a session and its graph under that rule; derived from the replays if it is stored under another.

    `wanted` None: by the size of the model that observed the session last.
    """
    observed = reader.last_observed(session_id)
    rule = wanted or default_rule(observed[1] if observed else None)
    stored = reader.graph_rule(session_id)
    if stored and (stored in OF_MASS) != (rule in OF_MASS):
        return rule, reader.derived_graph(session_id, rule, parameters)
    return rule, ContextGraph.from_rows(*reader.load_graph(session_id))


def _next_id(db: Connection, table: Table) -> int:
    return int(db.scalar(select(func.coalesce(func.max(table.c.id), 0))) or 0) + 1


def _standing_nodes(db: Connection, session_id: int, head_node_id: int | None) -> dict[int, tuple[int, ...]]:
    """Ordinal -> node ids in order of depth: those on the path to this node, else those of the last request that the
    block stood in."""
    query = select(block_nodes.c.ordinal, nodes.c.id).join(nodes, nodes.c.id == block_nodes.c.node_id)
    query = query.where(block_nodes.c.session_id == session_id).order_by(nodes.c.depth, nodes.c.id)
    members: dict[int, list[int]] = {}
    for ordinal, node in db.execute(query):
        members.setdefault(ordinal, []).append(node)
    head = head_node_id or db.scalar(select(sessions.c.head_node_id).where(sessions.c.id == session_id))
    found = _stand(members, frozenset(db.scalars(select(path_to(head).c.id))) if head is not None else ())
    if len(found) < len(members):
        e = exchanges.c
        of_session = select(e.head_node_id).where(e.session_id == session_id, e.head_node_id.is_not(None))
        heads = list(db.scalars(of_session.group_by(e.head_node_id).order_by(func.max(e.id).desc())))
        paths = load_paths(db, heads)
        for path in filter(None, map(paths.get, heads)):
            if len(found) == len(members):
                break
            found |= _stand({ordinal: n for ordinal, n in members.items() if ordinal not in found}, path)
    return {ordinal: found.get(ordinal) or tuple(all_) for ordinal, all_ in members.items()}


def _stand(members: Mapping[int, Sequence[int]], path: Container[int]) -> dict[int, tuple[int, ...]]:
    """Of the blocks that stand on a path, the nodes that do."""
    standing = ((ordinal, tuple(node for node in nodes if node in path)) for ordinal, nodes in members.items())
    return {ordinal: nodes for ordinal, nodes in standing if nodes}


def _session(row: Row[Any]) -> SessionRow:
    return SessionRow(**{name: value for name, value in row._mapping.items() if name != "evidence"})


def _exchange(row: Row[Any]) -> ExchangeRow:
    return ExchangeRow(**row._mapping)


def _block(row: Row[Any], node_ids: tuple[int, ...]) -> tuple[BlockRow, NodeState]:
    block = BlockRow(
        session_id=row.session_id,
        ordinal=row.ordinal,
        kind=row.kind,
        cost=row.cost,
        node_ids=node_ids,
        edits=tuple(json.loads(row.edits)),
        label=row.label,
    )
    return block, NodeState(row.ordinal, row.u, row.observed, row.stale)
