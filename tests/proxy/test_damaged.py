"""Truncated, bit-flipped and newer archives: every command says what is wrong or does its work; the proxy serves on."""

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from proxy.cli import main
from tests.proxy.dialogue import LUNCH_S, Dialogue, turn, user

ID = {"x-session-id": "s"}
HISTORY = [message for i in range(4) for message in turn(f"request {i}", f"name{i}", 3000)]


async def work(dialogue: Dialogue) -> None:
    for end in (1, 5, 9, 13):
        await dialogue.send(HISTORY[:end], headers=ID)


def flipped(data: bytes, seed: int) -> bytes:
    dice, changed = random.Random(seed), bytearray(data)
    for _ in range(1 + seed % 3):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE alembic_version SET version_num = '9999'")


async def original(folder: Path) -> tuple[Path, str]:
    dialogue = Dialogue(folder, changes={"beta": 0.1})
    await work(dialogue)
    (session,) = await dialogue.sessions()
    return folder / "recap.db", session.name


DAMAGES = [f"cut to {share} %" for share in (0, 1, 10, 50, 90, 99)] + [f"bits {seed}" for seed in range(12)] + ["newer"]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_archive_breaks_no_command_and_no_request(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, name = await original(tmp_path)
    whole = path.read_bytes()
    if damage == "newer":
        newer(path)
    elif damage.startswith("cut"):
        path.write_bytes(whole[: len(whole) * int(damage.split()[2]) // 100])
    else:
        path.write_bytes(flipped(whole, int(damage.split()[1])))
    bad = path.read_bytes()
    for command in (["verify"], ["sessions"], ["show", name], ["show", name, "--map"], ["explain", name]):
        code = main([*command, "--db", str(path)])
        said = capsys.readouterr()
        assert code in (0, 1) and (code == 0 or said.out or said.err.startswith("recap: ")), (command, said)
        if damage == "newer":
            assert code == 1 and "newer version" in said.err
    assert path.read_bytes() == bad, "somebody who only looked has changed it"

    dialogue = Dialogue(tmp_path, changes={"beta": 0.1})
    reply = await dialogue.send([*HISTORY, user("next")], headers=ID, after_s=LUNCH_S)
    health = dialogue.conversations.health()
    assert health["state"] == "ok" or health["problem"]
    await dialogue.close()
    if damage == "newer":
        assert not reply.rewritten and "newer version" in str(health["problem"])
        bad = path.read_bytes()
        assert main(["repair", "--db", str(path)]) == 1 and path.read_bytes() == bad
        return
    code = main(["repair", "--db", str(path)])
    said = capsys.readouterr()
    assert code == 0 or "restore a backup" in said.err, said
    if code == 0:
        assert main(["verify", "--db", str(path)]) == 0
