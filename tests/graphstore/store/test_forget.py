"""A session that is forgotten leaves nothing behind, and what others share of it stays as it was."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from graphstore.parameters import Parameters
from graphstore.records import Batch, BlockRow, Fork, NodeState
from graphstore.store.archive import Archive, open_queue, open_reader
from graphstore.store.forget import Forget
from graphstore.store.verify import verify
from tests.graphstore.store.conftest import open_archive
from tests.graphstore.store.history import History, exchange_row, message, selection_row, session_row
from tests.observed import observe, replay_of

WAIT_S = 30
LONG = " ".join(f"canary-long-{i}" for i in range(3000))  # lies on overflow pages
TABLES = "messages nodes sessions blocks block_nodes edges exchanges answers selections selection_blocks "
TABLES += "replay_jobs observations observation_blocks observation_edges inheritances marks"


def forget(archive: Archive, *ids: int, thorough: bool = True) -> None:
    done = archive.writer.forget(Forget(frozenset(ids), thorough=thorough)).result(WAIT_S)
    assert done.problem is None


def rows(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as db:
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES.split()}


def everything(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(path.parent.iterdir()))


def branch(history: History, id: int, *texts: str) -> Batch:
    """A branch that shares all of a history so far and goes on with texts of its own."""
    other = History(id, list(history.texts), history.exchanges, list(history.chain), list(history.rows))
    batch = other.grow(*texts)
    row = replace(batch.sessions[0], parent_id=history.session_id, fork_depth=len(history.texts))
    shared = tuple(
        BlockRow(id, i, "user", len(text), (other_id(history, i),), (), text[:40])
        for i, text in enumerate(history.texts)
    )
    exchange = exchange_row(10 * id, id, head_node_id=other.head)
    return replace(
        batch,
        sessions=(row,),
        blocks=(*shared, *batch.blocks),
        exchanges=(exchange,),
        forks=(Fork(id, history.session_id, frozenset(range(len(history.texts)))),),
    )


def other_id(history: History, index: int) -> int:
    from graphstore.identity import row_id

    return row_id(history.chain[index])


def test_nothing_is_left_of_the_only_session(archive: Archive, path: Path) -> None:
    history = History()
    archive.writer.submit(history.grow("canary-one", LONG, "canary-three"))
    tools = message("canary-tools")
    beside = session_row(2, kind="side", parent_id=1, title="canary-title", tools_id=tools.id)
    archive.writer.submit(Batch(messages=(tools,), sessions=(beside,), exchanges=(exchange_row(5, 2),)))
    archive.writer.submit(Batch(selections=(selection_row(left_out=[1]),)))
    archive.writer.submit(history.answer("canary-answer"), durable=True).result(WAIT_S)
    observe(path, 1, replay_of({0: 1.0, 1: 0.5}, [(0, 1, 0.5)]))
    assert b"canary" in everything(path)
    forget(archive, 1)
    assert set(rows(path).values()) == {0}
    assert b"canary" not in everything(path)
    assert verify(archive.reader) == []


def test_many_small_removals_and_one_rewriting_leave_nothing(archive: Archive, path: Path) -> None:
    """Overwriting rows is not enough: pages that were split before hold copies of rows that moved."""
    for id in range(1, 30):
        history = History(id)
        archive.writer.submit(history.grow(*(f"{'canary' if id % 2 else 'kept'}-{id}-{i} " * 30 for i in range(20))))
    archive.writer.submit(Batch(), durable=True).result(WAIT_S)
    before, freed = path.stat().st_size, 0
    for id in range(1, 30, 2):
        freed += archive.writer.forget(Forget(frozenset([id]))).result(WAIT_S).freed
    assert verify(archive.reader) == []
    assert freed > 15 * 20 * 60
    forget(archive, thorough=True)
    assert path.stat().st_size < before * 0.7
    assert b"canary" not in everything(path)


def test_what_a_branch_shares_stays_with_it(archive: Archive, path: Path) -> None:
    history = History()
    archive.writer.submit(history.grow("one", "two", "three"))
    archive.writer.submit(Batch(selections=(selection_row(left_out=[1, 2]),)), durable=True).result(WAIT_S)
    observe(path, 1, replay_of({0: 1.0, 1: 0.5, 2: 0.7}, [(0, 1, 0.5), (1, 2, 0.25)]))
    fork = branch(history, 2, "branched")
    served = replace(fork.exchanges[0], selection_id=1, blocks_left_out=2)
    fork = replace(fork, sessions=(replace(fork.sessions[0], selection_id=1),), exchanges=(served,))
    archive.writer.submit(fork)
    archive.writer.submit(history.grow("canary-of-the-parent " * 50), durable=True).result(WAIT_S)
    read = archive.reader
    graphs = [read.derived_graph(2, rule, Parameters()).to_rows() for rule in ("paper", "mass", "hybrid")]
    blocks, observed, selection = read.load_blocks(2), read.last_observed(2), read.load_selection(1)
    assert graphs[0][1] and selection is not None
    assert verify(read) == []

    forget(archive, 1)

    assert verify(read) == []
    assert [row.name for row in read.list_sessions()] == ["s-00002"]
    (session,) = read.list_sessions()
    assert session.parent_id is None and session.selection_id == 1
    assert read.path_contents(session.head_node_id or 0) == [b"one", b"two", b"three", b"branched"]
    assert read.load_blocks(2) == blocks and read.last_observed(2) == observed
    assert [read.derived_graph(2, rule, Parameters()).to_rows() for rule in ("paper", "mass", "hybrid")] == graphs
    kept = read.load_selection(1)
    assert kept is not None and kept.session_id == 2 and kept.verdicts == selection.verdicts
    assert b"canary" not in everything(path)
    with open_queue(path, clock=lambda: 0.0, claims=False) as queue:
        assert queue.rebuild(2, "mass")
    assert verify(read) == []
    forget(archive, 2)
    assert set(rows(path).values()) == {0}
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT key FROM meta").fetchall() == [("secret",)]


def test_the_parent_stays_when_its_branch_goes(archive: Archive, path: Path) -> None:
    history = History()
    archive.writer.submit(history.grow("one", "two"))
    archive.writer.submit(branch(history, 2, "canary-branch"), durable=True).result(WAIT_S)
    forget(archive, 2)
    assert verify(archive.reader) == []
    assert archive.reader.path_contents(history.head) == [b"one", b"two"]
    assert b"canary" not in everything(path)


def test_what_comes_after_a_removal_is_not_part_of_it(archive: Archive) -> None:
    """One transaction takes many batches; a removal among them must not see those behind it."""
    history, again = History(1), History(2)
    archive.writer.submit(history.grow("one", "two"))
    removal = archive.writer.forget(Forget(frozenset([1])))
    archive.writer.submit(replace(again.grow("one", "two"), exchanges=(exchange_row(7, 2, head_node_id=again.head),)))
    archive.writer.submit(Batch(), durable=True).result(WAIT_S)
    assert removal.result(WAIT_S).sessions == 1
    assert [row.id for row in archive.reader.list_sessions()] == [2]
    assert archive.reader.path_contents(again.head) == [b"one", b"two"]
    assert verify(archive.reader) == []


def test_a_reader_that_holds_the_log_back_is_named(path: Path) -> None:
    with open_archive(path) as archive:
        archive.writer.submit(History().grow("one"), durable=True).result(WAIT_S)
        with open_reader(path) as reader, reader.snapshot() as db:
            db.exec_driver_sql("SELECT count(*) FROM messages").all()
            done = archive.writer.forget(Forget(frozenset([1]))).result(WAIT_S)
        assert done.sessions == 1 and "-wal" in (done.problem or "")
        assert NodeState(0, 0.0, False, False) not in [state for _, state in archive.reader.load_blocks(1)]


def test_requests_of_no_session_go_by_age(archive: Archive) -> None:
    old, new = exchange_row(1, None, started_at=10.0), exchange_row(2, None, started_at=20.0)
    archive.writer.submit(Batch(exchanges=(old, new)))
    archive.writer.forget(Forget(frozenset(), unattached_before=15.0)).result(WAIT_S)
    assert archive.reader.load_exchange(1) is None and archive.reader.load_exchange(2) is not None


@pytest.mark.parametrize("ids", [(), (99,)])
def test_nothing_to_forget_is_no_failure(archive: Archive, ids: tuple[int, ...]) -> None:
    archive.writer.submit(History().grow("one"))
    forget(archive, *ids)
    assert len(archive.reader.list_sessions()) == 1
