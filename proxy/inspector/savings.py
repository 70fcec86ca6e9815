"""What was saved, per session, day and in all: sums over stored exchanges, money where the user gave prices."""

from collections import defaultdict

from proxy.inspector.sessions import Value, View
from proxy.ledger import Totals, price_of


def show_savings(view: View) -> Value:
    """Days in the proxy's local time. Numbers by the provider, but for what begins with `untouched`: see `ledger`."""
    by_session = view.savings.by_session(view.reader)
    days: dict[str, Totals] = defaultdict(Totals)
    models = set()
    for parts in by_session.values():
        for share, sums in parts.items():
            days[share.day] += sums
            models.add(share.model)
    return {
        "days": [{"day": name} | _line(days[name]) for name in sorted(days, reverse=True)],
        "sessions": [
            {"session": session.name, "title": session.title, "kind": session.kind, "model": session.model}
            | _line(sum(by_session.get(session.id, {}).values(), Totals()))
            for session in view.reader.list_sessions()
        ],
        "total": _line(sum(days.values(), Totals())),
        "priced": bool(view.settings.prices),
        "models_without_price": sorted(name for name in models if not price_of(name, view.settings.prices)),
        "idle_after_s": view.settings.idle_after,
    }


def _line(sums: Totals) -> Value:
    money = sums.priced > 0
    return {
        "requests": sums.requests,
        "with_usage": sums.with_usage,
        "rewritten": sums.rewritten,
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
        "resent": sums.resent,
        "reasoning_removed": sums.reasoning_removed,
    }
