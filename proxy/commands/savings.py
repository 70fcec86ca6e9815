"""recap savings: what rewriting saved, in tokens and, with prices, in money. The inspector's numbers."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from graphstore.store.archive import open_reader
from graphstore.store.report import find_session
from proxy.commands.text import count, number, plain, share, table
from proxy.comparison import TASKS_MIN, Compared, Comparison, compare, tasks
from proxy.errors import RecapError
from proxy.lab.statistics import LEVEL
from proxy.ledger import Totals
from proxy.savings import Savings, Sums, as_json, sum_up
from proxy.settings import Settings

COLUMNS = ("requests", "rewritten", "input", "cached", "untouched", "of it cached", "saved", "share")
MONEY = ("cost", "untouched cost", "saved cost")
LEGEND = (
    "rewritten: requests that were sent without some of their messages · input, cached: the provider's count\n"
    "untouched: the input tokens of the client's own requests, had they been sent as they came: an estimate\n"
    "saved: untouched less input; negative money: rewriting a cache that was still warm cost more than it saved"
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("savings", help="what was saved, by session, day or model")
    parser.add_argument("session", nargs="?", help="only this session: its name, or the beginning of it")
    by = ("session", "day", "model")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--by", choices=by, help="a line for each (default: session; of one session: day)")
    what.add_argument("--compare", action="store_true", help="sessions held out (setting holdout) against the others")
    parser.add_argument("--json", action="store_true", help="all of it, as one JSON object")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.compare:
        return _compare(arguments, settings)
    with open_reader(settings.db) as reader:
        only = find_session(reader, arguments.session) if arguments.session is not None else None
        sums = sum_up(Savings(settings), reader, only)
    if arguments.json:
        print(json.dumps(as_json(sums, settings), indent=2))
    elif not sums.total.requests:
        print("no requests yet: point an agent at the proxy (README, 'Pointing your agent at it')")
    else:
        _print(arguments.by or ("session" if only is None else "day"), sums, priced=bool(settings.prices))
    return 0


def _print(by: str, sums: Sums, *, priced: bool) -> None:
    match by:
        case "session":
            rows = [(row.name, part, plain(row.title)) for row, part in sums.sessions if part.requests]
        case "day":
            rows = [(name, part, "") for name, part in sums.days.items()]
        case _:
            rows = [(plain(name), part, "") for name, part in sums.models.items()]
    numbers = (*COLUMNS, *MONEY) if priced else COLUMNS
    lines = [[name, *_cells(part, priced=priced), title] for name, part, title in [*rows, ("total", sums.total, "")]]
    print(table([by, *numbers, "title" if by == "session" else ""], lines, right=numbers))
    print(f"\n{LEGEND}")
    for remark in _remarks(sums, priced=priced):
        print(remark)


def _cells(sums: Totals, *, priced: bool) -> list[str]:
    cells = [
        number(sums.requests),
        number(sums.rewritten),
        number(sums.input),
        share(sums.cached, sums.input),
        number(round(sums.untouched_input)),
        share(sums.untouched_cached, sums.untouched_input),
        number(round(sums.saved)),
        share(sums.saved, sums.untouched_input),
    ]
    if priced:
        known = sums.priced > 0
        cells += [f"{value:,.4f}" if known else "-" for value in (sums.cost, sums.untouched_cost, sums.saved_cost)]
    return cells


def _remarks(sums: Sums, *, priced: bool) -> Iterator[str]:
    """What the sums leave away, and what rewriting did besides."""
    total = sums.total
    if total.with_usage < total.requests:
        of = count(total.requests, "request")
        yield f"usage was reported for {number(total.with_usage)} of {of}: the tokens are theirs"
    if total.resent:
        yield f"refused when rewritten, and sent again as they came: {count(total.resent, 'request')}"
    if total.reasoning_removed:
        yield f"the provider removed {count(total.reasoning_removed, 'reasoning item')} whose history had changed"
    if not priced:
        yield "in tokens alone: the setting `prices` adds money (docs/configuration.md)"
    elif sums.models_without_price:
        yield f"without a price, and not in the money: {', '.join(map(plain, sums.models_without_price))}"


def _compare(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.session is not None:
        raise RecapError(f"--compare needs all sessions: leave {arguments.session!r} away")
    with open_reader(settings.db) as reader:
        parts = Savings(settings).by_session(reader)
        by_arm = tasks(reader.list_sessions(), parts, settings.prices)
    comparison = compare(by_arm, priced=bool(settings.prices), seed=settings.seed)
    if arguments.json:
        print(json.dumps(asdict(comparison), indent=2))
        return 0
    print("\n".join(_told(comparison, settings)))
    return 0


def _told(comparison: Comparison, settings: Settings) -> Iterator[str]:
    """The figures, and plainly what they cannot say."""
    held_out, treated = comparison.held_out, comparison.treated
    yield f"{count(held_out, 'session')} held out, {number(treated)} treated, with their sub-agents and side requests"
    if comparison.undrawn:
        yield f"not compared: {count(comparison.undrawn, 'session')} that began without the setting `holdout`"
    if comparison.without_usage:
        yield f"not compared: {count(comparison.without_usage, 'session')} without usage by the provider"
    if comparison.lines:
        columns = ("measure", "held out", "treated", "difference", "", f"{LEVEL:.0%} interval")
        yield ""
        yield table(columns, [_compared(line) for line in comparison.lines], right=columns[1:])
        yield ""
    if not comparison.is_enough:
        yield (
            f"too few sessions to tell a difference from chance: {TASKS_MIN} of each are needed"
            + ("" if settings.holdout else "; `holdout` is 0 now, so no more are held out")
        )
    else:
        yield "difference: treated less held out. Where its interval includes 0, these sessions show none."
    if settings.prices and not comparison.priced and comparison.lines:
        yield "no money: not every model that was used has a price (setting `prices`)"


def _compared(line: Compared) -> list[str | None]:
    def shown(value: float, sign: str = "") -> str:
        return f"{value:{sign},.4f}" if line.is_fraction else f"{value:{sign},.0f}"

    difference = line.difference
    cells: list[str | None] = [line.measure, shown(line.held_out), shown(line.treated)]
    if difference is None:
        return [*cells, None, None, None]
    relative = f"{difference.mean / line.held_out:+.0%}" if line.held_out else None
    interval = f"{shown(difference.low, '+')} to {shown(difference.high, '+')}"
    return [*cells, shown(difference.mean, "+"), relative, interval]
