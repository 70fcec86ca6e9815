"""recap sessions: a table of what the archive has seen."""

import argparse

from graphstore.store.archive import open_reader
from graphstore.store.report import summaries
from proxy.commands.text import moment, number, plain, share, table
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("sessions", help="list the archived sessions, newest first")
    parser.add_argument("--all", action="store_true", help="include side requests such as titles and summaries")
    parser.add_argument("--limit", type=int, default=30, metavar="N", help="at most this many (default 30)")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        rows = [row for row in summaries(reader) if arguments.all or row.session.kind == "agent"][: arguments.limit]
    if not rows:
        print("no sessions yet: point an agent at the proxy (README, 'Pointing your agent at it')")
        return 0
    print(
        table(
            ("session", "client", "model", "turns", "requests", "input", "cached", "left out", "last active", "title"),
            [
                (
                    row.session.name,
                    row.session.client + ("" if row.session.state == "normal" else " (pass-through)"),
                    row.session.model,
                    row.session.turns,
                    row.exchanges,
                    number(row.input_tokens),
                    share(row.cached_tokens, row.input_tokens),
                    f"{row.blocks_left_out} blocks" if row.blocks_left_out else "-",
                    moment(row.session.last_active_at),
                    plain(row.session.title)[:48],
                )
                for row in rows
            ],
            right=("turns", "requests", "input", "cached"),
        )
    )
    return 0
