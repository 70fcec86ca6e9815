"""What every study has: a name, arguments of its own, a run that can be resumed, and a page of results."""

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from proxy.lab.errors import LabError
from proxy.lab.recordings import Data, read_recordings
from proxy.lab.results import Results, Row, open_results
from proxy.settings import Settings

T = TypeVar("T")

INSTALL = "pip install 'recap-proxy[lab]'"
MADE_BY = "`recap eval "  # begins the line of a page that says how it was made


@dataclass(frozen=True, slots=True)
class Study:
    """`run` does what is not done yet and returns its results; `render` makes Markdown of them, and plots."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Settings], Results]
    render: Callable[[Results, Path], str]

    def page(self, results: Results, folder: Path) -> str:
        """What `render` makes. Raises `LabError`: another version wrote the results, and they lack something."""
        try:
            return self.render(results, folder)
        except KeyError as error:
            raise LabError(
                f"{str(results.path)!r} lacks {error}: it is damaged, or of version {results.about.get('version')} and "
                f"not {version('recap-proxy')}; delete it and run the study again"
            ) from error


def add_data(parser: argparse.ArgumentParser) -> None:
    """Arguments of a study over recorded sessions."""
    parser.add_argument("sessions", nargs="+", type=Path, metavar="FILE", help="JSONL of recorded sessions")


def load_data(arguments: argparse.Namespace) -> Data:
    return read_recordings(arguments.sessions)


def begin(name: str, arguments: argparse.Namespace, **about: object) -> Results:
    """Open the run's file. `about` is what makes it this run: the data's hash, the model, what was asked for."""
    said: Row = {"study": name, "version": version("recap-proxy"), "seed": arguments.seed, **about}
    return open_results(arguments.out / f"{name}.jsonl", said)


def remaining(results: Results, items: Iterable[tuple[str, T]], label: str) -> Iterator[tuple[str, T]]:
    """Those that are not finished, with a progress bar over all."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise LabError(f"the lab needs tqdm and matplotlib: {INSTALL}") from error
    every = list(items)
    left = [(name, item) for name, item in every if name not in results.done]
    with tqdm(total=len(every), initial=len(every) - len(left), desc=label, unit="item", leave=False) as bar:
        for name, item in left:
            yield name, item
            bar.update()


def provenance(results: Results, command: str) -> str:
    """One line under every table: how to have it again."""
    about = " · ".join(f"{key} {_shown(value)}" for key, value in results.about.items() if value not in (None, "", []))
    return f"`{command}` · {about}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def command_of(name: str, *words: object) -> str:
    return shlex.join(["recap", "eval", name, *map(str, words)])
