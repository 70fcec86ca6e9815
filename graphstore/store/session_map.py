"""A session as a picture: a row for every turn, a segment for every block (the paper's Figure 2, left).

What is drawn and how is the business of others; these are the values. Read-only.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import select

from graphstore.records import ExchangeRow, Mark
from graphstore.store.paths import Path, load_paths
from graphstore.store.reader import Reader
from graphstore.store.report import left_out_of
from graphstore.store.schema import observation_blocks, observations


@dataclass(frozen=True, slots=True)
class MapBlock:
    """What is the same of a block in every turn."""

    ordinal: int
    kind: str
    label: str
    tokens: int
    is_edit: bool
    mark: Mark | None

    @property
    def is_outlined(self) -> bool:
        """A user's words, an edit, pinned."""
        return self.kind in ("user", "pinned") or self.is_edit or self.mark == "pin"


@dataclass(frozen=True, slots=True)
class MapRow:
    """The history of a turn's last request. `reason` is that of a cold boundary; None: there was none.

    `density` is attention a token, by the turn's replay, of the blocks that it observed.
    """

    turn: int
    started_at: float
    reason: str | None
    blocks: tuple[int, ...]
    left_out: frozenset[int]
    density: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Segment:
    """A block in one turn. `density` None: not observed."""

    block: MapBlock
    density: float | None
    is_sent: bool


@dataclass(frozen=True, slots=True)
class SessionMap:
    """Turns in order; those without a history of the session's own are left away."""

    blocks: Mapping[int, MapBlock]
    rows: tuple[MapRow, ...]

    def segments(self, row: MapRow) -> Iterator[Segment]:
        for ordinal in row.blocks:
            yield Segment(self.blocks[ordinal], row.density.get(ordinal), ordinal not in row.left_out)


def session_map(reader: Reader, session_id: int) -> SessionMap:
    return SessionMap(_blocks(reader, session_id), _rows(reader, session_id, _densities(reader, session_id)))


def turns_of(reader: Reader, session_id: int) -> tuple[MapRow, ...]:
    """The rows of the map without attention: which blocks stood in each turn, and which were left out."""
    return _rows(reader, session_id, {})


def _rows(reader: Reader, session_id: int, densities: Mapping[int, Mapping[int, float]]) -> tuple[MapRow, ...]:
    exchanges = [row for row in reader.session_exchanges(session_id) if row.outcome not in ("side", "opaque")]
    last = {row.turn: row for row in exchanges if row.head_node_id is not None}
    cold = {row.turn: row.reason for row in reversed(exchanges) if row.boundary == "cold"}
    with reader.snapshot() as db:
        paths = load_paths(db, (row.head_node_id for row in last.values() if row.head_node_id is not None))
    standing = _standing(reader.block_ordinals(session_id), paths)
    gone: dict[tuple[int | None, int], frozenset[int]] = {}  # a selection holds for many turns
    return tuple(
        MapRow(
            turn=turn,
            started_at=row.started_at,
            reason=cold.get(turn),
            blocks=standing.get(row.head_node_id or 0, ()),
            left_out=_once(gone, reader, row),
            density=densities.get(turn, {}),
        )
        for turn, row in sorted(last.items())
    )


def _blocks(reader: Reader, session_id: int) -> dict[int, MapBlock]:
    tokens, marks = reader.block_tokens(session_id), reader.marks(session_id)
    return {
        block.ordinal: MapBlock(
            ordinal=block.ordinal,
            kind=block.kind,
            label=block.label,
            tokens=tokens.get(block.ordinal, 0),
            is_edit=bool(block.edits),
            mark=marks.get(block.ordinal),
        )
        for block, _ in reader.load_blocks(session_id)
    }


def _standing(numbers: Mapping[int, int], paths: Mapping[int, Path]) -> dict[int, tuple[int, ...]]:
    """Head -> ordinals of its history. Histories of one walk are beginnings of the same list."""
    firsts: dict[int, list[tuple[int, int]]] = {}  # of a walk: depth at which each block begins, block
    found = {}
    for head, path in paths.items():
        begun = firsts.get(id(path.walk))
        if begun is None:
            first: dict[int, int] = {}
            for depth, node in enumerate(path.walk.nodes):
                if node in numbers:
                    first.setdefault(numbers[node], depth)
            begun = firsts[id(path.walk)] = [(depth, ordinal) for ordinal, depth in first.items()]
        found[head] = tuple(ordinal for _, ordinal in begun[: bisect_left(begun, (path.length, -1))])
    return found


def _once(known: dict[tuple[int | None, int], frozenset[int]], reader: Reader, row: ExchangeRow) -> frozenset[int]:
    key = (row.selection_id, min(row.blocks_left_out, 1))
    if key not in known:
        known[key] = left_out_of(reader, row)
    return known[key]


def _densities(reader: Reader, session_id: int) -> dict[int, dict[int, float]]:
    """Turn -> ordinal -> attention a token."""
    query = (
        select(observations.c.turn, observation_blocks.c.ordinal, observation_blocks.c.density)
        .join(observation_blocks, observation_blocks.c.observation_id == observations.c.id)
        .where(observations.c.session_id == session_id)
    )
    found: dict[int, dict[int, float]] = {}
    with reader.snapshot() as db:
        for turn, ordinal, density in db.execute(query):
            found.setdefault(turn, {})[ordinal] = density
    return found
