"""recap verify: re-derive every hash and invariant of the archive from disk and name what disagrees."""

import argparse

from graphstore.blocks import cut_blocks
from graphstore.store.archive import open_reader
from graphstore.store.verify import verify
from proxy.dialects import DIALECTS
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    return subparsers.add_parser("verify", help="check the archive and name what disagrees")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    del arguments
    with open_reader(settings.db) as reader:
        findings = verify(reader, cut=_cut)
    for finding in findings:
        print(finding)
    print(f"{settings.db}: {len(findings)} findings" if findings else f"{settings.db}: everything agrees")
    return 1 if findings else 0


def _cut(dialect: str, contents: list[bytes]) -> list[tuple[int, ...]]:
    """Message positions of every block of a history."""
    parse = DIALECTS[dialect].parse_message  # type: ignore[index]  # written from a DialectName
    return [block.messages for block in cut_blocks([parse(raw) for raw in contents]).blocks]
