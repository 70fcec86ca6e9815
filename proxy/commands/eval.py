"""recap eval: the evaluation lab. Every study writes rows as JSONL, and Markdown and plots made of them."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.lab.compaction.suite import STUDY as COMPACTION
from proxy.lab.concentration import STUDY as CONCENTRATION
from proxy.lab.costs import STUDY as COSTS
from proxy.lab.document import write_into
from proxy.lab.lic import STUDY as LIC
from proxy.lab.modes import STUDY as MODES
from proxy.lab.queries import STUDY as QUERIES
from proxy.lab.results import page_of, read_results, unwritable
from proxy.lab.reuse import STUDY as REUSE
from proxy.lab.simulation import STUDY as SIMULATE
from proxy.lab.study import Study
from proxy.settings import Settings

STUDIES: tuple[Study, ...] = (REUSE, CONCENTRATION, QUERIES, SIMULATE, MODES, COSTS, LIC, COMPACTION)
OUT = Path("eval")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("eval", help="repeat the paper's studies on your own sessions and models")
    studies = parser.add_subparsers(dest="study", metavar="STUDY", required=True)
    for study in STUDIES:
        own = studies.add_parser(study.name, help=study.help)
        study.add_arguments(own)
        _add_common(own)
        own.set_defaults(chosen=study)
    report = studies.add_parser("report", help="draw the tables and plots of all finished studies again")
    report.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="a document whose marked parts are written instead: docs/evaluation.md",
    )
    _add_common(report)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"where results go (default {OUT})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (default 0)")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.study == "report":
        with _writing(arguments.out):
            if arguments.into is None:
                print(_report(arguments.out))
            else:
                _write_into(arguments.into, arguments.out)
        return 0
    study: Study = arguments.chosen
    with _stoppable():
        results = study.run(arguments, settings)
    with _writing(arguments.out):
        page = study.page(results, arguments.out)
        page_of(results.path).write_text(page, encoding="utf-8")
    print(page)
    return 0


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends a run as ^C does: what it made of sessions for itself is removed."""
    is_main = threading.current_thread() is threading.main_thread()  # no other may have handlers
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        yield
    except KeyboardInterrupt:
        print("recap: stopped. What is finished is kept: give the same command again to go on", file=sys.stderr)
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Pages and plots: what goes wrong with them leaves the results as they are."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(Path(error.filename or folder), error) from error


def _report(folder: Path) -> str:
    """The pages of all studies that have results, in one."""
    done = [study for study in STUDIES if (folder / f"{study.name}.jsonl").is_file()]
    return "\n".join(study.page(read_results(folder / f"{study.name}.jsonl"), folder) for study in done)


def _write_into(document: Path, folder: Path) -> None:
    for mark in write_into(document, folder, {study.name: study for study in STUDIES}):
        print(f"{document}: {mark} is left as it is: {folder / mark.file} is no finished run", file=sys.stderr)
