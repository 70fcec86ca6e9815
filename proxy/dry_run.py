"""What a selection went by, and what one would choose now: the algorithm run over the archive, for people who ask.

Reads the archive; sends nothing and stores nothing.
"""

import itertools
import json
from dataclasses import replace
from typing import Literal, NamedTuple

from graphstore.blocks import Cut, Message, cut_blocks
from graphstore.evidence import Rule
from graphstore.graph import ContextGraph
from graphstore.identity import message_digest
from graphstore.records import BlockRow, SelectionRow, SessionRow
from graphstore.selectors import SelectorName
from graphstore.store.reader import Reader, load_evidence
from graphstore.store.report import latest_answer
from proxy.boundary import Decision, Facts, decide
from proxy.conversations import parameters_of, policy_of, rule_of, selector_for
from proxy.dialects import stored_dialect
from proxy.dialects.base import Dialect, ParsedRequest
from proxy.economics.weighing import CHARS_PER_TOKEN
from proxy.recorder import block_label
from proxy.selecting import IdentifierCache, choose
from proxy.settings import Settings, cold_after


def graph_of(reader: Reader, selection: SelectionRow, settings: Settings) -> ContextGraph:
    """The graph that this selection went by: of the replays that had been stored by then, under its rule."""
    stored = reader.load_replays(selection.session_id)
    until = max((o.turn for o in stored if o.created_at <= selection.created_at), default=0)
    rule = rule_of_selection(selection)
    return reader.derived_graph(selection.session_id, rule, parameters_of(settings), until_turn=until)


def present_blocks(reader: Reader, session: SessionRow) -> tuple[dict[int, BlockRow], dict[int, int]]:
    """The session's blocks as they stand now, and the tokens of each."""
    blocks = {block.ordinal: block for block, _ in reader.load_blocks(session.id)}
    return blocks, reader.block_tokens(session.id)


def blocks_of(reader: Reader, selection: SelectionRow) -> tuple[dict[int, BlockRow], dict[int, int]]:
    """The blocks that this selection chose from, as they stood then, and the tokens of each.

    The archive has the cost and the label of a block's latest version: those of another are read from its messages.
    """
    made_by, exchange = reader.load_session(selection.session_id), reader.load_exchange(selection.exchange_id)
    head = exchange.head_node_id if exchange is not None else None
    blocks = {block.ordinal: block for block, _ in reader.load_blocks(selection.session_id, head)}
    if made_by is not None and head != made_by.head_node_id:
        dialect = stored_dialect(made_by.dialect)
        for latest, _ in reader.load_blocks(selection.session_id):
            if (block := blocks[latest.ordinal]).node_ids != latest.node_ids:
                blocks[block.ordinal] = _as_it_was(reader, dialect, block)
    return blocks, reader.block_tokens(selection.session_id, head)


def _as_it_was(reader: Reader, dialect: Dialect, block: BlockRow) -> BlockRow:
    contents = reader.node_contents(block.node_ids)
    cost = sum(dialect.parse_message(raw).cost for raw in contents)
    return replace(block, cost=cost, label=block_label(dialect, contents)) if contents else block


def rule_of_selection(selection: SelectionRow) -> Rule:
    rule: Rule = json.loads(selection.parameters).get("rule", "paper")
    return rule


def selector_of(selection: SelectionRow) -> SelectorName:
    selector: SelectorName = json.loads(selection.parameters).get("selector", "recap")
    return selector


class DryRun(NamedTuple):
    """What would be chosen, the graph that it goes by, and what would come of it.

    `outcome`: it would be `sent`; `weighed`, for mode auto knows only at the request whether it pays; `recorded`, for
    the mode is off; or `nothing` would be selected at all. `reason`: why.
    """

    selection: SelectionRow
    graph: ContextGraph
    outcome: Literal["sent", "weighed", "recorded", "nothing"]
    reason: str


def dry_run(reader: Reader, session: SessionRow, settings: Settings, query: str, blocks: dict[int, BlockRow]) -> DryRun:
    """As if the client had sent, after a pause, its history, the last answer and this query. Adds what is new to
    `blocks`."""
    dialect = stored_dialect(session.dialect)
    contents = reader.path_contents(session.head_node_id) if session.head_node_id is not None else []
    answer = latest_answer(reader, session)
    if not any(dialect.parse_message(raw).calls for raw in answer):  # a call without its result is never rewritten
        contents = [*contents, *answer]
    messages = dialect.parse_messages(contents)
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
        selector=selector_for(settings),
    )  # fmt: skip
    made = choice.selection.to_row(
        id=0, session_id=session.id, exchange_id=0, turn=session.turns + 1, created_at=0.0, applied=False,
        reason="dry run", parameters=parameters_of(settings), notice=settings.notice,
    )  # fmt: skip
    decision = decide(_facts(reader, session, settings, query, cut, ordinals), policy_of(settings))
    return DryRun(made, graph, _outcome(decision, settings), decision.reason)


def _outcome(decision: Decision, settings: Settings) -> Literal["sent", "weighed", "recorded", "nothing"]:
    if not decision.select:
        return "nothing"
    if settings.mode == "off":
        return "recorded"
    return "weighed" if decision.weigh else "sent"


def _facts(reader: Reader, session: SessionRow, settings: Settings, query: str, cut: Cut, ordinals: list[int]) -> Facts:
    """Of the request that is tried; `served_tokens` is what it would be under the present selection."""
    present = reader.load_selection(session.selection_id) if session.selection_id is not None else None
    gone = {verdict.ordinal for verdict in present.verdicts if not verdict.kept} if present is not None else set()
    fixed = reader.message_contents(i for i in (session.instructions_id, session.tools_id) if i is not None)
    served = sum(block.cost for block, ordinal in zip(cut.blocks, ordinals, strict=True) if ordinal not in gone)
    return Facts(
        side=session.kind == "side",
        passing_through=session.state_reason if session.state == "pass-through" else None,
        open_calls=bool(cut.open_calls),
        at_user_request=True,
        history_blocks=cut.turn_start,
        history_tokens=sum(block.cost for block in cut.blocks[: cut.turn_start]) // CHARS_PER_TOKEN,
        served_tokens=(served + len(query) + sum(map(len, fixed.values()))) // CHARS_PER_TOKEN,
        idle_s=cold_after(settings, session.upstream, session.model),
    )


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
