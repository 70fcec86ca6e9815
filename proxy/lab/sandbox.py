"""Run a model's code against tests in a process of its own, with limits. POSIX only.

What holds everywhere: an empty folder and environment, an isolated Python without installed packages, limits of
processor time, memory and open files, not a byte written to any file, a deadline for everything, and the whole process
group killed at the end. On Linux also: no capabilities, nothing read but Python itself and nothing made or removed
(Landlock), no processes, signals or sockets (seccomp). `Outcome.guards` says what took hold. This is made for code that
a model wrote without thinking, not for an attacker who knows the kernel: for that, run the lab in a container or a
virtual machine.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass

from proxy.lab.errors import LabError

GUARDS = ("rlimit", "landlock", "seccomp")  # all there are
MISSING = {
    "landlock": "the code that is tested can read and remove what you can",
    "seccomp": "it can use the network, and start and signal processes as far as limits of the user allow",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """For each of the two processes but `wall_s`, which is for all of a run."""

    wall_s: float = 10.0
    cpu_s: int = 8
    memory_bytes: int = 1 << 30
    open_files: int = 32


@dataclass(frozen=True, slots=True)
class Program:
    """`code` defines `function`; `test` defines `check(candidate)`. Both may use what `helpers` defines.

    `candidate` is `function` in another process: tests see the values that it returns, no changes of its arguments in
    place, and every exception as a RuntimeError.
    """

    code: str
    function: str
    test: str
    helpers: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    passed: bool
    detail: str  # what is wrong, "" when nothing is
    guards: tuple[str, ...]


def run_tests(program: Program, limits: Limits | None = None) -> Outcome:
    """Never raises for what the code does. Raises `LabError` where there is no sandbox."""
    if os.name != "posix":
        raise LabError(f"there is no sandbox for {sys.platform}: run the lab on Linux or macOS, or in a container")
    from proxy.lab import sandboxed  # it needs POSIX

    limits = limits or Limits()
    job = {"code": program.code, "helpers": program.helpers, "function": program.function, "limits": asdict(limits)}
    with tempfile.TemporaryDirectory(prefix="recap-lab-", ignore_cleanup_errors=True) as folder:
        jobs = sandboxed.frame(job) + sandboxed.frame({"test": program.test})
        try:
            said, exit_code = _run(sandboxed.__file__, jobs, folder, limits.wall_s)
        except OSError as error:
            raise LabError(
                f"the sandbox cannot be started: {error}; lower --parallel, or free processes and memory"
            ) from error
    if said is None:
        return Outcome(False, f"not done after {limits.wall_s:g} s", ())
    if not said:
        return Outcome(False, f"the tests did not come to an end (exit {exit_code})", ())
    found = json.loads(said[sandboxed.HEAD_BYTES :])
    return Outcome(found["passed"], found["detail"], tuple(found["guards"]))


def _run(script: str, jobs: bytes, folder: str, wall_s: float) -> tuple[bytes | None, int]:
    """(what it said, None when it was not done in time; its exit status)"""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", script],
        cwd=folder,
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    said = None
    try:
        said, _ = process.communicate(jobs, timeout=wall_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return said, process.returncode
