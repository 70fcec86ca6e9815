"""The command `recap`.

A command is a module of `proxy.commands`, or an object in one, with two functions: `add_parser(subparsers)` makes and
returns its parser, `run(arguments, settings)` does the work and returns the exit code. Every command takes every
setting as a flag. What a person can put right is raised as RecapError: its text is shown, without a traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.reader import AmbiguousSession
from graphstore.store.report import UnknownSession
from proxy.commands import (
    config,
    explain,
    export,
    health,
    model,
    plot,
    rebuild,
    savings,
    serve,
    sessions,
    show,
    verify,
    worker,
)
from proxy.commands import eval as evaluation
from proxy.commands.mark import mute, pin, unpin
from proxy.errors import RecapError
from proxy.settings import add_options, load_settings

LOOKING = (sessions, show, explain, savings, plot, verify, export)
CHANGING = (pin, mute, unpin, rebuild)
COMMANDS = (serve, *LOOKING, *CHANGING, health, worker, model, evaluation, config)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        exit_code: int = arguments.run(arguments, load_settings(arguments, os.environ).settings)
    except RecapError as exc:
        print(f"recap: {exc}", file=sys.stderr)
        return exc.exit_code
    except (ArchiveUnavailable, UnknownSession, AmbiguousSession) as exc:
        print(f"recap: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recap", description="A context proxy for coding agents.")
    parser.add_argument("--version", action="version", version=version("recap-proxy"))
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        command = module.add_parser(subparsers)
        command.usage = command.format_usage().removeprefix("usage: ").strip() + " [SETTING ...]"
        command.set_defaults(run=module.run)
        add_options(command)
    return parser
