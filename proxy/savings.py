"""What was saved by session, day and model: the ledger's sums over the archive."""

import time
from collections import defaultdict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple

from graphstore.records import ExchangeRow
from graphstore.store.reader import Reader
from graphstore.store.report import ExchangesStamp, exchange_tokens, exchanges_stamps
from proxy.ledger import Entry, Totals, entries, total
from proxy.settings import Settings


class Share(NamedTuple):
    """A part of a session. `day`: `2026-11-30`, in local time."""

    day: str
    model: str


Parts = Mapping[Share, Totals]


@dataclass(frozen=True, slots=True)
class Savings:
    """Sums over sessions, remembered while a session's exchanges stay as they are."""

    settings: Settings
    _known: MutableMapping[int, tuple[ExchangesStamp, Parts]] = field(default_factory=dict)

    def by_session(self, reader: Reader) -> dict[int, Parts]:
        """Session id -> its parts. A session without exchanges has none."""
        found: dict[int, Parts] = {}
        with reader.snapshot():
            for session, stamp in exchanges_stamps(reader).items():
                known = self._known.get(session)
                if known is None or known[0] != stamp:
                    known = self._known[session] = (stamp, self._parts(reader, session))
                found[session] = known[1]
        return found

    def _parts(self, reader: Reader, session: int) -> Parts:
        rows = reader.session_exchanges(session)
        own = entries(rows, exchange_tokens(reader, rows), self.settings.prices, self.settings.idle_after)
        parts: dict[Share, tuple[list[ExchangeRow], list[Entry]]] = defaultdict(lambda: ([], []))
        for row in rows:
            parts[_share(row)][0].append(row)
        for entry in own:
            parts[_share(entry.exchange)][1].append(entry)
        return {share: total(*members) for share, members in parts.items()}


def _share(row: ExchangeRow) -> Share:
    return Share(time.strftime("%Y-%m-%d", time.localtime(row.started_at)), row.model)
