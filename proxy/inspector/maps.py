"""The map of a session, small enough to send for thousands of blocks and hundreds of turns.

A turn holds nearly all blocks of the turn before, so its blocks are sent as runs of numbers, and what attention said
only of those that it says something of.
"""

from collections.abc import Iterable

from graphstore.records import SessionRow
from graphstore.store.reader import load_evidence
from graphstore.store.session_map import session_map
from proxy.conversations import parameters_of, rule_of
from proxy.inspector.sessions import Value, View

DIGITS = 5  # of a weight: more than any screen shows
PLACES = 7  # of a density: a token in a context of a million gets 1e-6 on average


def show_map(view: View, session: SessionRow) -> Value:
    """Blocks once, as columns; rows by reference to them."""
    shown = session_map(view.reader, session.id)
    blocks = [shown.blocks[ordinal] for ordinal in sorted(shown.blocks)]
    return {
        "blocks": {
            "ordinal": [block.ordinal for block in blocks],
            "kind": [block.kind for block in blocks],
            "label": [block.label for block in blocks],
            "tokens": [block.tokens for block in blocks],
            "outline": [block.outline for block in blocks],
            "mark": [block.mark for block in blocks],
        },
        "rows": [
            {
                "turn": row.turn,
                "started_at": row.started_at,
                "reason": row.reason,
                "blocks": runs(row.blocks),
                "left_out": runs(sorted(row.left_out.intersection(row.blocks))),
                "sizes": [runs(sorted(row.sizes)), [row.sizes[ordinal] for ordinal in sorted(row.sizes)]],
                "density": [runs(row.density), [round(value, PLACES) for value in row.density.values()]],
            }
            for row in shown.rows
        ],
    }


def show_graph(view: View, session: SessionRow) -> Value:
    """What the graph knows now: u of observed blocks, and edges (support, dependent, weight)."""
    rule, graph = load_evidence(view.reader, session.id, rule_of(view.settings), parameters_of(view.settings))
    nodes, edges = graph.to_rows()
    return {
        "rule": rule,
        "nodes": {
            "ordinal": [node.ordinal for node in nodes if node.observed],
            "u": [_short(node.u) for node in nodes if node.observed],
            "stale": [node.ordinal for node in nodes if node.stale],
        },
        "edges": [[edge.support, edge.dependent, _short(edge.weight)] for edge in edges],
    }


def runs(ordinals: Iterable[int]) -> list[list[int]]:
    """[first, last] of every run of consecutive numbers, in order."""
    found: list[list[int]] = []
    for ordinal in ordinals:
        if found and ordinal == found[-1][1] + 1:
            found[-1][1] = ordinal
        else:
            found.append([ordinal, ordinal])
    return found


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
