"""recap explain: every block of a session, kept or not, by which rule and with which scores.

With --query it is a dry run: what would be kept if this text came now. Without, it explains the latest selection, or
with --turn the one in force then.
"""

import argparse
import json
from collections.abc import Callable

from graphstore.evidence import OF_IMPORTANCE, OF_PAST_USE, Rule
from graphstore.graph import ContextGraph
from graphstore.records import BlockRow, NodeState, SelectionRow, SessionRow, VerdictRow
from graphstore.selectors import SelectorName
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from graphstore.store.report import find_session, latest_selection
from proxy.commands.attention import attention_state, signals
from proxy.commands.text import number, plain, score, table
from proxy.commands.words import why
from proxy.dry_run import blocks_of, dry_run, graph_of, present_blocks, rule_of_selection, selector_of
from proxy.errors import RecapError
from proxy.settings import Settings

SELECTORS_SAY: dict[SelectorName, str] = {
    "recap-without-graph": "protected blocks, then by the words of the request",
    "recency": "your messages, then the newest blocks",
    "random": "your messages, then blocks by a draw",
    "user-messages": "your messages alone",
    "clear-tool-results": "everything but old tool calls with their results",
    "full": "everything",
}
OUTCOMES = {
    "sent": "it would be sent: {}",
    "weighed": "mode auto: {}, it would be sent if it pays, which is weighed when the request comes",
    "recorded": "mode off: it would be recorded and not sent ({})",
    "nothing": "nothing would be left out: {}; this is what a selection would be",
}
SUPPORTS_SHOWN = 3  # of the blocks that one block uses: a column of a terminal
LEGEND = {
    "why": "the rule that kept it, and what that rule went by; of a block left out, what it lacked. "
    "expanded: kept because a kept block uses it",
    "u": "importance that replays gave it, as the selection knew it; *: stale, later edits or results replaced it",
    "z(past)": "how much of it the last turn named",
    "z(words)": "words that it shares with the request",
    "explore": "a draw for blocks that no replay has observed",
    "uses": "blocks that it depends on (edges of the graph)",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("explain", help="every block of a session: kept or not, and why")
    parser.add_argument("session", help="name of the session, or the beginning of it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--query", metavar="TEXT", help="what would be kept if you asked this now")
    what.add_argument("--turn", type=int, metavar="N", help="the selection that was in force in this turn")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        session = find_session(reader, arguments.session)
        latest = None if arguments.query is not None else _made(reader, session, arguments.turn)
        if latest is None:
            blocks, tokens = present_blocks(reader, session)
            tried = dry_run(reader, session, settings, arguments.query or "", blocks)
            selection, graph = tried.selection, tried.graph
        else:
            blocks, tokens = blocks_of(reader, latest)
            selection, graph = latest, graph_of(reader, latest, settings)
        if latest is not None:
            state = "" if latest.applied else " (mode off: recorded, not sent)"
            print(f"{session.name}: selection of turn {latest.turn}, {latest.reason}{state}")
        elif arguments.query is not None:
            print(f"{session.name}: what would be kept now for {arguments.query!r}")
        else:
            print(f"{session.name}: nothing selected yet; what would be kept now, whatever the request (--query TEXT)")
        if latest is None and selection.verdicts:
            print(OUTCOMES[tried.outcome].format(tried.reason))
        _print(reader, session, settings, selection, graph, blocks, tokens)
    return 0


def _made(reader: Reader, session: SessionRow, turn: int | None) -> SelectionRow | None:
    """The latest selection, or the latest that had been made by the end of a turn. Raises RecapError: none had been."""
    if turn is None:
        return latest_selection(reader, session.id)
    of_turn = [row.selection_id for row in reader.session_exchanges(session.id) if row.turn == turn]
    made = next((found for id in reversed(of_turn) if id is not None and (found := reader.load_selection(id))), None)
    if made is None:
        raise RecapError(f"nothing had been selected for turn {turn} of {session.name}; `recap show` lists its turns")
    return made


def _print(
    reader: Reader,
    session: SessionRow,
    settings: Settings,
    selection: SelectionRow,
    graph: ContextGraph,
    blocks: dict[int, BlockRow],
    tokens: dict[int, int],
) -> None:
    if not selection.verdicts:
        print("no history yet: there is nothing to choose from")
        return
    kept = [v for v in selection.verdicts if v.kept]
    print(
        f"budget {number(selection.budget)} of {number(selection.total_cost)} characters; kept {len(kept)} of "
        f"{len(selection.verdicts)} blocks with {number(selection.cost)} characters, "
        f"{number(selection.protected_cost)} of them protected"
    )
    print(attention_state(reader, session.id, settings))
    weights = json.loads(selection.parameters)
    rule = rule_of_selection(selection)
    if (selector := selector_of(selection)) != "recap":
        print(f"selector {selector}: {SELECTORS_SAY[selector]}; scores, where shown, are for comparison")
    print(
        f"rule {rule}: score = {signals(rule)} + {weights['lam']:g} z(words) + {weights['eps']:g} explore, less "
        f"{weights['kappa']:g} if stale (z: standard deviations from the blocks' mean)"
    )
    _print_blocks(tokens, rule, selection, graph, blocks)


def _print_blocks(
    tokens: dict[int, int], rule: Rule, selection: SelectionRow, graph: ContextGraph, blocks: dict[int, BlockRow]
) -> None:
    """One line a block, then what the columns mean. Those of signals that this rule does not have are left away."""
    nodes, edges = graph.to_rows()
    states = {node.ordinal: node for node in nodes}
    supports: dict[int, list[int]] = {}
    for edge in edges:
        supports.setdefault(edge.dependent, []).append(edge.support)
    observed = any(node.observed for node in nodes)
    columns: dict[str, Callable[[VerdictRow], object]] = {
        "": lambda v: "kept" if v.kept else "left out",
        "block": lambda v: v.ordinal,
        "kind": lambda v: blocks[v.ordinal].kind if v.ordinal in blocks else None,
        "tokens": lambda v: number(tokens.get(v.ordinal)),
        "why": why,
        "rank": lambda v: v.rank,
        "score": lambda v: score(v.score),
    }
    if observed:
        columns["u"] = lambda v: _importance(states.get(v.ordinal))
    if rule in OF_IMPORTANCE:
        columns["z(u)"] = lambda v: score(v.z_u)
    if rule in OF_PAST_USE:
        columns["z(past)"] = lambda v: score(v.z_past)
    columns["z(words)"] = lambda v: score(v.z_lex)
    if any(verdict.exploration for verdict in selection.verdicts):
        columns["explore"] = lambda v: score(v.exploration)
    if supports:
        columns["uses"] = lambda v: _listed(supports.get(v.ordinal, []))
    columns["what"] = lambda v: plain(blocks[v.ordinal].label) if v.ordinal in blocks else ""
    rows = [[cell(v) for cell in columns.values()] for v in selection.verdicts]
    left = ("", "kind", "why", "uses", "what")
    print(table(tuple(columns), rows, right=tuple(name for name in columns if name not in left)))
    print("\n" + "\n".join(f"{name}: {LEGEND[name]}" for name in columns if name in LEGEND))


def _importance(state: NodeState | None) -> str | None:
    if state is None or not state.observed:
        return None
    return f"{state.u:.3f}{'*' if state.stale else ' '}"


def _listed(supports: list[int]) -> str:
    return ",".join(map(str, supports[:SUPPORTS_SHOWN])) + ("…" if len(supports) > SUPPORTS_SHOWN else "")
