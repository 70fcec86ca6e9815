"""What a case is, and what came of it."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from graphstore.selectors import Selector
from proxy.lab.compaction import checks
from proxy.lab.compaction.bench import Lab, Served
from proxy.lab.results import Row

SENTENCES_KEPT = 5  # a row; more of a kind say nothing new


@dataclass(slots=True)
class Tally:
    """`promised`: what the product promises whatever the selector. `passed` of `trials`: how well a selector did."""

    promised: int = 0
    broken: list[str] = field(default_factory=list)
    trials: int = 0
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    chars: list[int] = field(default_factory=lambda: [0, 0])  # of messages: sent, and as the client had them
    values: Row = field(default_factory=dict)  # further numbers of this case

    def result(self, holds: bool, otherwise: str) -> None:
        self.trials += 1
        self.passed += holds
        if not holds:
            self.failures.append(otherwise)

    def promise(self, faults: Iterable[str], where: str = "") -> None:
        self.promised += 1
        self.broken += [f"{where}: {fault}" if where else fault for fault in faults]

    def watch(self, served: Served, where: str = "") -> None:
        """What holds of every request."""
        self.promise(checks.faults(served), where)
        self.chars[0] += sum(map(len, served.upstream))
        self.chars[1] += sum(map(len, served.client))

    def to_row(self) -> Row:
        return {
            "promised": self.promised,
            "broken_count": len(self.broken),
            "broken": list(dict.fromkeys(self.broken))[:SENTENCES_KEPT],
            "trials": self.trials,
            "passed": self.passed,
            "failures": list(dict.fromkeys(self.failures))[:SENTENCES_KEPT],
            "chars": self.chars,
            **self.values,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """`run` makes one row. `once`: a case that no selector changes much; it runs with the first one."""

    family: str
    name: str
    run: Callable[[Lab, Selector], Awaitable[Tally]]
    once: bool = False
