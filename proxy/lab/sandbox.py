"""Run a model's code against tests in a process of its own, with limits. POSIX only.

What holds everywhere: a fresh folder, an empty environment, an isolated Python without installed packages, limits of
processor time, memory, file size and open files, a deadline for everything, and the whole process group killed at the
end. On Linux also: no files elsewhere (Landlock), no processes, signals or sockets (seccomp). `Outcome.guards` says
what took hold. This is made for code that a model wrote without thinking, not for an attacker who knows the kernel:
for that, run the lab in a container or a virtual machine.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from proxy.lab.errors import LabError

GUARDS = ("rlimit", "landlock", "seccomp")  # all there are
MISSING = {
    "landlock": "the code that is tested can read and write what you can",
    "seccomp": "it can use the network, and start and signal processes as far as limits of the user allow",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """For each of the two processes but `wall_s`, which is for all of a run."""

    wall_s: float = 10.0
    cpu_s: int = 8
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    open_files: int = 32


@dataclass(frozen=True, slots=True)
class Program:
    """`code` defines `function`; `test` defines `check(candidate)`, and may use what `helpers` defines."""

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
    from proxy.lab import sandboxed

    limits = limits or Limits()
    job = {"code": program.code, "function": program.function, "limits": asdict(limits)}
    tests = {"test": program.test, "helpers": program.helpers, "function": program.function}
    folder = tempfile.mkdtemp(prefix="recap-lab-")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(Path(sandboxed.__file__))],
        cwd=folder,
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(sandboxed.frame(job) + sandboxed.frame(tests), timeout=limits.wall_s)
    except subprocess.TimeoutExpired:
        return Outcome(False, f"not done after {limits.wall_s:g} s", ())
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)
    if not said:
        return Outcome(False, f"the tests did not come to an end (exit {process.returncode})", ())
    found = json.loads(said[sandboxed.HEAD_BYTES :])
    return Outcome(found["passed"], found["detail"], tuple(found["guards"]))
