"""Plays seeded histories, in as many processes as the machine has processors."""

import gc
import logging
import multiprocessing
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from unittest import mock

from proxy.dialects.base import DialectName
from tests.archives import lay_out_archive
from tests.simulation.machine import in_virtual_time, machine
from tests.simulation.world import World, lay_out

SEEDS = Path(__file__).with_name("seeds.txt")
MEMORY = "/dev/shm"
LOG_SHOWN = 60
HASH_SEED = "0"
LENGTHS = (1, 1, 2, 2, 3, 4, 6)  # steps: most faults need few, and short histories are many


@dataclass(frozen=True)
class Outcome:
    """`broken`: the promise that did not hold; "error" when the simulation itself failed; None when all is well."""

    seed: int
    broken: str | None
    story: str
    seen: Counter[str]


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="recap-simulation-", dir=MEMORY if os.path.isdir(MEMORY) else None)


@cache
def _archive() -> bytes:
    path = Path(_folder().name) / "empty.db"
    lay_out_archive(path)
    lay_out(path.read_bytes(), path)
    return path.read_bytes()


def play(seed: int) -> Outcome:
    """One history, whole: its steps, its length and its faults follow from the seed."""
    random = Random(seed)
    path = Path(_folder().name) / "recap.db"
    for file in path.parent.glob("recap.db*"):
        file.unlink()
    path.write_bytes(_archive())
    logging.disable(logging.CRITICAL)
    world: World | None = None
    try:
        with in_virtual_time(), machine(random) as made, mock.patch("proxy.attention.why_none", lambda _: None):
            dialect: DialectName = random.choice(("chat", "responses"))
            world = World(dialect=dialect, path=path, machine=made, steps=random.choice(LENGTHS))
            made.run_until_complete(world.run())
    except Exception as error:
        log = world.log[-LOG_SHOWN:] if world is not None else []
        story = "\n".join([f"seed {seed}", *log, "".join(traceback.format_exception(error)).rstrip()])
        return Outcome(seed, getattr(error, "promise", "error"), story, Counter())
    finally:
        logging.disable(logging.NOTSET)
    return Outcome(seed, None, "", world.seen)


def play_all(seeds: Sequence[int]) -> Iterator[Outcome]:
    """In processes of their own, in which sets have the same order each time."""
    workers = min(len(os.sched_getaffinity(0)), max(1, len(seeds)))
    with (
        mock.patch.dict(os.environ, PYTHONHASHSEED=HASH_SEED),
        multiprocessing.get_context("spawn").Pool(workers, gc.set_threshold, (100_000, 50, 100)) as pool,
    ):
        yield from pool.imap_unordered(play, seeds, chunksize=4)


def kept_seeds() -> list[int]:
    """Seeds that failed once, each with a word on why."""
    lines = (line.partition("#")[0].strip() for line in SEEDS.read_text().splitlines())
    return [int(line) for line in lines if line]


def keep(failures: Iterable[Outcome]) -> None:
    """Add seeds that failed for the first time."""
    known = set(kept_seeds())
    failures = [failure for failure in failures if failure.seed not in known]
    with SEEDS.open("a") as file:
        file.writelines(f"{failure.seed}  # {failure.broken}\n" for failure in failures)
