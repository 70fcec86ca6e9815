"""What rewriting does, measured: sessions that the hold-out left untouched against all others that were drawn.

What is compared is a task: a session with its sub-agents and side requests. A branch is a task of its own. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphstore.records import Arm, SessionRow
from proxy.lab.statistics import Estimate, unpaired_difference
from proxy.ledger import Price, Totals, price_of
from proxy.savings import Parts

ARMS: tuple[Arm, Arm] = ("held out", "treated")
TASKS_MIN = 10  # in each arm: an interval from fewer would promise more than it can keep
RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Task:
    """Sums over the requests of a task whose usage the provider reported."""

    requests: int = 0
    input: int = 0
    cached: int = 0
    cost: float | None = 0.0  # of the input; None: not every model has a price

    def __add__(self, other: "Task") -> "Task":
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return Task(self.requests + other.requests, self.input + other.input, self.cached + other.cached, cost)


def tasks(
    sessions: Iterable[SessionRow], parts: Mapping[int, Parts], prices: Mapping[str, Price]
) -> dict[Arm | None, list[Task]]:
    """By arm; None: begun without a draw. A task that an agent never worked on, such as a title alone, is none."""
    rows = {row.id: row for row in sessions}
    found: dict[int, Task] = {}
    for row in rows.values():
        root = _root(row, rows).id
        for share, sums in parts.get(row.id, {}).items():
            found[root] = found.get(root, Task()) + _task(sums, price_of(share.model, prices))
    by_arm: dict[Arm | None, list[Task]] = {}
    for root, task in sorted(found.items()):
        if rows[root].kind == "agent":
            by_arm.setdefault(rows[root].arm, []).append(task)
    return by_arm


def _root(row: SessionRow, rows: Mapping[int, SessionRow]) -> SessionRow:
    while row.fork_depth is None and row.parent_id is not None and (parent := rows.get(row.parent_id)) is not None:
        row = parent
    return row


def _task(sums: Totals, price: Price | None) -> Task:
    fresh = sums.input - sums.cached - sums.written
    cost = None if sums.with_usage else 0.0
    if price is not None:
        cost = price.cost(uncached=fresh, cached=sums.cached, written=sums.written, output=0)
    return Task(sums.with_usage, sums.input, sums.cached, cost)


Measure = Callable[[Sequence[Task]], float]


def _a_request(amount: Callable[[Task], float]) -> Measure:
    return lambda members: sum(map(amount, members)) / sum(task.requests for task in members)


def _a_task(amount: Callable[[Task], float]) -> Measure:
    return lambda members: sum(map(amount, members)) / len(members)


def _cost(task: Task) -> float:
    return task.cost or 0.0


MEASURES: Mapping[str, Measure] = {
    "input tokens a request": _a_request(lambda task: task.input),
    "uncached tokens a request": _a_request(lambda task: task.input - task.cached),
    "cached share": lambda members: sum(t.cached for t in members) / sum(t.input for t in members),
    "input tokens a session": _a_task(lambda task: task.input),
    "uncached tokens a session": _a_task(lambda task: task.input - task.cached),
    "requests a session": _a_task(lambda task: task.requests),
}
MONEY: Mapping[str, Measure] = {
    "input cost a request": _a_request(_cost),
    "input cost a session": _a_task(_cost),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One measure in both arms. `difference`: treated less held out, None when there are too few for an interval."""

    measure: str
    held_out: float
    treated: float
    difference: Estimate | None

    @property
    def is_fraction(self) -> bool:
        """Whether its digits after the point matter."""
        return self.measure in MONEY or self.measure in ("cached share", "requests a session")


@dataclass(frozen=True, slots=True)
class Comparison:
    """`lines` is empty as long as an arm is. `without_usage`, `undrawn`: sessions that are not compared, and why."""

    held_out: int
    treated: int
    without_usage: int
    undrawn: int
    priced: bool
    lines: list[Compared]

    @property
    def is_enough(self) -> bool:
        return min(self.held_out, self.treated) >= TASKS_MIN


def compare(by_arm: Mapping[Arm | None, Sequence[Task]], *, priced: bool, seed: int) -> Comparison:
    """By the arm that was drawn, whatever became of the session: also where nothing was ever left out, or a rewritten
    request was refused. `priced`: there are prices; money needs one for every model that was used."""
    held_out, treated = ([task for task in by_arm.get(arm, ()) if task.input] for arm in ARMS)
    drawn = sum(len(by_arm.get(arm, ())) for arm in ARMS)
    priced = priced and all(task.cost is not None for task in (*held_out, *treated))
    found = Comparison(
        held_out=len(held_out),
        treated=len(treated),
        without_usage=drawn - len(held_out) - len(treated),
        undrawn=len(by_arm.get(None, ())),
        priced=priced,
        lines=[],
    )
    if not held_out or not treated:
        return found
    lines = []
    for name, measure in (*MEASURES.items(), *(MONEY.items() if priced else ())):
        difference = None
        if found.is_enough:
            difference = unpaired_difference(treated, held_out, measure, seed=seed, resamples=RESAMPLES)
        lines.append(Compared(name, measure(held_out), measure(treated), difference))
    return replace(found, lines=lines)
