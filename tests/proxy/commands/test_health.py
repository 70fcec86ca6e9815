"""recap health: one number for a healthcheck, and words for people."""

import json
import time
from pathlib import Path

import httpx
import pytest

from graphstore.records import WorkerStatus
from graphstore.store.archive import open_queue
from proxy.cli import main
from proxy.conversations import open_conversations
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


async def test_a_second_proxy_on_an_archive_in_use_is_not_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It records nothing: that must not look well to anybody."""
    import asyncio

    settings = Settings(upstream="http://127.0.0.1:9/v1", db=str(tmp_path / "recap.db"))
    first, second = open_conversations(settings, time.time), open_conversations(settings, time.time)
    async with running_proxy(settings, first) as owner, running_proxy(settings, second) as other:
        codes = [await asyncio.to_thread(main, ["health", "--port", str(proxy.port)]) for proxy in (owner, other)]
        async with httpx.AsyncClient(base_url=other.url) as client:
            reply = await client.get("/recap/health")
            problem = (await client.get("/recap/api/self")).json()["problem"]
    assert codes == [0, 1] and reply.status_code == 200
    assert '"status": "degraded"' in capsys.readouterr().out
    assert problem == reply.json()["problem"] and "nothing is recorded" in problem and "is in use by another" in problem


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
