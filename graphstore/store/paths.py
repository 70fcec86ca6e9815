"""Many histories at once: turns of a session mostly go on from one another, so the deepest walk holds the others."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from sqlalchemy import CTE, ColumnElement, Connection, Row, Select, select

from graphstore.store.schema import messages, nodes

LOOKUP_MAX = 500  # values in one IN list, well under SQLite's limit of variables


@dataclass(frozen=True, slots=True)
class Path:
    """A history: the first `length` positions of a walk that others may share. Both parts run from its beginning."""

    walk: "Walk"
    length: int

    @property
    def nodes(self) -> list[int]:
        return self.walk.nodes[: self.length]

    @property
    def tokens(self) -> int:
        return self.walk.sums[self.length]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and self.walk.depth.get(node, self.length) < self.length

    def tokens_of(self, wanted: Iterable[int]) -> int:
        """Tokens of those of these nodes that stand in the history."""
        return sum(self.walk.tokens_at(self.walk.depth[node]) for node in wanted if node in self)


@dataclass(frozen=True, slots=True)
class Walk:
    nodes: list[int]
    depth: dict[int, int]  # node -> its place
    sums: list[int]  # tokens of the first so many messages, from 0 on

    def tokens_at(self, place: int) -> int:
        return self.sums[place + 1] - self.sums[place]


def among(
    db: Connection, query: Select[Any], column: ColumnElement[Any], wanted: Iterable[object]
) -> Iterator[Row[Any]]:
    """Rows whose column is one of the wanted values, asked for in pieces."""
    values = list(dict.fromkeys(wanted))
    for start in range(0, len(values), LOOKUP_MAX):
        yield from db.execute(query.where(column.in_(values[start : start + LOOKUP_MAX])))


def path_to(head_node_id: int | ColumnElement[int]) -> CTE:
    """Recursive walk from a node to the beginning of its history."""
    start = select(nodes).where(nodes.c.id == head_node_id).cte("path", recursive=True)
    return start.union_all(select(nodes).join(start, nodes.c.id == start.c.parent_id))


def load_paths(db: Connection, heads: Iterable[int]) -> dict[int, Path]:
    """The history that ends at each of these nodes; unknown nodes have none."""
    found: dict[int, Path] = {}
    depths = dict(tuple(row) for row in among(db, select(nodes.c.id, nodes.c.depth), nodes.c.id, heads))
    for head in sorted(depths, key=lambda node: -depths[node]):
        if head in found:
            continue
        walk = _walk(db, head)
        for other in depths:
            if other not in found and other in walk.depth:
                found[other] = Path(walk, walk.depth[other] + 1)
    return found


def _walk(db: Connection, head: int) -> Walk:
    path = path_to(head)
    query = select(path.c.id, messages.c.tokens).join(messages, messages.c.id == path.c.message_id)
    rows = [(node, tokens) for node, tokens in db.execute(query.order_by(path.c.depth))]
    sums = [0, *accumulate(tokens for _, tokens in rows)]
    return Walk([node for node, _ in rows], {node: i for i, (node, _) in enumerate(rows)}, sums)
