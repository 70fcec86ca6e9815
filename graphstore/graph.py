"""The context graph of one session: what past attention says of each block, and which block supported which.

Nodes are block ordinals; edges go from a support to a later dependent and keep the order in which they were first
seen. The hot form is a handful of flat arrays: 9 bytes a node, indexed by ordinal (gaps stay empty), and 12 bytes an
edge up to 65,536 blocks, 16 beyond. It knows no text, no database and no selection.
"""

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from itertools import compress, count
from math import isfinite
from operator import attrgetter, itemgetter
from sys import getsizeof
from typing import TypeVar

from graphstore.errors import GraphIntegrityError
from graphstore.observation import Observation
from graphstore.parameters import Parameters
from graphstore.records import EdgeRow, NodeState
from graphstore.scoring import blend, replaced

T = TypeVar("T")

ORDINAL_MAX = (1 << 24) - 1  # sessions have thousands of blocks; more is a corrupt row, not a reason to allocate

_NARROW_MAX = 0xFFFF  # the largest ordinal that two bytes hold
_KNOWN, _OBSERVED, _STALE = 1, 2, 4


class ContextGraph:
    """Mutable only through `update`. A block that the graph has never seen reads as u 0, not observed, not stale."""

    __slots__ = ("_dependents", "_flags", "_importance", "_supports", "_weights")

    def __init__(self) -> None:
        self._importance = array("d")  # u by ordinal
        self._flags = bytearray()  # by ordinal
        self._supports = array("H")
        self._dependents = array("H")
        self._weights = array("d")

    @classmethod
    def from_rows(cls, nodes: Iterable[NodeState], edges: Iterable[EdgeRow]) -> "ContextGraph":
        """The graph that these rows describe, edges in order of `position`. Raises GraphIntegrityError."""
        graph = cls()
        known = list(nodes)
        graph._admit({node.ordinal for node in known})
        if sum(map(bool, graph._flags)) < len(known):
            raise GraphIntegrityError("a block is stored once", sorted(node.ordinal for node in known))
        for node in known:
            graph._importance[node.ordinal] = node.u
            graph._flags[node.ordinal] = _KNOWN | _OBSERVED * node.observed | _STALE * node.stale
        ordered = sorted(edges, key=attrgetter("position"))
        try:
            graph._supports.extend([edge.support for edge in ordered])
            graph._dependents.extend([edge.dependent for edge in ordered])
        except OverflowError as error:
            raise GraphIntegrityError("edges join known blocks", str(error)) from error
        graph._weights.extend([edge.weight for edge in ordered])
        graph.check_integrity()
        return graph

    def to_rows(self) -> tuple[list[NodeState], list[EdgeRow]]:
        """Nodes by ordinal and edges in stored order. Positions count from 0: store all edges or none."""
        nodes = [
            NodeState(ordinal, self._importance[ordinal], bool(flags & _OBSERVED), bool(flags & _STALE))
            for ordinal, flags in enumerate(self._flags)
            if flags
        ]
        columns = zip(self._supports, self._dependents, self._weights, strict=True)
        return nodes, [EdgeRow(*edge, position) for position, edge in enumerate(columns)]

    def held_bytes(self) -> tuple[int, int]:
        """Memory of the arrays, in bytes: those by node and those by edge."""
        of_edges = (self._supports, self._dependents, self._weights)
        return sum(map(getsizeof, (self._importance, self._flags))), sum(map(getsizeof, of_edges))

    def importance(self, ordinals: Sequence[int]) -> list[float]:
        return _at(self._importance.tolist(), ordinals, 0.0)

    def observed(self, ordinals: Sequence[int]) -> list[bool]:
        return self._flagged(ordinals, _OBSERVED)

    def stale(self, ordinals: Sequence[int]) -> list[bool]:
        return self._flagged(ordinals, _STALE)

    def supports_of(self, dependents: Iterable[int]) -> dict[int, list[int]]:
        """Predecessors of each of these blocks in stored order; blocks without any are absent. One pass over edges."""
        ends = self._dependents.tolist()  # lists are read faster than arrays
        named = set(dependents)
        wanted = [dependent in named for dependent in ends]
        found: defaultdict[int, list[int]] = defaultdict(list)
        for support, dependent in zip(compress(self._supports, wanted), compress(ends, wanted), strict=True):
            found[dependent].append(support)
        return dict(found)

    def update(self, observation: Observation, parameters: Parameters) -> None:
        """Take in what a replay saw: Eq. 1, Eq. 5 and the stale rule (paper §4.2). Raises ValueError, changing nothing.

        Blocks outside the observation keep their importance. New edges are stored by dependent, then support; a larger
        mass on a known edge raises its weight and keeps its place. Stale is for good.
        """
        observation.check()
        edges = [edge for edge in observation.mass if edge[2] > parameters.theta]
        attention = observation.attention
        self._admit({*attention, *map(itemgetter(0), edges), *map(itemgetter(1), edges)})
        evidence = attention if observation.evidence is None else observation.evidence
        largest = max(evidence.values(), default=0.0)
        for ordinal, value in evidence.items():
            self._importance[ordinal] = blend(self._importance[ordinal], value, largest, parameters.alpha)
            self._flags[ordinal] |= _OBSERVED
        for ordinal in {*replaced(attention, observation.identifiers, parameters), *observation.replaced}:
            self._flags[ordinal] |= _STALE
        self._strengthen(edges)

    def check_integrity(self) -> None:
        """Raise GraphIntegrityError naming the first invariant that does not hold."""
        for ordinal, (u, flags) in enumerate(zip(self._importance, self._flags, strict=True)):
            if not 0.0 <= u <= 1.0:
                raise GraphIntegrityError("importance lies in [0, 1]", (ordinal, u))
            if flags & _STALE and not flags & _OBSERVED:
                raise GraphIntegrityError("only observed blocks are stale", ordinal)
            if u and not flags & _OBSERVED:
                raise GraphIntegrityError("only observed blocks have importance", (ordinal, u))
        edges = list(zip(self._supports, self._dependents, strict=True))
        for edge, weight in zip(edges, self._weights, strict=True):
            if not edge[0] < edge[1]:
                raise GraphIntegrityError("a support precedes its dependent", edge)
            if edge[1] >= len(self._flags) or not (self._flags[edge[0]] and self._flags[edge[1]]):
                raise GraphIntegrityError("edges join known blocks", edge)
            if not (weight >= 0 and isfinite(weight)):
                raise GraphIntegrityError("edge weights are finite and at least 0", (*edge, weight))
        if len(set(edges)) < len(edges):
            raise GraphIntegrityError("an edge is stored once", next(e for e in edges if edges.count(e) > 1))

    def _admit(self, ordinals: Collection[int]) -> None:
        """Know these blocks, with room for them. Raises GraphIntegrityError, changing nothing."""
        if not ordinals:
            return
        first, last = min(ordinals), max(ordinals)
        if not 0 <= first <= last <= ORDINAL_MAX:
            raise GraphIntegrityError(f"block ordinals lie between 0 and {ORDINAL_MAX}", (first, last))
        missing = max(0, last + 1 - len(self._flags))
        self._flags.extend(bytes(missing))
        self._importance.frombytes(bytes(self._importance.itemsize * missing))
        for ordinal in ordinals:
            self._flags[ordinal] |= _KNOWN
        if last > _NARROW_MAX and self._supports.typecode == "H":
            self._supports, self._dependents = array("I", self._supports), array("I", self._dependents)

    def _strengthen(self, edges: Iterable[tuple[int, int, float]]) -> None:
        """Store new edges by dependent, then support; raise the weight of known ones in place. All ends are known."""
        masses: dict[tuple[int, int], float] = {}
        for support, dependent, mass in _by_dependent(edges):
            if mass > masses.get((support, dependent), -1.0):
                masses[support, dependent] = mass
        known = self._places({dependent for _, dependent in masses})
        for pair in masses.keys() & known.keys():
            mass, position = masses.pop(pair), known[pair]
            self._weights[position] = max(mass, self._weights[position])
        self._supports.fromlist([support for support, _ in masses])
        self._dependents.fromlist([dependent for _, dependent in masses])
        self._weights.fromlist(list(masses.values()))

    def _places(self, dependents: Set[int]) -> dict[tuple[int, int], int]:
        """Where each known edge to these blocks is stored."""
        wanted = [dependent in dependents for dependent in self._dependents]
        pairs = compress(zip(self._supports, self._dependents, strict=True), wanted)
        return dict(zip(pairs, compress(count(), wanted), strict=True))

    def _flagged(self, ordinals: Sequence[int], flag: int) -> list[bool]:
        has = [flags & flag != 0 for flags in range(8)]
        return _at([has[flags] for flags in self._flags], ordinals, False)


def _at(values: Sequence[T], ordinals: Sequence[int], absent: T) -> list[T]:
    """The value of each of these blocks; those beyond the end are `absent`."""
    if (size := len(values)) > max(ordinals, default=-1):
        return [values[v] for v in ordinals]
    return [values[v] if v < size else absent for v in ordinals]


def _by_dependent(edges: Iterable[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """By dependent, then support: two stable sorts by a number are cheaper than one by a pair."""
    ordered = sorted(edges, key=itemgetter(0))
    ordered.sort(key=itemgetter(1))
    return ordered
