"""One writer: idempotent, in order, alive after every failure, and honest about what it could not keep."""

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from graphstore.records import Batch, BlockRow, EdgeRow, MessageRow, NodeState
from graphstore.store.archive import Archive
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.verify import verify
from graphstore.store.writer import RETRY_PAUSES_S, QueueFull, Writer
from tests.graphstore.store.conftest import open_archive
from tests.graphstore.store.history import START, History, exchange_row, message, selection_row, session_row
from tests.observed import plant

DEADLINE_S = 30


class Disk:
    """Makes the writing connection fail on demand, at the statement or at the commit."""

    def __init__(self, archive: Archive) -> None:
        self.error: sqlite3.Error | None = None
        self.commits = 0
        engine = archive.writer._engine
        event.listen(engine, "before_cursor_execute", self._execute)
        event.listen(engine, "commit", self._commit)

    def fail(self, code: int) -> None:
        error = sqlite3.OperationalError("made to fail")
        error.sqlite_errorcode = code
        self.error = error

    def repair(self) -> None:
        self.error = None

    def _execute(self, *_: object) -> None:
        if self.error is not None:
            raise self.error

    def _commit(self, _: object) -> None:
        self.commits += 1


class Pauses:
    """Stands for the wait between two attempts: lets the test decide when it is over."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        self._next = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def __call__(self, _hurry: threading.Event, length: float) -> None:
        self.lengths.append(length)
        self.begun.release()
        assert self._next.acquire(timeout=DEADLINE_S)

    def end(self) -> None:
        self._next.release()


@pytest.fixture
def disk(archive: Archive) -> Iterator[Disk]:
    disk = Disk(archive)
    yield disk
    disk.repair()


def texts(archive: Archive, head: int) -> list[str]:
    return [raw.decode() for raw in archive.reader.path_contents(head)]


def test_writing_twice_changes_nothing(archive: Archive) -> None:
    history = History()
    batch = replace(history.grow("one", "two"), selections=(selection_row(left_out=[1]),))
    answer = history.answer("three")
    archive.writer.submit(batch).result(DEADLINE_S)
    archive.writer.submit(answer).result(DEADLINE_S)
    with archive.reader.snapshot() as db:
        before = [db.exec_driver_sql(f"SELECT * FROM {table}").fetchall() for table in TABLES]
    archive.writer.submit(batch).result(DEADLINE_S)
    archive.writer.submit(answer).result(DEADLINE_S)
    with archive.reader.snapshot() as db:
        after = [db.exec_driver_sql(f"SELECT * FROM {table}").fetchall() for table in TABLES]
    assert after == before


TABLES = (
    "messages", "nodes", "sessions", "blocks", "block_nodes", "edges", "exchanges", "answers", "selections",
    "selection_blocks",
)  # fmt: skip


def test_a_message_is_counted_and_compressed_once(path: Path) -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    with Archive.open(path, clock=lambda: START, count_tokens=count) as archive:
        history = History()
        batch = history.grow("one", "x" * 600, "one")
        for _ in range(3):
            archive.writer.submit(batch).result(DEADLINE_S)
        uncounted = MessageRow(7, b"7" * 16, b"image", None)
        archive.writer.submit(Batch(messages=(uncounted,))).result(DEADLINE_S)
        with archive.reader.snapshot() as db:
            rows = db.exec_driver_sql("SELECT codec, size, tokens, length(content) FROM messages ORDER BY size")
            assert rows.fetchall()[:2] == [("raw", 3, 3, 3), ("raw", 5, 0, 5)]
            codec, size, tokens, stored = (
                db.exec_driver_sql(
                    "SELECT codec, size, tokens, length(content) FROM messages ORDER BY size DESC"
                ).fetchone()
                or ()
            )
    assert (codec, size, tokens) == ("zstd", 600, 600) and stored < 100
    assert counted == ["", "one", "x" * 600]


def test_sessions_and_exchanges_are_replaced_blocks_keep_what_was_observed(archive: Archive) -> None:
    history = History()
    submit = archive.writer.submit
    submit(history.grow("one", "two")).result(DEADLINE_S)
    plant(archive.path, 1, [NodeState(1, 0.75, True, True)], [EdgeRow(0, 1, 0.5, 3)])
    submit(Batch(sessions=(session_row(title="renamed", head_node_id=history.head),)))
    submit(Batch(exchanges=(exchange_row(ending="complete", status=200, head_node_id=history.head),)))
    submit(Batch(blocks=(BlockRow(1, 1, "tools", 99, (history.head,), ("a.py",), "edit a.py"),))).result(DEADLINE_S)
    reader = archive.reader
    assert reader.list_sessions() == [session_row(title="renamed", head_node_id=history.head)]
    assert reader.session_exchanges(1) == [exchange_row(ending="complete", status=200, head_node_id=history.head)]
    block, state = reader.load_blocks(1)[1]
    assert (block.kind, block.cost, block.edits, state) == ("tools", 99, ("a.py",), NodeState(1, 0.75, True, True))
    assert reader.load_edges(1) == [EdgeRow(0, 1, 0.5, 3)]


def test_what_no_database_stores_does_not_cost_the_row(archive: Archive) -> None:
    """Lone surrogates, NUL and absurd numbers arrive from clients and providers; none may poison a batch."""
    row = session_row(title="half \ud83d and \x00", model="\udcff", client_id="pair \ud83d\ude00")
    usage = exchange_row(input_tokens=10**30, cached_tokens=-5, error="\ud800")
    archive.writer.submit(Batch(sessions=(row,), exchanges=(usage,), messages=(message("\ud800"),))).result(DEADLINE_S)
    stored = archive.reader.load_session(1)
    assert stored is not None
    assert (stored.title, stored.model, stored.client_id) == ("half \ufffd and  ", "\ufffd", "pair \U0001f600")
    exchange = archive.reader.last_exchange(1)
    assert exchange is not None and exchange.input_tokens == 2**40 and exchange.cached_tokens == 0
    assert archive.writer.lost == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, "full"),
        (sqlite3.SQLITE_BUSY, "locked"),
        (sqlite3.SQLITE_IOERR_WRITE, "io"),
        (sqlite3.SQLITE_READONLY, "read-only"),
        (sqlite3.SQLITE_CORRUPT, "corrupt"),
    ],
)
def test_a_failing_file_delays_history_but_loses_none(path: Path, code: int, kind: str) -> None:
    pauses = Pauses()
    with open_archive(path) as archive:
        archive.writer._pause = pauses
        disk, history = Disk(archive), History()
        disk.fail(code)
        first = archive.writer.submit(history.grow("one"))
        assert pauses.begun.acquire(timeout=DEADLINE_S)
        later = archive.writer.submit(history.grow("two", "three"))
        with pytest.raises(ArchiveUnavailable) as raised:
            first.result(DEADLINE_S)
        assert raised.value.kind == kind and raised.value.remedy
        assert archive.writer.failure is not None and archive.writer.failure.kind == kind
        assert archive.writer.failure.at == START and "UTC" in str(archive.writer.failure)
        assert archive.writer.pending == 2
        disk.repair()
        pauses.end()
        later.result(DEADLINE_S)
        assert texts(archive, history.head) == ["one", "two", "three"]
        assert (archive.writer.failure, archive.writer.pending, archive.writer.lost) == (None, 0, 0)
        assert verify(archive.reader) == []


def test_pauses_grow_and_start_over_after_a_success(path: Path) -> None:
    pauses = Pauses()
    with open_archive(path) as archive:
        archive.writer._pause = pauses
        disk, history = Disk(archive), History()
        for _ in range(2):
            disk.fail(sqlite3.SQLITE_FULL)
            archive.writer.submit(history.grow("x"))
            for _ in range(3):
                assert pauses.begun.acquire(timeout=DEADLINE_S)
                if len(pauses.lengths) % 3:
                    pauses.end()
            disk.repair()
            ok = archive.writer.submit(history.grow("y"))
            pauses.end()
            ok.result(DEADLINE_S)
    assert pauses.lengths == [*RETRY_PAUSES_S[:3], *RETRY_PAUSES_S[:3]]


def test_a_durable_batch_does_not_wait_for_the_pause_to_end(archive: Archive, disk: Disk) -> None:
    history = History()
    disk.fail(sqlite3.SQLITE_BUSY)
    with pytest.raises(ArchiveUnavailable):
        archive.writer.submit(history.grow("one")).result(DEADLINE_S)
    disk.repair()
    archive.writer.submit(history.grow("two"), durable=True).result(DEADLINE_S)
    assert texts(archive, history.head) == ["one", "two"]


def test_a_decision_that_did_not_reach_the_disk_did_not_happen(archive: Archive, disk: Disk) -> None:
    """The caller was told and sent the original request; the history of the batch is kept all the same."""
    history = History()
    disk.fail(sqlite3.SQLITE_FULL)
    batch = history.grow("one")
    batch = replace(
        batch,
        sessions=(replace(batch.sessions[0], selection_id=1),),
        exchanges=(replace(batch.exchanges[0], selection_id=1),),
        selections=(selection_row(),),
    )
    with pytest.raises(ArchiveUnavailable):
        archive.writer.submit(batch, durable=True).result(DEADLINE_S)
    disk.repair()
    archive.writer.submit(history.grow("two"), durable=True).result(DEADLINE_S)
    assert texts(archive, history.head) == ["one", "two"]
    assert archive.reader.load_selection(1) is None
    assert [row.selection_id for row in archive.reader.session_exchanges(1)] == [None, None]
    assert verify(archive.reader) == []


def test_a_poisoned_batch_is_skipped_and_counted_the_others_are_kept(archive: Archive) -> None:
    one, two = History(1), History(2)
    gate = threading.Event()
    archive.writer._count_tokens = lambda text: gate.wait(DEADLINE_S) and 1 or 0  # all wait for one transaction
    good = [archive.writer.submit(one.grow("first"))]
    poison = archive.writer.submit(Batch(exchanges=(exchange_row(50, session_id=99),)))
    good += [archive.writer.submit(two.grow("second")), archive.writer.submit(one.grow("third"))]
    gate.set()
    with pytest.raises(ArchiveUnavailable, match="FOREIGN KEY") as raised:
        poison.result(DEADLINE_S)
    assert raised.value.kind == "rejected"
    assert [future.result(DEADLINE_S) for future in good] == [None] * 3
    assert archive.writer.lost == 1
    assert texts(archive, one.head) == ["first", "third"]


def test_a_full_queue_refuses_at_once(archive: Archive, disk: Disk) -> None:
    archive.writer._queue_max = 2
    archive.writer._pause = pauses = Pauses()
    disk.fail(sqlite3.SQLITE_FULL)
    history = History()
    archive.writer.submit(history.grow("one"))
    assert pauses.begun.acquire(timeout=DEADLINE_S)
    archive.writer.submit(history.grow("two"))
    with pytest.raises(QueueFull, match="free some space"):
        archive.writer.submit(history.grow("three"))
    disk.repair()
    pauses.end()


def test_closing_writes_what_is_queued(path: Path) -> None:
    history = History()
    with open_archive(path) as archive:
        futures = [archive.writer.submit(history.grow(f"message {i}")) for i in range(300)]
    assert [future.result(0) for future in futures] == [None] * 300
    with pytest.raises(ArchiveUnavailable, match="closed"):
        archive.writer.submit(Batch())
    with open_archive(path) as archive:
        assert len(texts(archive, history.head)) == 300


def test_closing_with_a_failing_file_counts_what_is_lost(path: Path) -> None:
    archive = open_archive(path)
    disk = Disk(archive)
    disk.fail(sqlite3.SQLITE_IOERR)
    futures = [archive.writer.submit(History(i).grow("x")) for i in range(1, 4)]
    archive.close()
    assert all(isinstance(future.exception(0), ArchiveUnavailable) for future in futures)
    assert archive.writer.lost == 3


def test_a_really_full_database_recovers_when_there_is_room(archive: Archive) -> None:
    """The limit is SQLite's own page limit: the same error as a full disk, at whatever statement needs the page."""
    pages = 60
    limit = lambda connection, _record: connection.execute(f"PRAGMA max_page_count={pages}")  # noqa: E731
    event.listen(archive.writer._engine, "connect", limit)
    archive.writer._engine.dispose()
    history = History()
    kinds = set()
    for i in range(40):
        try:
            archive.writer.submit(history.grow(f"{i} " + "".join(map(chr, range(300, 5000)))), durable=True).result(
                DEADLINE_S
            )
        except ArchiveUnavailable as error:
            kinds.add(error.kind)
    assert kinds == {"full"}
    pages = 100_000
    archive.writer.submit(history.grow("the end"), durable=True).result(DEADLINE_S)
    assert len(texts(archive, history.head)) == 41
    assert verify(archive.reader) == []


def test_a_lock_held_by_another_program_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphstore.store.engine.BUSY_TIMEOUT_S", 0.01)
    with open_archive(path) as archive:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ArchiveUnavailable) as raised:
            archive.writer.submit(History().grow("one")).result(DEADLINE_S)
        assert raised.value.kind == "locked"
        other.execute("COMMIT")
        other.close()
        archive.writer.submit(Batch(sessions=(session_row(2),)), durable=True).result(DEADLINE_S)
        assert {row.id for row in archive.reader.list_sessions()} == {1, 2}


def test_batches_that_wait_together_share_a_commit(archive: Archive, disk: Disk) -> None:
    gate = threading.Event()
    archive.writer._count_tokens = lambda text: gate.wait(DEADLINE_S) and 1 or 0
    history = History()
    futures = [archive.writer.submit(history.grow(f"message {i}")) for i in range(50)]
    gate.set()
    for future in futures:
        future.result(DEADLINE_S)
    assert disk.commits <= 2


def test_two_hundred_turns_stay_below_twice_their_unique_bytes(path: Path) -> None:
    """Every turn resends 200 kB and more of history, as clients do; other archives grew by that much with each turn."""
    import random

    random.seed(7)
    words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz_", k=random.randint(2, 9))) for _ in range(4000)]
    history = History()
    with open_archive(path) as archive:
        archive.writer.submit(history.grow(*(" ".join(random.choices(words, k=350)) for _ in range(98))))
        for _ in range(200):
            new = [" ".join(random.choices(words, k=k)) for k in (12, 40, 350)]
            archive.writer.submit(history.grow(*new))
            archive.writer.submit(Batch(messages=tuple(history.rows)), durable=True).result(DEADLINE_S)
        unique = sum(len(text.encode()) for text in history.texts)
        size = sum(file.stat().st_size for file in path.parent.iterdir() if not file.name.endswith("-shm"))
        assert unique > 600_000
        assert size < 2 * unique


# -- against a model ------------------------------------------------------------------------------------------------


class Model:
    """What the archive should say, as dicts."""

    def __init__(self) -> None:
        self.histories: dict[int, History] = {}


actions = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(1, 3), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3)),
        st.tuples(st.just("fail"), st.integers(1, 3), st.just([])),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions)
def test_any_sequence_of_batches_and_failures_equals_the_model(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, list[str]]]
) -> None:
    path = tmp_path_factory.mktemp("model") / "recap.db"
    model = Model()
    with open_archive(path) as archive:
        disk = Disk(archive)
        for action, session, values in steps:
            run(model, archive.writer, disk, action, session, values)
        disk.repair()
        archive.writer.submit(Batch(), durable=True).result(DEADLINE_S)
        assert {row.id for row in archive.reader.list_sessions()} == set(model.histories)
        for history in model.histories.values():
            assert texts(archive, history.head) == history.texts
        assert archive.writer.lost == 0
        assert verify(archive.reader) == []


def run(model: Model, writer: Writer, disk: Disk, action: str, session: int, values: list[str]) -> None:
    if action == "fail":
        disk.fail(sqlite3.SQLITE_FULL)
    else:
        history = model.histories.setdefault(session, History(session))
        writer.submit(history.grow(*values, exchange=False))
