"""What a case is, and what came of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from graphstore.selectors import Selector
from proxy.lab.compaction import checks
from proxy.lab.compaction.bench import Lab, Served

FAILURES_KEPT = 5  # sentences a row; more of a kind say nothing new


@dataclass(slots=True)
class Tally:
    """Counts trials. `broken` are promises of the product that did not hold; `failures` what a selector lost."""

    trials: int = 0
    passed: int = 0
    broken: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    chars: list[int] = field(default_factory=lambda: [0, 0])  # of messages: sent, and as the client had them
    values: dict[str, float] = field(default_factory=dict)  # further numbers of this case

    def result(self, holds: bool, otherwise: str) -> None:
        """A trial whose failing says something of the selector."""
        self._count(holds)
        if not holds:
            self.failures.append(otherwise)

    def promise(self, faults: Iterable[str], where: str = "") -> None:
        """A trial that must not fail."""
        found = [f"{where}: {fault}" if where else fault for fault in faults]
        self._count(not found)
        self.broken += found

    def watch(self, served: Served, where: str = "") -> None:
        """What holds of every request; counts only what does not."""
        self.broken += [f"{where}: {fault}" if where else fault for fault in checks.faults(served)]
        self.chars[0] += sum(map(len, served.upstream))
        self.chars[1] += sum(map(len, served.client))

    def _count(self, holds: bool) -> None:
        self.trials += 1
        self.passed += holds

    def to_row(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "trials": self.trials,
            "sent_share": round(self.chars[0] / self.chars[1], 4) if self.chars[1] else None,
            "broken": list(dict.fromkeys(self.broken))[:FAILURES_KEPT],
            "broken_count": len(self.broken),
            "failures": list(dict.fromkeys(self.failures))[:FAILURES_KEPT],
            **self.values,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """`run` makes one row; `selectors` None: it is run with each."""

    family: str
    name: str
    run: Callable[[Lab, Selector], Tally]
    selectors: tuple[str, ...] | None = None
