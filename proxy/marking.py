"""A person's word on one block: which blocks can be marked, and how."""

from collections.abc import Callable, Mapping

from graphstore.records import BlockRow, Mark, SessionRow
from graphstore.selection import OWED, HistoryBlock, budget_of, protection
from graphstore.selectors import SELECTORS
from graphstore.store.marks import set_mark
from graphstore.store.reader import Reader
from proxy.conversations import parameters_of
from proxy.settings import Settings


class UnknownBlock(LookupError):
    """The session has no block of this number."""


class ProtectedBlock(ValueError):
    """A protected block cannot be muted."""


def mark_block(
    reader: Reader,
    settings: Settings,
    session: SessionRow,
    ordinal: int,
    mark: Mark | None,
    *,
    clock: Callable[[], float],
) -> BlockRow:
    """Pin or mute a block, or take its mark away (None).

    Raises `UnknownBlock`, `ProtectedBlock`, `ArchiveUnavailable`.
    """
    blocks = blocks_of(reader, session)
    block = find_block(session, blocks, ordinal)
    if mark == "mute" and (why := protected_blocks(reader, settings, session, blocks).get(ordinal)):
        raise ProtectedBlock(f"block {ordinal} cannot be muted: it is protected ({why})")
    set_mark(settings.db, session.id, ordinal, mark, clock=clock)
    return block


def blocks_of(reader: Reader, session: SessionRow) -> dict[int, BlockRow]:
    """By number."""
    return {block.ordinal: block for block, _ in reader.load_blocks(session.id)}


def find_block(session: SessionRow, blocks: Mapping[int, BlockRow], ordinal: int) -> BlockRow:
    """Raises `UnknownBlock`."""
    if ordinal not in blocks:
        numbers = f"they go from 0 to {max(blocks)}" if blocks else "it has none yet"
        listed = f"`recap explain {session.name}` lists them"
        raise UnknownBlock(f"{session.name} has no block {ordinal}: {numbers}; {listed}")
    return blocks[ordinal]


def protected_blocks(
    reader: Reader, settings: Settings, session: SessionRow, blocks: Mapping[int, BlockRow]
) -> dict[int, str]:
    """Ordinal -> why a selection from the history as it stands would send the block whatever its score, marks aside."""
    history = _standing(reader, session, blocks, {})
    reasons = protection(history, edits=SELECTORS[settings.selector].protects_edits)
    gone = {block.ordinal: OWED[block.kind] for block in blocks.values() if block.kind in OWED}
    return gone | {history[position].ordinal: why for position, why in reasons.items()}


def pin_takes(
    reader: Reader, settings: Settings, session: SessionRow, blocks: Mapping[int, BlockRow], ordinal: int
) -> str | None:
    """What a pin of the block takes of the budget that the history as it stands has; None: the block stands no more."""
    history = _standing(reader, session, blocks, {**reader.marks(session.id), ordinal: "pin"})
    if all(block.ordinal != ordinal for block in history):
        return None
    selector = SELECTORS[settings.selector]
    budget = budget_of(sum(block.cost for block in history), parameters_of(settings), selector)
    spent = sum(history[position].cost for position in protection(history, edits=selector.protects_edits))
    return (
        f"takes {blocks[ordinal].cost:,} of the {budget:,} characters that a selection may keep; "
        f"with all that is pinned or protected {spent:,}"
        + (", so that no other block is chosen by its score" if spent > budget else "")
    )


def _standing(
    reader: Reader, session: SessionRow, blocks: Mapping[int, BlockRow], marks: Mapping[int, Mark]
) -> list[HistoryBlock]:
    """The history as it stands, as a selection takes it."""
    places = {node: block.ordinal for block in blocks.values() for node in block.node_ids}
    path = reader.load_path(session.head_node_id) if session.head_node_id is not None else []
    standing = [blocks[o] for o in dict.fromkeys(places[node] for node, _, _, _ in path if node in places)]
    return [HistoryBlock(b.ordinal, b.kind, b.cost, b.edits, marks.get(b.ordinal)) for b in standing]  # type: ignore[arg-type]


def unheeded(settings: Settings, session: SessionRow) -> str | None:
    """Why no selection of this session heeds a mark; None: the next one does."""
    if session.state == "pass-through":
        return f"the session is left alone, everything is sent ({session.state_reason})"
    if session.kind == "side":
        return "side requests are never rewritten"
    return "the mode is off, everything is sent" if settings.mode == "off" else None
