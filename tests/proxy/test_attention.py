"""What health says of attention: which signal is missing, why, and what to do."""

from pathlib import Path

import pytest

from graphstore.records import WorkerStatus
from graphstore.store.archive import open_queue, open_reader
from proxy import attention
from proxy.attention import attention_health
from proxy.settings import Settings
from tests.observed import observe, replay_of
from tests.proxy.dialogue import Dialogue, user

ID = {"x-session-id": "one"}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever this runs, torch and transformers count as installed."""
    monkeypatch.setattr(attention, "find_spec", lambda name: object())


def health(dialogue: Dialogue, **changes: object) -> dict[str, object]:
    settings = Settings(db=dialogue.settings.db, **changes)  # type: ignore[arg-type]
    with open_reader(dialogue.settings.db) as reader:
        return attention_health(reader, settings)


async def one_turn(tmp_path: Path) -> Dialogue:
    dialogue = Dialogue(tmp_path)
    await dialogue.send([user("one")], headers=ID)
    await dialogue.close()
    return dialogue


def tell(dialogue: Dialogue, state: str, pid: int, problem: str | None = None) -> None:
    with open_queue(dialogue.settings.db) as queue:
        status = WorkerStatus(pid, state, "test/model", "cpu", problem, 0.0)  # type: ignore[arg-type]
        queue.set_status(status)


async def test_without_libraries_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: None if name == "torch" else object())
    found = health(await one_turn(tmp_path))
    assert (found["state"], found["problem"]) == ("missing", "torch cannot be imported here")
    assert "make attention" in str(found["remedy"])
    assert found["queued"] == 1


async def test_off_is_off(tmp_path: Path, libraries: None) -> None:
    assert health(await one_turn(tmp_path), attention="off")["state"] == "off"


async def test_a_worker_that_has_not_said_anything_yet(tmp_path: Path, libraries: None) -> None:
    assert health(await one_turn(tmp_path))["state"] == "waiting"


async def test_what_the_worker_said_last_counts_while_it_runs(tmp_path: Path, libraries: None) -> None:
    dialogue = await one_turn(tmp_path)
    with open_queue(dialogue.settings.db) as queue:
        queue.set_status(WorkerStatus(1, "unavailable", "test/model", "cpu", "there are no weights; fetch them", 0.0))
        found = health(dialogue)
        assert (found["state"], found["problem"]) == ("unavailable", "there are no weights")
        assert (found["remedy"], found["model"], found["device"]) == ("fetch them", "test/model", "cpu")
    assert (health(dialogue)["state"], health(dialogue)["problem"]) == ("dead", "there are no weights")
    for state, problem in (("loading", "while it loaded the model"), ("replaying", "while it replayed a turn")):
        tell(dialogue, state, 1)  # killed for want of memory, most likely: it cannot say so itself
        assert health(dialogue)["state"] == "dead" and problem in str(health(dialogue)["problem"])
        assert "smaller" in str(health(dialogue)["remedy"])
    tell(dialogue, "stopped", 1)
    assert health(dialogue)["state"] == "stopped"


async def test_a_worker_elsewhere_has_its_own_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers the proxy has no torch and the worker has."""
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    dialogue = await one_turn(tmp_path)
    with open_queue(dialogue.settings.db) as queue:
        queue.set_status(WorkerStatus(1, "idle", "test/model", "cuda", None, 0.0))
        assert health(dialogue)["state"] == "idle"
    assert health(dialogue)["state"] == "missing"


async def test_jobs_are_counted_and_the_last_failure_told(tmp_path: Path, libraries: None) -> None:
    dialogue = await one_turn(tmp_path)
    with open_queue(dialogue.settings.db) as queue:
        job = queue.claim()
        assert job is not None
        queue.fail(job, "NaN in the rows; report it", again=False)
    found = health(dialogue)
    assert (found["queued"], found["failed"], found["last_error"]) == (0, 1, "NaN in the rows; report it")


async def test_the_running_proxy_tells_it(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, changes={"attention": "off"})
    told = dialogue.conversations.health()["attention"]
    assert isinstance(told, dict) and told["state"] == "off" and told["evidence"] == "auto"
    await dialogue.close()


async def test_replays_are_counted_as_done(tmp_path: Path, libraries: None) -> None:
    dialogue = await one_turn(tmp_path)
    observe(dialogue.settings.db, 1, replay_of({0: 0.5}), turn=1)
    assert health(dialogue)["done"] == 1
