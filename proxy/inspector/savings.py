"""What was saved, per session, day and in all: sums over stored exchanges, money where the user gave prices."""

import time
from collections import defaultdict
from collections.abc import Sequence

from graphstore.records import ExchangeRow
from graphstore.store.report import exchange_tokens
from proxy.inspector.sessions import Value, View
from proxy.ledger import Entry, entries, price_of, total


def show_savings(view: View) -> Value:
    """Days in the proxy's local time. Numbers by the provider, but for what begins with `untouched`: see `ledger`."""
    found: list[Entry] = []
    every: list[ExchangeRow] = []
    sessions = []
    for session in view.reader.list_sessions():
        rows = view.reader.session_exchanges(session.id)
        own = entries(rows, exchange_tokens(view.reader, rows), view.settings.prices, view.settings.idle_after)
        found += own
        every += rows
        name = {"session": session.name, "title": session.title, "kind": session.kind, "model": session.model}
        sessions.append(name | _line(rows, own))
    days: dict[str, tuple[list[ExchangeRow], list[Entry]]] = defaultdict(lambda: ([], []))
    day = {row.id: day_of(row) for row in every}
    for row in every:
        days[day[row.id]][0].append(row)
    for entry in found:
        days[day[entry.exchange.id]][1].append(entry)
    return {
        "days": [{"day": name} | _line(*days[name]) for name in sorted(days, reverse=True)],
        "sessions": sessions,
        "total": _line(every, found),
        "priced": bool(view.settings.prices),
        "models_without_price": sorted({row.model for row in every if not price_of(row.model, view.settings.prices)}),
        "idle_after_s": view.settings.idle_after,
    }


def day_of(row: ExchangeRow) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(row.started_at))


def _line(rows: Sequence[ExchangeRow], found: Sequence[Entry]) -> Value:
    sums = total(found)
    money = sums.priced > 0
    return {
        "requests": len(rows),
        "with_usage": sums.requests,
        "rewritten": sum(row.messages_sent < row.messages_total for row in rows),
        "input_tokens": sums.input,
        "cached_tokens": sums.cached,
        "written_tokens": sums.written,
        "output_tokens": sums.output,
        "untouched_input_tokens": round(sums.untouched_input),
        "untouched_cached_tokens": round(sums.untouched_cached),
        "saved_tokens": round(sums.untouched_input - sums.input),
        "priced_requests": sums.priced,
        "cost": sums.cost if money else None,
        "untouched_cost": sums.untouched_cost if money else None,
        "saved_cost": sums.untouched_cost - sums.cost if money else None,
        "resent": sum(row.fell_back for row in rows),
        "reasoning_removed": sum(row.transformations for row in rows),
    }
