"""What was saved by session, day and model: the ledger's sums over the archive, and how they are told.

The inspector and `recap savings` both say what `sum_up` found, so that their numbers cannot differ.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphstore.records import ExchangeRow, SessionRow
from graphstore.store.reader import Reader
from graphstore.store.report import ExchangesStamp, exchange_tokens, exchanges_stamps, lead_of
from proxy.economics.profiles import profile_of
from proxy.economics.warmth import WarmthBook
from proxy.ledger import Account, Totals, Warmth, entries, newly_removed, price_of, provider_tokens_per_ours
from proxy.settings import Settings, profiles_of


class Share(NamedTuple):
    """A part of a session. `day`: `2026-11-30`, in local time."""

    day: str
    model: str


Parts = Mapping[Share, Totals]


@dataclass(frozen=True, slots=True)
class Savings:
    """Sums over sessions, remembered while a session's exchanges stay as they are."""

    settings: Settings
    _known: MutableMapping[int | None, tuple[ExchangesStamp, Parts]] = field(default_factory=dict)

    def by_session(self, reader: Reader, only: int | None = None) -> dict[int | None, Parts]:
        """Session id -> its parts; None: of the exchanges of no session. Of one session alone where `only` names it. A
        session without exchanges has none."""
        found: dict[int | None, Parts] = {}
        stamps = exchanges_stamps(reader)
        for forgotten in set(self._known) - stamps.keys():
            self._known.pop(forgotten, None)
        for session, stamp in stamps.items() if only is None else [(only, stamps[only])] * (only in stamps):
            known = self._known.get(session)
            if known is None or known[0] != stamp:
                known = self._known[session] = (stamp, self._parts(reader, session))
            found[session] = known[1]
        return found

    def _parts(self, reader: Reader, id: int | None) -> Parts:
        rows = reader.session_exchanges(id)
        account = account_of(reader, self.settings, reader.load_session(id) if id is not None else None, rows)
        parts: dict[Share, list[ExchangeRow]] = defaultdict(list)
        for row in rows:
            parts[_share(row)].append(row)
        return {share: account.total(members) for share, members in parts.items()}


def account_of(reader: Reader, settings: Settings, session: SessionRow | None, rows: Sequence[ExchangeRow]) -> Account:
    """`rows`: all exchanges of the session."""
    lead = lead_of(reader, session, rows) if session is not None else []
    tokens = exchange_tokens(reader, [*lead, *rows])
    warmth = _warmth(settings, session.upstream if session is not None else settings.upstream, [*lead, *rows])
    own = entries(rows, tokens, settings.prices, warmth, lead=lead)
    return Account(
        tokens=tokens,
        entries={entry.exchange.id: entry for entry in own},
        removed=newly_removed(rows, lead=lead),
        per_token=provider_tokens_per_ours([*lead, *rows], tokens),
    )


def _warmth(settings: Settings, upstream: str, rows: Sequence[ExchangeRow]) -> Warmth:
    """By the provider's profile and what these requests show of its cache, nothing else."""
    book, profiles = WarmthBook(), profiles_of(settings)
    book.note_all(upstream, rows)

    def probability(model: str, pause_s: float) -> float:
        return book.of(upstream, model).probability(profile_of(profiles, upstream, model), pause_s)

    return probability


@dataclass(frozen=True, slots=True)
class Sums:
    """Every sum of the archive, or of one session. Days in local time, the newest first; models by name."""

    days: Mapping[str, Totals]
    models: Mapping[str, Totals]
    sessions: list[tuple[SessionRow, Totals]]  # the most recently active first
    total: Totals
    models_without_price: list[str]


def sum_up(savings: Savings, reader: Reader, only: SessionRow | None = None) -> Sums:
    by_session = savings.by_session(reader, only.id if only is not None else None)
    days: dict[str, Totals] = defaultdict(Totals)
    models: dict[str, Totals] = defaultdict(Totals)
    for parts in by_session.values():
        for share, sums in parts.items():
            days[share.day] += sums
            models[share.model] += sums
    return Sums(
        days={name: days[name] for name in sorted(days, reverse=True)},
        models={name: models[name] for name in sorted(models)},
        sessions=[
            (session, sum(by_session.get(session.id, {}).values(), Totals()))
            for session in (reader.list_sessions() if only is None else [only])
        ],
        total=sum(days.values(), Totals()),
        models_without_price=sorted(name for name in models if name and not price_of(name, savings.settings.prices)),
    )


def as_json(sums: Sums, settings: Settings) -> dict[str, object]:
    """Numbers are the provider's, but for what begins with `untouched`: see `ledger`."""
    return {
        "days": [{"day": name} | line(part) for name, part in sums.days.items()],
        "models": [{"model": name} | line(part) for name, part in sums.models.items()],
        "sessions": [
            {"session": session.name, "title": session.title, "kind": session.kind, "model": session.model} | line(part)
            for session, part in sums.sessions
        ],
        "total": line(sums.total),
        "priced": bool(settings.prices),
        "models_without_price": sums.models_without_price,
    }


def line(sums: Totals) -> dict[str, object]:
    """One sum in JSON. Money is None where no request has a price."""
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
        "saved_tokens": round(sums.saved),
        "priced_requests": sums.priced,
        "cost": sums.cost if money else None,
        "untouched_cost": sums.untouched_cost if money else None,
        "saved_cost": sums.saved_cost if money else None,
        "resent": sums.resent,
        "reasoning_removed": sums.reasoning_removed,
    }


def _share(row: ExchangeRow) -> Share:
    return Share(time.strftime("%Y-%m-%d", time.localtime(row.started_at)), row.model)
