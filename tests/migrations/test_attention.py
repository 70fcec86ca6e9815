"""A database of the first revision keeps all that it holds and learns of attention."""

import sqlite3
from contextlib import closing
from pathlib import Path

from alembic import command

from graphstore.records import NodeState
from graphstore.store.archive import Archive, alembic_config
from graphstore.store.engine import ensure_private, writer_engine
from graphstore.store.verify import verify
from tests.observed import observe, replay_of

FIRST = """
    INSERT INTO messages VALUES (1, x'aa', 'raw', x'7b7d', 2, 1, 0.0);
    INSERT INTO nodes VALUES (1, x'bb', NULL, 1, 0);
    INSERT INTO sessions (id, name, scope, upstream, dialect, client, kind, model, head_node_id, state, turns,
        created_at, last_active_at, title)
        VALUES (1, 's-1', x'cc', 'u', 'chat', 'other', 'agent', 'm', 1, 'normal', 1, 0.0, 0.0, 'Old');
    INSERT INTO blocks (session_id, ordinal, kind, cost, edits, label) VALUES (1, 0, 'user', 2, '[]', 'old');
    INSERT INTO block_nodes VALUES (1, 1, 0);
    INSERT INTO exchanges (id, session_id, turn, step, started_at, path, dialect, model, stream, outcome, boundary,
        reason, blocks_total, blocks_left_out, messages_total, messages_sent, chars_total, chars_sent, bytes_total,
        bytes_sent, prefix_messages, prefix_bytes, ending, fell_back, transformations)
        VALUES (1, 1, 1, 0, 0.0, '/', 'chat', 'm', 0, 'new', 'none', '', 1, 0, 1, 1, 2, 2, 2,
        2, 0, 0, 'complete', 0, 0);
    INSERT INTO selections VALUES (1, 1, 1, 1, 0.0, 1, 'idle', '{}', 1, 2, 2, 2, 1);
    INSERT INTO selection_blocks VALUES (1, 0, 1, 'protected', 'user message', 0.5, 0.25, 0.125, 0.0, NULL);
"""


def old_database(path: Path) -> None:
    ensure_private(path)
    engine = writer_engine(path)
    config = alembic_config()
    with engine.connect() as connection, connection.begin():
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    engine.dispose()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(FIRST)


def test_an_old_archive_is_upgraded_with_all_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "recap.db"
    old_database(path)
    with Archive.open(path, count_tokens=len) as archive:
        reader = archive.reader
        assert [(row.name, row.title, row.arm) for row in reader.list_sessions()] == [("s-1", "Old", None)]
        selection = reader.load_selection(1)
        assert selection is not None
        (verdict,) = selection.verdicts
        assert (verdict.score, verdict.z_u, verdict.z_lex, verdict.z_past) == (0.5, 0.25, 0.125, None)
        assert (reader.graph_rule(1), reader.last_observed(1), reader.load_jobs(1)) == ("", None, [])
        observe(path, 1, replay_of({0: 0.5}))
        assert reader.load_graph(1)[0] == [NodeState(0, 0.6, True, False)]
        assert not [finding for finding in verify(reader) if finding.table in ("blocks", "edges", "observations")]
        with reader.snapshot() as db:
            (seen,) = db.exec_driver_sql("SELECT session, turn, mass, label FROM v_observations").all()
            assert tuple(seen) == ("s-1", 1, 0.5, "old")
    assert (tmp_path / "recap.db.backup-0001").exists()
