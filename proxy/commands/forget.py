"""recap forget: remove a session and every byte that only it needs. A running proxy does it itself, when asked."""

import argparse
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

from graphstore.records import SessionRow
from graphstore.store.archive import Archive, open_reader
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.forget import Forget, request_forget, requested
from graphstore.store.report import find_session
from proxy.commands.text import plain, short
from proxy.errors import RecapError
from proxy.settings import Settings

WAIT_S = 60.0
LOOK_S = 0.1
TITLE_CHARS = 60


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("forget", help="remove a session from the archive, for good")
    parser.add_argument("session", help="name of the session, or the beginning of it")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        session = find_session(reader, arguments.session)
    if not arguments.yes and not _agrees(session):
        print("nothing was removed")
        return 1
    path = Path(settings.db)
    problem = _remove(path, session)
    print(f"{session.name} is forgotten")
    if problem:
        print(f"but {problem}")
    copies = _copies(path, session)
    for copy in copies:
        print(f"but {copy} {'holds it too' if copies[copy] else 'may hold it too'}: delete that file yourself")
    return 1 if problem else 0


def _agrees(session: SessionRow) -> bool:
    if not sys.stdin.isatty():
        raise RecapError("nobody can be asked here: add --yes to remove the session for good")
    about = f"{session.name} ({short(plain(session.title), TITLE_CHARS)})"
    return input(f"Remove {about} for good? [y/N] ").strip().lower() in ("y", "yes")


def _remove(path: Path, session: SessionRow) -> str | None:
    """Remove it, or have it removed by the proxy that owns the archive. Returns what may keep its bytes for a while."""
    give_up_at = time.monotonic() + WAIT_S
    asked = False
    while time.monotonic() < give_up_at:
        try:
            with Archive.open(path, count_tokens=len) as archive:
                return archive.writer.forget(Forget(frozenset([session.id]), thorough=True)).result().problem
        except ArchiveUnavailable as error:
            if error.kind != "in use":
                raise
        if not asked:
            request_forget(path, session.id, clock=time.time)
            asked = True
        time.sleep(LOOK_S)
        if not _is_pending(path, session):
            return None
    raise RecapError(
        f"the running proxy has not removed {session.name} within {WAIT_S:.0f} s; it does so as soon as it can. "
        "`recap health` says how it is"
    )


def _is_pending(path: Path, session: SessionRow) -> bool:
    with open_reader(path) as reader, reader.snapshot() as db:
        return session.id in requested(db)


def _copies(path: Path, session: SessionRow) -> dict[Path, bool]:
    """Copies of the archive that hold the session (True) or cannot be looked into (False)."""
    found: dict[Path, bool] = {}
    siblings = [*path.parent.glob(f"{path.name}.backup-*"), *path.parent.glob(f"{path.name}.damaged-*")]
    for copy in sorted(file for file in siblings if not file.name.endswith(("-wal", "-shm"))):
        try:
            with closing(sqlite3.connect(f"{copy.as_uri()}?mode=ro", uri=True)) as db:
                query = "SELECT 1 FROM sessions WHERE name = ? AND scope = ?"
                if db.execute(query, (session.name, session.scope)).fetchone():
                    found[copy] = True
        except sqlite3.Error:
            found[copy] = False
    return found
