"""A session as a picture: a row for every turn, a segment for every block (the paper's Figure 2, left).

What is drawn and how is the business of others; these are the values. Read-only.
"""

from dataclasses import dataclass

from graphstore.store.reader import Reader
from graphstore.store.report import left_out_of


@dataclass(frozen=True, slots=True)
class Segment:
    """A block in one turn. `density`: attention a token, by the turn's replay; None: not observed."""

    ordinal: int
    kind: str
    label: str
    tokens: int
    density: float | None
    is_sent: bool
    is_marked: bool  # a user's words, an edit, pinned


@dataclass(frozen=True, slots=True)
class MapRow:
    """The history of a turn's last request. `reason` is that of a cold boundary; None: there was none."""

    turn: int
    started_at: float
    reason: str | None
    segments: tuple[Segment, ...]


def session_map(reader: Reader, session_id: int) -> list[MapRow]:
    """Turns in order; those without a history of the session's own are left away."""
    blocks = {block.ordinal: block for block, _ in reader.load_blocks(session_id)}
    tokens, numbers = reader.block_tokens(session_id), reader.block_ordinals(session_id)
    marks = reader.marks(session_id)
    seen = {o.turn: {b.ordinal: b.density for b in o.replay.blocks} for o in reader.load_observations(session_id)}
    exchanges = [row for row in reader.session_exchanges(session_id) if row.outcome not in ("side", "opaque")]
    last = {row.turn: row for row in exchanges if row.head_node_id is not None}
    cold = {row.turn: row.reason for row in reversed(exchanges) if row.boundary == "cold"}
    rows = []
    for turn, row in sorted(last.items()):
        assert row.head_node_id is not None
        path = reader.load_path(row.head_node_id)
        present = dict.fromkeys(numbers[node] for node, *_ in path if node in numbers)
        gone, density = left_out_of(reader, row), seen.get(turn, {})
        segments = tuple(
            Segment(
                ordinal=ordinal,
                kind=blocks[ordinal].kind,
                label=blocks[ordinal].label,
                tokens=tokens.get(ordinal, 0),
                density=density.get(ordinal),
                is_sent=ordinal not in gone,
                is_marked=_is_marked(blocks[ordinal].kind, bool(blocks[ordinal].edits), marks.get(ordinal)),
            )
            for ordinal in present
        )
        rows.append(MapRow(turn, row.started_at, cold.get(turn), segments))
    return rows


def _is_marked(kind: str, edits: bool, mark: str | None) -> bool:
    return kind in ("user", "pinned") or edits or mark == "pin"
