"""Rows of a run in a JSONL file: written as they are made, so that a run that was stopped goes on where it was.

The first line says what the run is: command, seed, data hash, model, version. A file of another run is never continued.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxy.lab.errors import LabError

Row = dict[str, Any]
KEY = "item"  # what names a row within its run


class Results:
    """An open run. `done` are the names of the items that are finished."""

    def __init__(self, path: Path, about: Row, rows: list[Row]) -> None:
        self.path = path
        self.about = about
        self.rows = rows
        self.done = {row[KEY] for row in rows}

    def add(self, item: str, **values: object) -> Row:
        """Write a finished item; it is on disk when this returns."""
        row: Row = {KEY: item, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)
        self.done.add(item)
        return row


def open_results(path: Path, about: Row) -> Results:
    """Begin a run, or go on with one. Raises `LabError` when the file is another run's."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size == 0:
            page_of(path).unlink(missing_ok=True)
            path.write_text(json.dumps({"about": about}, ensure_ascii=False) + "\n", encoding="utf-8")
            return Results(path, about, [])
    except OSError as error:
        raise LabError(f"{str(path)!r} cannot be written: {error.strerror}; choose another place with --out") from error
    lines = list(_complete_lines(path))
    known = lines[0].get("about") if lines else None
    if known != about:
        differs = sorted(key for key in {*about, *(known or {})} if (known or {}).get(key) != about.get(key))
        raise LabError(
            f"{str(path)!r} holds another run (it differs in {', '.join(differs)}); "
            "delete it to begin anew, or choose another place with --out"
        )
    return Results(path, about, lines[1:])


def page_of(path: Path) -> Path:
    """What is written when a run is finished."""
    return path.with_suffix(".md")


def is_finished(path: Path) -> bool:
    return path.is_file() and page_of(path).is_file()


def read_results(path: Path) -> Results:
    """Raises `LabError`: there is no such run."""
    if not path.is_file():
        raise LabError(f"there are no results at {str(path)!r}; run the study first")
    lines = list(_complete_lines(path))
    if not lines or "about" not in lines[0]:
        raise LabError(f"{str(path)!r} is no file of results; delete it, or choose another place with --out")
    return Results(path, lines[0]["about"], lines[1:])


def _complete_lines(path: Path) -> Iterator[Row]:
    """What was written whole; the torn end of a run that was killed is cut off."""
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise LabError(f"{str(path)!r} line {number} is no JSON: delete the file to begin anew") from error
