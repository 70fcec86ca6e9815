"""recap sessions: a table of what the archive has seen."""

import argparse

from graphstore.store.archive import open_reader
from graphstore.store.report import SessionSummary, summaries
from proxy.cache_watch import cache_fall
from proxy.commands.text import count, moment, number, plain, share, table
from proxy.failures import has_failed
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("sessions", help="list the archived sessions, newest first")
    parser.add_argument("--all", action="store_true", help="include side requests such as titles and summaries")
    parser.add_argument("--limit", type=_positive, default=30, metavar="N", help="at most this many (default 30)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _state(row: SessionSummary) -> str:
    failed = " (failed)" if row.latest is not None and has_failed(row.latest) else ""
    if row.session.arm == "held out":
        return failed + " (held out)"
    return failed + ("" if row.session.state == "normal" else " (pass-through)")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        found = summaries(reader)
        wanted = [row for row in found if arguments.all or row.session.kind == "agent"]
        rows = wanted[: arguments.limit]
        fallen = {row.session.id for row in rows if cache_fall(reader.session_exchanges(row.session.id))}
    if not found:
        print("no sessions yet: point an agent at the proxy (README, 'Pointing your agent at it')")
        return 0
    if not rows:
        print("only side requests such as titles so far: `recap sessions --all` lists them")
        return 0
    print(
        table(
            ("session", "client", "model", "turns", "requests", "input", "cached", "left out", "last active", "title"),
            [
                (
                    row.session.name,
                    row.session.client + _state(row),
                    row.session.model,
                    row.session.turns,
                    row.exchanges,
                    number(row.input_tokens),
                    share(row.cached_tokens, row.input_tokens) + (" FELL" if row.session.id in fallen else ""),
                    count(row.blocks_left_out, "block") if row.blocks_left_out else "-",
                    moment(row.session.last_active_at),
                    plain(row.session.title),
                )
                for row in rows
            ],
            right=("turns", "requests", "input", "cached"),
        )
    )
    if fallen:
        print("FELL: the provider's cache serves the session much less than it used to; `recap show` says how much")
    if len(rows) < len(wanted):
        print(f"{len(wanted) - len(rows)} more: --limit {len(wanted)}")
    return 0
