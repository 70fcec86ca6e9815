"""recap worker: replay finished turns through the local model until Ctrl-C. `recap serve` starts one by itself."""

import argparse
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType

from graphstore.evidence import default_rule
from graphstore.records import WorkerStatus
from graphstore.replays import Replay, ReplayJob
from graphstore.store.archive import open_queue, open_reader
from graphstore.store.reader import Reader
from graphstore.store.replays import ReplayQueue
from proxy.commands.model import replay_config
from proxy.commands.serve import configure_logging
from proxy.contexts import Context, context_of
from proxy.conversations import parameters_of, rule_of
from proxy.errors import RecapError
from proxy.settings import Settings
from proxy_model.config import ReplayConfig
from proxy_model.worker import Observer, State, Stopped, Worker

log = logging.getLogger("recap.worker")

GRACE_S = 10.0  # for ending in order once the parent has died
NICENESS = 19  # the lowest priority there is: requests come first


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("worker", help="replay finished turns through the local model, until Ctrl-C")
    parser.add_argument("--supervised", action="store_true", help="end when standard input does")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if settings.attention == "off":
        raise RecapError("the setting attention is off, which forbids replays; set it to auto to run a worker")
    configure_logging(settings.log_level)
    yield_to_others()
    with (
        open_queue(settings.db, parameters=parameters_of(settings)) as queue,
        open_reader(settings.db) as reader,
        contextlib.suppress(Stopped),  # a signal before the worker looks out for it
    ):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        if arguments.supervised:
            threading.Thread(target=_stop_with_parent, daemon=True).start()
        jobs = ArchivedJobs(queue, reader, settings)
        Worker(jobs, jobs.context, jobs.load, time.sleep).run()
    return 0


class ArchivedJobs:
    """The worker's jobs over an archive, and the model that its settings name."""

    def __init__(self, queue: ReplayQueue, reader: Reader, settings: Settings) -> None:
        self._queue = queue
        self._reader = reader
        self._config: ReplayConfig = replay_config(settings)
        self._rule = rule_of(settings)
        self._device = settings.attention_device
        self.recover = queue.recover
        self.claim = queue.claim
        self.fail = queue.fail
        self.release = queue.release

    def has_work(self) -> bool:
        return self._reader.count_jobs().get("queued", 0) > 0

    def context(self, job: ReplayJob) -> Context:
        return context_of(self._reader, job)

    def load(self) -> Observer:
        """Takes seconds to minutes, and the first time a download. Raises ModelUnavailable."""
        from proxy_model.check import proven
        from proxy_model.loader import load

        log.info("model.loading name=%s", self._config.model)
        model = load(self._config)
        replayer = proven(model, self._config)
        self._device = model.device  # type: ignore[assignment]  # what "auto" has become
        log.info(
            "model.loaded name=%s device=%s dtype=%s layers=%s", model.name, model.device, model.dtype, model.layers
        )
        return replayer

    def finish(self, job: ReplayJob, replay: Replay, identifiers: Mapping[int, frozenset[str]]) -> bool:
        return self._queue.finish(job, replay, identifiers, self._rule or default_rule(replay.parameters))

    def tell(self, state: State, problem: str | None) -> None:
        self._queue.set_status(WorkerStatus(os.getpid(), state, self._config.model, self._device, problem, time.time()))


def yield_to_others() -> None:
    """Run only when nobody else wants to, as far as the system offers that."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    if hasattr(os, "sched_setscheduler") and hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _stop(_number: int, _frame: FrameType | None) -> None:
    """Once gives the job back in peace; twice ends the process, and the next worker recovers the job."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    raise Stopped


def _stop_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)  # a library that was being loaded may have swallowed the signal, and nobody is left to send another
