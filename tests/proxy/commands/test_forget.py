"""recap forget: by itself, beside a running `recap serve`, and asked twice."""

import asyncio
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from graphstore.store.archive import Archive, open_reader
from graphstore.store.verify import verify
from proxy.cli import main
from proxy.commands import forget
from tests.archives import lay_out_archive
from tests.fakes.recording_upstream import RecordingUpstream
from tests.proxy.commands.conftest import build
from tests.proxy.dialogue import TOOLS, said, turn, user
from tests.proxy.test_cli import environment, serving

DEADLINE_S = 30.0


def held(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.iterdir()))


def contents(database: Path) -> list[bytes]:
    """Every message as it lies on the disk, compressed or not."""
    with closing(sqlite3.connect(database)) as db:
        return [bytes(content) for (content,) in db.execute("SELECT content FROM messages")]


def names(database: Path) -> list[str]:
    with open_reader(database) as reader:
        assert verify(reader) == []
        return [row.name for row in reader.list_sessions() if row.kind == "agent"]


async def names_of(count: int, database: Path) -> list[str]:
    """Once the archive has so many sessions: the proxy writes them in its own time."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if len(found := names(database)) == count:
                return found
            await asyncio.sleep(0.05)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    asyncio.run(build(tmp_path))
    yield tmp_path / "recap.db"


def run(database: Path, *arguments: str) -> int:
    return main(["forget", *arguments, "--db", str(database)])


def test_without_a_proxy(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = names(database)
    stored = contents(database)
    assert b"Where is alpha?" in held(database.parent) and all(part in held(database.parent) for part in stored)
    assert run(database, name[:4], "--yes") == 0
    assert f"{name} is forgotten" in capsys.readouterr().out
    assert names(database) == [] and b"alpha" not in held(database.parent)
    assert not any(part in held(database.parent) for part in stored)
    assert run(database, name, "--yes") == 1
    assert "no session is called" in capsys.readouterr().err


def test_it_asks_first(database: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = names(database)
    assert run(database, name) == 1 and "--yes" in capsys.readouterr().err  # nobody to ask
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert run(database, name) == 1 and names(database) == [name]
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert run(database, name) == 0 and names(database) == []


def test_copies_that_hold_it_are_named(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = names(database)
    shutil.copy(database, f"{database}.backup-0002")
    Path(f"{database}.damaged-1").write_bytes(b"no database " * 1000)
    with closing(sqlite3.connect(f"{database}.backup-0001")) as db:
        db.execute("CREATE TABLE sessions (name, scope)")
    assert run(database, name, "--yes") == 0
    said = capsys.readouterr().out
    assert f"{database}.backup-0002 holds it too" in said and f"{database}.damaged-1 may hold it too" in said
    assert "backup-0001" not in said


def test_a_proxy_that_does_not_do_it_is_named(
    database: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (name,) = names(database)
    monkeypatch.setattr(forget, "WAIT_S", 0.5)
    with Archive.open(database, count_tokens=len):
        assert run(database, name, "--yes") == 1
    assert "as soon as it can" in capsys.readouterr().err
    assert run(database, name, "--yes") == 0 and names(database) == []


async def test_beside_a_running_proxy(tmp_path: Path) -> None:
    """The process that serves keeps the session in memory and has left part of it out: it removes it itself."""
    data = tmp_path / "data"
    data.mkdir()
    database = data / "recap.db"
    lay_out_archive(database)
    history = [*turn("canary alpha", "alpha"), *turn("canary beta", "beta"), user("canary gamma")]

    def body(upto: int) -> dict[str, object]:
        return {"model": "m", "messages": history[:upto], "tools": TOOLS, "stream": True}

    headers = {"x-session-id": "one", "authorization": "Bearer k"}
    flags = (
        "--db",
        str(database),
        "--mode",
        "idle",
        "--idle-after",
        "0",
        "--min-history-tokens",
        "0",
        "--beta",
        "0.05",
    )
    async with RecordingUpstream().running() as upstream, serving(tmp_path, upstream.url, *flags) as (_, port, _said):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30) as client:
            for upto in (1, 5, 9):
                assert (await client.post("/v1/chat/completions", json=body(upto))).status_code == 200
            assert b"unique_alpha" not in upstream.bodies[-1]  # left out: only memory and the archive have it
            (name,) = await names_of(1, database)
            stored = contents(database)
            command = ["-m", "proxy", "forget", name, "--yes", "--db", str(database)]
            process = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment(tmp_path))
            assert await process.wait() == 0
            assert names(database) == []
            assert b"canary" not in held(data) and not any(part in held(data) for part in stored)
            sent = await client.post("/v1/chat/completions", json=body(9))
            assert sent.status_code == 200 and b"unique_alpha" in upstream.bodies[-1]
            history += [said("done"), user("delta")]
            assert (await client.post("/v1/chat/completions", json=body(11))).status_code == 200
            health = (await client.get("/recap/health")).json()["archive"]
            assert health["state"] == "ok" and health["batches_lost"] == 0 and health["retention"]["problem"] is None
            assert await names_of(1, database) != [name]
