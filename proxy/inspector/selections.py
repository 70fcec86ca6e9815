"""A selection block by block: why, with which scores, and what changed since another one (the paper's Figure 8b)."""

import json
from collections.abc import Mapping
from typing import Literal

from graphstore.graph import ContextGraph
from graphstore.records import BlockRow, SelectionRow
from proxy.dry_run import rule_of_selection, selector_of
from proxy.inspector.sessions import Value

Change = Literal["kept", "revived", "new", "dropped", "still out", "out at once"]


def show_selection(
    selection: SelectionRow,
    former: SelectionRow | None,
    blocks: Mapping[int, BlockRow],
    tokens: Mapping[int, int],
    graph: ContextGraph,
) -> Value:
    """`former` is what was sent before: None means everything."""
    importance = {node.ordinal: node for node in graph.to_rows()[0]}
    weights = json.loads(selection.parameters)
    changes = changes_since(former, selection)
    costs = {ordinal: block.cost for ordinal, block in blocks.items()}
    spent = dict.fromkeys(("protected", "packed", "expanded"), 0)
    for verdict in selection.verdicts:
        if verdict.kept:
            spent[verdict.rule] = spent.get(verdict.rule, 0) + costs.get(verdict.ordinal, 0)
    counted: dict[str, int] = {}
    for change in changes.values():
        counted[change] = counted.get(change, 0) + 1
    rows = []
    for verdict in selection.verdicts:
        block, node = blocks.get(verdict.ordinal), importance.get(verdict.ordinal)
        rows.append(
            {
                "ordinal": verdict.ordinal,
                "kept": verdict.kept,
                "rule": verdict.rule,
                "detail": verdict.detail,
                "change": changes[verdict.ordinal],
                "kind": block.kind if block else None,
                "label": block.label if block else "",
                "tokens": tokens.get(verdict.ordinal),
                "cost": costs.get(verdict.ordinal),
                "rank": verdict.rank,
                "score": verdict.score,
                "z_u": verdict.z_u,
                "z_past": verdict.z_past,
                "z_words": verdict.z_lex,
                "exploration": verdict.exploration,
                "u": node.u if node and node.observed else None,
                "stale": bool(node and node.stale),
            }
        )
    return {
        "turn": selection.turn,
        "created_at": selection.created_at,
        "applied": selection.applied,
        "reason": selection.reason,
        "rule": rule_of_selection(selection),
        "selector": selector_of(selection),
        "weights": {name: weights.get(name) for name in ("beta", "lam", "eps", "kappa", "delta")},
        "budget": selection.budget,
        "cost": selection.cost,
        "total": selection.total_cost,
        "spent": spent,
        "changes": counted,
        "blocks": rows,
    }


def changes_since(former: SelectionRow | None, selection: SelectionRow) -> dict[int, Change]:
    """Ordinal -> what became of the block. Before the first selection everything was sent."""
    before = {verdict.ordinal: verdict.kept for verdict in former.verdicts} if former is not None else None
    found: dict[int, Change] = {}
    for verdict in selection.verdicts:
        was = True if before is None else before.get(verdict.ordinal)
        if verdict.kept:
            found[verdict.ordinal] = "new" if was is None else "kept" if was else "revived"
        else:
            found[verdict.ordinal] = "out at once" if was is None else "dropped" if was else "still out"
    return found
