"""recap repair: whatever happens to the file, what is saved verifies and is what was said, byte for byte."""

import asyncio
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from graphstore.identity import message_digest
from graphstore.store.archive import Archive, open_reader
from graphstore.store.blobs import unpack
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.repair import Salvage, salvage
from graphstore.store.verify import verify
from proxy.cli import main
from proxy.commands.verify import recut
from proxy.dialects import DIALECTS
from tests.observed import observe, replay_of
from tests.proxy.dialogue import LUNCH_S, Dialogue, turn, user

PAGE = 4096


async def build(folder: Path) -> None:
    """Two sessions, a branch, selections, a replay, a mark; every table has rows."""
    dialogue = Dialogue(folder, changes={"beta": 0.1})
    for name in ("one", "two"):
        headers = {"x-session-id": name}
        history = [m for i in range(5) for m in turn(f"{name} {i}", f"{name}{i}", 200 + 2000 * i)]
        for end in (1, 3, 5, 9, 13):
            await dialogue.send(history[:end], headers=headers)
        await dialogue.send([*history, user("next")], headers=headers, after_s=LUNCH_S)
    await dialogue.conversations.flush()
    observe(dialogue.settings.db, 2, replay_of({0: 1.0, 1: 0.5, 2: 0.7}, [(0, 1, 0.5), (1, 2, 0.25)]), turn=9)
    await dialogue.send([*history[:9], user("another way")], headers={"x-session-id": "three"})
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        name = reader.list_sessions()[-1].name
    assert main(["pin", name, "1", "--db", dialogue.settings.db]) == 0


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("sound")
    asyncio.run(build(folder))
    return (folder / "recap.db").read_bytes()


def messages(path: Path) -> dict[int, bytes]:
    with closing(sqlite3.connect(path)) as db:
        return {
            id: unpack(codec, content) for id, codec, content in db.execute("SELECT id, codec, content FROM messages")
        }


@pytest.fixture(scope="module")
def truth(original: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    path = tmp_path_factory.mktemp("truth") / "recap.db"
    path.write_bytes(original)
    return messages(path)


def repaired(folder: Path, data: bytes, truth: dict[int, bytes]) -> tuple[Salvage | None, int]:
    """Save what can be saved of these bytes, and check it. Returns how many messages that were."""
    source, target = folder / "bad.db", folder / "good.db"
    for file in folder.glob("good.db*"):
        file.unlink()
    source.write_bytes(data)
    try:
        report = salvage(source, target, recut, tuple(DIALECTS))
    except ArchiveUnavailable as error:
        assert error.kind in ("corrupt", "newer")
        return None, 0
    assert source.read_bytes() == data
    with open_reader(target) as reader:
        assert verify(reader, recut) == []
    saved = messages(target)
    assert saved.items() <= truth.items()
    return report, len(saved)


def test_a_sound_archive_is_saved_whole(original: bytes, truth: dict[int, bytes], tmp_path: Path) -> None:
    report, saved = repaired(tmp_path, original, truth)
    assert report is not None and report.is_whole and saved == len(truth)
    tables = "sessions exchanges nodes blocks block_nodes answers selections selection_blocks observations edges marks "
    tables += "observation_blocks observation_edges inheritances replay_jobs meta"
    (tmp_path / "was.db").write_bytes(original)
    with closing(sqlite3.connect(tmp_path / "was.db")) as was, closing(sqlite3.connect(tmp_path / "good.db")) as now:
        for table in tables.split():
            rows = [sorted(map(repr, db.execute(f"SELECT * FROM {table}"))) for db in (was, now)]
            if table == "sessions":  # nothing is left out by a decision that may be in part
                rows = [[len(found)] for found in rows]  # type: ignore[misc]
            assert rows[0] == rows[1], table


@pytest.mark.parametrize("part", range(4))
def test_truncated(original: bytes, truth: dict[int, bytes], tmp_path: Path, part: int) -> None:
    pages = len(original) // PAGE
    lengths = [n * PAGE for n in range(pages * part // 4, pages * (part + 1) // 4, 2)]
    saved = [repaired(tmp_path, original[:n], truth)[1] for n in (*lengths, lengths[-1] + 1, lengths[-1] + 777)]
    if part == 3:  # a history ends at its first message that is lost, and messages lie where their hashes put them
        assert max(saved) > 0


@pytest.mark.parametrize("seed", range(12))
def test_bits_flipped(original: bytes, truth: dict[int, bytes], tmp_path: Path, seed: int) -> None:
    """A few bits anywhere: nearly everything is saved; many: whatever is saved is right."""
    dice = random.Random(seed)
    for flips in (1, 4, 40, 400):
        data = bytearray(original)
        for _ in range(flips):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        report, saved = repaired(tmp_path, bytes(data), truth)
        if flips == 1:
            assert report is not None and saved >= len(truth) // 3


@pytest.mark.parametrize("seed", range(6))
def test_pages_overwritten(original: bytes, truth: dict[int, bytes], tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    for count in (1, 2, 5):
        data = bytearray(original)
        for page in dice.sample(range(len(data) // PAGE), count):
            data[page * PAGE : (page + 1) * PAGE] = dice.randbytes(PAGE)
        repaired(tmp_path, bytes(data), truth)


def test_the_first_page_is_not_needed(original: bytes, truth: dict[int, bytes], tmp_path: Path) -> None:
    report, saved = repaired(tmp_path, b"\xa5" * PAGE + original[PAGE:], truth)
    assert report is not None and saved == len(truth)


def test_what_only_the_log_has_is_saved_too(original: bytes, tmp_path: Path) -> None:
    live, copy = tmp_path / "live.db", tmp_path / "copy.db"
    live.write_bytes(original)
    from tests.graphstore.store.history import History

    with Archive.open(live, count_tokens=len) as archive:
        with open_reader(live) as reader, reader.snapshot() as db:
            db.exec_driver_sql("SELECT 1 FROM messages").all()  # keeps the log from being emptied
            history = History(90, exchanges=9000)
            archive.writer.submit(history.grow("only in the log"), durable=True).result(30)
            shutil.copy(live, copy)
            shutil.copy(f"{live}-wal", f"{copy}-wal")
    assert b"only in the log" not in copy.read_bytes()
    partly = lambda session, contents: () if session.id == 90 else recut(session, contents)  # noqa: E731
    salvage(copy, tmp_path / "good.db", partly, tuple(DIALECTS))
    assert message_digest(b"only in the log") in map(message_digest, messages(tmp_path / "good.db").values())


def test_the_command_keeps_the_damaged_file(
    original: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "recap.db"
    database.write_bytes(original)
    assert main(["repair", "--db", str(database)]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    bad = original[: len(original) // 2]
    database.write_bytes(bad)
    Path(f"{database}-wal").write_bytes(b"not a log")
    assert main(["repair", "--db", str(database), "--output", str(tmp_path / "other.db")]) == 0
    assert database.read_bytes() == bad and main(["verify", "--db", str(tmp_path / "other.db")]) == 0
    assert main(["repair", "--db", str(database)]) == 0
    said = capsys.readouterr().out
    (aside,) = (f for f in tmp_path.glob("recap.db.damaged-*") if f.suffix != ".db" and not f.name.endswith("-wal"))
    assert str(aside) in said and "lost" in said and "saved" in said
    assert aside.read_bytes() == bad and Path(f"{aside}-wal").read_bytes() == b"not a log"
    assert main(["verify", "--db", str(database)]) == 0
    assert (database.stat().st_mode & 0o777) == 0o600
    assert not list(tmp_path.glob(".recap-repair-*"))


def test_what_is_refused(original: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = tmp_path / "recap.db"
    database.write_bytes(original)
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("UPDATE alembic_version SET version_num = '9999'")
    whole = database.read_bytes()
    for data in (whole, b"\xa5" * PAGE + whole[PAGE:]):
        database.write_bytes(data)
        assert main(["repair", "--db", str(database)]) == 1
        assert "newer version" in capsys.readouterr().err and database.read_bytes() == data
    database.write_bytes(b"nothing of the kind " * 5000)
    assert main(["repair", "--db", str(database)]) == 1
    assert "restore a backup" in capsys.readouterr().err
    assert main(["repair", "--db", str(tmp_path / "absent.db")]) == 1
    database.write_bytes(original)
    with Archive.open(database, count_tokens=len):
        assert main(["repair", "--db", str(database)]) == 1
        assert "in use" in capsys.readouterr().err
