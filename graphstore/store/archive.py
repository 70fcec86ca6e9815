"""The archive as a whole: opened, owned, migrated, with one writer and any number of readers.

`Archive.open` is for the process that records sessions; `open_reader` for everyone who only looks. What the tables hold
is the business of `schema`, what migrations do of `migrations`.
"""

import secrets
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, select, text
from sqlalchemy.dialects.sqlite import insert

from graphstore.parameters import Parameters
from graphstore.store import schema, tokens
from graphstore.store.engine import (
    ArchiveUnavailable,
    OwnerLock,
    copy_database,
    ensure_private,
    explain,
    pragma,
    reader_engine,
    writer_engine,
)
from graphstore.store.reader import Reader
from graphstore.store.replays import ReplayQueue
from graphstore.store.writer import CountTokens, Writer

if TYPE_CHECKING:
    from alembic.config import Config

SECRET_BYTES = 32


class Archive:
    """An open archive. `secret` keys the hashes of credentials; it never leaves this machine."""

    def __init__(self, path: Path, lock: OwnerLock, engine: Engine, writer: Writer, reader: Reader, secret: bytes):
        self.path = path
        self.writer = writer
        self.reader = reader
        self.secret = secret
        self._engine = engine
        self._lock = lock

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        clock: Callable[[], float] = time.time,
        count_tokens: CountTokens = tokens.count_tokens,
        redacts: bool = False,
    ) -> "Archive":
        """Create or migrate the database at `path` and take ownership of it. Raises `ArchiveUnavailable`.

        `redacts`: what is written from now on is stored without secrets (`redaction`).
        An upgrade first copies the database to `<path>.backup-<old revision>`.
        """
        path = Path(path).expanduser().absolute()
        ensure_private(path)
        lock = OwnerLock(path)
        engine = writer_engine(path)
        try:
            migrate(engine, path)
            secret = _secret(engine)
        except BaseException as error:
            engine.dispose()
            lock.release()
            raise _explained(error, path) from error
        writer = Writer(engine, count_tokens=count_tokens, clock=clock, redacts=redacts)
        writer.start()
        return cls(path, lock, engine, writer, Reader(reader_engine(path)), secret)

    def close(self) -> None:
        """Write what is queued, then free the file. Safe to call twice."""
        self.writer.close()
        self.reader.close()
        self._engine.dispose()
        self._lock.release()

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_reader(path: Path | str) -> Reader:
    """Read an archive that a proxy may be using at the same time. Creates and migrates nothing.

    Raises `ArchiveUnavailable`: absent, foreign, older or newer than this program, corrupt, not readable.
    """
    return Reader(_checked_engine(Path(path).expanduser().absolute()))


def open_queue(
    path: Path | str,
    *,
    clock: Callable[[], float] = time.time,
    parameters: Parameters | None = None,
    claims: bool = True,
) -> ReplayQueue:
    """The replay jobs of an archive that a proxy may be using at the same time. Raises as `open_reader` does."""
    path = Path(path).expanduser().absolute()
    _checked_engine(path).dispose()
    return ReplayQueue(path, clock=clock, parameters=parameters, claims=claims)


def _checked_engine(path: Path) -> Engine:
    """A reading engine on an archive of this program's revision. Raises `ArchiveUnavailable`."""
    if not path.is_file():
        raise ArchiveUnavailable("absent", f"there is no archive at {str(path)!r}", "start `recap serve` first")
    engine = reader_engine(path)
    try:
        with engine.connect() as connection:
            revision = _revision(connection, path)
        if revision is None:
            raise ArchiveUnavailable("absent", f"{str(path)!r} is empty", "start `recap serve` first")
        if revision != schema.REVISION:
            raise _older(path, revision) if _is_known(revision) else newer(path, revision)
    except BaseException as error:
        engine.dispose()
        raise _explained(error, path) from error
    return engine


def migrate(engine: Engine, path: Path) -> None:
    """Bring the database to `schema.REVISION`, all of it or nothing."""
    with engine.connect() as connection:
        revision = _revision(connection, path)
    if revision == schema.REVISION:
        return
    if revision is not None:
        if not _is_known(revision):
            raise newer(path, revision)
        copy_database(path, path.with_name(f"{path.name}.backup-{revision}"))
    # Alembic is slow to import and rarely needed.
    from alembic import command

    config = alembic_config()
    with engine.connect() as connection:
        pragma(connection, "foreign_keys=OFF")  # a table that is rebuilt must not take its dependents with it
        with connection.begin():
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        pragma(connection, "foreign_keys=ON")


def alembic_config() -> "Config":
    """Alembic's configuration without a file; its caller adds the attribute `connection`."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config


def _revision(connection: Connection, path: Path) -> str | None:
    """Revision of an archive, None for an empty database. Raises `ArchiveUnavailable` for somebody else's."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    if "alembic_version" not in tables or schema.sessions.name not in tables:
        raise ArchiveUnavailable(
            "foreign", f"{str(path)!r} is the database of another program", "choose another path with --db"
        )
    return str(connection.scalar(text("SELECT version_num FROM alembic_version")))


def _is_known(revision: str) -> bool:
    return revision in known_revisions()


def known_revisions() -> frozenset[str]:
    """Every revision that this program can read or upgrade."""
    from alembic.script import ScriptDirectory

    return frozenset(script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions())


def newer(path: Path, revision: str) -> ArchiveUnavailable:
    problem = f"{str(path)!r} was written by a newer version of recap (revision {revision!r})"
    return ArchiveUnavailable("newer", problem, "upgrade recap, or choose another path with --db")


def _older(path: Path, revision: str) -> ArchiveUnavailable:
    problem = f"{str(path)!r} was written by an older version of recap (revision {revision!r})"
    return ArchiveUnavailable("older", problem, "start `recap serve` once: it copies and upgrades the archive")


def _secret(engine: Engine) -> bytes:
    """The archive's own random key, made when it is first opened."""
    fresh = {"key": "secret", "value": secrets.token_bytes(SECRET_BYTES)}
    with engine.begin() as connection:
        connection.execute(insert(schema.meta).values(fresh).on_conflict_do_nothing())
        secret = connection.scalar(select(schema.meta.c.value).where(schema.meta.c.key == "secret"))
    assert isinstance(secret, bytes)
    return secret


def _explained(error: BaseException, path: Path) -> BaseException:
    """What a person can do about it, with the file's name in it: they may have several."""
    known = explain(error)
    if known is None or repr(str(path)) in known.problem:
        return known or error
    return ArchiveUnavailable(known.kind, f"{str(path)!r}: {known.problem}", known.remedy)
