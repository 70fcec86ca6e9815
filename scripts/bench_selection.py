"""Time a selection and a graph update, and weigh the graph, on made-up histories with a warm index of identifiers.

Sizes, identifiers a block (median 27, mean 63) and identifiers of the request (32) follow recorded coding sessions;
there are three edges a block. Figures are medians of CPU time on one core; on a busy machine they still grow.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import accumulate

from graphstore.blocks import BlockKind
from graphstore.evidence import past_use
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex
from graphstore.observation import Observation
from graphstore.parameters import Parameters
from graphstore.records import EdgeRow, NodeState
from graphstore.selection import HistoryBlock, Selection, select

OBSERVED_BLOCKS_MAX = 132  # a served context: the paper's mean history, whatever the archive holds


class World:
    """A made-up session of `size` blocks; `observed` is the share of blocks that a replay has seen."""

    def __init__(self, size: int, *, observed: float, seed: int = 0) -> None:
        draw = random.Random(seed)
        vocabulary = [f"identifier_{i}" for i in range(30_000)]
        weights = list(accumulate(1 / (rank + 20) for rank in range(len(vocabulary))))  # Zipf, like words in code

        def words(count: int) -> frozenset[str]:
            return frozenset(draw.choices(vocabulary, cum_weights=weights, k=count))

        kinds: list[BlockKind] = ["user", "tools", "tools", "tools", "tools", "assistant"]
        self.history = [
            HistoryBlock(i, kinds[i % 6], draw.randrange(50, 9_000), (f"src/{i % 40}.py",) if i % 7 == 1 else ())
            for i in range(size)
        ]
        self.texts = [words(int(draw.lognormvariate(3.3, 1.3))) for _ in range(size)]
        self.request = words(32)
        self.finished = frozenset().union(*self.texts[-12:])  # of a turn of twelve steps
        seen = [draw.random() < observed for _ in range(size)]
        self.nodes = [NodeState(i, draw.random() * s, s, s and draw.random() < 0.1) for i, s in enumerate(seen)]
        pairs = {(draw.randrange(b), b) for b in range(1, size) for _ in range(3)}
        self.edges = [EdgeRow(a, b, draw.random(), i) for i, (a, b) in enumerate(sorted(pairs))]
        served = sorted(draw.sample(range(size), min(size, OBSERVED_BLOCKS_MAX)))
        self.observation = Observation(
            attention={v: draw.expovariate(1.0) for v in served},
            mass=tuple((a, b, draw.random() ** 4) for a in served for b in served if a < b and draw.random() < 0.2),
            identifiers={v: self.texts[v] for v in served},
        )

    def graph(self) -> ContextGraph:
        return ContextGraph.from_rows(self.nodes, self.edges)


def median_ms(run: Callable[[], object], *, repeat: int) -> float:
    def once() -> float:
        start = time.process_time()
        run()
        return (time.process_time() - start) * 1_000

    once()
    return statistics.median(once() for _ in range(repeat))


def report(size: int, *, observed: float, repeat: int) -> str:
    world, parameters = World(size, observed=observed), Parameters()
    graph, words = world.graph(), IdentifierIndex(world.texts)
    costs = [block.cost for block in world.history]

    def selection() -> Selection:
        return select(world.history, words, world.request, graph, parameters, session="s", turn=9)

    def with_past_use() -> Selection:
        past = past_use(words, world.finished, costs)
        return select(
            world.history, words, world.request, graph, parameters, session="s", turn=9, rule="hybrid", past=past
        )

    fresh = [world.graph() for _ in range(repeat + 1)]
    times = {
        "select": median_ms(selection, repeat=repeat),
        "with past use": median_ms(with_past_use, repeat=repeat),
        "verdicts": median_ms(selection().verdicts, repeat=repeat),
        "update": median_ms(lambda: fresh.pop().update(world.observation, parameters), repeat=repeat),
        "load": median_ms(world.graph, repeat=repeat),
        "index": median_ms(lambda: IdentifierIndex(world.texts), repeat=min(repeat, 5)),
    }
    timings = "  ".join(f"{name} {value:8.3f} ms" for name, value in times.items())
    return f"{size:6} blocks, {observed:4.0%} observed: {timings}"


def weigh(size: int) -> str:
    """Bytes that the graph's own arrays hold, by node and by edge."""
    graph = World(size, observed=1.0).graph()
    nodes, edges = graph.to_rows()
    of_nodes, of_edges = graph.held_bytes()
    by_node, by_edge = of_nodes / len(nodes), of_edges / len(edges)
    return f"{size:6} blocks, {len(edges)} edges: {by_node:.1f} bytes a node, {by_edge:.1f} bytes an edge"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=31, help="runs per figure (default 31)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[132, 10_000], help="history lengths in blocks")
    arguments = parser.parse_args()
    for size in arguments.sizes:
        for observed in (0.5, 0.0):  # 0: no model, every block gets an exploration draw
            print(report(size, observed=observed, repeat=arguments.repeat))
    for size in arguments.sizes:
        print(weigh(size))


if __name__ == "__main__":
    main()
