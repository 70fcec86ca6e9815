"""What `recap eval simulate` writes of its rows: tables for Figures 5 and 8, paired by session, and plots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean

from graphstore.selectors import SelectorName
from proxy.lab.pages import markdown_table, plot_bars, plot_lines
from proxy.lab.results import Results, Row
from proxy.lab.statistics import paired_difference
from proxy.lab.study import provenance

FULL: SelectorName = "full"  # what the others are compared with
ORIGINS = ("kept", "revived", "new")
SPANS = ((2, 2), (3, 4), (5, 8), (9, None))  # turns that are shown together
TENTHS = 10
ABOUT = (
    "Recorded sessions through the proxy's own session logic, on a virtual clock, against a simulated provider cache "
    "(paper §5.5, Figures 5 and 8). Agent and user say what was recorded. Tokens are those of a request; like the rest "
    "they are means over sessions, but `selections`, which counts those of all. The price of a session is in thousand "
    "uncached input tokens. TTFT is a model (uncached tokens / prefill rate), not a measurement. Differences: mean "
    "over sessions, 95 % interval of a paired bootstrap over sessions; of tokens and prices as shares of the session's "
    "own under `full`."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """The rows of one selector under one distribution of pauses, by session."""

    rows: Mapping[str, Row]
    about: Row

    def by_session(self, value: Callable[[Row], float]) -> dict[str, list[float]]:
        return {session: [value(row)] for session, row in self.rows.items()}

    def mean(self, value: Callable[[Row], float]) -> float:
        return fmean(value(row) for row in self.rows.values()) if self.rows else nan

    def seconds(self, pause: str) -> float:
        """Estimated time to the first token after a pause: uncached tokens at the prefill rate."""
        every = [tokens for row in self.rows.values() for tokens in row["after"][pause]]
        return fmean(every) / self.about["prefill"] if every else nan

    def price(self, row: Row) -> float:
        """In uncached input tokens."""
        fresh = row["served"] - row["cached"]
        return float(fresh + self.about["price_cached"] * row["cached"] + self.about["price_output"] * row["output"])


def _served(row: Row) -> float:
    return float(row["served"] / row["requests"])


def _cached(row: Row) -> float:
    return float(row["cached"] / row["requests"])


def _uncached(row: Row) -> float:
    return _served(row) - _cached(row)


def _hits(row: Row) -> float:
    return float(row["cached"] / row["served"])


def page_of(results: Results, folder: Path, command: str) -> str:
    """Markdown; the plots go to `folder`."""
    about = results.about
    cells = {
        (pauses, selector): Cell(
            {row["session"]: row for row in results.rows if (row["pauses"], row["selector"]) == (pauses, selector)},
            about,
        )
        for pauses in about["pauses"]
        for selector in about["selectors"]
    }
    sessions, refused = {row["session"] for row in results.rows}, sum(row["refused"] for row in results.rows)
    parts = [
        "## Sessions through the proxy",
        ABOUT,
        provenance(results, command),
        "",
        f"{len(sessions)} sessions, {refused} rewrites refused by the guard or for want of a saved decision.",
    ]
    for pauses in about["pauses"]:
        own = {selector: cells[pauses, selector] for selector in about["selectors"]}
        parts += ["", f"### {pauses}", "", _said_of(own[FULL]), "", _table(own), "", _differences(own, about["seed"])]
    if all("read_again" in row for row in results.rows):
        parts += ["", "### What would be read again", "", _read_again(cells, about)]
    bars = {p: {s: cells[p, s].mean(_served) for s in about["selectors"]} for p in about["pauses"]}
    parts += ["", plot_bars(folder / "simulate-served", bars, y="tokens served a request", title="served tokens")]
    first = about["pauses"][0]
    choosing = {s: cells[first, s] for s in about["selectors"] if s != FULL}
    parts += ["", f"### What the history gives ({first})", "", _origins(choosing), "", _places(choosing)]
    if "recap" in choosing:
        path, title = folder / "simulate-origins", f"recap, {first}"
        curves = _curves(choosing["recap"])
        parts += ["", plot_lines(path, curves, x="turn", y="blocks, mean of its selections", title=title)]
    return "\n".join(parts) + "\n"


def _said_of(cell: Cell) -> str:
    cold, warm = (sum(len(row["after"][pause]) for row in cell.rows.values()) for pause in ("cold", "warm"))
    chosen = sum(bool(row["changes"]) for row in cell.rows.values())
    return (
        f"{cold + warm} pauses of users, {cold} of them longer than the cache lives. {chosen} sessions had a history "
        "that was long enough to be selected from."
    )


def _table(cells: Mapping[str, Cell]) -> str:
    header = [
        "selector",
        "selections",
        "served",
        "uncached",
        "cached",
        "hit rate",
        "price",
        "TTFT cold s",
        "TTFT warm s",
    ]
    return markdown_table(
        header,
        [
            [
                selector,
                sum(len(row["changes"]) for row in cell.rows.values()),
                *(round(cell.mean(value)) for value in (_served, _uncached, _cached)),
                cell.mean(_hits),
                f"{cell.mean(cell.price) / 1000:.1f}",
                cell.seconds("cold"),
                cell.seconds("warm"),
            ]
            for selector, cell in cells.items()
        ],
    )


def _differences(cells: Mapping[str, Cell], seed: int) -> str:
    full = cells[FULL]

    def share(cell: Cell, value: Callable[[Row], float]) -> str:
        whole = {session: value(row) for session, row in full.rows.items()}
        left = {s: [value(row) / whole[s]] for s, row in cell.rows.items() if whole.get(s)}
        return str(paired_difference(left, dict.fromkeys(whole, [1.0]), seed=seed))

    return markdown_table(
        ["minus full", "served", "uncached", "hit rate", "price"],
        [
            [
                selector,
                share(cell, _served),
                share(cell, _uncached),
                str(paired_difference(cell.by_session(_hits), full.by_session(_hits), seed=seed)),
                share(cell, cell.price),
            ]
            for selector, cell in cells.items()
            if selector != FULL
        ],
    )


def _read_again(cells: Mapping[tuple[str, str], Cell], about: Row) -> str:
    text = (
        "An estimate, for nobody read again here: tokens a session, each message counted once a selection. For every "
        "code-like identifier that the agent named and had not been sent, the latest left-out message that has it."
    )
    rows = [
        [selector, *(round(cells[pauses, selector].mean(lambda row: row["read_again"])) for pauses in about["pauses"])]
        for selector in about["selectors"]
        if selector != FULL
    ]
    return f"{text}\n\n{markdown_table(['read again', *about['pauses']], rows)}"


def _origins(cells: Mapping[str, Cell]) -> str:
    """Figure 8b. The first selection of a session has no former one: what it keeps was sent before."""
    rows = []
    for selector, cell in cells.items():
        for first, last in SPANS:
            found = [
                c for row in cell.rows.values() for c in row["changes"] if first <= c["turn"] <= (last or c["turn"])
            ]
            chosen = sum(change[name] for change in found for name in ORIGINS)
            if chosen:
                shares = [sum(change[name] for change in found) / chosen for name in ORIGINS]
                left = sum(change["left out"] for change in found)
                turns = f"turn {first}" if first == last else f"turns {first}–{last or ''}"
                rows.append([f"{selector}, {turns}", len(found), *shares, left / (left + chosen)])
        later = [change for row in cell.rows.values() for change in row["changes"][1:]]
        revive = sum(change["revived"] > 0 for change in later)
        rows.append([f"{selector}: selections after another that revive a block", f"{revive} of {len(later)}"])
    header = ["of the blocks sent", "selections", *ORIGINS, "left out, of all"]
    return markdown_table(header, [[*row, *[""] * (len(header) - len(row))] for row in rows])


def _places(cells: Mapping[str, Cell]) -> str:
    """Figure 8a: blocks sent in each tenth of the history, as multiples of an even spread."""
    rows = []
    for selector, cell in cells.items():
        tenths = [sum(row["tenths"][i] for row in cell.rows.values()) for i in range(TENTHS)]
        rows.append([selector, *(TENTHS * count / sum(tenths) if sum(tenths) else None for count in tenths)])
    return markdown_table(["tenth of the history, even = 1", *map(str, range(1, TENTHS + 1))], rows)


def _curves(cell: Cell) -> dict[str, tuple[list[int], list[float]]]:
    changes = [change for row in cell.rows.values() for change in row["changes"]]
    turns = sorted({change["turn"] for change in changes})
    return {
        name: (turns, [fmean(change[name] for change in changes if change["turn"] == turn) for turn in turns])
        for name in (*ORIGINS, "left out")
    }
