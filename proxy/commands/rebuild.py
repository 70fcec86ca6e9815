"""recap rebuild: derive importance anew from what the replays measured, under another rule. No model runs."""

import argparse
import time

from graphstore.evidence import RULES
from graphstore.store.archive import open_queue, open_reader
from graphstore.store.report import find_session
from proxy.commands.text import count
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("rebuild", help="derive importance anew from stored replays, under another rule")
    parser.add_argument("rule", choices=RULES, help="the rule that importance is to follow")
    parser.add_argument("session", nargs="?", help="name of one session, or the beginning of it; default: all")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        sessions = (
            [find_session(reader, arguments.session)] if arguments.session is not None else reader.list_sessions()
        )
    with open_queue(settings.db, clock=time.time, claims=False) as queue:
        rebuilt = [session.name for session in sessions if queue.rebuild(session.id, arguments.rule)]
    none = len(sessions) - len(rebuilt)
    hint = "; no replay has observed " + ("it" if none == 1 else "them") + ": `recap health` says why" if none else ""
    print(f"{count(len(rebuilt), 'session')} rebuilt by {arguments.rule!r}, {none} unobserved{hint}")
    if rebuilt and settings.evidence != arguments.rule:
        print(
            f"This is what the archive shows. What is sent goes by the setting evidence, now {settings.evidence!r}: "
            f"set it to {arguments.rule!r} to choose by this rule."
        )
    return 0
