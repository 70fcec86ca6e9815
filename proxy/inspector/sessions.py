"""Which sessions there are, how each one stands, and its turns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from graphstore.records import ExchangeRow, JobRow, ReplayRow, SessionRow
from graphstore.store.reader import Reader
from graphstore.store.replays import worker_runs
from graphstore.store.report import BESIDE, SessionSummary, Tokens, cached_of, exchange_tokens, summaries
from proxy.attention import why_none
from proxy.cache_watch import cache_fall
from proxy.commands.attention import attention_state, replay_line
from proxy.dialects import stored_dialect
from proxy.failures import explained, has_failed
from proxy.holdout import HELD_OUT
from proxy.ledger import Account
from proxy.savings import Savings, account_of, line
from proxy.settings import Settings, cold_after

Value = dict[str, object]
ASKED_CHARS = 2_000  # of what the user said: more than a heading can show
SIZES_KEPT = 5_000  # of exchanges in memory, 200 bytes each
SESSIONS_MAX = 500  # in one list; the page asks for more by search


@dataclass(frozen=True, slots=True)
class View:
    """What every view looks at. `started_at`: since when this proxy runs; what an earlier one left open is over.

    `savings` and `sizes` (of exchanges) remember what was asked for before: pages ask again at every change.
    """

    reader: Reader
    settings: Settings
    now: float
    started_at: float
    savings: Savings
    sizes: dict[tuple[int, int], Tokens] = field(default_factory=dict)


def list_sessions(view: View, *, side: bool, limit: int) -> Value:
    """The most recently active first. `side`: titles, summaries and the like too."""
    found = [row for row in summaries(view.reader) if side or row.session.kind == "agent"]
    shown = found[: min(limit, SESSIONS_MAX)]
    names = {row.session.id: row.session.name for row in found}
    tokens = _sizes(view, [row.latest for row in shown if row.latest is not None])
    return {
        "total": len(found),
        "sessions": [_summary(view, row, tokens, names.get(row.session.parent_id or 0)) for row in shown],
    }


def show_session(view: View, session: SessionRow) -> Value:
    """One session with a line for each turn."""
    exchanges = view.reader.session_exchanges(session.id)
    account = account_of(view.reader, view.settings, session, exchanges)
    sums, tokens = account.total(exchanges), account.tokens
    summary = SessionSummary(
        session=session,
        exchanges=len(exchanges),
        input_tokens=_sum(row.input_tokens for row in exchanges),
        cached_tokens=_sum(cached_of(row) for row in exchanges),
        latest=own_of(exchanges)[-1] if exchanges else None,
        running_since=max((row.started_at for row in exchanges if row.ending == "running"), default=None),
        answered=any(row.status is not None and row.status < 400 for row in exchanges),
    )
    parent = view.reader.load_session(session.parent_id) if session.parent_id is not None else None
    jobs = {job.turn: job for job in view.reader.load_jobs(session.id)}
    replays = {replay.turn: replay for replay in view.reader.load_replays(session.id)}
    fall = cache_fall(exchanges)
    return {
        "session": _summary(view, summary, tokens, parent.name if parent else None)
        | {
            "created_at": session.created_at,
            "client_id": session.client_id,
            "attention": attention_state(view.reader, session.id, view.settings),
            "cache_fall": str(fall) if fall else None,
            "reasoning_removed": sums.reasoning_removed,
            "savings": line(sums),
            "marks": [{"ordinal": o, "mark": mark} for o, mark in sorted(view.reader.marks(session.id).items())],
        },
        "turns": _turns(view, session, exchanges, account, jobs, replays),
    }


def _sizes(view: View, rows: Sequence[ExchangeRow]) -> dict[int, Tokens]:
    """Exchange id -> tokens. What is left out can only change to nothing, when the original was sent after all."""
    known = {row.id: size for row in rows if (size := view.sizes.get((row.id, row.blocks_left_out))) is not None}
    new = [row for row in rows if row.id not in known]
    found = exchange_tokens(view.reader, new)
    if len(view.sizes) + len(new) > SIZES_KEPT:
        view.sizes.clear()
    view.sizes.update(((row.id, row.blocks_left_out), found[row.id]) for row in new)
    return known | found


def own_of(rows: list[ExchangeRow]) -> list[ExchangeRow]:
    """Those of some requests that moved the session; all of them where none did."""
    return [row for row in rows if row.outcome not in BESIDE] or rows


def asked_in(view: View, session: SessionRow, rows: Sequence[ExchangeRow]) -> dict[int, str]:
    """Exchange id -> what the user had just said, of requests whose history ends with a user's words."""
    dialect = stored_dialect(session.dialect)
    ends = {row.id: row.head_node_id for row in rows if row.head_node_id is not None and row.outcome != "side"}
    heads = list(dict.fromkeys(ends.values()))
    contents = dict(zip(heads, view.reader.node_contents(heads), strict=True))
    return {
        id: dialect.message_text(contents[head])[:ASKED_CHARS]
        for id, head in ends.items()
        if dialect.parse_message(contents[head]).role == "user"
    }


def _replay(job: JobRow | None, replay: ReplayRow | None, idle: tuple[str, str] | None) -> str | None:
    if replay is None and job is not None and job.state == "queued" and idle is not None:
        return f"not replayed: {idle[0]}"
    return replay_line(job, replay)


def _turns(
    view: View,
    session: SessionRow,
    exchanges: Sequence[ExchangeRow],
    account: Account,
    jobs: Mapping[int, JobRow],
    replays: Mapping[int, ReplayRow],
) -> list[Value]:
    found = []
    in_order = sorted(exchanges, key=lambda row: (row.turn, row.id))
    turns = {turn: list(members) for turn, members in groupby(in_order, key=lambda row: row.turn)}
    asked = asked_in(view, session, [own_of(rows)[0] for rows in turns.values()])
    idle = None if worker_runs(Path(view.settings.db)) else why_none(view.settings)
    for turn, rows in turns.items():
        own = own_of(rows)
        last = own[-1]
        found.append(
            {
                "turn": turn,
                "started_at": rows[0].started_at,
                "asked": asked.get(own[0].id),
                "boundary": own[0].boundary,
                "reason": own[0].reason,
                "requests": len(rows),
                "running": any(is_running(view, row) for row in rows),
                "blocks": last.blocks_total,
                "blocks_left_out": last.blocks_left_out,
                "tokens_full": account.tokens[last.id].full,
                "tokens_sent": account.tokens[last.id].sent,
                "input_tokens": _sum(row.input_tokens for row in rows),
                "cached_tokens": _sum(cached_of(row) for row in rows),
                "output_tokens": _sum(row.output_tokens for row in rows),
                "saved_tokens": round(account.total(rows).saved),
                "selected": any(row.boundary == "cold" and row.selection_id is not None for row in own),
                "errors": sum(is_failure(view, row) for row in rows),
                "replay": _replay(jobs.get(turn), replays.get(turn), idle),
            }
        )
    return found


def _summary(view: View, row: SessionSummary, tokens: Mapping[int, Tokens], parent: str | None) -> Value:
    session = row.session
    latest = tokens[row.latest.id] if row.latest is not None else Tokens(0, 0)
    return {
        "name": session.name,
        "title": session.title,
        "kind": session.kind,
        "client": session.client,
        "model": session.model,
        "upstream": session.upstream,
        "dialect": session.dialect,
        "parent": parent,
        "turns": session.turns,
        "requests": row.exchanges,
        "last_active_at": session.last_active_at,
        "state": state_of(view.settings, session),
        "state_reason": HELD_OUT if session.arm == "held out" else session.state_reason,
        "problem": explained(row.latest)[0] if row.latest is not None and is_failure(view, row.latest) else None,
        "cache": _cache(view, row),
        "cold_at": _cold_at(view, session),
        "tokens_full": latest.full,
        "tokens_sent": latest.sent,
        "blocks_left_out": row.blocks_left_out,
        "input_tokens": row.input_tokens,
        "cached_tokens": row.cached_tokens,
    }


def state_of(settings: Settings, session: SessionRow) -> str:
    """`observe`: the mode is off, selections are recorded and not sent."""
    if session.arm == "held out":
        return session.arm
    if session.state != "normal":
        return session.state
    return "observe" if settings.mode == "off" else "normal"


def _cache(view: View, row: SessionSummary) -> str:
    """What is believed of the provider's cache: `running` while a request is under way, then `warm` until cold_at; but
    `unknown` of a session that the provider has answered nothing."""
    if row.running_since is not None and row.running_since >= view.started_at:
        return "running"
    if not row.answered:
        return "unknown"
    return "warm" if view.now < _cold_at(view, row.session) else "cold"


def _cold_at(view: View, session: SessionRow) -> float:
    return session.last_active_at + cold_after(view.settings, session.upstream, session.model)


def is_running(view: View, row: ExchangeRow) -> bool:
    return row.ending == "running" and row.started_at >= view.started_at


def is_failure(view: View, row: ExchangeRow) -> bool:
    return has_failed(row) or ending_of(view, row) == "interrupted"


def ending_of(view: View, row: ExchangeRow) -> str:
    return "interrupted" if row.ending == "running" and not is_running(view, row) else row.ending


def _sum(values: Iterable[int | None]) -> int | None:
    """None when nothing was reported."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
