"""One block in full: what it says, where it was sent, what attention it got, what it hangs together with."""

from collections.abc import Iterable

from graphstore.records import BlockRow, SessionRow
from graphstore.store.reader import Reader, load_evidence
from graphstore.store.report import block_readings, block_versions, latest_selection
from graphstore.store.session_map import turns_of
from proxy.conversations import parameters_of, rule_of
from proxy.dialects import stored_dialect
from proxy.dialects.base import Dialect
from proxy.inspector.maps import runs
from proxy.inspector.sessions import Value, View
from proxy.marking import blocks_of, find_block, pin_takes, protected_blocks, unheeded


def show_block(view: View, session: SessionRow, ordinal: int) -> Value:
    """Raises `UnknownBlock`."""
    reader = view.reader
    blocks = blocks_of(reader, session)
    block = find_block(session, blocks, ordinal)
    rule, graph = load_evidence(reader, session.id, rule_of(view.settings), parameters_of(view.settings))
    nodes, edges = graph.to_rows()
    node = next((node for node in nodes if node.ordinal == ordinal), None)
    latest = latest_selection(reader, session.id)
    verdict = next((v for v in latest.verdicts if v.ordinal == ordinal), None) if latest is not None else None
    rows = [row for row in turns_of(reader, session.id) if ordinal in row.blocks]
    return {
        "session": session.name,
        "ordinal": ordinal,
        "kind": block.kind,
        "label": block.label,
        "edits": list(block.edits),
        "chars": block.cost,
        "tokens": reader.block_tokens(session.id).get(ordinal),
        "mark": reader.marks(session.id).get(ordinal),
        "protected": protected_blocks(reader, view.settings, session, blocks).get(ordinal),
        "pin_takes": pin_takes(reader, view.settings, session, blocks, ordinal),
        "unheeded": unheeded(view.settings, session),
        "verdict": {"kept": verdict.kept, "rule": verdict.rule, "detail": verdict.detail} if verdict else None,
        "u": node.u if node is not None and node.observed else None,
        "stale": bool(node is not None and node.stale),
        "rule": rule,
        "supports": [_end(blocks, e.support, e.weight) for e in edges if e.dependent == ordinal],
        "dependents": [_end(blocks, e.dependent, e.weight) for e in edges if e.support == ordinal],
        "served": {
            "sent": runs(row.turn for row in rows if ordinal not in row.left_out),
            "left_out": runs(row.turn for row in rows if ordinal in row.left_out),
        },
        "importance": [reading._asdict() for reading in block_readings(reader, session.id, ordinal)],
        "messages": _messages(session, reader.node_contents(block.node_ids)),
        "earlier": _earlier(reader, session, ordinal),
    }


def _end(blocks: dict[int, BlockRow], ordinal: int, weight: float) -> Value:
    block = blocks.get(ordinal)
    return {"ordinal": ordinal, "label": block.label if block else "", "weight": weight}


def readable(dialect: Dialect, raw: bytes) -> str:
    """What a message says and calls."""
    return "\n".join(part for part in (dialect.message_text(raw), dialect.call_text(raw)) if part)


def _earlier(reader: Reader, session: SessionRow, ordinal: int) -> list[Value]:
    """What it said before the client pruned or amended it, the latest version first."""
    versions = block_versions(reader, session.id, ordinal)[1:]
    contents = reader.message_contents(i for version in versions for i in version.messages)
    return [
        {"turns": runs(version.turns), "messages": _messages(session, [contents[i] for i in version.messages])}
        for version in versions
    ]


def _messages(session: SessionRow, contents: Iterable[bytes]) -> list[Value]:
    """As they were sent (raw), and what of that is text or a call."""
    dialect = stored_dialect(session.dialect)
    return [
        {
            "role": dialect.parse_message(raw).role,
            "text": readable(dialect, raw),
            "raw": raw.decode("utf-8", "replace"),
        }
        for raw in contents
    ]
