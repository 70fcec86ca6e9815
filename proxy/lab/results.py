"""Rows of a run in a JSONL file: written as they are made, so that a run that was stopped goes on where it was.

The first line says what the run is: command, seed, data hash, model, version. A file of another run is never continued,
and never written by two at once.
"""

import fcntl
import json
import os
import weakref
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from proxy.lab.errors import LabError

Row = dict[str, Any]
ABOUT = b'{"about": '
KEY = "item"  # what names a row within its run


class Results:
    """A run. `done` are the names of the items that are finished. `held` is its file, locked, while the run goes on."""

    def __init__(self, path: Path, about: Row, rows: list[Row], held: FileIO | None = None) -> None:
        self.path = path
        self.about = about
        self.rows = rows
        self.done = {row[KEY] for row in rows}
        self._held = held
        if held is not None:
            weakref.finalize(self, held.close)

    def add(self, item: str, **values: object) -> Row:
        """Write a finished item; it is on disk when this returns. Raises `LabError`: it cannot be written."""
        assert self._held is not None, "only who opened a run may write"
        row: Row = {KEY: item, **values}
        end = self._held.seek(0, os.SEEK_END)
        try:
            _write(self._held, row)
        except OSError as error:
            with suppress(OSError):
                self._held.truncate(end)  # what was written of the row
            raise unwritable(self.path, error) from error
        self.rows.append(row)
        self.done.add(item)
        return row


def unwritable(path: Path, error: OSError) -> LabError:
    return LabError(
        f"{str(path)!r} cannot be written: {error.strerror or error}. What is finished is kept: make room, and give "
        "the same command again to go on"
    )


def open_results(path: Path, about: Row) -> Results:
    """Begin a run, or go on with one. Raises `LabError`: the file is another run's, or another process writes it."""
    with ExitStack() as opened:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held = opened.enter_context(path.open("a+b", buffering=0))
            _lock(held, path)
            rows = _begun(held, path, about)
            page_of(path).unlink(missing_ok=True)  # until it is finished again
        except OSError as error:
            raise LabError(
                f"{str(path)!r} cannot be written: {error.strerror}; choose another place with --out"
            ) from error
        opened.pop_all()
    return Results(path, about, rows, held)


def _begun(file: FileIO, path: Path, about: Row) -> list[Row]:
    """The rows that a file has, which holds this run from here on."""
    file.seek(0)
    whole, torn = _lines(path, file.readall())
    if torn and not whole and not torn.startswith(ABOUT[: len(torn)]):
        raise LabError(f"{str(path)!r} is no file of results; delete it, or choose another place with --out")
    known = _about(path, whole[0]) if whole else about
    differs = [key for key in {**about, **known} if json.dumps(known.get(key)) != json.dumps(about.get(key))]
    if differs:  # in its order as well: items are numbered by the order of files
        raise LabError(
            f"{str(path)!r} holds another run (it differs in {', '.join(sorted(differs))}); "
            "delete it to begin anew, or choose another place with --out"
        )
    rows = _rows(path, whole[1:])
    file.truncate(file.tell() - len(torn))
    if not whole:
        _write(file, {"about": about})
    return rows


def _lock(file: FileIO, path: Path) -> None:
    """Until the file is closed."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise LabError(
            f"{str(path)!r} is being written by another run; wait for it, or choose another place with --out"
        ) from None
    except OSError:
        return  # a file system without locks


def _write(file: FileIO, row: Row) -> None:
    left = memoryview(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())


def page_of(path: Path) -> Path:
    """What is written when a run is finished."""
    return path.with_suffix(".md")


def is_finished(path: Path) -> bool:
    return path.is_file() and page_of(path).is_file()


def read_results(path: Path) -> Results:
    """Raises `LabError`: there is no such run."""
    if not path.is_file():
        raise LabError(f"there are no results at {str(path)!r}; run the study first")
    try:
        whole, _ = _lines(path, path.read_bytes())
    except OSError as error:
        raise LabError(f"{str(path)!r} cannot be read: {error.strerror}; choose another place with --out") from error
    if not whole:
        raise LabError(f"{str(path)!r} is no file of results; delete it, or choose another place with --out")
    return Results(path, _about(path, whole[0]), _rows(path, whole[1:]))


def _lines(path: Path, raw: bytes) -> tuple[list[Any], bytes]:
    """(what was written whole, the torn end that a run left which was killed)"""
    end = raw.rfind(b"\n") + 1
    found = []
    for number, line in enumerate(raw[:end].splitlines(), 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise LabError(f"{str(path)!r} line {number} is no JSON: delete the file to begin anew") from error
    return found, raw[end:]


def _about(path: Path, line: Any) -> Row:
    about = line.get("about") if isinstance(line, dict) else None
    if not isinstance(about, dict):
        raise LabError(f"{str(path)!r} is no file of results; delete it, or choose another place with --out")
    return about


def _rows(path: Path, lines: list[Any]) -> list[Row]:
    for number, row in enumerate(lines, 2):
        if not isinstance(row, dict) or not isinstance(row.get(KEY), str):
            raise LabError(f"{str(path)!r} line {number} is no row of results: delete the file to begin anew")
    return lines
