"""recap plot: the map of a session as a picture; `recap show --map` draws it in a terminal."""

import argparse
import sys
from pathlib import Path

from graphstore.store.archive import open_reader
from graphstore.store.report import find_session
from graphstore.store.session_map import session_map
from proxy.commands.drawing import as_svg
from proxy.errors import RecapError
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("plot", help="draw a session's map as SVG: blocks, attention, what was sent")
    parser.add_argument("session", help="name of the session, or the beginning of it")
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write (default: standard output)")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        session = find_session(reader, arguments.session)
        picture = as_svg(session_map(reader, session.id), f"{session.name} {session.title}".strip())
    picture = picture.encode("ascii", "xmlcharrefreplace").decode()  # the same bytes in every encoding of a terminal
    if arguments.output is None:
        sys.stdout.write(picture)
        return 0
    try:
        Path(arguments.output).write_text(picture, "utf-8")
    except OSError as exc:
        raise RecapError(f"{arguments.output!r} cannot be written: {exc}; name another file with -o") from exc
    return 0
