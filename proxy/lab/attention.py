"""Attention as arguments of a study, and how its page says where it came from and what it does not cover."""

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path

from proxy.commands.model import replay_config
from proxy.lab.archived import read_archive
from proxy.lab.errors import LabError
from proxy.lab.observed import Attention
from proxy.lab.recordings import Data
from proxy.lab.replayed import ModelAttention
from proxy.lab.results import Results, Row
from proxy.lab.study import load_data
from proxy.settings import Settings

TOKENS_MIN = 64  # with fewer no turn fits
NEEDED = "attention is needed: name a model with --model, or an archive with --archive and --session"


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Sessions in files to be replayed, or sessions of an archive that the worker has observed."""
    parser.add_argument("sessions", nargs="*", type=Path, metavar="FILE", help="JSONL of recorded sessions")
    add_model(parser)
    parser.add_argument(
        "--archive", type=Path, metavar="DB", help="sessions that the worker observed, instead of files"
    )
    parser.add_argument(
        "--session", action="append", default=[], metavar="ID", help="of the archive; may be given several times"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="local model: a Hugging Face name, a folder or a .gguf file")
    parser.add_argument(
        "--tokens-max",
        type=int,
        metavar="N",
        help="do not replay longer contexts (default: the setting attention_max_tokens)",
    )


def load_attention(arguments: argparse.Namespace, settings: Settings) -> tuple[Data, Attention | None]:
    """The sessions, and what observes them; None where neither a model nor an archive is named."""
    if arguments.archive is None:
        if arguments.session:
            raise LabError(f"--session {arguments.session[0]!r} is looked for in an archive: name it with --archive")
        if not arguments.sessions:
            raise LabError("there is nothing to read: name files of sessions, or --archive and --session")
        data = load_data(arguments)
        return data, load_model(arguments, settings) if arguments.model is not None else None
    if arguments.model is not None or arguments.sessions:
        raise LabError("--archive brings its own sessions and observations: leave out --model and the files")
    if not arguments.session:
        raise LabError("--archive needs a session: name one with --session; `recap sessions` lists them")
    return read_archive(arguments.archive, arguments.session)


def load_model(arguments: argparse.Namespace, settings: Settings) -> ModelAttention:
    """The model that is named, run as the settings `attention_*` say for the product."""
    if not arguments.model:
        raise LabError("the model's name is empty: give a Hugging Face name, a folder or a .gguf file with --model")
    config = replace(replay_config(settings), model=arguments.model)
    if arguments.tokens_max is not None:
        if arguments.tokens_max < TOKENS_MIN:
            raise LabError(f"--tokens-max {arguments.tokens_max} holds no turn: give {TOKENS_MIN} at least")
        config = replace(config, max_tokens=arguments.tokens_max)
    return ModelAttention(config)


def words_of(about: Row) -> list[object]:
    """What stood behind the study's name on the command line."""
    if "archive" in about:
        return ["--archive", about["archive"], *(w for name in about["files"] for w in ("--session", name))]
    words: list[object] = [*about["files"]]
    return [*words, "--model", about["model"], "--tokens-max", about["tokens_max"]] if "model" in about else words


def missing_of(results: Results) -> str:
    """How much of the data was not observed, and why. Rows have `turns` and `missing`."""
    why: Counter[str] = Counter()
    for row in results.rows:
        why.update(row["missing"])
    listed = "; ".join(f"{count} {reason}" for reason, count in sorted(why.items())) or "none"
    turns = sum(row["turns"] for row in results.rows)
    empty = sum(row["turns"] == sum(row["missing"].values()) for row in results.rows)
    return f"Of {turns} turns not observed: {listed}. {empty} of {len(results.rows)} sessions have no observation."
