"""The only module that writes: one thread, one connection, a bounded queue of batches.

Batches wait in order until a transaction has taken them, several at a time. What fails because of the file, the disk or
the machine stays at the head of the queue and is tried again with growing pauses, later rows refer to earlier ones;
what fails because of its own content is skipped and counted. Nothing here blocks or is awaited on the request path
except the future of a durable batch.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import chain, islice, takewhile
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, Engine, Table, select
from sqlalchemy.dialects.sqlite import Insert, insert

from graphstore.records import (
    AnswerRow,
    Batch,
    BlockRow,
    ExchangeRow,
    MessageRow,
    NodeRow,
    SelectionRow,
    SessionRow,
)
from graphstore.redaction import redact, redact_text
from graphstore.store import schema
from graphstore.store.blobs import pack, pack_redacted
from graphstore.store.engine import BUSY_TIMEOUT_S, ArchiveUnavailable, Kind, explain, pragma
from graphstore.store.forget import Forget, Forgotten, forget_sessions
from graphstore.store.marks import carry_marks
from graphstore.store.replays import inherit, queue_replays

log = logging.getLogger(__name__)

QUEUE_BATCHES_MAX = 2048  # at one batch per request and answer: minutes of a busy proxy with a failing disk
GROUP_BATCHES_MAX = 64  # per transaction: the commit is shared, and a durable batch never waits for more than this
LINGER_S = 0.2  # that a batch waits for company: a request and its answer then cost one transaction, not two or three
RETRY_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
LOG_WAIT_MS = 100  # for readers, before the log is emptied another time
ID_LOOKUP_MAX = 500  # ids in one statement, well under SQLite's limit of variables

CountTokens = Callable[[str], int]
R = TypeVar("R", SessionRow, ExchangeRow)
Pause = Callable[[threading.Event, float], object]


class QueueFull(ArchiveUnavailable):
    """The batch was not taken: the writer is behind or its file fails. The caller goes on without the archive."""


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """The last thing that went wrong, until a later write succeeds."""

    at: float
    kind: Kind
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{datetime.fromtimestamp(self.at, UTC):%Y-%m-%d %H:%M:%S} UTC: {self.problem}; {self.remedy}"


@dataclass(slots=True)
class _Job:
    batch: Batch
    durable: bool
    forget: Forget | None = None  # then the batch is empty
    result: Forgotten | None = None
    done: "Future[Any]" = field(default_factory=Future)

    def tell(self, error: Exception | None) -> None:
        """Resolve the future once; a batch that is tried again has already told its caller."""
        if self.done.done() or not self.done.set_running_or_notify_cancel():
            return
        if error is None:
            self.done.set_result(self.result)
        else:
            self.done.set_exception(error)


class Writer:
    """Owns the writing connection. Thread-safe; start it with `start`, end it with `close`."""

    def __init__(
        self,
        engine: Engine,
        *,
        count_tokens: CountTokens,
        clock: Callable[[], float],
        redacts: bool = False,
        queue_max: int = QUEUE_BATCHES_MAX,
        pause: Pause = threading.Event.wait,
    ) -> None:
        self._engine = engine
        self._count_tokens = count_tokens
        self._clock = clock
        self._redacts = redacts
        self._queue_max = queue_max
        self._pause = pause
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._hurry = threading.Event()  # ends every wait: a durable batch is queued, or we are closing
        self._closing = False
        self._attempts = 0
        self._lost = 0
        self._failure: WriteFailure | None = None
        self._thread = threading.Thread(target=self._run, name="recap-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- for callers --------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Batches accepted and not yet committed."""
        return len(self._jobs)

    @property
    def lost(self) -> int:
        """Batches accepted and given up: refused by the database for their content, or unwritten at close."""
        return self._lost

    @property
    def failure(self) -> WriteFailure | None:
        return self._failure

    def submit(self, batch: Batch, *, durable: bool = False) -> "Future[None]":
        """Queue one batch; never blocks. Raises `QueueFull`, or `ArchiveUnavailable` after `close`.

        The future resolves when the batch is committed; with `durable`, when it has also reached the disk. It gets an
        `ArchiveUnavailable` at the first failure. A batch that failed because of the file or the disk stays queued all
        the same and is tried again; of a durable one only its history: the decision that it carried did not happen.
        """
        return self._queue(_Job(batch, durable))

    def forget(self, what: Forget) -> "Future[Forgotten]":
        """Queue a removal; it sees what was submitted before and nothing of what comes later. Fails as `submit` does;
        one that failed because of the file or the disk stays queued."""
        return self._queue(_Job(Batch(), durable=True, forget=what))

    def _queue(self, job: _Job) -> "Future[Any]":
        with self._changed:
            if self._closing:
                raise ArchiveUnavailable("closed", "the archive is closed", "restart the proxy")
            if len(self._jobs) >= self._queue_max:
                remedy = self._failure.remedy if self._failure else "wait until the disk has caught up"
                raise QueueFull("busy", f"{len(self._jobs)} batches wait to be written", remedy)
            self._jobs.append(job)
            if job.durable:
                self._hurry.set()
            self._changed.notify()
        return job.done

    def close(self, timeout_s: float | None = 10.0) -> None:
        """Write what is queued and stop. What cannot be written is counted as lost. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._hurry.set()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._count_tokens("")  # loads the rank table before the first request needs it
        while group := self._next_group():
            if self._store(group):
                continue
            if self._closing:
                self._give_up()
            else:
                self._rest()
        with suppress(Exception), self._engine.connect() as connection:
            pragma(connection, "wal_checkpoint(TRUNCATE)")

    def _next_group(self) -> tuple[_Job, ...]:
        """The head of the queue; a short one after a moment in which others may join it. Empty: closed and drained."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
        if len(self._jobs) < GROUP_BATCHES_MAX:
            self._hurry.wait(LINGER_S)
        with self._changed:
            head = islice(self._jobs, GROUP_BATCHES_MAX)
            group = tuple(takewhile(lambda job: job.forget is None, head)) or tuple(islice(self._jobs, 1))
            if not self._closing and not any(job.durable for job in islice(self._jobs, len(group), None)):
                self._hurry.clear()
            return group

    def _store(self, group: tuple[_Job, ...]) -> bool:
        """Commit a group from the head of the queue; False when file or disk failed and the rest must wait."""
        try:
            self._commit(group)
        except Exception as error:
            trouble = explain(error)
            if trouble is not None:
                self._keep(trouble, error)
                return False
            if len(group) > 1:
                return all(self._store((job,)) for job in group)
            self._skip(group[0], error)
        else:
            self._failure = None
            self._attempts = 0
            self._leave(group, None)
        return True

    def _commit(self, group: tuple[_Job, ...]) -> None:
        if group[0].forget is not None:
            group[0].result = self._forget(group[0].forget)
            return
        durable = any(job.durable for job in group)
        with self._engine.connect() as connection:
            pragma(connection, f"synchronous={'FULL' if durable else 'NORMAL'}")
            with connection.begin():
                batch = _merge(job.batch for job in group)
                _Transaction(connection, self._count_tokens, self._clock(), self._redacts).write(batch)

    def _forget(self, what: Forget) -> Forgotten:
        with self._engine.connect() as connection:
            pragma(connection, "synchronous=FULL")
            pragma(connection, "foreign_keys=OFF")
            try:
                with connection.begin():
                    done = forget_sessions(connection, what)
            finally:
                pragma(connection, "foreign_keys=ON")
            return replace(done, problem=_shrink(connection, thorough=what.thorough))

    def _leave(self, group: tuple[_Job, ...], error: Exception | None) -> None:
        """Take a group off the head of the queue and tell its callers."""
        with self._changed:
            for _ in group:
                self._jobs.popleft()
        for job in group:
            job.tell(error)

    def _keep(self, trouble: ArchiveUnavailable, error: Exception) -> None:
        """File or disk failed: tell everyone who waits, keep all history queued, start over with a new connection."""
        self._note(trouble, error)
        self._engine.dispose()
        with self._changed:
            waiting = tuple(self._jobs)
            for job in waiting:
                if job.durable:
                    job.batch, job.durable = _history_of(job.batch), False
            self._hurry.clear()
        for job in waiting:
            job.tell(trouble)

    def _skip(self, job: _Job, error: Exception) -> None:
        trouble = ArchiveUnavailable(
            "rejected", f"the database refused a batch: {error}", "run `recap verify` and report this message"
        )
        trouble.__cause__ = error
        self._lost += 1
        self._note(trouble, error)
        self._leave((job,), trouble)

    def _note(self, trouble: ArchiveUnavailable, error: Exception) -> None:
        self._failure = WriteFailure(self._clock(), trouble.kind, trouble.problem, trouble.remedy)
        log.warning(
            "archive.write_failed kind=%s problem=%r remedy=%r waiting=%d lost=%d",
            trouble.kind,
            trouble.problem,
            trouble.remedy,
            len(self._jobs),
            self._lost,
            exc_info=error if trouble.kind == "rejected" else None,
        )

    def _give_up(self) -> None:
        with self._changed:
            group = tuple(self._jobs)
        self._lost += len(group)
        log.error("archive.unwritten batches=%d", len(group))
        self._leave(group, ArchiveUnavailable("closed", "the archive was closed before it could write", "see the log"))

    def _rest(self) -> None:
        pause = RETRY_PAUSES_S[min(self._attempts, len(RETRY_PAUSES_S) - 1)]
        self._attempts += 1
        self._pause(self._hurry, pause)


def _shrink(connection: Connection, *, thorough: bool) -> str | None:
    """Give freed pages back and empty the log. What hinders it, in words: removed is removed all the same.

    Only a file that is written anew surely holds nothing old: pages that were split keep copies of moved rows.
    """
    try:
        pragma(connection, f"busy_timeout={int(1000 * BUSY_TIMEOUT_S) if thorough else LOG_WAIT_MS}")
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("VACUUM" if thorough else "PRAGMA incremental_vacuum").fetchall()
        ((busy, *_),) = pragma(connection, "wal_checkpoint(TRUNCATE)")
        return "somebody reads the archive, so its -wal file still holds what was removed" if busy else None
    except Exception as error:
        trouble = explain(error)
        if trouble is None:
            raise
        return f"the file could not be written anew, so old copies may be left in it: {trouble.problem}"
    finally:
        pragma(connection, f"busy_timeout={int(1000 * BUSY_TIMEOUT_S)}")


def _merge(batches: Iterable[Batch]) -> Batch:
    """One batch with the rows of all, in order: later replacements win, and rows still find what they refer to."""
    parts = list(batches)
    return Batch(*(tuple(chain.from_iterable(getattr(part, f.name) for part in parts)) for f in fields(Batch)))


def _redacted(batch: Batch) -> Batch:
    """Without secrets in what is stored as text beside the messages."""
    clean = redact_text
    return replace(
        batch,
        sessions=tuple(
            replace(s, title=clean(s.title), state_reason=clean(s.state_reason) if s.state_reason else s.state_reason)
            for s in batch.sessions
        ),
        blocks=tuple(
            replace(b, label=clean(b.label), edits=tuple(clean(path) for path in b.edits)) for b in batch.blocks
        ),
        exchanges=tuple(
            replace(e, reason=clean(e.reason), error=clean(e.error) if e.error else e.error) for e in batch.exchanges
        ),
        selections=tuple(
            replace(s, reason=clean(s.reason), verdicts=tuple(v._replace(detail=clean(v.detail)) for v in s.verdicts))
            for s in batch.selections
        ),
    )


def _history_of(batch: Batch) -> Batch:
    """What remains of a batch whose decision could not be made durable in time: the request went out unchanged."""
    undecided = {selection.id for selection in batch.selections}
    if not undecided:
        return batch
    return replace(
        batch,
        selections=(),
        sessions=tuple(replace(s, selection_id=None) if s.selection_id in undecided else s for s in batch.sessions),
        exchanges=tuple(replace(e, selection_id=None) if e.selection_id in undecided else e for e in batch.exchanges),
    )


# -- statements, built once: rebuilding them would cost more than running them --------------------------------------


def _add(table: Table) -> Insert:
    return insert(table).on_conflict_do_nothing()


def _replace(table: Table, columns: Iterable[str] | None = None) -> Insert:
    statement = insert(table)
    keys = [column.name for column in table.primary_key]
    names = columns or [column.name for column in table.columns if column.name not in keys]
    return statement.on_conflict_do_update(index_elements=keys, set_={name: statement.excluded[name] for name in names})


_ADD_MESSAGE = _add(schema.messages)
_ADD_NODE = _add(schema.nodes)
_REPLACE_SESSION = _replace(schema.sessions, [f.name for f in fields(SessionRow) if f.name != "id"])
_REPLACE_BLOCK = _replace(schema.blocks, ("kind", "cost", "edits", "label"))
_ADD_BLOCK_NODE = _add(schema.block_nodes)
_REPLACE_EXCHANGE = _replace(schema.exchanges)
_ADD_ANSWER = _add(schema.answers)
_ADD_SELECTION = _add(schema.selections)
_ADD_VERDICT = _add(schema.selection_blocks)


_SELECTION = tuple(column.name for column in schema.selections.columns)


def _values(row: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


@dataclass(frozen=True, slots=True)
class _Ready:
    """An insert as text for the driver, with the order of its values and how each is converted.

    SQLAlchemy would construct the parameters of every row anew, which costs more than SQLite's own work.
    """

    text: str
    binds: tuple[tuple[str, Callable[[Any], Any] | None], ...]

    @classmethod
    def of(cls, statement: Insert, keys: tuple[str, ...], dialect: Dialect) -> "_Ready":
        compiled = statement.compile(dialect=dialect, column_keys=list(keys))
        types = {column.name: column.type.dialect_impl(dialect) for column in statement.table.columns}
        order = compiled.positiontup or []
        return cls(str(compiled), tuple((name, types[name].bind_processor(dialect)) for name in order))

    def values(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple([row[name] if convert is None else convert(row[name]) for name, convert in self.binds])


_READY: dict[tuple[Insert, tuple[str, ...]], _Ready] = {}


def _latest(rows: Sequence[R]) -> Iterable[R]:
    """The last version of every row, in order of the first."""
    return {row.id: row for row in rows}.values()


@dataclass(slots=True)
class _Transaction:
    """Writes batches in the order in which their rows refer to each other. Parents stand before children."""

    connection: Connection
    count_tokens: CountTokens
    now: float
    redacts: bool

    def write(self, batch: Batch) -> None:
        if self.redacts:
            batch = _redacted(batch)
        self._many(_ADD_MESSAGE, (self._message(row) for row in self._new(batch.messages)))
        self._many(_ADD_NODE, (_values(row, NodeRow.__slots__) for row in batch.nodes))
        self._many(_REPLACE_SESSION, (_values(row, SessionRow.__slots__) for row in _latest(batch.sessions)))
        self._blocks(batch.blocks)
        for fork in batch.forks:
            inherit(self.connection, fork)
        carry_marks(self.connection, batch.resent)
        self._many(_REPLACE_EXCHANGE, (_values(row, ExchangeRow.__slots__) for row in _latest(batch.exchanges)))
        self._many(_ADD_ANSWER, (_values(row, AnswerRow.__slots__) for row in batch.answers))
        self._selections(batch.selections)
        queue_replays(self.connection, batch.replays)

    def _many(self, statement: Insert, rows: Iterable[dict[str, Any]]) -> None:
        values = list(rows)
        if not values:
            return
        key = (statement, tuple(values[0]))
        ready = _READY.get(key)
        if ready is None:
            ready = _READY[key] = _Ready.of(statement, key[1], self.connection.dialect)
        self.connection.exec_driver_sql(ready.text, [ready.values(row) for row in values])

    def _new(self, rows: Sequence[MessageRow]) -> Iterable[MessageRow]:
        """Rows not stored yet: neither compressed nor counted a second time."""
        known: set[int] = set()
        for start in range(0, len(rows), ID_LOOKUP_MAX):
            ids = [row.id for row in rows[start : start + ID_LOOKUP_MAX]]
            known.update(self.connection.scalars(select(schema.messages.c.id).where(schema.messages.c.id.in_(ids))))
        return {row.id: row for row in rows if row.id not in known}.values()

    def _message(self, row: MessageRow) -> dict[str, Any]:
        stored = redact(row.content) if self.redacts else row.content
        codec, content = pack(stored) if stored == row.content else pack_redacted(stored)
        return {
            "id": row.id,
            "digest": row.digest,
            "codec": codec,
            "content": content,
            "size": len(row.content),
            "tokens": self.count_tokens(row.text) if row.text else 0,
            "created_at": self.now,
        }

    def _blocks(self, rows: Sequence[BlockRow]) -> None:
        self._many(
            _REPLACE_BLOCK,
            (
                {
                    "session_id": row.session_id,
                    "ordinal": row.ordinal,
                    "kind": row.kind,
                    "cost": row.cost,
                    "edits": json.dumps(row.edits),
                    "label": row.label,
                }
                for row in rows
            ),
        )
        self._many(
            _ADD_BLOCK_NODE,
            (
                {"session_id": row.session_id, "node_id": node_id, "ordinal": row.ordinal}
                for row in rows
                for node_id in row.node_ids
            ),
        )

    def _selections(self, rows: Sequence[SelectionRow]) -> None:
        self._many(_ADD_SELECTION, (_values(row, _SELECTION) for row in rows))
        self._many(
            _ADD_VERDICT,
            (
                {
                    "selection_id": row.id,
                    "ordinal": verdict.ordinal,
                    "kept": verdict.kept,
                    "rule": verdict.rule,
                    "detail": verdict.detail,
                    "score": verdict.score,
                    "z_u": verdict.z_u,
                    "z_lex": verdict.z_lex,
                    "z_past": verdict.z_past,
                    "exploration": verdict.exploration,
                    "rank": verdict.rank,
                }
                for row in rows
                for verdict in row.verdicts
            ),
        )
