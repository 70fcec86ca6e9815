"""Whoever writes to the archive is noticed, in this process or another; whoever only reads is not."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from graphstore.store.archive import Archive
from graphstore.store.changes import Changes
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.marks import set_mark
from tests.graphstore.store.conftest import open_archive
from tests.graphstore.store.history import START, History

DEADLINE_S = 30


@pytest.fixture
def history(archive: Archive) -> History:
    history = History()
    archive.writer.submit(history.grow("one", "two")).result(DEADLINE_S)
    return history


def test_each_commit_is_told_once(archive: Archive, history: History) -> None:
    changes = Changes(archive.path)
    assert [changes.happened() for _ in range(3)] == [True, False, False], "the first look has seen nothing yet"
    archive.writer.submit(history.grow("three")).result(DEADLINE_S)
    assert [changes.happened() for _ in range(2)] == [True, False]
    for text in ("four", "five"):
        archive.writer.submit(history.grow(text)).result(DEADLINE_S)
    assert [changes.happened() for _ in range(2)] == [True, False], "many commits between two looks are one change"
    changes.close()


def test_reading_is_no_change(archive: Archive, history: History) -> None:
    changes = Changes(archive.path)
    changes.happened()
    assert archive.reader.path_contents(history.head) and archive.reader.list_sessions()
    assert not changes.happened()
    changes.close()


def test_what_another_connection_and_another_process_commit_counts(archive: Archive, history: History) -> None:
    changes = Changes(archive.path)
    changes.happened()
    set_mark(archive.path, 1, 0, "pin", clock=lambda: START)
    assert changes.happened() and not changes.happened()
    code = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('DELETE FROM marks'); db.commit()"
    subprocess.run([sys.executable, "-c", code, str(archive.path)], check=True, timeout=DEADLINE_S)
    assert changes.happened() and not changes.happened()
    changes.close()


def test_what_is_rolled_back_is_no_change(archive: Archive, history: History) -> None:
    changes = Changes(archive.path)
    changes.happened()
    other = sqlite3.connect(archive.path)
    other.execute("DELETE FROM sessions")
    other.rollback()
    other.close()
    assert not changes.happened()
    changes.close()


def test_each_watcher_is_told_by_itself(archive: Archive, history: History) -> None:
    one, other = Changes(archive.path), Changes(archive.path)
    assert one.happened() and other.happened()
    archive.writer.submit(history.grow("three")).result(DEADLINE_S)
    assert one.happened() and other.happened() and not one.happened()
    one.close()
    other.close()


def test_an_archive_that_is_not_there_is_named_and_is_watched_once_it_is(path: Path) -> None:
    """Looking must not make the file: an empty one would be taken for somebody else's."""
    path.parent.mkdir()
    changes = Changes(path)
    with pytest.raises(ArchiveUnavailable, match="check the path"):
        changes.happened()
    assert not path.exists()
    open_archive(path).close()
    assert changes.happened() and not changes.happened()
    changes.close()


def test_a_closed_watcher_lets_go_of_the_file_and_starts_anew(archive: Archive, history: History) -> None:
    changes = Changes(archive.path)
    changes.happened()
    changes.close()
    changes.close()
    assert changes.happened(), "it has seen nothing since"
    changes.close()
