"""recap repair: save what verifies of a damaged archive into a new one, and keep the damaged one."""

import argparse
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from graphstore.store.archive import open_reader
from graphstore.store.engine import ArchiveUnavailable, OwnerLock, explained
from graphstore.store.repair import Salvage, salvage
from graphstore.store.verify import verify
from proxy.commands.text import count, plain
from proxy.commands.verify import recut
from proxy.dialects import DIALECTS
from proxy.errors import RecapError
from proxy.settings import Settings

SHOWN = 20


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("repair", help="save what can be saved of a damaged archive")
    parser.add_argument("--output", metavar="PATH", help="write it there and leave the archive where it is")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    path = Path(settings.db)
    if not path.is_file():
        raise RecapError(f"there is no archive at {str(path)!r}: choose one with --db")
    target = Path(arguments.output).expanduser().absolute() if arguments.output else None
    if target is not None and target.exists():
        raise RecapError(f"{str(target)!r} exists: choose another --output")
    lock = OwnerLock(path)
    try:
        if target is None and _is_sound(path):
            print(f"{path}: everything agrees, there is nothing to repair")
            return 0
        folder = (target or path).parent
        with tempfile.TemporaryDirectory(dir=folder, prefix=".recap-repair-") as place, explained():
            made = Path(place) / "recap.db"
            report = salvage(path, made, recut, tuple(DIALECTS))
            with open_reader(made) as reader:
                findings = verify(reader, recut)
            if findings:
                first = findings[0]
                raise RecapError(
                    f"what was saved does not verify ({first.table} {first.row}: {first.problem}): "
                    "nothing was changed; please report this"
                )
            kept = None if target is not None else _set_aside(path)
            os.replace(made, target or path)
    finally:
        lock.release()
    _say(report, target or path, kept)
    return 0


def _is_sound(path: Path) -> bool:
    try:
        with open_reader(path) as reader:
            return not verify(reader, recut)
    except ArchiveUnavailable as error:
        if error.kind in ("newer", "foreign", "locked"):
            raise
        return False


def _set_aside(path: Path) -> Path:
    """The damaged archive and its log under another name; at no time is there neither. Returns that name."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
    number = 1
    while aside.exists():
        number += 1
        aside = aside.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{number}")
    os.link(path, aside)
    with suppress(FileNotFoundError):
        os.rename(f"{path}-wal", f"{aside}-wal")
    with suppress(FileNotFoundError):
        os.unlink(f"{path}-shm")
    return aside


def _say(report: Salvage, written: Path, aside: Path | None) -> None:
    for name, (kept, had) in list(report.cut.items())[:SHOWN]:
        lost = f" of at least {had:,}" if had > kept else ""
        print(f"{plain(name)} lost its end: it has {count(kept, 'message')}{lost}")
    for name in report.nameless[:SHOWN]:
        print(f"{name}: title, client and name are lost")
    if report.lost_secret:
        print("the secret that recognises callers is lost: running conversations begin new sessions")
    for name in report.found:
        kept, found = report.kept[name], report.found[name]
        print(f"{name}: {kept:,} saved" + (f", {found - kept:,} lost or damaged" if found > kept else ""))
    print("pages that could not be read at all may have held more; the next requests are sent in full")
    print(f"written to {written}" + (f"; the damaged archive is {aside}" if aside is not None else ""))
