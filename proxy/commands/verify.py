"""recap verify: re-derive every hash and invariant of the archive from disk and name what disagrees."""

import argparse
from collections.abc import Sequence

from graphstore.blocks import Block, cut_blocks
from graphstore.records import SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.verify import verify
from proxy.commands.text import count
from proxy.dialects import stored_dialect
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    return subparsers.add_parser("verify", help="check the archive and name what disagrees")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    del arguments
    with open_reader(settings.db) as reader:
        findings = verify(reader, recut)
    for finding in findings:
        print(f"{finding.table} {finding.row}: {finding.problem}")
    print(f"{settings.db}: {count(len(findings), 'finding') if findings else 'everything agrees'}")
    return 1 if findings else 0


def recut(session: SessionRow, contents: Sequence[bytes]) -> Sequence[Block]:
    """The blocks that a history's messages form."""
    return cut_blocks(stored_dialect(session.dialect).parse_messages(contents)).blocks
