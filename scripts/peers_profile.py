"""Where a running proxy's processor time goes, by sampling it with py-spy while it is asked."""

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from peers import ROOT, NotMeasured, ensure_installed

RATE = 250  # samples a second
FRAME = re.compile(r"^(?P<function>.+?) \((?P<file>[^:()]+)(?::\d+)?\)$")
OURS = ("proxy/", "graphstore/")
MOST = 14
WAITS = {  # innermost frames of threads that do nothing
    ("selectors.py", "select"),
    ("threading.py", "wait"),
    ("threading.py", "_wait_for_tstate_lock"),
    ("thread.py", "_worker"),
    ("queue.py", "get"),
}


async def profile(leader: int, asked: Coroutine[Any, Any, object], homes: Path) -> list[list[Any]]:
    """[function of ours, what it was in, share of samples] while `asked` runs, the most first. Raises `NotMeasured`."""
    home = homes / "py-spy"
    try:
        ensure_installed(home, "py-spy")
    except NotMeasured:
        asked.close()
        raise
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "stacks")
        options = ("--rate", str(RATE), "--format", "raw", "--full-filenames", "--output", str(out))
        sampler = await asyncio.create_subprocess_exec(
            str(home / "bin/py-spy"),
            *("record", "--pid", str(leader), *options),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        await asyncio.sleep(1)  # to attach
        await asked
        if sampler.returncode is None:
            sampler.send_signal(2)
        _, said = await sampler.communicate()
        return _ranked_of(out, said.decode(errors="replace"))


def _ranked_of(out: Path, said: str) -> list[list[Any]]:
    if not out.exists():
        raise NotMeasured(f"py-spy: {said.strip()[-160:]}")
    return ranked(out.read_text().splitlines())


def ranked(stacks: Iterable[str]) -> list[list[Any]]:
    """Samples by the innermost function of ours, with the library or builtin below it that it was in, if any."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in stacks:
        stack, _, number = line.rpartition(" ")
        frames = [match for frame in stack.split(";") if (match := FRAME.match(frame)) is not None]
        if frames and not _waits(frames[-1]):
            counts[_place(frames)] += int(number)
    total = sum(counts.values()) or 1
    return [[ours, below, round(number / total, 4)] for (ours, below), number in counts.most_common(MOST)]


def _waits(innermost: re.Match[str]) -> bool:
    return (Path(innermost["file"]).name, innermost["function"].rpartition(".")[2]) in WAITS


def _place(frames: list[re.Match[str]]) -> tuple[str, str]:
    files = [frame["file"].removeprefix(f"{ROOT}/") for frame in frames]
    inner = next((i for i in reversed(range(len(frames))) if files[i].startswith(OURS)), None)
    below = _library(files[-1]) if inner != len(frames) - 1 else ""
    if inner is None:
        return "none of ours", below
    return f"{files[inner]}: {frames[inner]['function']}", below


def _library(file: str) -> str:
    """The package of a file, or the module of the standard library."""
    tail = file.rpartition("site-packages/")[2] if "site-packages/" in file else file.rpartition("/")[2]
    return tail.partition("/")[0].removesuffix(".py")
