"""With `redact`, no secret reaches the disk, no byte on the wire differs, and the archive verifies and repairs."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from graphstore.store.blobs import unpack
from graphstore.store.repair import salvage
from proxy.commands.verify import recut
from proxy.dialects import DIALECTS
from tests.proxy.dialogue import LUNCH_S, Dialogue, Message, read, said, turn, user

SECRETS = ("sk-proj-canary0123456789abcdef", "AKIACANARY0123456789", "ghp_canary0123456789abcdefghij")
ID = {"x-session-id": "one"}
HISTORY: list[Message] = [
    user(f"Use {SECRETS[0]} please"),
    *read(f"{SECRETS[1]}.py", f"key = '{SECRETS[2]}'\n" + "filler text " * 400),
    said(f"password=canary-{SECRETS[0]}"),
    *turn("And beta?", "beta"),
]


async def talk(folder: Path, redact: bool) -> tuple[Dialogue, list[bytes]]:
    dialogue = Dialogue(folder, changes={"beta": 0.05, "redact": redact})
    sent = [(await dialogue.send(HISTORY[:end], headers=ID)).sent for end in (1, 3, 5, 7)]
    answer = said(f"the key is {SECRETS[1]}")
    sent.append((await dialogue.send([*HISTORY, user("next")], headers=ID, after_s=LUNCH_S, answer=answer)).sent)
    await dialogue.restart()
    more = [*HISTORY, user("next"), answer, user(f"what does {SECRETS[1]}.py say")]
    sent.append((await dialogue.send(more, headers=ID)).sent)
    sent.append((await dialogue.send([*more, said("ok"), user("again")], headers=ID, after_s=LUNCH_S)).sent)
    return dialogue, sent


def messages(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "recap.db")) as db:
        return [repr(unpack(*row)) for row in db.execute("SELECT codec, content FROM messages")]


def stored(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "recap.db")) as db:
        texts = messages(folder)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return "\n".join([*texts, *(repr(row) for name in tables for row in db.execute(f"SELECT * FROM {name}"))])


async def test_only_the_stored_copy_differs(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "redacted")]
    for folder in folders:
        folder.mkdir()
    plain, sent_plain = await talk(folders[0], redact=False)
    redacted, sent = await talk(folders[1], redact=True)
    assert sent == sent_plain and len(sent[4]) < len(sent[3])
    assert await plain.outcomes() == await redacted.outcomes()
    assert all(secret in stored(folders[0]) for secret in SECRETS)
    assert not any(secret in stored(folders[1]) for secret in (*SECRETS, "canary"))
    assert await redacted.findings() == []
    report = salvage(folders[1] / "recap.db", folders[1] / "good.db", recut, tuple(DIALECTS))
    assert report.is_whole


async def test_damage_to_a_redacted_copy_is_found(tmp_path: Path) -> None:
    dialogue, _ = await talk(tmp_path, redact=True)
    await dialogue.close()
    with closing(sqlite3.connect(tmp_path / "recap.db")) as db, db:
        changed = db.execute(
            "UPDATE messages SET content = CAST(substr(content, 1, 20) || x'41' || substr(content, 22) AS BLOB)"
            " WHERE codec = 'redacted-raw'"
        )
        assert changed.rowcount > 0
    assert any("digest" in finding.problem for finding in await dialogue.findings())


@pytest.mark.parametrize("redact", [True, False])
async def test_turning_it_on_or_off_keeps_what_is_stored(tmp_path: Path, redact: bool) -> None:
    dialogue, _ = await talk(tmp_path, redact)
    await dialogue.restart(redact=not redact)
    await dialogue.send([*HISTORY, user("later")], headers=ID)
    await dialogue.close()
    assert any(SECRETS[0] in text for text in messages(tmp_path)) is not redact
    assert await dialogue.findings() == []
