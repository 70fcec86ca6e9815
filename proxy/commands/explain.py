"""recap explain: every block of a session, kept or not, by which rule and with which scores.

With --query it is a dry run: what would be kept if this text came now. Without, it explains the latest selection.
"""

import argparse
import itertools
import json
from collections.abc import Sequence

from graphstore.blocks import Cut, Message, cut_blocks
from graphstore.graph import ContextGraph
from graphstore.identity import message_digest
from graphstore.records import BlockRow, SelectionRow, SessionRow, VerdictRow
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from graphstore.store.report import find_session, latest_answer, latest_selection
from proxy.commands.text import number, plain, score, table
from proxy.commands.words import why
from proxy.conversations import parameters_of
from proxy.dialects import DIALECTS
from proxy.dialects.base import ParsedRequest
from proxy.recorder import block_label
from proxy.selecting import IdentifierCache, choose
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("explain", help="every block of a session: kept or not, and why")
    parser.add_argument("session", help="name of the session, or the beginning of it")
    parser.add_argument("--query", metavar="TEXT", help="what would be kept if you asked this now")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        session = find_session(reader, arguments.session)
        latest = None if arguments.query is not None else latest_selection(reader, session.id)
        blocks = {block.ordinal: block for block, _ in reader.load_blocks(session.id)}
        selection = latest or _dry_run(reader, session, settings, arguments.query or "", blocks)
        if latest is not None:
            state = "" if latest.applied else " (mode off: recorded, not sent)"
            print(f"{session.name}: selection of turn {latest.turn}, {latest.reason}{state}")
        elif arguments.query is not None:
            print(f"{session.name}: what would be kept now for {arguments.query!r}")
        else:
            print(f"{session.name}: nothing selected yet; what would be kept now, whatever the request (--query TEXT)")
        _print(selection, blocks, reader.block_tokens(session.id))
    return 0


def _dry_run(
    reader: Reader, session: SessionRow, settings: Settings, query: str, blocks: dict[int, BlockRow]
) -> SelectionRow:
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


def _print(selection: SelectionRow, blocks: dict[int, BlockRow], tokens: dict[int, int]) -> None:
    if not selection.verdicts:
        print("no history yet: there is nothing to choose from")
        return
    kept = [v for v in selection.verdicts if v.kept]
    print(
        f"budget {number(selection.budget)} of {number(selection.total_cost)} characters; kept {len(kept)} of "
        f"{len(selection.verdicts)} blocks with {number(selection.cost)} characters, "
        f"{number(selection.protected_cost)} of them protected"
    )
    print("signals: the request's words and the graph; attention: none (importance u is 0 where nothing was observed)")
    weights = json.loads(selection.parameters)
    print(
        f"score = z(u) + {weights['lam']:g} z(words) + {weights['eps']:g} explore, less {weights['kappa']:g} if stale "
        "(z: standard deviations from the blocks' mean)"
    )
    header = ("", "block", "kind", "tokens", "why", "rank", "score", "z(u)", "z(words)", "explore", "what")
    rows = [_line(v, blocks.get(v.ordinal), tokens) for v in selection.verdicts]
    print(table(header, rows, right=("block", "tokens", "rank", "score", "z(u)", "z(words)", "explore")))


def _line(verdict: VerdictRow, block: BlockRow | None, tokens: dict[int, int]) -> Sequence[object]:
    return (
        "kept" if verdict.kept else "left out",
        verdict.ordinal,
        block.kind if block else None,
        number(tokens.get(verdict.ordinal)),
        why(verdict),
        verdict.rank,
        score(verdict.score),
        score(verdict.z_u),
        score(verdict.z_lex),
        score(verdict.exploration),
        plain(block.label if block else ""),
    )
