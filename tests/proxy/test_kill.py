"""kill -9 at every commit: the archive verifies, and the next request is served right."""

import subprocess
import sys
from pathlib import Path

import pytest

from graphstore.store.archive import open_reader
from graphstore.store.verify import verify
from proxy.commands.verify import recut
from tests.archives import lay_out_archive
from tests.proxy.dialogue import Dialogue, said, user
from tests.proxy.killed_writer import HISTORY, ID, OTHER

DEADLINE_S = 60
COMMITS_MAX = 60


def killed(folder: Path, at: int, moment: str) -> list[str]:
    """What the process had sent before it was killed, or all of it and `done`."""
    command = [sys.executable, "-m", "tests.proxy.killed_writer", str(folder), str(at), moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == (0 if "done" in done.stdout else -9), done.stderr
    return done.stdout.splitlines()


async def check(folder: Path, sent: list[str]) -> None:
    with open_reader(folder / "recap.db") as reader:
        assert verify(reader, recut) == []
        assert "forgotten" not in sent or 2 not in {row.id for row in reader.list_sessions()}
    dialogue = Dialogue(folder, changes={"beta": 0.05})
    try:
        for headers in (ID, OTHER):
            name = headers["x-session-id"]
            whole = [*HISTORY, user("delta"), said("ok"), user("next")]
            reply = await dialogue.send(whole, headers=headers)
            if f"{name} rewritten" in sent and not (name == "two" and "forgotten" in sent):
                assert reply.rewritten and "unique_alpha" not in reply.text, (name, sent)  # the same bytes as before
            elif not reply.rewritten:
                assert reply.messages[1:] == whole
    finally:
        await dialogue.close()
    assert await dialogue.findings() == []


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_killed_at_every_commit(tmp_path: Path, moment: str) -> None:
    for at in range(1, COMMITS_MAX):
        folder = tmp_path / str(at)
        folder.mkdir()
        lay_out_archive(folder / "recap.db")
        sent = killed(folder, at, moment)
        await check(folder, sent)
        if sent[-1:] == ["done"]:
            assert at > 8 and sent == ["one rewritten", "two rewritten", "forgotten", "done"]
            return
    pytest.fail("it never came to its end")
