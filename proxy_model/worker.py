"""The replay worker: takes finished turns off the queue, one after the other, and writes down what they attended to.

It runs in a process of its own, which the request path never waits for. Where jobs, contexts and models come from it
does not know: they arrive as functions. Whatever fails ends as a sentence in the archive, and the worker goes on.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from graphstore.replays import Replay, ReplayJob
from graphstore.store.engine import ArchiveUnavailable
from proxy_model.context import ContextBlock
from proxy_model.errors import ModelUnavailable, ReplayError

log = logging.getLogger(__name__)

POLL_S = 1.0  # between two looks at an empty queue: a reading query on an index
FORGET_POLLS = 600  # then the keys and values of the last context go: a session that rests begins anew anyway
MODEL_PAUSES_S = (30.0, 120.0, 600.0)  # before a model that could not be loaded is tried again
ARCHIVE_PAUSE_S = 5.0

T = TypeVar("T")
State = Literal["starting", "loading", "idle", "replaying", "unavailable", "stopped"]


class Stopped(BaseException):
    """Raised in the worker's thread by a signal: the job in hand goes back as it came."""


class Observer(Protocol):
    """A loaded model. Raises ReplayError; whatever else it raises counts as a fault of this replay."""

    def observe(self, blocks: Sequence[ContextBlock], session: int) -> Replay: ...

    def forget(self) -> None:
        """Free what is kept for the next replay."""


class Context(Protocol):
    @property
    def blocks(self) -> Sequence[ContextBlock]: ...

    @property
    def identifiers(self) -> Mapping[int, frozenset[str]]: ...


class Jobs(Protocol):
    """The queue of `graphstore.store.replays`, bound to one evidence rule for each size of model."""

    def recover(self) -> int: ...
    def has_work(self) -> bool: ...
    def claim(self) -> ReplayJob | None: ...
    def finish(self, job: ReplayJob, replay: Replay, identifiers: Mapping[int, frozenset[str]]) -> bool: ...
    def fail(self, job: ReplayJob, error: str, *, again: bool) -> None: ...
    def release(self, job: ReplayJob) -> None: ...
    def tell(self, state: State, problem: str | None) -> None: ...


@dataclass(slots=True)
class Worker:
    """`pause` waits so many seconds, or less when the worker is to stop."""

    jobs: Jobs
    context_of: Callable[[ReplayJob], Context]
    load: Callable[[], Observer]
    pause: Callable[[float], object]
    _observer: Observer | None = None
    _failures: int = 0
    _problem: str | None = None  # why there is no model
    _idle_polls: int = 0
    _owes: bool = False  # the archive failed when a job was to be ended: it counts as claimed until it is recovered

    def run(self) -> None:
        """Until `Stopped`. Raises nothing else."""
        try:
            self._settle(self.jobs.recover)
            self._tell("idle")
            while True:
                self.step()
        except Stopped:
            self._tell("stopped")

    def step(self) -> None:
        """One look at the queue, and what follows from it."""
        if self._owes:
            self._settle(self.jobs.recover)
        if not self._guarded(self.jobs.has_work):
            self._rest()
            return
        try:  # before a job is taken: a process that dies of the model costs no turn one of its attempts
            observer = self._model()
        except ModelUnavailable as error:
            self._do_without(str(error))
            return
        job = self._guarded(self.jobs.claim)
        if job is None:
            self._rest()
            return
        self._idle_polls = 0
        try:
            self._work(job, observer)
        except Stopped:
            self._settle(lambda: self.jobs.release(job))
            raise

    # -- parts ------------------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        self._idle_polls += 1
        if self._observer is not None and self._idle_polls == FORGET_POLLS:
            self._observer.forget()
        self.pause(POLL_S)

    def _work(self, job: ReplayJob, observer: Observer) -> None:
        self._tell("replaying")
        try:
            context = self.context_of(job)
            replay = observer.observe(context.blocks, job.session_id)
            stored = self.jobs.finish(job, replay, context.identifiers)
        except ModelUnavailable as error:  # only the replay itself shows that this model's attention cannot be read
            self._observer = None
            self._settle(lambda: self.jobs.release(job))
            self._do_without(str(error))
            return
        except ArchiveUnavailable as error:
            log.warning("replay.unwritten session=%d turn=%d: %s", job.session_id, job.turn, error)
            self._settle(lambda: self.jobs.release(job))
            self.pause(ARCHIVE_PAUSE_S)
        except ReplayError as error:
            self._fail(job, str(error), again=False)
        except MemoryError:
            self._fail(job, "memory is exhausted; lower attention_max_tokens or choose a smaller model", again=True)
        except Exception as error:
            log.exception("replay.failed session=%d turn=%d", job.session_id, job.turn)
            self._fail(job, f"{type(error).__name__}: {error}; please report this", again=True)
        else:
            log.info(
                "replay.done session=%d turn=%d stored=%s blocks=%d tokens=%d computed=%d seconds=%.1f",
                job.session_id, job.turn, stored, len(replay.blocks), replay.tokens, replay.tokens_computed,
                replay.seconds,
            )  # fmt: skip
        self._tell("idle")

    def _model(self) -> Observer:
        if self._observer is None:
            self._tell("loading", self._problem)  # why it failed last is worth more than that it is tried again
            self._observer = self.load()
            self._failures, self._problem = 0, None
        return self._observer

    def _do_without(self, problem: str) -> None:
        """No replay can be made: jobs wait until one can."""
        log.warning("replay.no_model %s", problem)
        self._problem = problem
        self._tell("unavailable", problem)
        self.pause(MODEL_PAUSES_S[min(self._failures, len(MODEL_PAUSES_S) - 1)])
        self._failures += 1

    def _fail(self, job: ReplayJob, error: str, *, again: bool) -> None:
        log.warning("replay.failed session=%d turn=%d: %s", job.session_id, job.turn, error)
        self._settle(lambda: self.jobs.fail(job, error, again=again))

    def _settle(self, change: Callable[[], object]) -> None:
        """Change the state of jobs, or remember that one is still claimed."""

        def settled() -> None:
            change()
            self._owes = False

        self._owes = True
        self._guarded(settled)

    def _tell(self, state: State, problem: str | None = None) -> None:
        self._guarded(lambda: self.jobs.tell(state, problem))

    def _guarded(self, ask: Callable[[], T]) -> T | None:
        """What the archive says; a failing one is waited for, never a reason to end."""
        try:
            return ask()
        except ArchiveUnavailable as error:
            log.warning("replay.archive %s", error)
            self.pause(ARCHIVE_PAUSE_S)
            return None
