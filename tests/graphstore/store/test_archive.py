"""Opening: private files, one owner, clear words for every file that is not a usable archive."""

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from graphstore.records import Batch
from graphstore.store import engine, schema
from graphstore.store.archive import Archive, migrate, open_reader
from graphstore.store.engine import ArchiveUnavailable, ensure_private, explain, writer_engine
from graphstore.store.verify import verify
from tests.graphstore.store.conftest import open_archive
from tests.graphstore.store.history import History, session_row

DEADLINE_S = 30


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "new" / "data" / "recap.db"
    before = os.umask(0)
    try:
        with open_archive(path) as archive:
            archive.writer.submit(History().grow("one"), durable=True).result(DEADLINE_S)
            files = {file.name: mode(file) for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert files == dict.fromkeys(["recap.db", "recap.db-wal", "recap.db-shm", "recap.db.lock"], 0o600)
    assert mode(path.parent) == 0o700


def test_a_file_that_others_may_read_is_tightened_the_users_folder_is_not(tmp_path: Path) -> None:
    path = tmp_path / "recap.db"
    path.touch(0o644)
    before = mode(tmp_path)
    ensure_private(path)
    assert (mode(path), mode(tmp_path)) == (0o600, before)


def test_freed_pages_can_be_given_back(archive: Archive) -> None:
    """auto_vacuum holds only when it was set before the first page: deletes would never shrink the file."""
    with archive.reader.snapshot() as db:
        assert db.exec_driver_sql("PRAGMA auto_vacuum").scalar() == 2
        assert db.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_the_secret_is_made_once(path: Path) -> None:
    with open_archive(path) as archive:
        secret = archive.secret
    with open_archive(path) as archive:
        assert archive.secret == secret and len(secret) == 32


def test_only_one_process_owns_an_archive_others_may_read(path: Path) -> None:
    with open_archive(path) as archive:
        archive.writer.submit(Batch(sessions=(session_row(),)), durable=True).result(DEADLINE_S)
        with pytest.raises(ArchiveUnavailable, match="another recap process") as raised:
            open_archive(path)
        assert raised.value.kind == "in use"
        with open_reader(path) as reader:
            assert [row.id for row in reader.list_sessions()] == [1]
    open_archive(path).close()


def test_closing_twice_is_harmless(path: Path) -> None:
    archive = open_archive(path)
    archive.close()
    archive.close()


def test_a_reader_finds_an_archive_that_nobody_has_open(path: Path) -> None:
    with open_archive(path) as archive:
        archive.writer.submit(Batch(sessions=(session_row(),)), durable=True).result(DEADLINE_S)
    with open_reader(path) as reader:
        assert [row.id for row in reader.list_sessions()] == [1]
        with pytest.raises(ArchiveUnavailable) as raised, reader.snapshot() as db:
            db.exec_driver_sql("DELETE FROM sessions")
    assert raised.value.kind == "read-only"


def test_an_archive_on_a_read_only_medium_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup on a disc, a snapshot: there is no room for the files that SQLite puts beside a database."""
    with open_archive(path) as archive:
        archive.writer.submit(Batch(sessions=(session_row(),)), durable=True).result(DEADLINE_S)
    before = sorted(path.parent.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)
    with open_reader(path) as reader:
        assert [row.id for row in reader.list_sessions()] == [1]
        assert sorted(path.parent.iterdir()) == before


def test_who_looks_at_a_lock_keeps_nobody_from_taking_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_archive(path).close()
    with open(f"{path}.lock") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        monkeypatch.setattr(engine, "sleep", lambda _: fcntl.flock(looked_at, fcntl.LOCK_UN))
        open_archive(path).close()


def refusal(path: Path, *, read: bool = False) -> ArchiveUnavailable:
    with pytest.raises(ArchiveUnavailable) as raised:
        (open_reader if read else open_archive)(path).close()
    assert raised.value.problem and raised.value.remedy
    return raised.value


def test_a_reader_creates_nothing(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none" / "recap.db", read=True).kind == "absent"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.db").touch()
    assert refusal(tmp_path / "empty.db", read=True).kind == "absent"


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"dear diary, " * 1000)
    for read in (False, True):
        error = refusal(path, read=read)
        assert error.kind == "corrupt" and "not a database" in error.problem
    assert path.read_bytes() == b"dear diary, " * 1000


def test_a_damaged_database_is_named(path: Path) -> None:
    with open_archive(path) as archive:
        archive.writer.submit(History().grow(*(f"message {i} " * 50 for i in range(200))), durable=True).result(60)
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    assert refusal(path).kind == "corrupt"
    assert refusal(path, read=True).kind == "corrupt"


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    assert refusal(path).kind == "foreign"
    assert refusal(path, read=True).kind == "foreign"
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]


def test_a_database_of_a_newer_version_is_left_alone(path: Path) -> None:
    open_archive(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE alembic_version SET version_num = '9999'")
    for read in (False, True):
        error = refusal(path, read=read)
        assert error.kind == "newer" and "upgrade recap" in error.remedy
    assert [file.name for file in path.parent.iterdir() if "backup" in file.name] == []


def test_an_older_database_is_copied_then_upgraded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is made to expect one revision more; the upgrade then has nothing to do."""
    with open_archive(path) as archive:
        archive.writer.submit(History().grow("one"), durable=True).result(DEADLINE_S)
    present = schema.REVISION
    monkeypatch.setattr(schema, "REVISION", "9999")
    assert refusal(path, read=True).kind == "older"
    engine = writer_engine(path)
    migrate(engine, path)
    engine.dispose()
    backup = path.with_name(f"recap.db.backup-{present}")
    assert mode(backup) == 0o600
    with closing(sqlite3.connect(backup)) as copy:
        assert copy.execute("SELECT count(*) FROM sessions").fetchone() == (1,)


def test_an_upgrade_that_fails_leaves_the_database_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDL is part of the transaction: half a schema would be worse than none."""
    ensure_private(path)
    engine = writer_engine(path)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("made to fail")

    with monkeypatch.context() as patch, pytest.raises(sqlite3.OperationalError):
        patch.setattr("sqlalchemy.schema.Index.create", fail, raising=True)
        patch.setattr("alembic.ddl.impl.DefaultImpl.create_index", fail)
        migrate(engine, path)
    engine.dispose()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == []
    open_archive(path).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refusal(tmp_path / "file" / "recap.db")
    assert error.kind == "directory" and "--db" in error.remedy


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path).kind == "directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_file_is_named(path: Path) -> None:
    open_archive(path).close()
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        assert refusal(path).kind in ("read-only", "directory")
    finally:
        path.parent.chmod(0o700)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_READONLY_DBMOVED, "read-only"),
        (sqlite3.SQLITE_CANTOPEN, "io"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, "locked"),
        (sqlite3.SQLITE_NOTADB, "corrupt"),
        (sqlite3.SQLITE_FULL, "full"),
    ],
)
def test_every_failure_of_the_file_has_a_kind_and_a_remedy(code: int, kind: str) -> None:
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    found = explain(error)
    assert found is not None and found.kind == kind and found.remedy


def test_a_failure_of_the_data_is_not_blamed_on_the_file() -> None:
    error = sqlite3.IntegrityError("x")
    error.sqlite_errorcode = sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY
    assert explain(error) is None
    assert explain(ValueError("x")) is None


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from tests.graphstore.store.conftest import open_archive
from tests.graphstore.store.history import History

archive, history = open_archive(Path(sys.argv[1])), History()
while True:
    archive.writer.submit(history.grow(f"message {len(history.texts)} " * 40), durable=True).result(30)
    print(len(history.texts), flush=True)
"""


def test_what_was_committed_survives_a_kill(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    with process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 25:
            pass
        process.send_signal(signal.SIGKILL)
        confirmed = max([25, *map(int, process.stdout.read().split("\n")[:-1])])
    with open_archive(path) as archive:  # the lock died with its owner
        row = archive.reader.load_session(1)
        assert row is not None and row.head_node_id is not None
        kept = archive.reader.path_contents(row.head_node_id)
        assert len(kept) >= confirmed
        assert kept == [f"message {i} ".encode() * 40 for i in range(len(kept))]
        assert verify(archive.reader) == []
