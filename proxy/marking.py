"""A person's word on one block: which blocks can be marked, and how."""

from collections.abc import Callable, Mapping

from graphstore.records import BlockRow, Mark, SelectionRow, SessionRow
from graphstore.selection import OWED, PINNED
from graphstore.store.marks import set_mark
from graphstore.store.reader import Reader
from graphstore.store.report import latest_selection


class UnknownBlock(LookupError):
    """The session has no block of this number."""


class ProtectedBlock(ValueError):
    """A protected block cannot be muted."""


def mark_block(
    reader: Reader, path: str, session: SessionRow, ordinal: int, mark: Mark | None, *, clock: Callable[[], float]
) -> BlockRow:
    """Pin or mute a block, or take its mark away (None).

    Raises `UnknownBlock`, `ProtectedBlock`, `ArchiveUnavailable`.
    """
    block = find_block(session, {block.ordinal: block for block, _ in reader.load_blocks(session.id)}, ordinal)
    if mark == "mute" and (why := protection(block, latest_selection(reader, session.id))):
        raise ProtectedBlock(f"block {ordinal} cannot be muted: it is protected ({why})")
    set_mark(path, session.id, ordinal, mark, clock=clock)
    return block


def find_block(session: SessionRow, blocks: Mapping[int, BlockRow], ordinal: int) -> BlockRow:
    """Raises `UnknownBlock`."""
    if ordinal not in blocks:
        numbers = f"they go from 0 to {max(blocks)}" if blocks else "it has none yet"
        listed = f"`recap explain {session.name}` lists them"
        raise UnknownBlock(f"{session.name} has no block {ordinal}: {numbers}; {listed}")
    return blocks[ordinal]


def protection(block: BlockRow, latest: SelectionRow | None) -> str | None:
    """Why a block is sent whatever its score. An edit is protected while it is its file's latest."""
    if block.kind in OWED:
        return OWED[block.kind]
    verdicts = latest.verdicts if latest is not None else ()
    mine = next((v for v in verdicts if v.ordinal == block.ordinal and v.rule == "protected"), None)
    return mine.detail if mine is not None and mine.detail != PINNED else None
