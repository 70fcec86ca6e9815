"""recap pin, mute, unpin: a person's word on one block, obeyed at the next cold boundary."""

import argparse
import time

from graphstore.records import Mark
from graphstore.store.archive import open_reader
from graphstore.store.report import find_session
from proxy.commands.text import plain, short
from proxy.errors import RecapError
from proxy.marking import ProtectedBlock, UnknownBlock, blocks_of, mark_block, pin_takes, unheeded
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
NOTED = {"pin": "is pinned", "mute": "is muted", "unpin": "has no mark any more"}
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
            former = reader.marks(session.id).get(arguments.block)
            try:
                block = mark_block(reader, settings, session, arguments.block, mark, clock=time.time)
                takes = pin_takes(reader, settings, session, blocks_of(reader, session), block.ordinal)
            except (UnknownBlock, ProtectedBlock) as error:
                raise RecapError(plain(str(error))) from error
        name, why = self.__name__, unheeded(settings, session)
        if mark is None and former is None:
            print(f"block {block.ordinal} of {session.name} had no mark: {short(plain(block.label), LABEL_CHARS)}")
            return 0
        becomes = SAYS[name] if why is None else f"{NOTED[name]}, without effect for now: {plain(why)}"
        print(f"block {block.ordinal} of {session.name} {becomes}: {short(plain(block.label), LABEL_CHARS)}")
        if mark == "pin" and takes is not None:
            print(f"it {takes}")
        return 0


pin, mute, unpin = (MarkCommand(name) for name in MARKS)
