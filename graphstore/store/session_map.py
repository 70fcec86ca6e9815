"""A session as a picture: a row for every turn, a segment for every block (the paper's Figure 2, left).

What is drawn and how is the business of others; these are the values. Read-only.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from sqlalchemy import select

from graphstore.records import ExchangeRow, Mark
from graphstore.store.paths import Path, Walk, load_paths
from graphstore.store.reader import Reader
from graphstore.store.report import left_out_of
from graphstore.store.schema import observation_blocks, observations

Outline = Literal["pin", "mute", "user", "edit"]


@dataclass(frozen=True, slots=True)
class MapBlock:
    """What is the same of a block in every turn, but for `tokens`: of the last request that it stood in."""

    ordinal: int
    kind: str
    label: str
    tokens: int
    is_edit: bool
    mark: Mark | None

    @property
    def outline(self) -> Outline | None:
        """What sets it apart: a person's mark first."""
        if self.mark is not None:
            return self.mark
        if self.kind in ("user", "pinned"):
            return "user" if self.kind == "user" else "pin"
        return "edit" if self.is_edit else None


@dataclass(frozen=True, slots=True)
class MapRow:
    """The history of a turn's last request. `reason` is that of a cold boundary; None: there was none.

    `density` is attention a token, by the turn's replay, of the blocks that it observed. `sizes`: tokens of the blocks
    that had others then, before the client pruned or amended them.
    """

    turn: int
    started_at: float
    reason: str | None
    blocks: tuple[int, ...]
    left_out: frozenset[int]
    density: Mapping[int, float]
    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """A block in one turn. `density` None: not observed."""

    block: MapBlock
    tokens: int
    density: float | None
    is_sent: bool


@dataclass(frozen=True, slots=True)
class SessionMap:
    """Turns in order; those without a history of the session's own are left away."""

    blocks: Mapping[int, MapBlock]
    rows: tuple[MapRow, ...]

    def segments(self, row: MapRow) -> Iterator[Segment]:
        for ordinal in row.blocks:
            block = self.blocks[ordinal]
            tokens = row.sizes.get(ordinal, block.tokens)
            yield Segment(block, tokens, row.density.get(ordinal), ordinal not in row.left_out)


def session_map(reader: Reader, session_id: int) -> SessionMap:
    blocks = _blocks(reader, session_id)
    tokens = {ordinal: block.tokens for ordinal, block in blocks.items()}
    return SessionMap(blocks, _rows(reader, session_id, tokens, _densities(reader, session_id)))


def turns_of(reader: Reader, session_id: int) -> tuple[MapRow, ...]:
    """The rows of the map without attention: which blocks stood in each turn, and which were left out."""
    return _rows(reader, session_id, reader.block_tokens(session_id), {})


def _rows(
    reader: Reader, session_id: int, tokens: Mapping[int, int], densities: Mapping[int, Mapping[int, float]]
) -> tuple[MapRow, ...]:
    exchanges = [row for row in reader.session_exchanges(session_id) if row.outcome not in ("side", "opaque")]
    last = {row.turn: row for row in exchanges if row.head_node_id is not None}
    cold = {row.turn: row.reason for row in reversed(exchanges) if row.boundary == "cold"}
    with reader.snapshot() as db:
        paths = load_paths(db, (row.head_node_id for row in last.values() if row.head_node_id is not None))
    standing = _standing(reader.block_ordinals(session_id), tokens, paths)
    gone: dict[tuple[int | None, int], frozenset[int]] = {}  # a selection holds for many turns
    return tuple(
        MapRow(
            turn=turn,
            started_at=row.started_at,
            reason=cold.get(turn),
            blocks=standing.get(row.head_node_id or 0, NOTHING).blocks,
            left_out=_once(gone, reader, row),
            density=densities.get(turn, {}),
            sizes=standing.get(row.head_node_id or 0, NOTHING).sizes,
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


@dataclass(frozen=True, slots=True)
class _Standing:
    """The blocks of one history, and the tokens of those of another size than they are known by."""

    blocks: tuple[int, ...]
    sizes: Mapping[int, int]


NOTHING = _Standing((), {})


class _Layout:
    """Blocks along a walk, which many histories are beginnings of."""

    def __init__(self, walk: Walk, numbers: Mapping[int, int], tokens: Mapping[int, int]) -> None:
        self._walk = walk
        self._tokens = tokens
        self._places: dict[int, list[int]] = {}  # block -> depths of its messages
        for depth, node in enumerate(walk.nodes):
            if node in numbers:
                self._places.setdefault(numbers[node], []).append(depth)
        self._blocks = tuple(self._places)
        self._begins = [places[0] for places in self._places.values()]
        self._ends = list(accumulate((places[-1] for places in self._places.values()), max))  # of all up to each
        whole = {ordinal: self._size(ordinal, len(walk.nodes)) for ordinal in self._blocks}
        self._changed = {ordinal: size for ordinal, size in whole.items() if size != tokens.get(ordinal, 0)}

    def until(self, length: int) -> _Standing:
        """In the first so many messages. Only blocks near the end can stand there in part."""
        count = bisect_left(self._begins, length)
        blocks = self._blocks[:count]
        sizes = {o: size for o, size in self._changed.items() if self._places[o][0] < length}
        for i in range(count - 1, -1, -1):
            if self._ends[i] < length:
                break
            sizes[blocks[i]] = self._size(blocks[i], length)
        return _Standing(blocks, {o: size for o, size in sizes.items() if size != self._tokens.get(o, 0)})

    def _size(self, ordinal: int, length: int) -> int:
        return sum(self._walk.tokens_at(depth) for depth in self._places[ordinal] if depth < length)


def _standing(numbers: Mapping[int, int], tokens: Mapping[int, int], paths: Mapping[int, Path]) -> dict[int, _Standing]:
    """Head -> what stands in its history."""
    layouts: dict[int, _Layout] = {}
    found = {}
    for head, path in paths.items():
        if (layout := layouts.get(id(path.walk))) is None:
            layout = layouts[id(path.walk)] = _Layout(path.walk, numbers, tokens)
        found[head] = layout.until(path.length)
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
