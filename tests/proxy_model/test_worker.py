"""The worker goes on whatever fails, ends every job with a sentence, and gives back what it cannot do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from graphstore.replays import Replay, ReplayJob
from graphstore.store.engine import ArchiveUnavailable
from proxy_model.context import ContextBlock
from proxy_model.errors import ModelUnavailable, ReplayError
from proxy_model.worker import ARCHIVE_PAUSE_S, FORGET_POLLS, MODEL_PAUSES_S, POLL_S, Stopped, Worker
from tests.observed import replay_of

JOB = ReplayJob(7, 1, 3, 9, 1, 1)
NO_WEIGHTS = ModelUnavailable("there are no weights", "fetch them")
LOCKED = ArchiveUnavailable("locked", "the database is locked", "close the other program")


@dataclass
class Words:
    blocks: Sequence[ContextBlock] = ()
    identifiers: Mapping[int, frozenset[str]] = field(default_factory=lambda: {0: frozenset({"alpha"})})


@dataclass
class FakeJobs:
    """Hands out `waiting` and writes down what is done with it. `fail_with`: raised by the next calls of that name."""

    waiting: list[ReplayJob]
    log: list[object] = field(default_factory=list)
    fail_with: dict[str, list[Exception]] = field(default_factory=dict)

    def _maybe(self, name: str) -> None:
        if self.fail_with.get(name):
            raise self.fail_with[name].pop()

    def recover(self) -> int:
        self._maybe("recover")
        self.log.append("recover")
        return 0

    def has_work(self) -> bool:
        return bool(self.waiting)

    def claim(self) -> ReplayJob | None:
        self._maybe("claim")
        return self.waiting.pop(0) if self.waiting else None

    def finish(self, job: ReplayJob, replay: Replay, identifiers: Mapping[int, frozenset[str]]) -> bool:
        self._maybe("finish")
        self.log.append(("done", job.id, dict(identifiers)))
        return True

    def fail(self, job: ReplayJob, error: str, *, again: bool) -> None:
        self._maybe("fail")
        self.log.append(("failed", job.id, error, again))

    def release(self, job: ReplayJob) -> None:
        self._maybe("release")
        self.log.append(("released", job.id))
        self.waiting = [job]

    def tell(self, state: str, problem: str | None) -> None:
        self._maybe("tell")
        self.log.append((state, problem))


@dataclass
class FakeModel:
    fault: BaseException | None = None
    seen: list[int] = field(default_factory=list)

    def observe(self, blocks: Sequence[ContextBlock], session: int) -> Replay:
        self.seen.append(session)
        if self.fault is not None:
            raise self.fault
        return replay_of({0: 0.5})

    def forget(self) -> None:
        self.seen.append(-1)


class Pauses:
    """Ends the worker at the nth wait; a real one would go on for ever."""

    def __init__(self, last: int = 1) -> None:
        self.lengths: list[float] = []
        self._last = last

    def __call__(self, seconds: float) -> None:
        self.lengths.append(seconds)
        if len(self.lengths) == self._last:
            raise Stopped


def run(jobs: FakeJobs, load: Callable[[], FakeModel], pauses: Pauses | None = None) -> Pauses:
    pauses = pauses or Pauses()
    Worker(jobs, lambda _job: Words(), load, pauses).run()
    return pauses


def test_a_turn_is_replayed_and_stored() -> None:
    jobs, model = FakeJobs([JOB]), FakeModel()
    assert run(jobs, lambda: model).lengths == [POLL_S]
    assert jobs.log == [
        "recover", ("idle", None), ("loading", None), ("replaying", None),
        ("done", 7, {0: frozenset({"alpha"})}), ("idle", None), ("stopped", None),
    ]  # fmt: skip


def test_the_model_is_loaded_when_it_is_first_needed_and_once() -> None:
    loads = []

    def load() -> FakeModel:
        loads.append(1)
        return FakeModel()

    run(FakeJobs([]), load)
    assert loads == []
    run(FakeJobs([JOB, JOB, JOB]), load)
    assert loads == [1]


@pytest.mark.parametrize(
    ("fault", "said", "again"),
    [
        (ReplayError("the turn has no words", "nothing is to be done"), "the turn has no words; nothing is", False),
        (MemoryError(), "memory is exhausted; lower attention_max_tokens", True),
        (RuntimeError("shape mismatch"), "RuntimeError: shape mismatch; please report this", True),
    ],
)
def test_a_fault_is_a_sentence_and_the_next_turn_follows(fault: Exception, said: str, again: bool) -> None:
    jobs, model = FakeJobs([JOB]), FakeModel(fault)
    run(jobs, lambda: model)
    (failed,) = [entry for entry in jobs.log if entry[0] == "failed"]  # type: ignore[index]
    assert failed[1] == 7 and failed[2].startswith(said) and failed[3] == again  # type: ignore[index]
    assert jobs.log[-2:] == [("idle", None), ("stopped", None)]


@pytest.mark.parametrize("when", ["loading", "replaying"])
def test_without_a_model_turns_wait_and_the_reason_is_told(when: str) -> None:
    def load() -> FakeModel:
        if when == "loading":
            raise NO_WEIGHTS
        return FakeModel(NO_WEIGHTS)

    jobs = FakeJobs([JOB])
    pauses = run(jobs, load, Pauses(5))
    expected = MODEL_PAUSES_S if when == "loading" else MODEL_PAUSES_S[:1]
    assert set(expected) <= set(pauses.lengths) and POLL_S not in pauses.lengths
    assert ("unavailable", "there are no weights; fetch them") in jobs.log
    assert jobs.waiting == [JOB]


def test_no_turn_is_taken_before_there_is_a_model() -> None:
    """A process that dies while it loads one, for want of memory say, must not use up the turn's attempts."""
    waiting = []

    def load() -> FakeModel:
        waiting.extend(jobs.waiting)
        return FakeModel()

    jobs = FakeJobs([JOB])
    run(jobs, load)
    assert waiting == [JOB]


def test_why_there_is_no_model_is_told_while_it_is_tried_again() -> None:
    def load() -> FakeModel:
        raise NO_WEIGHTS

    jobs = FakeJobs([JOB])
    run(jobs, load, Pauses(2))
    told = [entry for entry in jobs.log if isinstance(entry, tuple) and entry[0] == "loading"]
    assert told == [("loading", None), ("loading", str(NO_WEIGHTS))]


def test_a_model_that_is_there_at_last_replays_what_waited() -> None:
    answers: list[FakeModel | ModelUnavailable] = [NO_WEIGHTS, FakeModel()]

    def load() -> FakeModel:
        answer = answers.pop(0)
        if isinstance(answer, ModelUnavailable):
            raise answer
        return answer

    jobs = FakeJobs([JOB])
    assert run(jobs, load, Pauses(2)).lengths == [MODEL_PAUSES_S[0], POLL_S]
    assert ("done", 7, {0: frozenset({"alpha"})}) in jobs.log


@pytest.mark.parametrize("where", ["recover", "claim", "finish", "tell"])
def test_an_archive_that_fails_is_waited_for(where: str) -> None:
    jobs = FakeJobs([JOB], fail_with={where: [LOCKED]})
    assert ARCHIVE_PAUSE_S in run(jobs, FakeModel, Pauses(3)).lengths
    assert ("done", 7, {0: frozenset({"alpha"})}) in jobs.log


@pytest.mark.parametrize(
    ("where", "fault"), [("release", None), ("fail", RuntimeError("shape mismatch"))], ids=["release", "fail"]
)
def test_a_job_that_could_not_be_ended_is_recovered_once_the_archive_is_back(
    where: str, fault: Exception | None
) -> None:
    """Otherwise it would count as claimed until the worker is started again, by a worker that has forgotten it."""
    faults: dict[str, list[Exception]] = {"finish": [LOCKED], where: [LOCKED]}
    jobs = FakeJobs([JOB], fail_with=faults)
    run(jobs, lambda: FakeModel(fault), Pauses(4))
    assert jobs.log.count("recover") == 2


def test_an_idle_worker_frees_what_it_kept() -> None:
    model = FakeModel()
    run(FakeJobs([JOB]), lambda: model, Pauses(2 * FORGET_POLLS))
    assert model.seen == [1, -1]


def test_a_signal_in_the_middle_gives_the_turn_back() -> None:
    jobs = FakeJobs([JOB])
    run(jobs, lambda: FakeModel(Stopped()))
    assert jobs.log[-2:] == [("released", 7), ("stopped", None)]
