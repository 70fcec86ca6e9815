"""One machine in virtual time: an event loop, threads and processes in which nothing is left to chance.

Threads of the production code become greenlets that run until they wait, so a history of events follows from its seed
alone and costs no real waiting. A process can be killed at any point: its threads end where they are, and nothing that
they hold in memory is used again.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

from greenlet import getcurrent, greenlet

STARTS_AT = 1_800_000_000.0
TICK_S = 1e-6  # what a clock of this size can tell apart
SWITCH_S_MAX = 0.01  # that the system lets a thread wait for its turn


class Killed(BaseException):
    """The process of this thread ends here."""


class Stuck(Exception):
    """Everybody waits, and nothing is left that could happen."""


class Process:
    """A proxy or a worker. Once it is dead, none of its threads goes on and its files take no more from it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.held: list[Callable[[], object]] = []  # ends what it has open; the system does so when it dies
        self.threads: list[Thread] = []

    def kill(self) -> None:
        self.dead = True
        for thread in self.threads:
            thread.end()


class Machine(asyncio.BaseEventLoop):
    """The event loop: it sleeps by moving its clock. `process`: whose code runs outside all threads."""

    current: "Machine"

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.process = Process("none")
        self.main = getcurrent()
        self._moment = STARTS_AT
        self._clock_resolution = TICK_S
        self._selector = self

    def time(self) -> float:
        return self._moment

    def select(self, timeout: float | None) -> list[object]:
        """Stands for the selector: nobody comes from outside, so a wait passes at once."""
        if timeout is None:
            raise Stuck("everybody waits for somebody else")
        self._moment += timeout
        return []

    def _process_events(self, events: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: object, function: Callable[..., Any], *arguments: Any) -> Any:  # type: ignore[override]
        done = self.create_future()

        def run() -> None:
            try:
                result = function(*arguments)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        Thread(target=run).start()
        return done

    def owner(self) -> Process:
        """The process whose code runs now."""
        thread = getattr(getcurrent(), "thread", None)
        return thread.process if thread is not None else self.process

    def sleep(self, seconds: float) -> None:
        """In a thread."""
        Condition().wait(seconds)


class _Greenlet(greenlet):  # type: ignore[misc]  # without types
    thread: "Thread"


class Thread:
    """Stands for `threading.Thread`."""

    def __init__(
        self,
        *,
        target: Callable[[], object],
        name: str = "",
        daemon: bool = True,
        process: Process | None = None,
    ) -> None:
        del name, daemon
        self._machine = Machine.current
        self.process = process or self._machine.owner()
        self.process.threads.append(self)
        self._target = target
        self._ended = Condition()
        self._greenlet = _Greenlet(self._run, parent=self._machine.main)
        self._greenlet.thread = self
        self._is_over = False

    def start(self) -> None:
        self._machine.call_later(self._machine.random.random() * SWITCH_S_MAX, self.resume, Killed)

    def is_alive(self) -> bool:
        return not self._is_over

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait_for(lambda: self._is_over, timeout)

    def resume(self, _token: object) -> None:
        if not self.process.dead and not self._is_over:
            self._greenlet.switch()

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._greenlet:  # it has begun
                self._greenlet.throw(Killed)

    def _run(self) -> None:
        try:
            self._target()
        except Killed:
            self.process.dead = True
        finally:
            self._is_over = True
        self._ended.notify_all()


class _Waiter:
    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.is_woken = False
        self.is_over = False


class Condition:
    """Stands for `threading.Condition`. Its lock is free whenever another thread can run."""

    def __init__(self, lock: object = None) -> None:
        del lock
        self._waiting: list[_Waiter] = []

    def __enter__(self) -> "Condition":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        machine = Machine.current
        thread = getattr(getcurrent(), "thread", None)
        assert thread is not None, "the event loop waits for a thread"
        waiter = _Waiter(thread)
        self._waiting.append(waiter)
        alarm = None if timeout is None else machine.call_later(timeout, self._resume, waiter)
        try:
            machine.main.switch()
        finally:
            waiter.is_over = True
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            if alarm is not None:
                alarm.cancel()
        return waiter.is_woken

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        ends_at = None if timeout is None else Machine.current.time() + timeout
        while not (result := predicate()):
            left = None if ends_at is None else ends_at - Machine.current.time()
            if left is not None and left <= TICK_S:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for waiter in woken:
            waiter.is_woken = True
            Machine.current.call_soon(self._resume, waiter)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    @staticmethod
    def _resume(waiter: _Waiter) -> None:
        if not waiter.is_over:
            waiter.thread.resume(waiter)


class Event(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class Future(futures.Future):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


class Threading:
    """What a module of the production code finds under the name `threading`."""

    Thread = Thread
    Condition = Condition
    Event = Event


@contextmanager
def in_virtual_time() -> Iterator[None]:
    """The production code makes its threads, events and futures here from now on."""
    from graphstore.store import writer

    class Job(writer._Job):
        __slots__ = ()

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **{**named, "done": Future()})

    with (
        mock.patch("graphstore.store.writer.threading", Threading),
        mock.patch("graphstore.store.writer._Job", Job),
        mock.patch("proxy.recorder.threading", Threading),
        mock.patch("proxy.recorder.Future", Future),
    ):
        yield


@contextmanager
def machine(random: Random) -> Iterator[Machine]:
    made = Machine.current = Machine(random)
    asyncio.set_event_loop(made)
    try:
        yield made
    finally:
        asyncio.set_event_loop(None)
        made.close()
