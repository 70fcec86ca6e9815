"""What each request cost, by the provider's own counts, beside what the untouched history would have cost. Pure.

What was sent is counted, by the provider. What was not sent is an estimate, in two parts: its size (our tokens, at the
rate at which this provider counts the session's untouched requests) and how much of it the cache would have served
(the share that it serves of this session's warm requests, with the probability that it was still warm).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from operator import add
from statistics import median
from typing import Annotated

import msgspec

from graphstore.records import ExchangeRow
from graphstore.store.report import BESIDE, Tokens
from proxy.economics.warmth import PROBABLY

MILLION = 1_000_000
BROKEN = (*BESIDE, "client compaction")  # outcomes of requests that do not begin as the one before them

Warmth = Callable[[str, float], float]  # model, pause in seconds -> probability that what was sent before is cached


Money = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # more than any model costs in any currency; never infinite


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a million tokens. `cached`: read from the cache, `write`: written to it; None: as `input`."""

    input: Money
    output: Money = 0.0
    cached: Money | None = None
    write: Money | None = None

    def cost(self, *, uncached: float, cached: float, written: float, output: float) -> float:
        read = self.input if self.cached is None else self.cached
        write = self.input if self.write is None else self.write
        return (uncached * self.input + cached * read + written * write + output * self.output) / MILLION


@dataclass(frozen=True, slots=True)
class Entry:
    """One exchange whose usage the provider reported. Tokens are the provider's; `untouched_*` are estimates.

    `cost` and `untouched_cost` are None where no price is known.
    """

    exchange: ExchangeRow
    input: int
    cached: int
    written: int
    output: int
    untouched_input: float
    untouched_cached: float
    cost: float | None
    untouched_cost: float | None


def price_of(model: str, prices: Mapping[str, Price]) -> Price | None:
    """By the first pattern that fits (`gpt-5*`), in the order of the settings."""
    return next((price for pattern, price in prices.items() if fnmatchcase(model, pattern)), None)


def provider_tokens_per_ours(exchanges: Sequence[ExchangeRow], tokens: Mapping[int, Tokens]) -> float:
    """How many tokens this provider counts for one of ours: by the session's untouched requests, else 1.

    A request of which little was sent would not do: what each costs beside its words would be multiplied. Nor would one
    that goes on from what the provider keeps: we have not seen all of it.
    """
    seen = [row for row in exchanges if row.input_tokens and row.outcome != "opaque"]
    whole = [row for row in seen if row.messages_sent == row.messages_total]
    ours = sum(tokens[row.id].sent for row in whole)
    return sum(row.input_tokens or 0 for row in whole) / ours if ours else 1.0


def entries(
    exchanges: Sequence[ExchangeRow],
    tokens: Mapping[int, Tokens],
    prices: Mapping[str, Price],
    warmth: Warmth,
    *,
    lead: Sequence[ExchangeRow] = (),
) -> list[Entry]:
    """The exchanges of one session in order; those without usage are left away.

    `lead`: of a branch, what its parent had sent until then: it filled the cache that the branch begins with.
    """
    rate = provider_tokens_per_ours([*lead, *exchanges], tokens)
    share = _cache_share((lead, exchanges), warmth)
    found: list[Entry] = []
    latest: dict[str, Entry] = {}  # by model: each has a cache of its own
    used_until: dict[str, float] = {}
    for row in (*lead, *exchanges):
        before = latest.get(row.model)
        if row.input_tokens is not None:
            left_out = (tokens[row.id].full - tokens[row.id].sent) * rate
            untouched = row.input_tokens + left_out
            cached = min(row.cached_tokens or 0, row.input_tokens)
            untouched_cached: float = cached
            if left_out and before is None:
                untouched_cached = 0.0
            elif before is not None and _goes_on(before.exchange, row):
                if left_out or before.untouched_input > before.input:
                    warm = warmth(row.model, max(0.0, row.started_at - used_until[row.model]))
                    untouched_cached = min(untouched, warm * share * before.untouched_input)
            found.append(_entry(row, cached, untouched, untouched_cached, price_of(row.model, prices)))
        if row.outcome in BESIDE:
            continue
        if row.input_tokens is not None:
            latest[row.model] = found[-1]
        if row.input_tokens is not None or (row.status is not None and row.status < 400):
            used_until[row.model] = row.ended_at or row.started_at
    return found[sum(row.input_tokens is not None for row in lead) :]


def _goes_on(before: ExchangeRow, row: ExchangeRow) -> bool:
    """Whether the client's own request begins as the one before it: not so, the cache serves it no better untouched."""
    is_broken = (row.instructions_id, row.tools_id) != (before.instructions_id, before.tools_id)
    return not is_broken and row.outcome not in BROKEN


def _entry(row: ExchangeRow, cached: int, untouched: float, untouched_cached: float, price: Price | None) -> Entry:
    given, output = row.input_tokens or 0, row.output_tokens or 0
    written = min(row.cache_write_tokens or 0, given - cached)
    cost = untouched_cost = None
    if price is not None:
        cost = price.cost(uncached=given - cached - written, cached=cached, written=written, output=output)
        fresh = untouched - untouched_cached
        fresh_written = fresh * written / (given - cached) if given > cached else 0.0
        untouched_cost = price.cost(
            uncached=fresh - fresh_written, cached=untouched_cached, written=fresh_written, output=output
        )
    return Entry(row, given, cached, written, output, untouched, untouched_cached, cost, untouched_cost)


def _pause_s(before: ExchangeRow, row: ExchangeRow) -> float:
    return max(0.0, row.started_at - (before.ended_at or before.started_at))


def _cache_share(sessions: Iterable[Iterable[ExchangeRow]], warmth: Warmth) -> float:
    """Share of the request before that the cache serves of a warm one; what it serves is taken to be all of it as long
    as nothing else has been seen, so that a saving is never made of ignorance. 0: the provider reports no cache."""
    shares, reports = [], False
    for exchanges in sessions:
        before = None
        for row in exchanges:
            if row.input_tokens is None or row.outcome in BESIDE:
                continue
            reports = reports or row.cached_tokens is not None
            if (
                before is not None
                and (before.selection_id, before.model) == (row.selection_id, row.model)
                and not before.fell_back
                and before.input_tokens
                and warmth(row.model, _pause_s(before, row)) > PROBABLY
            ):
                shares.append(min(1.0, min(row.cached_tokens or 0, row.input_tokens) / before.input_tokens))
            before = row
    return median(shares) if shares and reports else float(reports)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over exchanges; tokens and money are those of the exchanges with usage. They can be added.

    `untouched_*` less its counterpart is what was saved, and signed: a rewrite of a warm cache costs.
    """

    requests: int = 0
    rewritten: int = 0
    resent: int = 0  # refused when rewritten, then sent as they came
    reasoning_removed: int = 0
    with_usage: int = 0
    input: int = 0
    cached: int = 0
    written: int = 0
    output: int = 0
    untouched_input: float = 0.0
    untouched_cached: float = 0.0
    priced: int = 0  # with usage, and a model that has a price
    cost: float = 0.0
    untouched_cost: float = 0.0

    @property
    def saved(self) -> float:
        """Input tokens."""
        return self.untouched_input - self.input

    @property
    def saved_cost(self) -> float:
        return self.untouched_cost - self.cost

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*map(add, astuple(self), astuple(other)))


def newly_removed(exchanges: Sequence[ExchangeRow], *, lead: Sequence[ExchangeRow] = ()) -> dict[int, int]:
    """Exchange id -> reasoning items that the provider removed there and not before. `lead`: as of `entries`.

    An answer names every item that was removed from its request, those of earlier requests again. What is new is taken
    to be by how many they are more than in the answer before.
    """
    found, before = {}, 0
    for row in (*lead, *exchanges):
        if row.outcome != "side" and (row.input_tokens is not None or row.transformations):
            found[row.id] = max(0, row.transformations - before)
            before = row.transformations
    return found


@dataclass(frozen=True, slots=True)
class Account:
    """The exchanges of one session, or of none, each by its id. `per_token`: provider's tokens for one of ours."""

    tokens: Mapping[int, Tokens]
    entries: Mapping[int, Entry]
    removed: Mapping[int, int]  # see `newly_removed`
    per_token: float

    def total(self, rows: Sequence[ExchangeRow]) -> Totals:
        """Of some of the exchanges."""
        found = [self.entries[row.id] for row in rows if row.id in self.entries]
        return total(rows, found, removed=sum(self.removed.get(row.id, 0) for row in rows))


def total(rows: Sequence[ExchangeRow], found: Sequence[Entry], *, removed: int = 0) -> Totals:
    """Of these exchanges and their entries; `removed`: reasoning items."""
    priced = [entry for entry in found if entry.cost is not None]
    return Totals(
        requests=len(rows),
        rewritten=sum(row.messages_sent < row.messages_total for row in rows),
        resent=sum(row.fell_back for row in rows),
        reasoning_removed=removed,
        with_usage=len(found),
        input=sum(entry.input for entry in found),
        cached=sum(entry.cached for entry in found),
        written=sum(entry.written for entry in found),
        output=sum(entry.output for entry in found),
        untouched_input=sum(entry.untouched_input for entry in found),
        untouched_cached=sum(entry.untouched_cached for entry in found),
        priced=len(priced),
        cost=sum(entry.cost or 0.0 for entry in priced),
        untouched_cost=sum(entry.untouched_cost or 0.0 for entry in priced),
    )
