"""Opens the archive's file: who may read it, how SQLite is set up, and what its failures mean to a person.

Knows no table. Two kinds of engine: one writer whose transactions begin IMMEDIATE (a deferred transaction that reads
and then writes fails at once when another commit came between, whatever the busy timeout says), and read-only readers.
The driver's own transaction handling is off (`isolation_level=None`), because it commits DDL behind our back.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Literal

from sqlalchemy import Engine, QueuePool, create_engine, event
from sqlalchemy.engine import Connection
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

BUSY_TIMEOUT_S = 5.0
LOOK_S = 0.02  # a look at somebody's lock takes far less
WAL_PAGES = 64  # checkpoint at 256 KiB: the log counts, and must not outgrow a small archive
WAL_BYTES_MAX = 1 << 18  # to which a longer log is cut back after a checkpoint

Kind = Literal[
    "absent",
    "busy",
    "closed",
    "corrupt",
    "directory",
    "foreign",
    "full",
    "in use",
    "io",
    "locked",
    "newer",
    "older",
    "read-only",
    "rejected",
]


class ArchiveUnavailable(Exception):
    """The archive cannot do what was asked. `problem` says what is wrong, `remedy` what a person can do about it."""

    def __init__(self, kind: Kind, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.kind: Kind = kind
        self.problem = problem
        self.remedy = remedy


# SQLite's primary result codes: kind, problem, remedy.
_CAUSES: dict[int, tuple[Kind, str, str]] = {
    sqlite3.SQLITE_BUSY: ("locked", "the database is locked", "close the program that holds it open for writing"),
    sqlite3.SQLITE_LOCKED: ("locked", "the database is locked", "close the program that holds it open for writing"),
    sqlite3.SQLITE_READONLY: ("read-only", "the database is read-only", "make the file and its directory writable"),
    sqlite3.SQLITE_PERM: ("read-only", "access to the database is denied", "make the file readable and writable"),
    sqlite3.SQLITE_CANTOPEN: ("io", "the database cannot be opened", "check the path and its permissions"),
    sqlite3.SQLITE_FULL: ("full", "the disk is full", "free some space"),
    sqlite3.SQLITE_IOERR: ("io", "the disk reports an error", "check the disk and the free space"),
    sqlite3.SQLITE_PROTOCOL: ("io", "the database's locks do not work", "move it off the network file system"),
    sqlite3.SQLITE_NOMEM: ("io", "memory is exhausted", "free some memory"),
    sqlite3.SQLITE_CORRUPT: ("corrupt", "the database is malformed", "move the file away or restore a backup of it"),
    sqlite3.SQLITE_NOTADB: ("corrupt", "the file is not a database", "move the file away or choose another path"),
}


def explain(error: BaseException) -> ArchiveUnavailable | None:
    """What a failure means when its cause lies in the file, the disk or the machine; None when it lies in the data."""
    if isinstance(error, ArchiveUnavailable):
        return error
    origin = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(origin, sqlite3.Error):
        cause = _CAUSES.get(getattr(origin, "sqlite_errorcode", 0) & 0xFF)
        return ArchiveUnavailable(cause[0], f"{cause[1]} ({origin})", cause[2]) if cause else None
    if isinstance(origin, UnicodeDecodeError):  # SQLite quotes a damaged schema in its own message
        cause = _CAUSES[sqlite3.SQLITE_CORRUPT]
        return ArchiveUnavailable(cause[0], f"{cause[1]} ({origin})", cause[2])
    if isinstance(origin, OSError):
        return ArchiveUnavailable("io", f"the disk reports: {origin}", "check the disk, the path and its permissions")
    return None


def ensure_private(path: Path) -> None:
    """Create the file 0600 and its directory 0700 where they are missing; tighten a file that others may read.

    SQLite gives the -wal and -shm files the mode of the database. Raises `ArchiveUnavailable`.
    """
    try:
        if not path.parent.is_dir():
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise ArchiveUnavailable(
            "directory", f"{str(path)!r} cannot be created or opened: {error}", "choose another path with --db"
        ) from error


@contextmanager
def explained() -> Iterator[None]:
    """Raise whatever fails of the file as `ArchiveUnavailable`, and everything else as it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ArchiveUnavailable) or (trouble := explain(error)) is None:
            raise
        raise trouble from error


class OwnerLock:
    """Says that one process owns the archive. The system frees it when that process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock beside the database at `path`, or raise `ArchiveUnavailable`."""
        self._fd = -1
        try:
            self._fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._take()
        except BlockingIOError as error:
            self.release()
            raise ArchiveUnavailable(
                "in use",
                f"{str(path)!r} is in use by another recap process",
                "stop it or choose another path with --db",
            ) from error
        except OSError as error:
            self.release()
            raise ArchiveUnavailable(
                "directory", f"{path.name!r} cannot be locked: {error}", "make its directory writable"
            ) from error

    def _take(self) -> None:
        """Twice: somebody who only looks (`is_owned`) holds it for an instant."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sleep(LOOK_S)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_owned(path: Path) -> bool:
    """Whether some process holds the `OwnerLock` of this path, in this container or in another one on this machine."""
    try:
        fd = os.open(f"{path}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def writer_engine(path: Path) -> Engine:
    """Engine of the one connection that writes. The file must exist (`ensure_private`)."""
    engine = _engine(path, "rw", begin="BEGIN IMMEDIATE", pool_size=1)

    @event.listens_for(engine, "connect")
    def set_up(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        # auto_vacuum holds only when set before the first page is written, and journal_mode writes it.
        for setting in (
            "auto_vacuum=INCREMENTAL",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
            f"wal_autocheckpoint={WAL_PAGES}",
            f"journal_size_limit={WAL_BYTES_MAX}",
            "secure_delete=ON",  # what is removed is overwritten
        ):
            cursor.execute(f"PRAGMA {setting}")
        cursor.close()

    return engine


def file_identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def reader_engine(path: Path) -> Engine:
    """Engine of read-only connections, one for each thread that reads at the same time."""
    return _engine(path, "ro&immutable=1" if _is_frozen(path) else "ro", begin="BEGIN", pool_size=4)


def _is_frozen(path: Path) -> bool:
    """On a medium that nobody can write to SQLite reads a database with a log of changes only if told that it rests."""
    rests = not Path(f"{path}-wal").exists()
    return rests and path.exists() and not os.access(path.parent, os.W_OK)


def _engine(path: Path, mode: str, *, begin: str, pool_size: int) -> Engine:
    uri = f"{path.absolute().as_uri()}?mode={mode}"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=256
        )

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=pool_size, max_overflow=-1)

    @event.listens_for(engine, "connect")
    def remember(_connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        record.info["file"] = file_identity(path)

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        """SQLite goes on with a file that has been deleted: what is written there could never be read again, and what
        is read there is not what stands at the path."""
        if connection.info["file"] != file_identity(path):
            raise ArchiveUnavailable("io", f"{path.name!r} was moved or deleted", "put it back, or restart the proxy")
        connection.exec_driver_sql(begin)

    return engine


def pragma(connection: Connection, statement: str) -> list[tuple[object, ...]]:
    """Run a PRAGMA outside any transaction, where SQLite wants most of them."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver.execute(f"PRAGMA {statement}").fetchall()


def copy_database(path: Path, target: Path) -> None:
    """Consistent copy of a database, also while others read it; the copy is 0600. Raises `ArchiveUnavailable`."""
    try:
        with suppress(FileNotFoundError):
            target.unlink()
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        source, copy = sqlite3.connect(path), sqlite3.connect(target)
        try:
            source.backup(copy)
        finally:
            copy.close()
            source.close()
    except (sqlite3.Error, OSError) as error:
        raise explain(error) or ArchiveUnavailable(
            "io", f"the backup {str(target)!r} cannot be written: {error}", "free some space"
        ) from error
