"""recap pin, mute, unpin: a person's word on one block, obeyed at the next cold boundary."""

import argparse
import time

from graphstore.records import BlockRow, Mark, SelectionRow
from graphstore.selection import OWED, PINNED
from graphstore.store.archive import open_reader
from graphstore.store.marks import set_mark
from graphstore.store.report import find_session, latest_selection
from proxy.commands.text import plain, short
from proxy.errors import RecapError
from proxy.settings import Settings

MARKS: dict[str, Mark | None] = {"pin": "pin", "mute": "mute", "unpin": None}
HELP = {
    "pin": "send a block at every cold boundary, whatever its score",
    "mute": "never choose a block for its score, nor because another one uses it",
    "unpin": "take the mark of a block away, pin or mute",
}
SAYS = {
    "pin": "is sent from the next cold boundary on",
    "mute": "is left out from the next cold boundary on",
    "unpin": "counts by its score again from the next cold boundary on",
}
LABEL_CHARS = 60


class MarkCommand:
    """One of the three, in the shape of a command module, its name included."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def add_parser(self, subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
        parser = subparsers.add_parser(self.__name__, help=HELP[self.__name__])
        parser.add_argument("session", help="name of the session, or the beginning of it")
        parser.add_argument("block", type=int, help="number of the block, as `recap explain` lists it")
        return parser

    def run(self, arguments: argparse.Namespace, settings: Settings) -> int:
        mark = MARKS[self.__name__]
        with open_reader(settings.db) as reader:
            session = find_session(reader, arguments.session)
            known = {block.ordinal: block for block, _ in reader.load_blocks(session.id)}
            block = known.get(arguments.block)
            if block is None:
                numbers = f"they go from 0 to {max(known)}" if known else "it has none yet"
                listed = f"`recap explain {session.name}` lists them"
                raise RecapError(f"{session.name} has no block {arguments.block}: {numbers}; {listed}")
            if mark == "mute" and (why := _protected(block, latest_selection(reader, session.id))):
                raise RecapError(f"block {block.ordinal} cannot be muted: it is protected ({why})")
        set_mark(settings.db, session.id, block.ordinal, mark, clock=time.time)
        print(
            f"block {block.ordinal} of {session.name} {SAYS[self.__name__]}: {short(plain(block.label), LABEL_CHARS)}"
        )
        return 0


def _protected(block: BlockRow, latest: SelectionRow | None) -> str | None:
    """Why a block is sent whatever its score. An edit is protected while it is its file's latest."""
    if block.kind in OWED:
        return OWED[block.kind]
    verdicts = latest.verdicts if latest is not None else ()
    mine = next((v for v in verdicts if v.ordinal == block.ordinal and v.rule == "protected"), None)
    return plain(mine.detail) if mine is not None and mine.detail != PINNED else None


pin, mute, unpin = (MarkCommand(name) for name in MARKS)
