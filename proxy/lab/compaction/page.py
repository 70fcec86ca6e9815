"""The page of the compaction tests: broken promises first, then how each selector did, then what it lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from graphstore.selectors import SelectorName
from proxy.lab.compaction.differential import TRIALS
from proxy.lab.compaction.horizon import TURNS
from proxy.lab.compaction.needle import ASKS
from proxy.lab.pages import markdown_table, plot_bars
from proxy.lab.results import Results, Row
from proxy.lab.study import command_of, provenance

NAME = "compaction"
TITLES = {
    "needle": "Facts still sent (10.20.1)",
    "constraints": "Constraints retained (10.19.2)",
    "recoverability": "Recoverability (10.19.5)",
    "adversarial": "Hostile and confusing results (10.20.4)",
    "horizon": "Long horizon (10.20.5)",
    "replay": "Replay after a kill (10.20.2)",
    "differential": "A model, with everything and as sent (10.20.3)",
}
LOST_SHOWN = 3  # sentences of a selector in a family


def render(results: Results, folder: Path) -> str:
    about = results.about
    parts = ["## Compaction tests", provenance(results, _command(about))]
    parts += ["", "### Promises, whatever the selector", "", _promises(results.rows)]
    for family, title in TITLES.items():
        rows = [row for row in results.rows if row["family"] == family and row["trials"]]
        if not rows:
            continue
        parts += ["", f"### {title}", "", _passed(rows, about["selectors"]), ""]
        if family == "needle":
            parts += [_plot(rows, folder), ""]
        if family == "horizon":
            parts += [_horizon(rows), ""]
        if family == "differential":
            parts += [_answers(rows), ""]
        parts += _lost(rows)
    if "base_url" not in about:
        parts += ["", f"### {TITLES['differential']}", "", "Not measured: no model was named."]
    return "\n".join(parts) + "\n"


def _promises(rows: list[Row]) -> str:
    table, sentences = [], []
    for family, title in TITLES.items():
        own = [row for row in rows if row["family"] == family]
        table += [[title, len(own), _sum(own, "promised"), _sum(own, "broken_count")]] if own else []
        sentences += [f"- **{row['case']}, {row['selector']}**: {text}" for row in own for text in row["broken"]]
    page = markdown_table(["tests", "runs", "checked", "broken"], table)
    return "\n".join([page, "", *(sentences or ["No promise was broken."])])


def _passed(rows: list[Row], selectors: list[str]) -> str:
    """Passed of trials: a row a case, a column a selector."""
    cells = {(row["case"], row["selector"]): f"{row['passed']}/{row['trials']}" for row in rows}
    once = {row["case"] for row in rows if row["once"]}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    table = [[case, *(cells.get((case, name), "" if case in once else "–") for name in selectors)] for case in cases]
    shares = [_share([row for row in rows if row["selector"] == name and not row["once"]]) for name in selectors]
    return markdown_table(["passed", *selectors], [*table, ["history sent", *shares]])


def _share(rows: list[Row]) -> str:
    sent, client = (sum(row["chars"][i] for row in rows) for i in (0, 1))
    return f"{sent / client:.0%}" if client else "–"


def _horizon(rows: list[Row]) -> str:
    table = [[row["selector"], row["compactions"], row["archive_ratio"]] for row in rows]
    return markdown_table(["selector", "compactions", "bytes of the archive for each of the messages"], table)


def _answers(rows: list[Row]) -> str:
    table = []
    for name, own in _by_selector(rows).items():
        acted = [row for row in own if "same_line" in row]
        same, asked = sum(row["same_line"] for row in acted), sum(row["trials"] for row in acted)
        counts = (_counted(own, key) for key in ("tokens_sent", "tokens_full", "cut"))
        table.append([name, f"{same}/{asked}", *counts])
    header = ["selector", "same line", "prompt tokens", "of the baseline", "prompts that the server cut"]
    return markdown_table(header, table)


def _counted(rows: list[Row], key: str) -> int | None:
    """None: the provider counted nothing."""
    counts = [row[key] for row in rows if key in row]
    return sum(counts) if counts else None


def _plot(rows: list[Row], folder: Path) -> str:
    groups = {}
    for ask in ASKS:
        asked = _by_selector([row for row in rows if row["case"].endswith(f" {ask}")])
        groups[ask] = {name: _sum(asked[name], "passed") / _sum(asked[name], "trials") for name in asked}
    return plot_bars(folder / f"{NAME}-needles", groups, y="share of facts still sent", title=TITLES["needle"])


def _lost(rows: list[Row]) -> Iterator[str]:
    """A few of what failed; the results have more."""
    for name, own in _by_selector(rows).items():
        count = _sum(own, "trials") - _sum(own, "passed")
        firsts = list(dict.fromkeys(row["failures"][0] for row in own if row["failures"]))[:LOST_SHOWN]
        if count:
            yield f"- {name} failed {count:,} of {_sum(own, 'trials'):,}, among them: {'; '.join(firsts)}"


def _sum(rows: list[Row], key: str) -> int:
    return sum(row[key] for row in rows)


def _by_selector(rows: list[Row]) -> dict[str, list[Row]]:
    names = dict.fromkeys(row["selector"] for row in rows)
    return {name: [row for row in rows if row["selector"] == name] for name in names}


def _command(about: Row) -> str:
    """What was asked for, as on the command line."""
    words: list[object] = [
        *(about["files"] or ()),
        *(word for name in about["archive"] or () for word in ("--archive", name)),
    ]
    words += [word for name in about["sessions"] or () for word in ("--session", name)]
    if about["selectors"] != list(get_args(SelectorName)):
        words += [word for name in about["selectors"] for word in ("--selector", name)]
    if about["families"] != [name for name in TITLES if name != "differential" or "base_url" in about]:
        words += [word for name in about["families"] for word in ("--family", name)]
    for key, default in (("turns", TURNS), ("seed", 0), ("trials", TRIALS), ("temperature", 0.0)):
        words += [f"--{key}", about[key]] if about.get(key, default) != default else []
    for key in ("base_url", "model"):
        words += [f"--{key.replace('_', '-')}", about[key]] if key in about else []
    return command_of(NAME, *words)
