"""Keeps the replay worker running beside the proxy: starts it, starts it again when it ends, stops it in order.

The worker ends by itself when its standard input does, so it never outlives a proxy that was killed.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

log = logging.getLogger(__name__)

PAUSES_S = (1.0, 5.0, 15.0, 60.0)  # before it is started again
STEADY_S = 60.0  # a worker that ran so long counts as well again
STOP_S = 5.0  # for giving its job back; then it is killed, and the next one recovers the job

Sleep = Callable[[float], Awaitable[object]]


class Supervisor:
    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        clock: Callable[[], float],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._command = command
        self._environ = environ
        self._clock = clock
        self._sleep = sleep
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The running worker; None between two."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def start(self, after: Awaitable[object] | None = None) -> None:
        """`after`: what the first worker waits for."""
        self._task = asyncio.create_task(self._run(after))

    async def stop(self) -> None:
        """End the worker, by its own will within `STOP_S`. Safe to call when it never started."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run(self, after: Awaitable[object] | None) -> None:
        if after is not None:
            await after
        failures = 0
        while True:
            started = self._clock()
            ending = await self._once()
            failures = 0 if self._clock() - started >= STEADY_S else failures
            pause = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            failures += 1
            log.warning("worker.ended how=%s; it is started again in %g s", ending, pause)
            await self._sleep(pause)

    async def _once(self) -> str:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                env=self._environ,
                start_new_session=True,  # Ctrl-C is meant for the proxy, which ends the worker when streams have ended
            )
        except OSError as error:
            return f"not started: {error}"
        log.info("worker.started pid=%d", self._process.pid)
        code = await self._process.wait()
        return f"exit {code}" if code >= 0 else f"signal {-code}"


def worker_command() -> list[str]:
    return [sys.executable, "-m", "proxy", "worker", "--supervised"]
