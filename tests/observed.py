"""Observations for tests that need a graph: stored as the worker stores them, by numbers that the test gives."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from graphstore.evidence import Rule
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex
from graphstore.parameters import Parameters
from graphstore.records import EdgeRow, NodeState, ReplayRequest
from graphstore.replays import BlockReading, Replay
from graphstore.selection import HistoryBlock, Selection, select
from graphstore.store.archive import open_queue, open_reader
from graphstore.store.engine import writer_engine
from graphstore.store.reader import Reader
from graphstore.store.replays import store_edges, store_nodes

LATEST = 1e12  # claimed before whatever else waits


def replay_of(
    density: Mapping[int, float],
    edges: Sequence[tuple[int, int, float]] = (),
    *,
    mass: Mapping[int, float] | None = None,
    parameters: int = 600_000_000,
) -> Replay:
    """What a model of so many parameters might have measured; mass follows density unless given."""
    mass = density if mass is None else mass
    readings = tuple(BlockReading(v, 10, mass[v], density[v], mass[v], density[v]) for v in sorted(density))
    return Replay(
        model="test/model",
        parameters=parameters,
        device="cpu",
        dtype="float32",
        layers=(1, 2),
        dependency_layer=2,
        tokens=10 * len(density),
        tokens_computed=10 * len(density),
        rows=8,
        rows_assistant=4,
        unobserved=(),
        seconds=0.5,
        blocks=readings,
        edges=tuple(edges),
    )


def observe(
    path: Path | str,
    session_id: int,
    replay: Replay,
    *,
    turn: int = 1,
    exchange_id: int | None = None,
    rule: Rule = "paper",
    identifiers: Mapping[int, frozenset[str]] | None = None,
    at: float = 0.0,
) -> None:
    """Queue, claim and finish a replay of this turn, in an archive that a proxy may have open.

    Its exchange is the session's last one unless given.
    """
    if exchange_id is None:
        with open_reader(path) as reader:
            last = reader.last_exchange(session_id)
            assert last is not None
            exchange_id = last.id
    with open_queue(path, clock=lambda: at) as queue:
        queue.add(ReplayRequest(session_id, turn, exchange_id, LATEST))
        job = queue.claim()
        assert job is not None and (job.session_id, job.turn) == (session_id, turn)
        assert queue.finish(job, replay, identifiers or {}, rule)


def plant(path: Path | str, session_id: int, states: Sequence[NodeState], edges: Sequence[EdgeRow] = ()) -> None:
    """Put a graph into the archive as if replays had led to it; `verify` will say that none did."""
    engine = writer_engine(Path(path))
    with engine.begin() as db:
        store_nodes(db, session_id, states)
        store_edges(db, session_id, edges)
    engine.dispose()


def selected(
    reader: Reader, session_id: int, ordinals: Sequence[int], graph: ContextGraph, parameters: Parameters, rule: Rule
) -> Selection:
    """The selection of these blocks that follows from a graph alone: no words, no past use."""
    blocks = {block.ordinal: block for block, _ in reader.load_blocks(session_id)}
    history = [
        HistoryBlock(v, blocks[v].kind, blocks[v].cost, blocks[v].edits)  # type: ignore[arg-type]
        for v in ordinals
    ]
    nothing = IdentifierIndex([frozenset()] * len(history))
    return select(history, nothing, frozenset(), graph, parameters, session="s", turn=1, rule=rule)
