"""A dialogue, the worker's own loop and a real small model in one process: what was measured decides what is sent."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphstore.evidence import Rule
from graphstore.graph import ContextGraph
from graphstore.parameters import Parameters
from graphstore.store.archive import open_queue, open_reader
from graphstore.store.report import latest_selection
from graphstore.store.verify import verify
from proxy.commands.serve import worker_environ
from proxy.commands.worker import ArchivedJobs
from proxy.settings import Settings
from proxy.supervisor import worker_command
from proxy_model.worker import Stopped, Worker
from tests.observed import selected
from tests.proxy.dialogue import LUNCH_S, Dialogue, Message, read, said, user

DEADLINE_S = 120
ID = {"x-session-id": "one"}
LINES = {"walnut": 5, "copper": 20, "lantern": 10, "harbour": 5, "meadow": 10, "violin": 20}
NAMES = tuple(LINES)


@dataclass
class UntilIdle:
    """The worker's pause: an empty queue ends it."""

    def __call__(self, seconds: float) -> None:
        raise Stopped


def work_off(settings: Settings, clock: Callable[[], float] = time.time) -> None:
    with open_queue(settings.db, clock=clock) as queue, open_reader(settings.db) as reader:
        jobs = ArchivedJobs(queue, reader, settings)
        Worker(jobs, jobs.context, jobs.load, UntilIdle()).run()


def steps(names: tuple[str, ...]) -> list[Message]:
    """One file read after the other. Attention a token prefers short ones, attention a block long ones."""
    return [
        message
        for name in names
        for message in read(f"{name}.txt", "\n".join(f"{name}_{n} = {n}" for n in range(LINES[name])), f"call_{name}")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "beta"), [("paper", 0.5), ("mass", 0.62)])
async def test_what_the_model_attended_to_decides_what_is_sent(
    tmp_path: Path, smollm2: Path, rule: Rule, beta: float
) -> None:
    """Words and chance have no say here. `beta` has room for one of the files over which the rule and age disagree."""
    only_attention = Parameters(beta=beta, lam=0.0, eps=0.0)
    changes = {"beta": beta, "lam": 0.0, "eps": 0.0, "evidence": rule, "attention_model": str(smollm2)}
    changes |= {"attention_threads": 1, "attention_dtype": "float32", "attention_offline": True}
    dialogue = Dialogue(tmp_path, changes=changes)
    history: list[Message] = []
    for request, names, answer in (
        ("read three", NAMES[:3], "copper_3 is 3"),
        ("the rest", NAMES[3:], "meadow_5 is 5"),
    ):
        reads = steps(names)
        await dialogue.send([*history, user(request)], headers=ID, answer=reads[0])
        history += [user(request), *reads]
        await dialogue.send(history, headers=ID, answer=said(answer))
        history.append(said(answer))
    await dialogue.conversations.flush()
    work_off(dialogue.settings)
    assert (await dialogue.send([*history, user("go on")], headers=ID, after_s=LUNCH_S)).rewritten
    await dialogue.close()

    with open_reader(dialogue.settings.db) as reader:
        assert [(job.turn, job.state) for job in reader.load_jobs(1)] == [(1, "folded"), (2, "done"), (3, "queued")]
        (observation,) = reader.load_observations(1)
        assert (observation.since_turn, observation.turn, observation.replay.unobserved) == (1, 2, ())
        assert observation.replay.edges and observation.replay.rows_assistant
        made = latest_selection(reader, 1)
        assert made is not None and made.applied
        ordinals = [verdict.ordinal for verdict in made.verdicts]
        graph = reader.derived_graph(1, rule, only_attention)
        by_attention = selected(reader, 1, ordinals, graph, only_attention, rule)
        assert [v.ordinal for v in made.verdicts if v.kept] == list(by_attention.chosen)
        assert [v.score for v in made.verdicts] == pytest.approx(by_attention.scores.total)
        without = selected(reader, 1, ordinals, ContextGraph(), only_attention, rule)
        assert without.chosen != by_attention.chosen
        assert verify(reader) == []


@pytest.mark.slow
@pytest.mark.parametrize(("how", "state", "attempts"), [("killed", "claimed", 1), ("orphaned", "queued", 0)])
async def test_a_worker_that_ends_in_the_middle_loses_no_turn(
    tmp_path: Path, smollm2: Path, how: str, state: str, attempts: int
) -> None:
    """`orphaned`: the proxy was killed, which closes the worker's standard input. The job is replayed once, later."""
    dialogue = Dialogue(tmp_path, changes={"attention_model": str(smollm2), "attention_offline": True})
    await dialogue.send([user("one two three " * 1000)], headers=ID)  # seconds of replay
    await dialogue.close()
    environ = worker_environ(dialogue.settings, os.environ)
    worker = await asyncio.create_subprocess_exec(*worker_command(), stdin=asyncio.subprocess.PIPE, env=environ)
    assert worker.stdin is not None
    with open_reader(dialogue.settings.db) as reader:
        async with asyncio.timeout(DEADLINE_S):
            while not (jobs := reader.load_jobs(1)) or jobs[0].state == "queued":  # noqa: ASYNC110  # a process
                await asyncio.sleep(0.01)  # until it has taken the turn, which it replays now
            if how == "killed":
                worker.kill()
            worker.stdin.close()
            await worker.wait()
        (job,) = reader.load_jobs(1)
        assert (job.state, job.attempts) == (state, attempts)
        work_off(dialogue.settings)
        (job,) = reader.load_jobs(1)
        assert (job.state, job.attempts) == ("done", attempts + 1)
        assert len(reader.load_observations(1)) == 1 and verify(reader) == []
