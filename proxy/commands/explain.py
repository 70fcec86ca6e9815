"""recap explain: every block of a session, kept or not, by which rule and with which scores.

With --query it is a dry run: what would be kept if this text came now. Without, it explains the latest selection.
"""

import argparse
from collections.abc import Sequence

from graphstore.blocks import Cut, Message, cut_blocks
from graphstore.graph import ContextGraph
from graphstore.identity import message_digest
from graphstore.records import BlockRow, SelectionRow, SessionRow, VerdictRow
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from graphstore.store.report import find_session, latest_selection
from proxy.commands.text import number, plain, score, table
from proxy.conversations import parameters_of
from proxy.dialects import DIALECTS
from proxy.dialects.base import ParsedRequest
from proxy.selecting import IdentifierCache, choose
from proxy.settings import Settings

WHY_CHARS = 60  # a reason may name many files; the table stays readable


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("explain", help="every block of a session: kept or not, and why")
    parser.add_argument("session", help="name of the session, or the beginning of it")
    parser.add_argument("--query", metavar="TEXT", help="what would be kept if you asked this now")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        session = find_session(reader, arguments.session)
        latest = None if arguments.query is not None else latest_selection(reader, session.id)
        selection = latest or _dry_run(reader, session, settings, arguments.query or "")
        if latest is None:
            print(f"{session.name}: what would be kept now for {arguments.query or ''!r}")
        else:
            state = "" if latest.applied else " (mode off: recorded, not sent)"
            print(f"{session.name}: selection of turn {latest.turn}, {latest.reason}{state}")
        _print(reader, selection)
    return 0


def _dry_run(reader: Reader, session: SessionRow, settings: Settings, query: str) -> SelectionRow:
    dialect = DIALECTS[session.dialect]  # type: ignore[index]  # written from a DialectName
    contents = reader.path_contents(session.head_node_id) if session.head_node_id is not None else []
    messages = tuple(dialect.parse_message(raw) for raw in contents)
    request = _request(session, contents, messages)
    cut = cut_blocks([*messages, Message("user")])  # the query is the current turn; what stands before it is history
    ordinals = _ordinals(reader, session, cut)
    graph = ContextGraph.from_rows(
        [state for _, state in reader.load_blocks(session.id)], reader.load_edges(session.id)
    )
    choice = choose(
        dialect, request, cut, ordinals, graph, parameters_of(settings), IdentifierCache(),
        session=session.name, turn=session.turns + 1, query=query,
    )  # fmt: skip
    return choice.selection.to_row(
        id=0, session_id=session.id, exchange_id=0, turn=session.turns + 1, created_at=0.0, applied=False,
        reason="dry run", parameters=parameters_of(settings), notice=settings.notice,
    )  # fmt: skip


def _ordinals(reader: Reader, session: SessionRow, cut: Cut) -> list[int]:
    """Block numbers as the archive gave them; the path is the session's own, so every block but the query has one."""
    by_node = {node: block.ordinal for block, _ in reader.load_blocks(session.id) for node in block.node_ids}
    path = [node for node, _, _, _ in reader.load_path(session.head_node_id)] if session.head_node_id else []
    known = [
        next((by_node[path[i]] for i in block.messages if i < len(path) and path[i] in by_node), -1)
        for block in cut.blocks
    ]
    return known


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


def _print(reader: Reader, selection: SelectionRow) -> None:
    blocks = {block.ordinal: block for block, _ in reader.load_blocks(selection.session_id)}
    tokens = reader.block_tokens(selection.session_id)
    kept = [v for v in selection.verdicts if v.kept]
    print(
        f"budget {number(selection.budget)} of {number(selection.total_cost)} characters; kept {len(kept)} of "
        f"{len(selection.verdicts)} blocks with {number(selection.cost)} characters, "
        f"{number(selection.protected_cost)} of them protected"
    )
    print("signals: the request's words and the graph; attention: none (importance u is 0 where nothing was observed)")
    header = ("", "block", "kind", "tokens", "rule", "why", "score", "z(u)", "z(words)", "explore", "rank", "what")
    rows = [_line(v, blocks.get(v.ordinal), tokens) for v in selection.verdicts]
    print(table(header, rows, right=("block", "tokens", "score", "z(u)", "z(words)", "explore", "rank")))


def _line(verdict: VerdictRow, block: BlockRow | None, tokens: dict[int, int]) -> Sequence[object]:
    return (
        "kept" if verdict.kept else "out",
        verdict.ordinal,
        block.kind if block else None,
        number(tokens.get(verdict.ordinal)),
        verdict.rule,
        plain(verdict.detail)[:WHY_CHARS],
        score(verdict.score),
        score(verdict.z_u),
        score(verdict.z_lex),
        score(verdict.exploration),
        verdict.rank,
        plain(block.label if block else ""),
    )
