"""Whatever clients do, and whatever fails: no session breaks, no history is lost, no warm prefix is broken."""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphstore.store.archive import Archive
from proxy.dialects.base import DialectName
from tests.properties.clients import Step
from tests.properties.world import World

OPERATIONS = sorted(name.removeprefix("do_") for name in dir(World) if name.startswith("do_"))
COMMON = ["turn", "lunch", "work", "ask", "retry", "regenerate", "disturb", "silent"]
steps = st.tuples(st.sampled_from(OPERATIONS + COMMON), st.integers(0, 40))
START: list[Step] = [("turn", 0), ("turn", 1), ("turn", 2), ("lunch", 0)]  # there is something to leave out


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "recap.db"
    Archive.open(path).close()
    return path


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for company or for a better time."""
    monkeypatch.setattr("graphstore.store.writer.LINGER_S", 0.001)
    monkeypatch.setattr("graphstore.store.writer.RETRY_PAUSES_S", (0.001,))
    monkeypatch.setattr("proxy.recorder.COLLECT_S", 0.001)
    monkeypatch.setattr("proxy.planning.SETTLE_DEADLINE_S", 0.05)


def run(template: Path, dialect: DialectName, mode: str, program: Sequence[Step], window: int = 0) -> World:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(template, folder)

        async def play() -> World:
            world = World(dialect, folder=Path(folder), mode=mode, window=window)
            await world.run(program)
            return world

        return asyncio.run(play())


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(
    dialect=st.sampled_from(["chat", "responses"]),
    mode=st.sampled_from(["idle", "always"]),
    program=st.lists(steps, max_size=12),
)
def test_promises_hold_for_every_program(template: Path, dialect: DialectName, mode: str, program: list[Step]) -> None:
    run(template, dialect, mode, [*START, *program])


WORK: list[Step] = [("work", n) for n in (0, 1, 7, 0, 14, 3)]


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    dialect=st.sampled_from(["chat", "responses"]),
    window=st.sampled_from([0, 250, 400, 800]),
    program=st.lists(steps | st.tuples(st.sampled_from(["work", "overflow"]), st.integers(0, 40)), max_size=14),
)
def test_promises_hold_under_pressure(template: Path, dialect: DialectName, window: int, program: list[Step]) -> None:
    run(template, dialect, "idle", [*START, *WORK, *program], window)


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_the_programs_do_press(template: Path, dialect: DialectName) -> None:
    world = run(template, dialect, "idle", [*START, *WORK, *WORK, ("overflow", 0), ("work", 0)], 400)
    assert world.seen["shortened"] and world.seen["cold"] > 1


REGRESSIONS: dict[str, tuple[DialectName, str, list[Step]]] = {
    "a pruned result is left out only when its placeholder is archived": ("chat", "idle", [("prune", 0)]),
    "a compacted session stays compacted while the disk fails": ("chat", "idle", [("fail", 1), ("amend", 0)]),
    "a client that prunes a shared history leaves the other's session alone": (
        "chat",
        "idle",
        [("work", 0), ("fork", 0), ("prune", 0)],
    ),
    "a client without an id leaves the session of one with an id alone": (
        "responses",
        "idle",
        [("fork", 4), ("turn", 0)],
    ),
    "an undo and its undoing": ("chat", "always", [("work", 0), ("regenerate", 5)]),
    "a branch that compacts nothing anew sends the same after a restart": (
        "chat",
        "idle",
        [("fork", 9), ("turn", 0), ("restart", 0), ("turn", 0)],
    ),
    "what an old call's late result brought back stays after a restart": (
        "responses",
        "idle",
        [("silent", 29), ("retry", 11), ("restart", 10)],
    ),
    "an overflowing queue leaves no hole behind": ("responses", "idle", [("fail", 3), ("work", 3)]),
    "a branch of a session that the archive lost stands for itself": (
        "responses",
        "idle",
        [("fail", 0), ("prune", 1), ("prune", 2), ("prune", 3)],
    ),
    "blocks of a decision that was not saved stand in the history that they were cut from": (
        "responses",
        "idle",
        [
            ("prune", 19),
            ("fail", 16),
            ("work", 40),
            ("undo", 21),
            ("heal", 2),
            ("fail", 33),
            ("edit", 20),
            ("lunch", 13),
        ],
    ),
    "a branch of a lost branch": (
        "responses",
        "idle",
        [("undo", 20), ("fork", 2), ("regenerate", 0), ("work", 0), ("fail", 0), ("prune", 0)],
    ),
    "one request on two connections, and a rejection": ("responses", "always", [("reject", 0), ("twice", 0)]),
    "everybody at once after a break": ("chat", "idle", [("fresh", 0), ("turn", 1), ("fork", 3), ("volley", 1)]),
    "an undo may cut a block": (
        "responses",
        "idle",
        [("silent", 7), ("disturb", 1), ("fork", 3), ("undo", 0), ("work", 0), ("turn", 9), ("undo", 30)],
    ),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_promises_hold_where_they_once_did_not(template: Path, name: str) -> None:
    dialect, mode, program = REGRESSIONS[name]
    run(template, dialect, mode, [*START, *program])
