"""A small archive and the commands that read it, run in this process."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphstore.store.archive import open_reader
from proxy.cli import main
from tests.proxy.dialogue import LUNCH_S, Dialogue, said, turn, user

OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk", "x-session-affinity": "ses_1"}
HISTORY = [*turn("Where is alpha?", "alpha"), *turn("And beta?", "beta")]
REQUEST = user("Fix unique_beta now")


@dataclass(frozen=True, slots=True)
class Printed:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Recap = Callable[..., Printed]


async def build(folder: Path, mode: str = "idle") -> str:
    """Two turns, lunch, a third that is compacted; a title beside it. Returns the session's name."""
    dialogue = Dialogue(folder, changes={"mode": mode, "beta": 0.6, "eps": 0.0})  # exploration goes by the random name
    titles = {"role": "system", "content": "You make titles."}
    await dialogue.send([user("Where is alpha?")], headers=OPENCODE, tools=None, system=titles)
    for end in (1, 3, 5, 7):
        await dialogue.send(HISTORY[:end], headers=OPENCODE)
    await dialogue.send([*HISTORY, REQUEST], headers=OPENCODE, after_s=LUNCH_S, answer=said("beta is fixed"))
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        return next(s.name for s in reader.list_sessions() if s.kind == "agent")


def newest_name(database: str) -> str:
    """Name of the session that was active last."""
    with open_reader(database) as reader:
        return reader.list_sessions()[0].name


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("archive")
    return folder / "recap.db", asyncio.run(build(folder))


@pytest.fixture
def name(archive: tuple[Path, str]) -> str:
    return archive[1]


@pytest.fixture
def recap(archive: tuple[Path, str], capfdbinary: pytest.CaptureFixture[bytes]) -> Recap:
    """`recap ARGUMENTS --db ARCHIVE`, unless the arguments name a database themselves."""

    def run(*arguments: str) -> Printed:
        given = list(arguments) if "--db" in arguments else [*arguments, "--db", str(archive[0])]
        try:
            code = main(given)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfdbinary.readouterr()
        return Printed(code, out.decode(), err.decode())

    return run
