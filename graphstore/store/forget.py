"""Sessions removed from the archive: every row and every byte that nobody else needs.

What a branch shares stays with the branch: messages and history by reference, the selection that it sends as its own,
and what it inherited of its parent's graph as numbers in `meta`. What was asked beside a session (titles, summaries)
goes with it. Only the archive's owner removes; others leave a request in `meta`, which the owner finds.
"""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert as upsert

from graphstore.evidence import RULES, restricted
from graphstore.parameters import Parameters
from graphstore.store.engine import explained, writer_engine
from graphstore.store.replays import INHERITED, KeptInheritance, derive_session, last_observed
from graphstore.store.schema import inheritances, meta, selection_blocks, selections

REQUEST = "forget:"  # + session id: the key of a request in `meta`
ID_LOOKUP_MAX = 500


@dataclass(frozen=True, slots=True)
class Forget:
    """What the writer is to remove. `thorough`: the whole file is written anew, so that no trace is left in it either.

    `unattached_before`: also exchanges of no session that began before this time.
    """

    session_ids: frozenset[int]
    thorough: bool = False
    unattached_before: float | None = None


@dataclass(frozen=True, slots=True)
class Forgotten:
    """`sessions` counts those removed; `freed` is the size of their messages as stored. `problem` says what may keep
    their bytes on the disk for a while."""

    sessions: int
    freed: int = 0
    problem: str | None = None


def request_forget(path: Path | str, session_id: int, *, clock: Callable[[], float]) -> None:
    """Ask the process that owns the archive to remove a session. Raises `ArchiveUnavailable`."""
    engine = writer_engine(Path(path))
    row = {"key": f"{REQUEST}{session_id}", "value": str(clock()).encode()}
    try:
        with explained(), engine.begin() as db:
            db.execute(upsert(meta).values(row).on_conflict_do_nothing())
    finally:
        engine.dispose()


def requested(db: Connection) -> frozenset[int]:
    """Ids of the sessions that somebody asked to remove."""
    keys = db.scalars(select(meta.c.key).where(meta.c.key.startswith(REQUEST, autoescape=True)))
    return frozenset(int(key.removeprefix(REQUEST)) for key in keys)


def with_side_sessions(db: Connection, session_ids: Iterable[int]) -> frozenset[int]:
    """These sessions, as far as they exist, and what was asked beside them, by the client's id also before them."""
    wanted = ",".join(str(int(id)) for id in session_ids)
    query = f"""
        WITH RECURSIVE gone(id, scope, client_id) AS (
            SELECT id, scope, client_id FROM sessions WHERE id IN ({wanted})
            UNION SELECT s.id, s.scope, s.client_id FROM sessions s JOIN gone ON s.kind = 'side' AND (
                s.parent_id = gone.id
                OR s.parent_id IS NULL AND s.scope = gone.scope AND s.client_id = gone.client_id
            )
        ) SELECT id FROM gone
    """
    return frozenset(db.exec_driver_sql(query).scalars())


def forget_sessions(db: Connection, what: Forget) -> Forgotten:
    """Remove sessions within a transaction of the owner's, in which foreign keys are not enforced: SQLite would look
    through whole tables for each row.
    """
    gone, freed = with_side_sessions(db, what.session_ids), 0
    for id in what.session_ids | gone:
        db.execute(delete(meta).where(meta.c.key.in_([f"{REQUEST}{id}", f"{INHERITED}{id}"])))
    if gone:
        _keep_inheritances(db, gone)
        _keep_selections(db, gone)
        _run(db, _LIST, gone)
        _run(db, _REMOVE)
        freed = int(
            db.exec_driver_sql("SELECT total(length(content)) FROM messages WHERE id IN gone_messages").scalar_one()
        )
        _run(db, _REMOVE_MESSAGES)
    if what.unattached_before is not None:
        db.exec_driver_sql(
            "DELETE FROM exchanges WHERE session_id IS NULL AND started_at < ?", (what.unattached_before,)
        )
    return Forgotten(len(gone), freed)


def _keep_inheritances(db: Connection, gone: Collection[int]) -> None:
    """A branch that inherits from a session that goes keeps the numbers, under each rule; it inherits from itself."""
    for child, parent, ordinals, turn in db.execute(select(inheritances)).all():
        if parent not in gone or child in gone:
            continue
        shared = frozenset(json.loads(ordinals))
        kept = KeptInheritance(
            observed=last_observed(db, parent, until_turn=turn),
            graphs={
                rule: restricted(derive_session(db, parent, rule, Parameters(), until_turn=turn), shared)
                for rule in RULES
            },
        )
        row = {"key": f"{INHERITED}{child}", "value": kept.packed()}
        db.execute(upsert(meta).values(row).on_conflict_do_update(index_elements=["key"], set_=row))
        db.execute(inheritances.update().where(inheritances.c.session_id == child).values(parent_id=child))


_BORROWED = """
    SELECT used.selection_id, used.session_id FROM (
        SELECT selection_id, id AS session_id FROM sessions UNION SELECT selection_id, session_id FROM exchanges
    ) used
    JOIN selections ON selections.id = used.selection_id
    WHERE selections.session_id IN ({gone}) AND used.session_id NOT IN ({gone})
"""
_MINE = "SELECT count(*) FROM blocks WHERE session_id = ? AND ordinal IN ({ordinals})"
_FIRST_USE = """
    SELECT id, turn FROM exchanges WHERE session_id = ? ORDER BY selection_id IS NOT ?, id LIMIT 1
"""


def _keep_selections(db: Connection, gone: Collection[int]) -> None:
    """A selection that a branch still sends becomes its own, without the blocks that only its parent has.

    Of several branches the one that shares most gets it: the others' shares are parts of that.
    """
    listed = ",".join(map(str, gone))
    users: dict[int, list[int]] = {}
    for selection, session in db.exec_driver_sql(_BORROWED.format(gone=listed)):
        users.setdefault(selection, []).append(session)
    for selection, sessions_ in users.items():
        named = list(db.scalars(select(selection_blocks.c.ordinal).where(selection_blocks.c.selection_id == selection)))
        count_mine = _MINE.format(ordinals=",".join(map(str, named)))
        owner = max(sessions_, key=lambda id: (db.exec_driver_sql(count_mine, (id,)).scalar() or 0, -id))
        exchange, turn = db.exec_driver_sql(_FIRST_USE, (owner, selection)).one()
        values = {"session_id": owner, "exchange_id": exchange, "turn": turn}
        db.execute(selections.update().where(selections.c.id == selection).values(values))
        db.exec_driver_sql(
            "DELETE FROM selection_blocks WHERE selection_id = ?"
            " AND ordinal NOT IN (SELECT ordinal FROM blocks WHERE session_id = ?)",
            (selection, owner),
        )


# What goes is listed before anything is removed, and what somebody else needs is taken off the list afterwards.
_LIST = """
    DROP TABLE IF EXISTS temp.gone_sessions; DROP TABLE IF EXISTS temp.gone_nodes;
    DROP TABLE IF EXISTS temp.gone_messages;
    CREATE TEMP TABLE gone_sessions AS SELECT id FROM sessions WHERE id IN ({gone});
    CREATE TEMP TABLE gone_nodes (id INTEGER PRIMARY KEY);
    INSERT INTO gone_nodes WITH RECURSIVE path(id) AS (
        SELECT head_node_id FROM sessions WHERE id IN gone_sessions AND head_node_id IS NOT NULL
        UNION SELECT head_node_id FROM exchanges WHERE session_id IN gone_sessions AND head_node_id IS NOT NULL
        UNION SELECT node_id FROM block_nodes WHERE session_id IN gone_sessions
        UNION SELECT n.parent_id FROM path JOIN nodes n ON n.id = path.id WHERE n.parent_id IS NOT NULL
    ) SELECT id FROM path;
    CREATE TEMP TABLE gone_messages (id INTEGER PRIMARY KEY);
    INSERT INTO gone_messages
        SELECT message_id FROM nodes WHERE id IN gone_nodes
        UNION SELECT message_id FROM answers
            WHERE exchange_id IN (SELECT id FROM exchanges WHERE session_id IN gone_sessions)
        UNION SELECT instructions_id FROM sessions WHERE id IN gone_sessions AND instructions_id IS NOT NULL
        UNION SELECT tools_id FROM sessions WHERE id IN gone_sessions AND tools_id IS NOT NULL
        UNION SELECT instructions_id FROM exchanges
            WHERE session_id IN gone_sessions AND instructions_id IS NOT NULL
        UNION SELECT tools_id FROM exchanges WHERE session_id IN gone_sessions AND tools_id IS NOT NULL
"""
_REMOVE = """
    DELETE FROM selection_blocks WHERE selection_id IN (SELECT id FROM selections WHERE session_id IN gone_sessions);
    DELETE FROM selections WHERE session_id IN gone_sessions;
    DELETE FROM observation_blocks
        WHERE observation_id IN (SELECT id FROM observations WHERE session_id IN gone_sessions);
    DELETE FROM observation_edges
        WHERE observation_id IN (SELECT id FROM observations WHERE session_id IN gone_sessions);
    DELETE FROM observations WHERE session_id IN gone_sessions;
    DELETE FROM replay_jobs WHERE session_id IN gone_sessions;
    DELETE FROM inheritances WHERE session_id IN gone_sessions;
    DELETE FROM marks WHERE session_id IN gone_sessions;
    DELETE FROM edges WHERE session_id IN gone_sessions;
    DELETE FROM block_nodes WHERE session_id IN gone_sessions;
    DELETE FROM blocks WHERE session_id IN gone_sessions;
    DELETE FROM answers WHERE exchange_id IN (SELECT id FROM exchanges WHERE session_id IN gone_sessions);
    DELETE FROM exchanges WHERE session_id IN gone_sessions;
    UPDATE sessions SET parent_id = NULL, fork_depth = NULL WHERE parent_id IN gone_sessions;
    DELETE FROM sessions WHERE id IN gone_sessions;
    DELETE FROM gone_nodes WHERE id IN (
        WITH RECURSIVE needed(id) AS (
            SELECT id FROM gone_nodes WHERE id IN (SELECT head_node_id FROM sessions)
                OR id IN (SELECT head_node_id FROM exchanges)
                OR EXISTS (SELECT 1 FROM block_nodes WHERE node_id = gone_nodes.id)
                OR id IN (SELECT parent_id FROM nodes WHERE id NOT IN gone_nodes)
            UNION SELECT n.parent_id FROM needed JOIN nodes n ON n.id = needed.id WHERE n.parent_id IS NOT NULL
        ) SELECT id FROM needed
    );
    DELETE FROM nodes WHERE id IN gone_nodes;
    DELETE FROM gone_messages WHERE id IN (SELECT message_id FROM nodes)
        OR id IN (SELECT message_id FROM answers)
        OR id IN (SELECT instructions_id FROM sessions) OR id IN (SELECT tools_id FROM sessions)
        OR id IN (SELECT instructions_id FROM exchanges) OR id IN (SELECT tools_id FROM exchanges)
"""
_REMOVE_MESSAGES = """
    DELETE FROM messages WHERE id IN gone_messages;
    DROP TABLE gone_sessions; DROP TABLE gone_nodes; DROP TABLE gone_messages
"""


def _run(db: Connection, statements: str, gone: Collection[int] = ()) -> None:
    for statement in statements.format(gone=",".join(map(str, gone))).split(";"):
        db.exec_driver_sql(statement)
