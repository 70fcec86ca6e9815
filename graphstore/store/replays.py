"""Replays in the archive: jobs that wait for the worker, what replays measured, and the graph that follows from it.

The worker is another process than the proxy, so this module writes beside the proxy's writer: every transaction here is
short and begins IMMEDIATE, and SQLite makes one wait for the other. A job's observation, the graph's update and the
job's end are one transaction: a process that dies at any point leaves all of it or nothing.

A session's observations are in order of turns. A job whose turn, or a later one, was observed already is `folded`.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from graphstore.evidence import RULES, Rule, StoredObservation, derive, observation_of, restricted
from graphstore.graph import ContextGraph
from graphstore.parameters import Parameters
from graphstore.records import EdgeRow, Fork, JobRow, NodeState, ReplayRequest, ReplayRow, WorkerStatus
from graphstore.replays import EDGE_MASS_MIN, BlockReading, LayerReading, Replay, ReplayJob, RowGroup
from graphstore.scoring import replaced
from graphstore.store.engine import ArchiveUnavailable, OwnerLock, explained, is_owned, writer_engine
from graphstore.store.marks import inherit_marks
from graphstore.store.schema import (
    blocks,
    edges,
    exchanges,
    inheritances,
    meta,
    observation_blocks,
    observation_edges,
    observations,
    replay_jobs,
    sessions,
    workers,
)

ATTEMPTS_MAX = 3  # a turn that kills the worker every time must not keep it from the others
JOBS_MAX = 1_000  # one a session is the rule; more means that no worker has run for long
WORKER = "attention"  # the one row of `workers`
GROUPS: tuple[RowGroup, ...] = ("turn", "assistant")
INHERITED = "inherited:"  # + session id: the key in `meta` of what a branch keeps of a parent that was forgotten

Identifiers = Mapping[int, frozenset[str]]


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.worker")


def _worker_lock(path: Path) -> OwnerLock:
    try:
        return OwnerLock(_lock_of(path))
    except ArchiveUnavailable as error:
        if error.kind != "in use":
            raise
        remedy = "`recap serve` starts one by itself: stop that, or give it --attention off"
        raise ArchiveUnavailable("in use", f"a worker of {str(path)!r} runs already", remedy) from error


def worker_runs(path: Path) -> bool:
    """Whether a worker has this archive's jobs in hand, whatever it last said of itself."""
    return is_owned(_lock_of(path))


# -- on a transaction of the proxy's writer ---------------------------------------------------------------------------


# As text: SQLAlchemy would take longer to put these together than SQLite to run them, on every turn.
_IS_KNOWN = "SELECT 1 FROM replay_jobs WHERE session_id = ? AND turn = ?"
_LAST_ANSWERED = """
    SELECT max(id) FROM exchanges
    WHERE session_id = ? AND turn = ? AND ended_at IS NOT NULL AND status < 400
        AND head_node_id IS NOT NULL AND outcome NOT IN ('side', 'opaque')
"""
_QUEUE = """
    INSERT INTO replay_jobs (session_id, turn, exchange_id, state, queued_at) VALUES (?, ?, ?, 'queued', ?)
    ON CONFLICT (session_id, turn) DO UPDATE SET exchange_id = excluded.exchange_id, queued_at = excluded.queued_at
    WHERE replay_jobs.state = 'queued'
"""
_COUNT = "SELECT count(*) FROM replay_jobs WHERE state = 'queued'"
_FOLD = """
    UPDATE replay_jobs SET state = 'folded', ended_at = ?, error = ? WHERE id IN
        (SELECT id FROM replay_jobs WHERE state = 'queued' ORDER BY queued_at DESC, id DESC LIMIT -1 OFFSET ?)
"""


def queue_replays(db: Connection, requests: Sequence[ReplayRequest]) -> None:
    """Add jobs, or point a waiting one of the same turn at the newer exchange. Claimed and ended jobs stay.

    Beyond `JOBS_MAX` that wait, the oldest are folded.
    """
    for request in requests:
        exchange = request.exchange_id
        turn = (request.session_id, request.turn)
        if exchange is None:
            if db.exec_driver_sql(_IS_KNOWN, turn).first() is not None:
                continue
            exchange = db.exec_driver_sql(_LAST_ANSWERED, turn).scalar()
        if exchange is not None:
            db.exec_driver_sql(_QUEUE, (*turn, exchange, request.queued_at))
    if requests and (db.exec_driver_sql(_COUNT).scalar() or 0) > JOBS_MAX:
        why = f"more than {JOBS_MAX} turns waited"
        db.exec_driver_sql(_FOLD, (requests[-1].queued_at, why, JOBS_MAX))


def inherit(db: Connection, fork: Fork) -> None:
    """Give a new session what its parent's graph knows of the shared blocks, and a person said of them.

    Once; later calls change nothing.
    """
    observed = db.scalar(select(func.max(observations.c.turn)).where(observations.c.session_id == fork.parent_id))
    added = db.execute(
        upsert(inheritances)
        .values(
            session_id=fork.session_id,
            parent_id=fork.parent_id,
            ordinals=json.dumps(sorted(fork.ordinals)),
            turn=observed or 0,
        )
        .on_conflict_do_nothing()
    )
    if added.rowcount == 0:
        return
    inherit_marks(db, fork)
    nodes, links = load_graph(db, fork.parent_id)
    shared = fork.ordinals
    rule = db.scalar(select(sessions.c.evidence).where(sessions.c.id == fork.parent_id))
    store_nodes(db, fork.session_id, [node for node in nodes if node.observed and node.ordinal in shared])
    store_edges(db, fork.session_id, [e for e in links if e.support in shared and e.dependent in shared])
    db.execute(update(sessions).where(sessions.c.id == fork.session_id).values(evidence=rule or ""))


# -- reading ----------------------------------------------------------------------------------------------------------


def load_graph(db: Connection, session_id: int) -> tuple[list[NodeState], list[EdgeRow]]:
    """Nodes by ordinal and edges in stored order, as they stand in the archive."""
    of_blocks = select(blocks.c.ordinal, blocks.c.u, blocks.c.observed, blocks.c.stale)
    of_edges = select(edges.c.support, edges.c.dependent, edges.c.weight, edges.c.position)
    nodes = db.execute(of_blocks.where(blocks.c.session_id == session_id).order_by(blocks.c.ordinal))
    links = db.execute(of_edges.where(edges.c.session_id == session_id).order_by(edges.c.position))
    return [NodeState(*row) for row in nodes], [EdgeRow(*row) for row in links]


def load_observations(db: Connection, session_id: int, *, until_turn: int | None = None) -> list[StoredObservation]:
    """A session's own observations in order of turns, without those that it inherits."""
    query = select(observations).where(observations.c.session_id == session_id).order_by(observations.c.turn)
    if until_turn is not None:
        query = query.where(observations.c.turn <= until_turn)
    return [_stored(db, row) for row in db.execute(query).mappings().all()]


def load_replays(db: Connection, session_id: int) -> list[ReplayRow]:
    """A session's own replays in order of turns, without what they measured of each block."""
    c = observations.c
    of_blocks = select(func.count()).where(observation_blocks.c.observation_id == c.id).scalar_subquery()
    of_edges = select(func.count()).where(observation_edges.c.observation_id == c.id).scalar_subquery()
    query = select(
        c.turn, c.since_turn, c.created_at, c.model, c.tokens, c.tokens_computed, c.rows, c.seconds,
        of_blocks.label("blocks"), of_edges.label("edges"), c.unobserved,
    )  # fmt: skip
    found = db.execute(query.where(c.session_id == session_id).order_by(c.turn)).mappings().all()
    of_stale = select(c.turn, observation_blocks.c.ordinal).join(
        observation_blocks, observation_blocks.c.observation_id == c.id
    )
    stale: dict[int, list[int]] = {}
    for turn, ordinal in db.execute(of_stale.where(c.session_id == session_id, observation_blocks.c.replaced)):
        stale.setdefault(turn, []).append(ordinal)
    return [
        ReplayRow(
            **{name: value for name, value in row.items() if name != "unobserved"},
            unobserved=tuple(json.loads(row["unobserved"])),
            replaced=tuple(sorted(stale.get(row["turn"], ()))),
        )
        for row in found
    ]


def derive_session(
    db: Connection, session_id: int, rule: Rule, parameters: Parameters, *, until_turn: int | None = None
) -> ContextGraph:
    """The graph that a session's stored observations make under a rule, those inherited included."""
    row = db.execute(select(inheritances).where(inheritances.c.session_id == session_id)).first()
    start = None
    if row is not None and row.parent_id != session_id:
        parent = derive_session(db, row.parent_id, rule, parameters, until_turn=row.turn)
        start = restricted(parent, frozenset(json.loads(row.ordinals)))
    elif row is not None and (kept := _kept(db, session_id)) is not None:
        start = kept.graphs[rule]
    return derive(load_observations(db, session_id, until_turn=until_turn), rule, parameters, start)


@dataclass(frozen=True, slots=True)
class KeptInheritance:
    """What a branch inherited of a parent that has been forgotten since: numbers about blocks that it has itself.

    `observed`: turn of the parent's latest observation and the parameters of its model.
    """

    observed: tuple[int, int] | None
    graphs: Mapping[Rule, ContextGraph]

    def packed(self) -> bytes:
        graphs = {rule: graph.to_rows() for rule, graph in self.graphs.items()}
        rows = {rule: [[astuple(row) for row in part] for part in parts] for rule, parts in graphs.items()}
        return zlib.compress(json.dumps({"observed": self.observed, "graphs": rows}).encode())

    @classmethod
    def unpacked(cls, packed: bytes) -> "KeptInheritance":
        value = json.loads(zlib.decompress(packed))
        graphs: dict[Rule, ContextGraph] = {
            rule: ContextGraph.from_rows([NodeState(*row) for row in nodes], [EdgeRow(*row) for row in links])
            for rule, (nodes, links) in value["graphs"].items()
        }
        return cls(tuple(value["observed"]) if value["observed"] else None, graphs)


def _kept(db: Connection, session_id: int) -> KeptInheritance | None:
    packed = db.scalar(select(meta.c.value).where(meta.c.key == f"{INHERITED}{session_id}"))
    return None if packed is None else KeptInheritance.unpacked(packed)


def last_observed(db: Connection, session_id: int, *, until_turn: int | None = None) -> tuple[int, int] | None:
    """Turn of the latest observation that a session has or inherits, and the parameters of its model.

    What a branch says in a turn of its own no replay of its parent has seen, however far the parent went.
    """
    columns = (observations.c.turn, observations.c.parameters)
    query = select(*columns).where(observations.c.session_id == session_id).order_by(observations.c.turn.desc())
    own = db.execute((query if until_turn is None else query.where(observations.c.turn <= until_turn)).limit(1)).first()
    if own is not None:
        return own.turn, own.parameters
    link = db.execute(select(inheritances).where(inheritances.c.session_id == session_id)).first()
    if link is None:
        return None
    if link.parent_id == session_id:
        kept = _kept(db, session_id)
        inherited = kept.observed if kept is not None else None
    else:
        inherited = last_observed(db, link.parent_id, until_turn=link.turn)
    if inherited is None:
        return None
    turn, size = inherited
    moving = exchanges.c.outcome.not_in(("side", "opaque"))
    first = db.scalar(select(func.min(exchanges.c.turn)).where(exchanges.c.session_id == session_id, moving))
    return (turn if first is None else min(turn, max(0, first - 1))), size


def load_jobs(db: Connection, session_id: int) -> list[JobRow]:
    query = select(replay_jobs).where(replay_jobs.c.session_id == session_id).order_by(replay_jobs.c.turn)
    return [JobRow(**row) for row in db.execute(query).mappings()]


def count_jobs(db: Connection) -> dict[str, int]:
    """State -> number of jobs."""
    query = select(replay_jobs.c.state, func.count()).group_by(replay_jobs.c.state)
    return {str(row.state): int(row[1]) for row in db.execute(query)}


def last_failure(db: Connection) -> JobRow | None:
    query = select(replay_jobs).where(replay_jobs.c.state == "failed").order_by(replay_jobs.c.ended_at.desc()).limit(1)
    row = db.execute(query).mappings().first()
    return None if row is None else JobRow(**row)


def load_status(db: Connection) -> WorkerStatus | None:
    row = db.execute(select(workers).where(workers.c.name == WORKER)).mappings().first()
    return None if row is None else WorkerStatus(**{name: value for name, value in row.items() if name != "name"})


# -- the worker's side ------------------------------------------------------------------------------------------------


class ReplayQueue:
    """The jobs of one archive, for the one worker that it may have. Raises `ArchiveUnavailable` when the file fails."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float], parameters: Parameters | None = None, claims: bool = True
    ) -> None:
        """Take the worker's lock; `ArchiveUnavailable` ("in use") when another worker has it.

        Without `claims` no lock is taken: for those who only rebuild. The archive must exist and be of this program's
        revision (`archive.open_queue` sees to it).
        """
        self._clock = clock
        self._parameters = parameters or Parameters()
        self._lock = _worker_lock(path) if claims else None
        self._engine: Engine = writer_engine(path)

    def close(self) -> None:
        self._engine.dispose()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "ReplayQueue":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, request: ReplayRequest) -> None:
        """Queue a turn by hand; the proxy's writer does so by itself."""
        with self._transaction() as db:
            queue_replays(db, (request,))

    def recover(self) -> int:
        """Queue again what a worker that died had claimed; what killed it too often has failed. Returns how many."""
        with self._transaction() as db:
            claimed = db.execute(select(replay_jobs).where(replay_jobs.c.state == "claimed")).mappings().all()
            for row in claimed:
                self._retry(db, row["id"], row["attempts"], "the worker ended while it replayed this turn")
            return len(claimed)

    def claim(self) -> ReplayJob | None:
        """The newest turn of the session that was queued last; that session's older turns are folded into it."""
        with self._transaction() as db:
            while True:
                queued = replay_jobs.c.state == "queued"
                order = (replay_jobs.c.queued_at.desc(), replay_jobs.c.id.desc())
                newest = db.execute(select(replay_jobs.c.session_id).where(queued).order_by(*order).limit(1)).first()
                if newest is None:
                    return None
                waiting = db.execute(
                    select(replay_jobs.c.id, replay_jobs.c.turn, replay_jobs.c.exchange_id, replay_jobs.c.attempts)
                    .where(queued, replay_jobs.c.session_id == newest.session_id)
                    .order_by(replay_jobs.c.turn)
                ).all()
                observed = last_observed(db, newest.session_id)
                covered = observed[0] if observed is not None else 0
                last = waiting[-1]
                takes = last.turn > covered
                self._end(db, [row.id for row in (waiting[:-1] if takes else waiting)], "folded")
                if not takes:
                    continue
                job = ReplayJob(last.id, newest.session_id, last.turn, last.exchange_id, covered + 1, last.attempts + 1)
                db.execute(
                    update(replay_jobs)
                    .where(replay_jobs.c.id == job.id)
                    .values(state="claimed", attempts=job.attempts, claimed_at=self._clock(), error=None)
                )
                return job

    def finish(self, job: ReplayJob, replay: Replay, identifiers: Identifiers, rule: Rule) -> bool:
        """Store what a replay measured, update the graph by it, and end its job: all or nothing.

        `identifiers` are the leading identifiers of the observed blocks, for the stale rule. False, with nothing
        stored, when this turn has been observed or the job is no longer claimed. Raises ValueError for numbers that
        no replay can measure.
        """
        density = {block.ordinal: block.density for block in replay.blocks}
        stale = frozenset(replaced(density, identifiers, self._parameters))
        for any_rule in RULES:  # what is stored must do for a rebuild under each
            observation_of(replay, any_rule, stale).check()
        observation = observation_of(replay, rule, stale)
        with self._transaction() as db:
            observed = last_observed(db, job.session_id)
            if not self._is_claimed(db, job) or (observed is not None and observed[0] >= job.turn):
                return False
            derived_by = db.scalar(select(sessions.c.evidence).where(sessions.c.id == job.session_id))
            if derived_by in ("", rule):
                graph = ContextGraph.from_rows(*load_graph(db, job.session_id))
            else:
                graph = derive_session(db, job.session_id, rule, self._parameters)
            graph.update(observation, self._parameters)
            self._add(db, job, replay, stale)
            self._write(db, job.session_id, graph, rule)
            self._end(db, [job.id], "done")
            return True

    def fail(self, job: ReplayJob, error: str, *, again: bool) -> None:
        """End a claimed job with its reason, or queue it again while it has attempts left."""
        with self._transaction() as db:
            if self._is_claimed(db, job):
                self._retry(db, job.id, job.attempts if again else ATTEMPTS_MAX, error)

    def release(self, job: ReplayJob) -> None:
        """Put a claimed job back as if it had never been claimed: the worker stops, or cannot replay at all."""
        with self._transaction() as db:
            if self._is_claimed(db, job):
                again = update(replay_jobs).where(replay_jobs.c.id == job.id)
                db.execute(again.values(state="queued", attempts=job.attempts - 1))

    def rebuild(self, session_id: int, rule: Rule) -> bool:
        """Derive u, edges and stale marks anew from what is stored. False when nothing has been observed."""
        with self._transaction() as db:
            if last_observed(db, session_id) is None:
                return False
            self._write(db, session_id, derive_session(db, session_id, rule, self._parameters), rule)
            return True

    def set_status(self, status: WorkerStatus) -> None:
        row = {"name": WORKER} | {name: getattr(status, name) for name in WorkerStatus.__slots__}
        statement = upsert(workers).values(row)
        with self._transaction() as db:
            db.execute(statement.on_conflict_do_update(index_elements=["name"], set_=row))

    # -- parts ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with explained(), self._engine.begin() as connection:
            yield connection

    def _end(self, db: Connection, ids: list[int], state: str, error: str | None = None) -> None:
        values = {"state": state, "ended_at": self._clock(), "error": error}
        db.execute(update(replay_jobs).where(replay_jobs.c.id.in_(ids)).values(values))

    @staticmethod
    def _is_claimed(db: Connection, job: ReplayJob) -> bool:
        """Not so when its session was forgotten meanwhile: another session's job may have its number by then."""
        c = replay_jobs.c
        found = db.execute(select(c.state, c.session_id, c.turn).where(c.id == job.id)).first()
        return found is not None and tuple(found) == ("claimed", job.session_id, job.turn)

    def _retry(self, db: Connection, id: int, attempts: int, error: str) -> None:
        if attempts >= ATTEMPTS_MAX:
            self._end(db, [id], "failed", error)
        else:
            db.execute(update(replay_jobs).where(replay_jobs.c.id == id).values(state="queued", error=error))

    def _write(self, db: Connection, session_id: int, graph: ContextGraph, rule: Rule) -> None:
        """Replace what the archive says of a session's graph. Blocks that it does not know count as never observed."""
        nodes, links = graph.to_rows()
        db.execute(update(blocks).where(blocks.c.session_id == session_id).values(u=0.0, observed=False, stale=False))
        store_nodes(db, session_id, nodes)
        db.execute(delete(edges).where(edges.c.session_id == session_id))
        store_edges(db, session_id, links)
        db.execute(update(sessions).where(sessions.c.id == session_id).values(evidence=rule))

    def _add(self, db: Connection, job: ReplayJob, replay: Replay, stale: frozenset[int]) -> None:
        added = db.execute(
            insert(observations).values(
                session_id=job.session_id,
                turn=job.turn,
                since_turn=job.since_turn,
                exchange_id=job.exchange_id,
                created_at=self._clock(),
                model=replay.model,
                parameters=replay.parameters,
                device=replay.device,
                dtype=replay.dtype,
                layers=json.dumps(replay.layers),
                dependency_layer=replay.dependency_layer,
                tokens=replay.tokens,
                tokens_computed=replay.tokens_computed,
                rows=replay.rows,
                rows_assistant=replay.rows_assistant,
                unobserved=json.dumps(replay.unobserved),
                seconds=replay.seconds,
            )
        )
        assert added.inserted_primary_key is not None
        id = added.inserted_primary_key[0]
        if replay.blocks:
            db.execute(
                insert(observation_blocks),
                [
                    {
                        "observation_id": id,
                        "ordinal": block.ordinal,
                        "tokens": block.tokens,
                        "mass": block.mass,
                        "density": block.density,
                        "mass_assistant": block.mass_assistant,
                        "density_assistant": block.density_assistant,
                        "by_layer": _packed(block.by_layer, replay.layers),
                        "replaced": block.ordinal in stale,
                    }
                    for block in replay.blocks
                ],
            )
        links = [edge for edge in replay.edges if edge[2] > EDGE_MASS_MIN]
        if links:
            db.execute(
                insert(observation_edges),
                [{"observation_id": id, "support": a, "dependent": b, "mass": mass} for a, b, mass in links],
            )


def store_nodes(db: Connection, session_id: int, nodes: Sequence[NodeState]) -> None:
    """Set u, observed and stale of the blocks that the archive has."""
    raw = [(node.u, node.observed, node.stale, session_id, node.ordinal) for node in nodes]
    if raw:
        db.exec_driver_sql("UPDATE blocks SET u = ?, observed = ?, stale = ? WHERE session_id = ? AND ordinal = ?", raw)


def store_edges(db: Connection, session_id: int, links: Sequence[EdgeRow]) -> None:
    """Add edges; those known already stay as they are."""
    if links:
        db.execute(
            upsert(edges).on_conflict_do_nothing(),
            [
                {
                    "session_id": session_id,
                    "support": edge.support,
                    "dependent": edge.dependent,
                    "weight": edge.weight,
                    "position": edge.position,
                }
                for edge in links
            ],
        )


def _packed(readings: tuple[LayerReading, ...], layers: tuple[int, ...]) -> bytes:
    """Little-endian float32: for each layer in order, each group of rows, mass and density; 0: not measured."""
    found = {(reading.layer, reading.group): (reading.mass, reading.density) for reading in readings}
    values = [number for layer in layers for group in GROUPS for number in found.get((layer, group), (0.0, 0.0))]
    return struct.pack(f"<{len(values)}f", *values) if found else b""


def _unpacked(packed: bytes, layers: tuple[int, ...]) -> tuple[LayerReading, ...]:
    if not packed:
        return ()
    pairs = list(struct.iter_unpack("<2f", packed))
    names = [(layer, group) for layer in layers for group in GROUPS]
    return tuple(LayerReading(*name, *pair) for name, pair in zip(names, pairs, strict=True))


def _stored(db: Connection, row: Mapping[Any, Any]) -> StoredObservation:
    layers = tuple(json.loads(str(row["layers"])))
    of_blocks = select(observation_blocks).where(observation_blocks.c.observation_id == row["id"])
    of_edges = select(observation_edges).where(observation_edges.c.observation_id == row["id"])
    members = db.execute(of_blocks.order_by(observation_blocks.c.ordinal)).all()
    links = db.execute(of_edges.order_by(observation_edges.c.dependent, observation_edges.c.support)).all()
    replay = Replay(
        model=row["model"],
        parameters=row["parameters"],
        device=row["device"],
        dtype=row["dtype"],
        layers=layers,
        dependency_layer=row["dependency_layer"],
        tokens=row["tokens"],
        tokens_computed=row["tokens_computed"],
        rows=row["rows"],
        rows_assistant=row["rows_assistant"],
        unobserved=tuple(json.loads(str(row["unobserved"]))),
        seconds=row["seconds"],
        blocks=tuple(
            BlockReading(
                m.ordinal,
                m.tokens,
                m.mass,
                m.density,
                m.mass_assistant,
                m.density_assistant,
                _unpacked(m.by_layer, layers),
            )
            for m in members
        ),
        edges=tuple((e.support, e.dependent, e.mass) for e in links),
    )
    return StoredObservation(
        turn=row["turn"],
        since_turn=row["since_turn"],
        exchange_id=row["exchange_id"],
        created_at=row["created_at"],
        replay=replay,
        replaced=frozenset(m.ordinal for m in members if m.replaced),
    )
