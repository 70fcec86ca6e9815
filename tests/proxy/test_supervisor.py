"""The worker is started again when it dies, ends in order with the proxy, and never outlives it."""

import argparse
import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from graphstore.store.archive import open_reader
from proxy.commands.serve import WORKER_SETTINGS, worker_environ
from proxy.settings import HINTS, Settings, load_settings
from proxy.supervisor import PAUSES_S, STEADY_S, Supervisor, worker_command
from tests.archives import lay_out_archive

DEADLINE_S = 20
WAITS_FOR_STDIN = [sys.executable, "-c", "import sys; sys.stdin.read()"]
ENDS = [sys.executable, "-c", "raise SystemExit(3)"]


class Sleeps:
    """Stands for the wait before a restart: notes how long it would be, and lets the first few end at once."""

    def __init__(self, allowed: int) -> None:
        self.lengths: list[float] = []
        self.enough = asyncio.Event()
        self._allowed = allowed

    async def __call__(self, seconds: float) -> None:
        self.lengths.append(seconds)
        if len(self.lengths) == self._allowed:
            self.enough.set()
            await asyncio.Event().wait()


async def until(condition: Callable[[], bool]) -> None:
    """Let real processes get on: they are not ours to clock."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  # processes set no events
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_is_started_again_with_growing_pauses() -> None:
    sleeps = Sleeps(6)
    supervisor = Supervisor(ENDS, os.environ, clock=lambda: 0.0, sleep=sleeps)
    supervisor.start()
    async with asyncio.timeout(DEADLINE_S):
        await sleeps.enough.wait()
    await supervisor.stop()
    assert sleeps.lengths == [*PAUSES_S, PAUSES_S[-1], PAUSES_S[-1]]


async def test_no_worker_starts_while_the_archive_is_another_proxys() -> None:
    ready = asyncio.Event()
    supervisor = Supervisor(WAITS_FOR_STDIN, os.environ, clock=lambda: 0.0, sleep=Sleeps(1))
    supervisor.start(ready.wait())
    for _ in range(20):
        await asyncio.sleep(0)
    assert supervisor.pid is None
    ready.set()
    await until(lambda: supervisor.pid is not None)
    await supervisor.stop()


async def test_a_worker_that_ran_well_starts_at_once() -> None:
    times = iter(range(0, 10_000, int(STEADY_S)))
    sleeps = Sleeps(3)
    supervisor = Supervisor(ENDS, os.environ, clock=lambda: float(next(times)), sleep=sleeps)
    supervisor.start()
    async with asyncio.timeout(DEADLINE_S):
        await sleeps.enough.wait()
    await supervisor.stop()
    assert sleeps.lengths == [PAUSES_S[0]] * 3


async def test_a_killed_worker_is_replaced() -> None:
    sleeps = Sleeps(2)
    supervisor = Supervisor(WAITS_FOR_STDIN, os.environ, clock=lambda: 0.0, sleep=sleeps)
    supervisor.start()
    await until(lambda: supervisor.pid is not None)
    first = supervisor.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.pid not in (None, first))
    await supervisor.stop()
    assert supervisor.pid is None and sleeps.lengths == [PAUSES_S[0]]


async def test_a_worker_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.supervisor.STOP_S", 0.01)
    code = "import signal, sys; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    supervisor = Supervisor([sys.executable, "-c", code], os.environ, clock=lambda: 0.0)
    supervisor.start()
    await until(lambda: supervisor.pid is not None)
    pid = supervisor.pid
    assert pid is not None
    await supervisor.stop()
    assert not is_alive(pid)


async def test_stopping_what_never_started_is_nothing() -> None:
    supervisor = Supervisor(["/nonexistent/worker"], os.environ, clock=lambda: 0.0, sleep=Sleeps(1))
    await supervisor.stop()
    supervisor.start()
    await asyncio.sleep(0)
    await supervisor.stop()
    assert supervisor.pid is None


PROXY = textwrap.dedent(
    """
    import asyncio, os, sys, time
    from proxy.supervisor import Supervisor

    async def main():
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        supervisor = Supervisor(command, os.environ, clock=time.monotonic)
        supervisor.start()
        while supervisor.pid is None:
            await asyncio.sleep(0.01)
        print(supervisor.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """
)


async def test_a_killed_proxy_takes_its_worker_along() -> None:
    proxy = await asyncio.create_subprocess_exec(sys.executable, "-c", PROXY, stdout=asyncio.subprocess.PIPE)
    assert proxy.stdout is not None
    worker = int(await proxy.stdout.readline())
    assert is_alive(worker)
    proxy.kill()
    await proxy.wait()
    await until(lambda: not is_alive(worker) or _is_zombie(worker))


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_the_worker_has_the_proxys_settings_wherever_they_come_from(tmp_path: Path) -> None:
    """It sees neither flags nor the file that `--config` names, so a key from there would be missing beside a host."""
    foreign = {"RECAP_HOST": "0.0.0.0", "RECAP_CONFIG": str(tmp_path / "absent.toml"), "HF_HOME": "/models"}
    ours = Settings(
        db=str(tmp_path / "recap.db"),
        host="0.0.0.0",
        proxy_key="secret",
        attention_layers=(3, 5),
        attention_offline=True,
        evidence="mass",
    )
    environ = worker_environ(ours, foreign)
    assert environ["HF_HOME"] == "/models" and "secret" not in environ.values()
    theirs = load_settings(argparse.Namespace(), environ).settings
    shared = [name for name in HINTS if name.startswith(WORKER_SETTINGS)]
    assert len(shared) > 8 and all(getattr(theirs, name) == getattr(ours, name) for name in shared)


async def test_the_worker_is_no_target_of_the_terminals_signals() -> None:
    """Ctrl-C reaches every process of the terminal's group; the worker ends when the proxy says so."""
    supervisor = Supervisor(WAITS_FOR_STDIN, os.environ, clock=lambda: 0.0)
    supervisor.start()
    await until(lambda: supervisor.pid is not None)
    assert os.getpgid(supervisor.pid or 0) != os.getpgid(0)
    await supervisor.stop()


async def test_a_worker_that_is_told_to_stop_ends_without_a_word(tmp_path: Path) -> None:
    """A thread that reads buffered standard input makes the interpreter abort when it ends: exit by signal 6."""
    lay_out_archive(tmp_path / "recap.db")
    worker = await asyncio.create_subprocess_exec(
        *worker_command(),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"RECAP_DB": str(tmp_path / "recap.db"), "RECAP_LOG_LEVEL": "info"},
    )
    with open_reader(tmp_path / "recap.db") as reader:
        await until(lambda: (status := reader.worker_status()) is not None and status.state == "idle")
        worker.send_signal(signal.SIGTERM)  # standard input stays open: the proxy still waits for us
        assert worker.stderr is not None
        said = (await worker.stderr.read()).decode()
        assert (await worker.wait(), "Fatal" in said) == (0, False), said
        status = reader.worker_status()
        assert status is not None and status.state == "stopped"
