"""recap eval reuse: does a signal point to what the next turn will name? (paper Observation 2, Figure 6)

One row in the results for each session: its coverage by setting, reading, signal and budget. Tables and differences are
made of these rows. With attention only transitions whose finished turn was observed count, for every signal.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import fmean, median
from typing import get_args

from proxy.lab.attention import add_attention, load_attention, missing_of, words_of
from proxy.lab.coverage import (
    BUDGETS,
    READINGS,
    SETTINGS,
    SIGNALS,
    WITH_ATTENTION,
    choices,
    coverage,
    lost,
    rankings,
    transitions,
)
from proxy.lab.errors import LabError
from proxy.lab.observed import Observed
from proxy.lab.pages import markdown_table, plot_lines
from proxy.lab.recordings import Recording
from proxy.lab.results import Results
from proxy.lab.statistics import paired_difference, session_means
from proxy.lab.study import Study, begin, command_of, provenance, remaining
from proxy.lab.units import Granularity
from proxy.settings import Settings

NAME = "reuse"
COMPARED_AT = 0.10
BASELINES = ("random", "recency", "past use + query")
TITLES = {
    "B.1": "candidates before the completed turn (paper B.1)",
    "product": "whole history (what the proxy chooses from)",
}
READ = {"code": "code-like identifiers", "any": "every identifier"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_attention(parser)
    parser.add_argument(
        "--granularity",
        choices=get_args(Granularity),
        default="block",
        help="cut plain answers by paragraphs or lines (Table 2); the proxy never does (default block)",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    granularity: Granularity = arguments.granularity
    if granularity != "block" and (arguments.model is not None or arguments.archive is not None):
        raise LabError(f"--granularity {granularity}: attention is of whole blocks; leave out --model and --archive")
    data, attention = load_attention(arguments, settings)
    about = attention.about if attention else {"granularity": granularity} if granularity != "block" else {}
    results = begin(NAME, arguments, files=dict(data.files), **about)
    items = [(f"{number} {recording.id}", recording) for number, recording in enumerate(data.recordings)]
    for item, recording in remaining(results, items, NAME):
        if attention is None:
            results.add(item, session=item, coverage=measure(recording, granularity=granularity))
            continue
        turns = len(recording.turns()) - 1  # nothing comes after the last one
        observed = attention.observe(recording, turns)
        skeletons = protected_lost(recording, observed)
        measured = measure(recording, observed)
        results.add(item, session=item, coverage=measured, lost=skeletons, turns=turns, missing=observed.missing)
    return results


def measure(
    recording: Recording, observed: Observed | None = None, granularity: Granularity = "block"
) -> dict[str, list[float]]:
    """ "setting|reading|signal|budget" -> coverage of every transition that has one."""
    found: dict[str, list[float]] = {}
    for setting in SETTINGS:
        for reading in READINGS:
            for transition in transitions(recording, setting, reading, observed, granularity):
                for name, choose in choices(transition):
                    for budget in BUDGETS:
                        value = coverage(transition, choose(budget))
                        if value is not None:
                            found.setdefault(f"{setting}|{reading}|{name}|{budget}", []).append(round(value, 6))
    return found


def protected_lost(recording: Recording, observed: Observed) -> dict[str, list[tuple[int, ...]]]:
    """Signal -> for every transition of B.1: users, users left out, latest edits, latest edits left out (paper B.3)."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for transition in transitions(recording, "B.1", "any", observed):
        for name, choose in rankings(transition):
            skeleton = lost(transition, choose, COMPARED_AT)
            if skeleton is not None:
                found.setdefault(name, []).append(astuple(skeleton))
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
        provenance(results, command_of(NAME, *words_of(results.about), *_granularity(results))),
    ]
    has_attention = "model" in results.about
    signals = (*SIGNALS, *WITH_ATTENTION) if has_attention else tuple(SIGNALS)
    if has_attention:
        parts += ["", missing_of(results), "", _EXPLAINED]
    for reading in READINGS:
        for setting in SETTINGS:
            parts += ["", f"### {TITLES[setting]}, {READ[reading]}", "", _table(results, setting, reading, signals)]
            curves = {name: _curve(results, setting, reading, name) for name in signals}
            path = folder / f"{NAME}-{setting.replace('.', '').lower()}-{reading}"
            title = f"{setting}, {READ[reading]}"
            parts += ["", plot_lines(path, curves, x="share of the history sent", y="coverage", title=title)]
    if has_attention:
        parts += ["", "### Protected blocks that a choice leaves out (paper B.3, Figure 6 right)", "", _losses(results)]
    return "\n".join(parts) + "\n"


def _granularity(results: Results) -> tuple[str, ...]:
    granularity = results.about.get("granularity")
    return ("--granularity", granularity) if granularity else ()


_EXPLAINED = (
    "`attention`: a token's, in the turn that was just completed; `mass`: a block's. `recap (RULE)`: the score of Eq. "
    "3 by the rule packs ten elevenths of the budget, one hop of expansion may use the rest; nothing is protected. "
    "Transitions without an observation are left out for every signal."
)


def _losses(results: Results) -> str:
    rows = []
    for name in _with_losses(results):
        members = [counts for row in results.rows for counts in row["lost"].get(name, ())]
        users, users_lost, edits, edits_lost = map(sum, zip(*members, strict=True))
        rows.append(
            [
                name,
                _share(users_lost, users),
                _share(edits_lost, edits),
                _share(sum(one[1] + one[3] > 0 for one in members), len(members)),
            ]
        )
    text = (
        f"By a budget of {COMPARED_AT:.0%} of the history, or what the protected take if that is more: all of them "
        "would fit. In the paper scores alone leave out 37 % and 28 %, and some in every transition. What the proxy "
        "sends has them all."
    )
    header = ["signal", "user messages left out", "latest edits left out", "transitions that lose any"]
    return f"{text}\n\n{markdown_table(header, rows)}"


def _with_losses(results: Results) -> list[str]:
    """Signals that have counted protected blocks, in the order of their tables."""
    return list(dict.fromkeys(name for row in results.rows for name in row["lost"]))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%} ({part}/{whole})" if whole else "–"


def _curve(results: Results, setting: str, reading: str, signal: str) -> tuple[list[float], list[float]]:
    means = [session_means(values_of(results, setting, reading, signal, budget)) for budget in BUDGETS]
    return list(BUDGETS), [fmean(mean.values()) if mean else float("nan") for mean in means]


def _table(results: Results, setting: str, reading: str, signals: Sequence[str]) -> str:
    rows = []
    by_signal = {name: values_of(results, setting, reading, name, COMPARED_AT) for name in signals}
    for name in signals:
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


STUDY = Study(
    NAME, "does a signal point to what the next turn names? (Observation 2, Figure 6)", add_arguments, run, render
)
