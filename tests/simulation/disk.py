"""The disk under the archive: a real SQLite file, whose every statement and commit may fail, wait or be the last.

Statements of all processes pass here. Locks are waited for in virtual time, as SQLite would wait in real time. What a
durable commit has brought to the disk is known, so that a power cut can take everything else.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn
from unittest import mock

from greenlet import getcurrent
from sqlalchemy import Engine, event

from graphstore.store import engine as engines
from tests.simulation.machine import Condition, Killed, Machine, Process

Trouble = Literal["full", "locked", "io", "stalled", "unreadable", "unsure", "busy"]
TROUBLES: tuple[Trouble, ...] = ("full", "locked", "io", "stalled", "unreadable", "unsure", "busy")
OTHER = "another program"
FAR = 1 << 40
LOCK_S = 3.0  # that somebody else holds the lock at each try while the disk is "locked" and may yet come free
WRITE_BACK_S = 60.0  # Linux: 30 s, and a moment to do it
_ERRORS: dict[str, tuple[int, str]] = {
    "full": (sqlite3.SQLITE_FULL, "database or disk is full"),
    "locked": (sqlite3.SQLITE_BUSY, "database is locked"),
    "busy": (sqlite3.SQLITE_BUSY, "database is locked"),
    "io": (sqlite3.SQLITE_IOERR, "disk I/O error"),
    "unsure": (sqlite3.SQLITE_IOERR, "disk I/O error"),
    "unreadable": (sqlite3.SQLITE_IOERR, "disk I/O error"),
}


def _error(trouble: str) -> sqlite3.OperationalError:
    code, text = _ERRORS[trouble]
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


class Disk:
    """`durable` holds the ids of the messages and selections that no power cut can take."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self.path = path
        self._machine = machine
        self._trouble: Trouble | None = None
        self._in = 0  # statements that still succeed
        self._times = FAR  # how often it fails before it heals by itself
        self._stall_s = 0.0
        self._kill_in: dict[Process, int] = {}
        self._writing: Process | None = None
        self._freed = Condition()
        self._look = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        self.troubled_at = float("-inf")  # when it last failed or kept somebody waiting
        self.commits = 0
        self._committed_at = machine.time()
        self._synced = self._files()
        self.durable: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    # -- what happens to it -------------------------------------------------------------------------------------

    def fail(self, trouble: Trouble, *, after: int, times: int = FAR, stall_s: float = 0.0) -> None:
        self._trouble, self._in, self._times, self._stall_s = trouble, after, times, stall_s
        self.troubled_at = self._machine.time()

    def heal(self) -> None:
        if self._trouble is not None:
            self.troubled_at = self._machine.time()
        self._trouble = None

    @property
    def fails(self) -> bool:
        return self._trouble is not None or (self._writing is not None and self._writing.name == OTHER)

    def kill_at(self, process: Process, statement: int) -> None:
        """End a process at its n-th statement or commit from now; every other commit has happened by then."""
        self._kill_in[process] = statement

    def spare(self) -> None:
        """Nobody dies of what was arranged before."""
        self._kill_in.clear()

    def cut_power(self) -> None:
        """Back to what the last durable commit left; whoever had the file open must be gone."""
        self._look.close()
        self._write_back()
        for file, content in self._synced.items():
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(content)
        Path(f"{self.path}-shm").unlink(missing_ok=True)
        self._look = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, isolation_level=None)

    def occupy(self, process: Process, seconds: float) -> None:
        """Another program's transaction, for so long. In its own thread."""
        self._freed.wait_for(lambda: self._writing is None)
        self._writing, self.troubled_at = process, self._machine.time()
        self._machine.sleep(seconds)
        self.troubled_at = self._machine.time()
        self.rolled_back(process)

    def replaced(self) -> None:
        """Another file stands there now, or other bytes; nobody has it open."""
        self._look.close()
        self._look = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, isolation_level=None)
        self._note()

    def bury(self, process: Process) -> None:
        """Close what a dead process had open."""
        for release in process.held:
            release()
        process.held.clear()
        self._kill_in.pop(process, None)
        self.rolled_back(process)

    def rolled_back(self, process: Process) -> None:
        if self._writing is process:
            self._free()

    def close(self) -> None:
        self._look.close()

    # -- looking, without passing here --------------------------------------------------------------------------

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._look.execute(query, values).fetchall()

    # -- statements of the production code ----------------------------------------------------------------------

    def open(self, *, writes: bool) -> Engine:
        """The production code's engine on this file, for the process that runs now."""
        process = self._machine.owner()
        free = _FREE.setdefault((self.path, writes), [])
        engine = free.pop() if free else _gated(self.path, writes=writes)
        _GATES[engine] = _Gate(self, process)
        process.held.append(lambda: self._leave(engine, free))
        return engine

    def open_to_look(self) -> Engine:
        """... for nobody in this world: nothing happens to what it reads."""
        if self.path not in _LOOKING:
            _LOOKING[self.path] = engines.reader_engine(self.path)
        return _LOOKING[self.path]

    @staticmethod
    def _leave(engine: Engine, free: list[Engine]) -> None:
        """Another one may take it: it keeps no connection, only the statements that it has compiled."""
        engine.dispose()
        free.append(engine)

    def before(self, process: Process, statement: str, *, writes: bool) -> None:
        assert getcurrent() is not self._machine.main, "the event loop waits for the disk"
        begins = statement.startswith("BEGIN")
        if process.dead or (not begins and self._is_killed(process)):
            self._end(process)
        if self._trouble == "busy":
            self._wait_in_vain(process)
        if self._trouble == "unreadable" and not writes:
            self._maybe_fail()
        if writes and begins:
            self._take(process)
        elif writes and self._trouble in ("full", "io"):
            self._maybe_fail()

    def _take(self, process: Process) -> None:
        """The write lock, as `BEGIN IMMEDIATE` waits for it."""
        if self._trouble == "locked" and self._in <= 0:
            self._machine.sleep(engines.BUSY_TIMEOUT_S if self._times > 1 else LOCK_S)
            if self._trouble == "locked":
                self._maybe_fail()
        if self._trouble == "locked":
            self._in -= 1
        if not self._freed.wait_for(lambda: self._writing is None, engines.BUSY_TIMEOUT_S):
            raise _error("locked")
        if process.dead:
            self._end(process)
        self._writing = process

    def commit(self, process: Process, connection: Any, commit: Callable[[Any], None]) -> None:
        if self._is_killed(process):
            self._end(process)
        if self._trouble == "busy":
            self._wait_in_vain(process)
        if self._trouble == "stalled":
            self.troubled_at = self._machine.time()
            self._in -= 1
            if self._in < 0:
                self._machine.sleep(self._stall_s)
                if process.dead:
                    self._end(process)
                self._count_down()
        if self._trouble in ("full", "io"):
            self._maybe_fail()
        is_durable = connection.execute("PRAGMA synchronous").fetchone()[0] >= 2
        self._write_back()
        commit(connection)
        self.commits += 1
        self._committed_at = self._machine.time()
        if is_durable:
            self._note()
        self._free()
        if self._is_killed(process):
            self._end(process)
        if self._trouble == "unsure":
            self._maybe_fail()

    def _wait_in_vain(self, process: Process) -> None:
        """Somebody has the whole file for himself: any statement waits for it, and so does a commit."""
        if self._in <= 0:
            self._machine.sleep(engines.BUSY_TIMEOUT_S)
            if process.dead:
                self._end(process)
        if self._trouble == "busy":
            self._maybe_fail()

    def _maybe_fail(self) -> None:
        trouble = self._trouble
        assert trouble is not None
        self._in -= 1
        if self._in < 0:
            self.troubled_at = self._machine.time()
            self._count_down()
            raise _error(trouble)

    def _count_down(self) -> None:
        self._times -= 1
        if self._times <= 0:
            self._trouble = None

    def _is_killed(self, process: Process) -> bool:
        left = self._kill_in.get(process)
        if left is None:
            return False
        self._kill_in[process] = left - 1
        if left > 0:
            return False
        return True

    def _end(self, process: Process) -> NoReturn:
        """The system frees a lock whose owner dies."""
        process.dead = True
        self.rolled_back(process)
        raise Killed

    def _write_back(self) -> None:
        """The system brings to the disk by itself what has waited for so long."""
        if self._machine.time() - self._committed_at > WRITE_BACK_S:
            self._synced = self._files()

    def _free(self) -> None:
        self._writing = None
        self._freed.notify_all()

    def _note(self) -> None:
        self._synced = self._files()
        self.durable = (
            frozenset(id for (id,) in self.ask("SELECT id FROM messages")),
            frozenset(id for (id,) in self.ask("SELECT id FROM selections")),
        )

    def _files(self) -> dict[Path, bytes | None]:
        files = (self.path, Path(f"{self.path}-wal"))
        return {file: file.read_bytes() if file.exists() else None for file in files}


class _Gate(NamedTuple):
    disk: Disk
    process: Process


_FREE: dict[tuple[Path, bool], list[Engine]] = {}  # making an engine costs more than most histories do
_GATES: dict[Engine, _Gate] = {}
_LOOKING: dict[Path, Engine] = {}


@contextmanager
def _let_go(connection: Any) -> Iterator[None]:
    """The process dies, and its lock with it: a cursor that nobody has collected yet would keep the file locked."""
    try:
        yield
    except Killed:
        connection.rollback()
        raise


def _gated(path: Path, *, writes: bool) -> Engine:
    engine = engines.writer_engine(path) if writes else engines.reader_engine(path)
    dialect: Any = engine.dialect
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=0"))

    def gated(run: Callable[..., Any]) -> Callable[..., Any]:
        def execute(cursor: Any, statement: str, *rest: Any) -> Any:
            disk, process = _GATES[engine]
            with _let_go(cursor.connection):
                disk.before(process, statement, writes=writes)
            return run(cursor, statement, *rest)

        return execute

    for name in ("do_execute", "do_executemany", "do_execute_no_params"):
        setattr(dialect, name, gated(getattr(dialect, name)))
    commit, rollback = dialect.do_commit, dialect.do_rollback

    def do_commit(connection: Any) -> None:
        disk, process = _GATES[engine]
        if writes and connection.in_transaction:
            with _let_go(connection):
                disk.commit(process, connection, commit)
        else:
            commit(connection)

    def do_rollback(connection: Any) -> None:
        rollback(connection)
        disk, process = _GATES[engine]
        if writes:
            disk.rolled_back(process)

    dialect.do_commit, dialect.do_rollback = do_commit, do_rollback
    return engine


@contextmanager
def over(disk: Disk) -> Iterator[None]:
    """Whatever opens the archive from now on goes through this disk, and is closed when its process ends."""

    class Lock(engines.OwnerLock):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            Machine.current.owner().held.append(self.release)

    def writer(path: Path) -> Engine:
        return disk.open(writes=True) if path == disk.path else engines.writer_engine(path)

    def reader(path: Path) -> Engine:
        return disk.open(writes=False) if path == disk.path else engines.reader_engine(path)

    with (
        mock.patch("graphstore.store.archive.writer_engine", writer),
        mock.patch("graphstore.store.archive.reader_engine", reader),
        mock.patch("graphstore.store.replays.writer_engine", writer),
        mock.patch("graphstore.store.archive.OwnerLock", Lock),
        mock.patch("graphstore.store.replays.OwnerLock", Lock),
    ):
        yield
