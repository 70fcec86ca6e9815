"""recap health: one number for a healthcheck, and words for people."""

import json
from pathlib import Path

import pytest

from graphstore.records import WorkerStatus
from graphstore.store.archive import open_queue
from proxy.cli import main
from proxy.settings import Settings
from tests.proxy.dialogue import Dialogue
from tests.support import running_proxy


async def test_a_running_proxy_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    async with running_proxy(Settings(upstream="http://127.0.0.1:9/v1", db=str(tmp_path / "recap.db"))) as proxy:
        code = await asyncio.to_thread(
            main, ["health", "--port", str(proxy.port), "--upstream", "http://127.0.0.1:9/v1"]
        )
    assert code == 0 and json.loads(capsys.readouterr().out)


def test_no_answer_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--port", "9"]) == 1
    assert "recap serve" in capsys.readouterr().out


async def test_the_worker_is_well_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dialogue = Dialogue(tmp_path)
    await dialogue.close()
    asked = ["health", "--worker", "--db", dialogue.settings.db]
    assert main(asked) == 1
    with open_queue(dialogue.settings.db) as queue:
        queue.set_status(WorkerStatus(1, "idle", "test/model", "cpu", None, 0.0))
        assert main(asked) == 0
        queue.set_status(WorkerStatus(1, "unavailable", "test/model", "cpu", "there are no weights; fetch them", 0.0))
        assert main(asked) == 1
    assert '"problem": "there are no weights"' in capsys.readouterr().out
