"""Every kind of damage is found and named, and a sound archive gives no finding."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from graphstore.blocks import Block
from graphstore.records import BlockRow, SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.verify import Finding, verify
from tests.graphstore.store.conftest import open_archive
from tests.graphstore.store.history import History, selection_row


@pytest.fixture
def sound(path: Path) -> Path:
    history = History()
    with open_archive(path) as archive:
        batch = history.grow("one", "two", "three " * 200)
        batch = replace(batch, selections=(selection_row(left_out=[1]),))
        archive.writer.submit(replace(batch, sessions=(replace(batch.sessions[0], selection_id=1),)))
        archive.writer.submit(history.answer("four"), durable=True).result(30)
    return path


def findings(path: Path, damage: str = "") -> list[Finding]:
    if damage:
        with closing(sqlite3.connect(path)) as db, db:
            db.executescript(damage)
    with open_reader(path) as reader:
        return verify(reader)


def test_a_sound_archive_has_no_findings(sound: Path) -> None:
    assert findings(sound) == []


@pytest.mark.parametrize(
    ("damage", "table", "problem"),
    [
        ("UPDATE messages SET content = x'00' WHERE content = x'6f6e65'", "messages", "bytes have digest"),
        ("UPDATE messages SET content = x'00' WHERE codec = 'zstd'", "messages", "not a zstd frame"),
        ("UPDATE messages SET codec = 'lzma' WHERE codec = 'zstd'", "messages", "unknown codec 'lzma'"),
        ("UPDATE messages SET size = 4 WHERE size = 3", "messages", "has 3 bytes, not 4"),
        ("UPDATE nodes SET depth = 7 WHERE depth = 2", "nodes", "depth 7 under a parent of depth 1"),
        ("UPDATE nodes SET digest = x'00' WHERE depth = 1", "nodes", "does not follow"),
        ("UPDATE sessions SET scope = x'00'", "nodes", "does not follow"),
        ("DELETE FROM block_nodes WHERE ordinal = 2", "blocks", "has no messages"),
        ("DELETE FROM block_nodes WHERE ordinal = 1; DELETE FROM blocks WHERE ordinal = 1", "selections",
         "leaves out block 1"),
        ("UPDATE sessions SET selection_id = 9", "sessions", "selection 9"),
        ("UPDATE exchanges SET selection_id = 9", "exchanges", "selection 9"),
        ("UPDATE exchanges SET head_node_id = 9", "exchanges", "row of nodes"),
        ("DELETE FROM answers", "messages", "nothing refers to it"),
        ("DELETE FROM block_nodes WHERE ordinal = 2; UPDATE sessions SET head_node_id = NULL;"
         "UPDATE exchanges SET head_node_id = NULL", "nodes", "nothing refers to it"),
        ("DELETE FROM messages WHERE size = 3", "nodes", "row of messages"),
        ("DROP TABLE answers", "database", "cannot be read"),
    ],
)  # fmt: skip
def test_damage_is_named(sound: Path, damage: str, table: str, problem: str) -> None:
    found = findings(sound, damage)
    assert any(f.table == table and problem in f.problem for f in found), found


def test_a_damaged_file_is_reported_not_raised(sound: Path) -> None:
    with closing(sqlite3.connect(sound)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with sound.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xa5" * size)
    assert any(f.table == "database" for f in findings(sound))


def cut(*blocks: Block) -> object:
    def recut(session: SessionRow, contents: Sequence[bytes]) -> Sequence[Block]:
        assert session.name == "s-00001" and [content[:3] for content in contents] == [b"one", b"two", b"thr"]
        return blocks

    return recut


STORED = (Block("user", (0,), 3), Block("user", (1,), 3), Block("user", (2,), 1200))


@pytest.mark.parametrize(
    ("blocks", "table", "problem"),
    [
        ((STORED[0], Block("tools", (1, 2), 1203)), "block_nodes", "(1, 2) are one block, stored in 1, 2"),
        ((Block("pinned", (0,), 3), *STORED[1:]), "blocks", "of kind pinned, stored as user"),
        ((Block("user", (0,), 4), *STORED[1:]), "blocks", "costs 4, stored as 3"),
    ],
)
def test_blocks_are_cut_again(sound: Path, blocks: tuple[Block, ...], table: str, problem: str) -> None:
    with open_reader(sound) as reader:
        assert verify(reader, cut(*STORED)) == []  # type: ignore[arg-type]
        (finding,) = verify(reader, cut(*blocks))  # type: ignore[arg-type]
    assert finding.table == table and problem in finding.problem


def test_the_cost_of_a_block_that_the_client_replaced_is_not_compared(sound: Path) -> None:
    with open_archive(sound) as archive:
        other = History(texts=[])
        archive.writer.submit(other.grow("one", "2", "three " * 200, exchange=False))
        block = BlockRow(1, 1, "user", 77, (), (), "")
        archive.writer.submit(replace(History().grow("one", exchange=False), sessions=(), blocks=(block,))).result(30)
        versions = (STORED[0], Block("user", (1,), 1), STORED[2])
        assert verify(archive.reader, lambda *_: versions) == []
