"""Several observers as one, none of which can harm what it observes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphstore.records import ExchangeRow
from proxy.ports import Observer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Observers:
    """`ports.Observer`. What fails in one of them is logged; the others hear all the same."""

    members: Sequence[Observer]

    def planned(self, seconds: float) -> None:
        self._tell(lambda observer: observer.planned(seconds))

    def selected(self, seconds: float) -> None:
        self._tell(lambda observer: observer.selected(seconds))

    def ended(self, row: ExchangeRow, upstream: str) -> None:
        self._tell(lambda observer: observer.ended(row, upstream))

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self.members:
            try:
                what(observer)
            except Exception:
                log.exception("observer.failed; requests are unharmed")
