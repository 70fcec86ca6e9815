"""recap explain: every block of a session, kept or not, by which rule and with which scores.

With --query it is a dry run: what would be kept if this text came now. Without, it explains the latest selection, or
with --turn the one in force then.
"""

import argparse
import itertools
import json
from collections.abc import Callable

from graphstore.blocks import Cut, Message, cut_blocks
from graphstore.evidence import OF_IMPORTANCE, OF_PAST_USE, Rule
from graphstore.graph import ContextGraph
from graphstore.identity import message_digest
from graphstore.records import BlockRow, NodeState, SelectionRow, SessionRow, VerdictRow
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader, load_evidence
from graphstore.store.report import find_session, latest_answer, latest_selection
from proxy.commands.attention import attention_state, signals
from proxy.commands.text import number, plain, score, table
from proxy.commands.words import why
from proxy.conversations import parameters_of, rule_of
from proxy.dialects import DIALECTS
from proxy.dialects.base import ParsedRequest
from proxy.errors import RecapError
from proxy.recorder import block_label
from proxy.selecting import IdentifierCache, choose
from proxy.settings import Settings

SUPPORTS_SHOWN = 4  # of the blocks that one block uses: a column of a terminal
LEGEND = {
    "why": "the rule that kept it, and what that rule went by; of a block left out, what it lacked. "
    "expanded: kept because a kept block uses it",
    "u": "importance that replays gave it, as the selection knew it; stale: later edits or results replaced it",
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
        blocks = {block.ordinal: block for block, _ in reader.load_blocks(session.id)}
        if latest is None:
            selection, graph = _dry_run(reader, session, settings, arguments.query or "", blocks)
        else:
            selection, graph = latest, _graph_of(reader, latest, settings)
        if latest is not None:
            state = "" if latest.applied else " (mode off: recorded, not sent)"
            print(f"{session.name}: selection of turn {latest.turn}, {latest.reason}{state}")
        elif arguments.query is not None:
            print(f"{session.name}: what would be kept now for {arguments.query!r}")
        else:
            print(f"{session.name}: nothing selected yet; what would be kept now, whatever the request (--query TEXT)")
        _print(reader, session, settings, selection, graph, blocks)
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


def _graph_of(reader: Reader, selection: SelectionRow, settings: Settings) -> ContextGraph:
    """The graph that this selection went by: of the replays that had been stored by then, under its rule."""
    stored = reader.load_observations(selection.session_id)
    until = max((o.turn for o in stored if o.created_at <= selection.created_at), default=0)
    rule = rule_of_selection(selection)
    return reader.derived_graph(selection.session_id, rule, parameters_of(settings), until_turn=until)


def rule_of_selection(selection: SelectionRow) -> Rule:
    rule: Rule = json.loads(selection.parameters).get("rule", "paper")
    return rule


def _dry_run(
    reader: Reader, session: SessionRow, settings: Settings, query: str, blocks: dict[int, BlockRow]
) -> tuple[SelectionRow, ContextGraph]:
    """As if the client had sent its history, the last answer and this query. Adds what is new to `blocks`."""
    dialect = DIALECTS[session.dialect]  # type: ignore[index]  # written from a DialectName
    contents = reader.path_contents(session.head_node_id) if session.head_node_id is not None else []
    answer = latest_answer(reader, session)
    if not any(dialect.parse_message(raw).calls for raw in answer):  # a call without its result is never rewritten
        contents = [*contents, *answer]
    messages = tuple(dialect.parse_message(raw) for raw in contents)
    request = _request(session, contents, messages)
    cut = cut_blocks([*messages, Message("user")])  # the query is the current turn; what stands before it is history
    ordinals = _ordinals(reader, session, cut, blocks)
    for ordinal, block in zip(ordinals, cut.blocks, strict=True):
        if ordinal not in blocks and block.messages[0] < len(contents):
            label = block_label(dialect, [contents[i] for i in block.messages])
            blocks[ordinal] = BlockRow(session.id, ordinal, block.kind, block.cost, (), label=label)
    rule, graph = load_evidence(reader, session.id, rule_of(settings), parameters_of(settings))
    choice = choose(
        dialect, request, cut, ordinals, graph, parameters_of(settings), IdentifierCache(),
        session=session.name, turn=session.turns + 1, rule=rule, marks=reader.marks(session.id), query=query,
    )  # fmt: skip
    made = choice.selection.to_row(
        id=0, session_id=session.id, exchange_id=0, turn=session.turns + 1, created_at=0.0, applied=False,
        reason="dry run", parameters=parameters_of(settings), notice=settings.notice,
    )  # fmt: skip
    return made, graph


def _ordinals(reader: Reader, session: SessionRow, cut: Cut, blocks: dict[int, BlockRow]) -> list[int]:
    """Block numbers as the archive gave them; the last answer and the query, which it has not cut yet, count on."""
    by_node = {node: block.ordinal for block in blocks.values() for node in block.node_ids}
    path = [node for node, _, _, _ in reader.load_path(session.head_node_id)] if session.head_node_id else []
    fresh = itertools.count(max(blocks, default=-1) + 1)
    known = [[by_node[path[i]] for i in b.messages if i < len(path) and path[i] in by_node] for b in cut.blocks]
    return [ordinals[0] if ordinals else next(fresh) for ordinals in known]


def _request(session: SessionRow, contents: list[bytes], messages: tuple[Message, ...]) -> ParsedRequest:
    spans, position = [], 1
    for raw in contents:
        spans.append((position, position + len(raw)))
        position += len(raw) + 1
    return ParsedRequest(
        dialect=session.dialect,  # type: ignore[arg-type]
        body=b"[" + b",".join(contents) + b"]",
        model=session.model,
        stream=False,
        spans=tuple(spans),
        leading=0,
        messages=messages,
        digests=tuple(message_digest(raw) for raw in contents),
        instructions=b"",
        tools=b"",
        notice_role="system",
        opaque=None,
        background=False,
        cache_key=None,
    )


def _print(
    reader: Reader,
    session: SessionRow,
    settings: Settings,
    selection: SelectionRow,
    graph: ContextGraph,
    blocks: dict[int, BlockRow],
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
    print(
        f"rule {rule}: score = {signals(rule)} + {weights['lam']:g} z(words) + {weights['eps']:g} explore, less "
        f"{weights['kappa']:g} if stale (z: standard deviations from the blocks' mean)"
    )
    _print_blocks(reader.block_tokens(session.id), rule, selection, graph, blocks)


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
    columns |= {"z(words)": lambda v: score(v.z_lex), "explore": lambda v: score(v.exploration)}
    if observed:
        columns["uses"] = lambda v: _listed(supports.get(v.ordinal, []))
    columns["what"] = lambda v: plain(blocks[v.ordinal].label) if v.ordinal in blocks else ""
    rows = [[cell(v) for cell in columns.values()] for v in selection.verdicts]
    left = ("", "kind", "why", "uses", "what")
    print(table(tuple(columns), rows, right=tuple(name for name in columns if name not in left)))
    print("\n" + "\n".join(f"{name}: {LEGEND[name]}" for name in columns if name in LEGEND))


def _importance(state: NodeState | None) -> str | None:
    if state is None or not state.observed:
        return None
    return f"{state.u:.3f}{' stale' if state.stale else ''}"


def _listed(supports: list[int]) -> str:
    return ",".join(map(str, supports[:SUPPORTS_SHOWN])) + ("…" if len(supports) > SUPPORTS_SHOWN else "")
