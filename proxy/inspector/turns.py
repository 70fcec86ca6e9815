"""One turn: its requests, what was decided at its beginning, and the selection that was in force."""

from collections.abc import Sequence

from graphstore.records import ExchangeRow, SelectionRow, SessionRow
from graphstore.store.report import Tokens, selection_before, selection_of
from proxy.dry_run import blocks_of, dry_run, graph_of, present_blocks
from proxy.inspector.selections import show_selection
from proxy.inspector.sessions import Value, View, asked_in, ending_of, is_running, own_of
from proxy.savings import account_of, line
from proxy.settings import cold_after


class UnknownTurn(LookupError):
    """The session has no such turn."""


def show_turn(view: View, session: SessionRow, turn: int) -> Value:
    """Raises `UnknownTurn`."""
    exchanges = view.reader.session_exchanges(session.id)
    rows = [row for row in exchanges if row.turn == turn]
    if not rows:
        known = sorted({row.turn for row in exchanges})
        listed = f"it has turns {known[0]} to {known[-1]}" if known else "it has none yet"
        raise UnknownTurn(f"{session.name} has no turn {turn}: {listed}")
    account = account_of(view.reader, view.settings, session, exchanges)
    own = own_of(rows)
    made = [selection for row in own if (selection := selection_of(view.reader, row.id)) is not None]
    selection = _in_force(view, own[-1], made)
    earlier = [one for one in made if selection is None or one.id != selection.id]
    return {
        "session": session.name,
        "turn": turn,
        "turns": sorted({row.turn for row in exchanges}),
        "boundary": own[0].boundary,
        "reason": own[0].reason,
        "asked": asked_in(view, session, own[:1]).get(own[0].id),
        "facts": {
            "mode": view.settings.mode,
            "outcome": own[0].outcome,
            "idle_s": own[0].idle_s,
            "idle_after_s": cold_after(view.settings, session.upstream, session.model),
            "history_blocks": own[0].blocks_total,
            "history_chars": own[0].chars_total,
        },
        "savings": line(account.total(rows)),
        "requests": [_request(view, row, account.tokens[row.id]) for row in rows],
        "selection": _selection(view, session, selection) if selection is not None else None,
        "selected_here": selection is not None and selection.exchange_id in {row.id for row in rows},
        "earlier": [_selection(view, session, one) for one in earlier],
        "served": selection is not None and selection.applied and not own[-1].fell_back,
    }


def show_what_if(view: View, session: SessionRow, query: str) -> Value:
    """What would be kept if this request came now, beside what is sent at present."""
    blocks, tokens = present_blocks(view.reader, session)
    tried = dry_run(view.reader, session, view.settings, query, blocks)
    present = view.reader.load_selection(session.selection_id) if session.selection_id is not None else None
    return {
        "session": session.name,
        "query": query,
        "outcome": tried.outcome,
        "reason": tried.reason,
        "compared_with": f"the selection of turn {present.turn}" if present is not None else "the full history",
        "selection": show_selection(tried.selection, present, blocks, tokens, tried.graph),
    }


def _in_force(view: View, last: ExchangeRow, made: Sequence[SelectionRow]) -> SelectionRow | None:
    """What the last request of the turn was sent by, or what mode `off` recorded in it."""
    if last.selection_id is not None:
        return view.reader.load_selection(last.selection_id)
    return made[-1] if made and not made[-1].applied else None


def _selection(view: View, session: SessionRow, selection: SelectionRow) -> Value:
    blocks, tokens = blocks_of(view.reader, selection)
    former = selection_before(view.reader, selection)
    maker = view.reader.load_session(selection.session_id)
    return show_selection(selection, former, blocks, tokens, graph_of(view.reader, selection, view.settings)) | {
        "former_turn": former.turn if former is not None else None,
        "made_by": maker.name if maker is not None else session.name,
    }


def _request(view: View, row: ExchangeRow, tokens: Tokens) -> Value:
    return {
        "id": row.id,
        "step": row.step,
        "started_at": row.started_at,
        "outcome": row.outcome,
        "boundary": row.boundary,
        "reason": row.reason,
        "model": row.model,
        "path": row.path,
        "stream": row.stream,
        "running": is_running(view, row),
        "messages": row.messages_total,
        "messages_sent": row.messages_sent,
        "blocks": row.blocks_total,
        "blocks_left_out": row.blocks_left_out,
        "tokens_full": tokens.full,
        "tokens_sent": tokens.sent,
        "bytes": row.bytes_total,
        "bytes_sent": row.bytes_sent,
        "prefix_messages": row.prefix_messages,
        "prefix_bytes": row.prefix_bytes,
        "input_tokens": row.input_tokens,
        "cached_tokens": row.cached_tokens,
        "cache_write_tokens": row.cache_write_tokens,
        "output_tokens": row.output_tokens,
        "reasoning_tokens": row.reasoning_tokens,
        "usage": row.usage,
        "first_byte_s": row.first_byte_at - row.started_at if row.first_byte_at is not None else None,
        "seconds": row.ended_at - row.started_at if row.ended_at is not None else None,
        "status": row.status,
        "ending": ending_of(view, row),
        "resent": row.fell_back,
        "reasoning_removed": row.transformations,
        "error": row.error,
    }
