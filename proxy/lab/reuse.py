"""recap eval reuse: does a signal point to what the next turn will name? (paper Observation 2, Figure 6)

One row in the results for each session: its coverage by setting, reading, signal and budget. Tables and differences are
made of these rows.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median

from proxy.lab.coverage import BUDGETS, READINGS, SETTINGS, SIGNALS, coverage, pack, transitions
from proxy.lab.pages import markdown_table, plot_lines
from proxy.lab.recordings import Recording
from proxy.lab.results import Results
from proxy.lab.statistics import paired_difference, session_means
from proxy.lab.study import Study, add_data, begin, command_of, load_data, provenance, remaining
from proxy.settings import Settings

NAME = "reuse"
COMPARED_AT = 0.10
BASELINES = ("random", "recency", "past use + query")
TITLES = {
    "B.1": "candidates before the completed turn (paper B.1)",
    "product": "whole history (what the proxy chooses from)",
}
READ = {"code": "code-like identifiers", "any": "every identifier"}


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    data = load_data(arguments)
    results = begin(NAME, arguments, files=dict(data.files))
    items = [(f"{number} {recording.id}", recording) for number, recording in enumerate(data.recordings)]
    for item, recording in remaining(results, items, NAME):
        results.add(item, session=item, coverage=measure(recording))
    return results


def measure(recording: Recording) -> dict[str, list[float]]:
    """ "setting|reading|signal|budget" -> coverage of every transition that has one."""
    found: dict[str, list[float]] = {}
    for setting in SETTINGS:
        for reading in READINGS:
            for transition in transitions(recording, setting, reading):
                for name, signal in SIGNALS.items():
                    scores = signal(transition)
                    for budget in BUDGETS:
                        value = coverage(transition, pack(scores, transition.costs, budget))
                        if value is not None:
                            found.setdefault(f"{setting}|{reading}|{name}|{budget}", []).append(round(value, 6))
    return found


def values_of(results: Results, setting: str, reading: str, signal: str, budget: float) -> dict[str, list[float]]:
    """Session -> coverage of its transitions."""
    key = f"{setting}|{reading}|{signal}|{budget}"
    return {row["session"]: row["coverage"][key] for row in results.rows if row["coverage"].get(key)}


def render(results: Results, folder: Path) -> str:
    parts = [
        "## Reuse across turns",
        "Coverage of the identifiers that the next turn names, by the blocks that a signal packs under a budget "
        "(paper B.1, Figure 6). Differences at 10 %: mean over sessions, 95 % interval of a paired bootstrap over "
        "sessions (10,000 resamples), not adjusted for many looks.",
        provenance(results, command_of(NAME, *results.about["files"])),
    ]
    for reading in READINGS:
        for setting in SETTINGS:
            parts += ["", f"### {TITLES[setting]}, {READ[reading]}", "", _table(results, setting, reading)]
            curves = {name: _curve(results, setting, reading, name) for name in SIGNALS}
            path = folder / f"{NAME}-{setting.replace('.', '').lower()}-{reading}"
            title = f"{setting}, {READ[reading]}"
            parts += ["", plot_lines(path, curves, x="share of the history sent", y="coverage", title=title)]
    return "\n".join(parts) + "\n"


def _curve(results: Results, setting: str, reading: str, signal: str) -> tuple[list[float], list[float]]:
    means = [session_means(values_of(results, setting, reading, signal, budget)) for budget in BUDGETS]
    return list(BUDGETS), [fmean(mean.values()) if mean else float("nan") for mean in means]


def _table(results: Results, setting: str, reading: str) -> str:
    rows = []
    by_signal = {name: values_of(results, setting, reading, name, COMPARED_AT) for name in SIGNALS}
    for name in SIGNALS:
        per_budget = [values_of(results, setting, reading, name, budget) for budget in BUDGETS]
        every = [[value for members in values.values() for value in members] for values in per_budget]
        medians = " / ".join(f"{median(values):.3f}" if values else "–" for values in every)
        means = " / ".join(f"{fmean(session_means(v).values()):.3f}" if v else "–" for v in per_budget)
        rows.append([name, medians, means, *(_against(by_signal, name, other, results) for other in BASELINES)])
    sessions, count = len(by_signal["random"]), sum(map(len, by_signal["random"].values()))
    share = " / ".join(f"{budget:.0%}" for budget in BUDGETS).replace("%", "").strip()
    header = ["signal", f"median {share} %", f"mean of sessions {share} %", *(f"minus {other}" for other in BASELINES)]
    return f"{count} transitions, {sessions} sessions.\n\n" + markdown_table(header, rows)


def _against(values: Mapping[str, dict[str, list[float]]], name: str, other: str, results: Results) -> str:
    if name == other:
        return ""
    return str(paired_difference(values[name], values[other], seed=results.about["seed"]))


STUDY = Study(NAME, "does a signal point to what the next turn names? (Observation 2, Figure 6)", add_data, run, render)
