"""recap eval concentration: on how little of the history does attention lie? (paper Observation 1, Figures 2, 6 left)

A finished turn's attention over the blocks that stood before the turn, normalised to that history. Blocks are sorted by
attention a token, the densest first; the curve says which share of the attention so large a share of the history's
tokens has. Between two blocks it is straight, as if a block could be cut. Uniform attention is the diagonal.

All positions of the turn ask, as for importance; in the paper's Figure 2 those of the arriving request do. One row in
the results for each session; figures are means over its turns, then over sessions.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean

from proxy.lab.attention import NEEDED, add_attention, load_attention, missing_of, words_of
from proxy.lab.coverage import BUDGETS, pack
from proxy.lab.errors import LabError
from proxy.lab.observed import Observed
from proxy.lab.pages import markdown_table, plot_lines
from proxy.lab.recordings import Recording
from proxy.lab.results import Results, Row
from proxy.lab.statistics import mean_of_sessions
from proxy.lab.study import Study, begin, command_of, provenance, remaining
from proxy.settings import Settings

NAME = "concentration"
BLOCKS_MIN = 5  # fewer make no curve
GRID = tuple(step / 20 for step in range(21))
LEVELS = (0.5, 0.8, 0.9)  # shares of the attention
PAPER = {0.10: 0.65}  # of whole blocks, final checkpoint of one session (B.1)

Points = Sequence[tuple[float, float]]  # ascending, from (0, 0) to (1, 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A block of the history. `mass` is the attention that it received, in any unit; `tokens` is above 0."""

    tokens: int
    mass: float

    @property
    def density(self) -> float:
        return self.mass / self.tokens


def curve(parts: Sequence[Part]) -> Points:
    """Share of the tokens -> share of the attention, the densest first. Needs some attention."""
    ordered = sorted(parts, key=lambda part: -part.density)
    tokens, mass = sum(part.tokens for part in parts), sum(part.mass for part in parts)
    xs, ys = accumulate(part.tokens for part in ordered), accumulate(part.mass for part in ordered)
    return [(0.0, 0.0), *((x / tokens, y / mass) for x, y in zip(xs, ys, strict=True))]


def held(points: Points, share: float) -> float:
    """The share of the attention that this share of the tokens has."""
    return _between(points, share)


def needed(points: Points, level: float) -> float:
    """The least share of the tokens that has this share of the attention."""
    return _between([(y, x) for x, y in points], level)


def _between(points: Points, x: float) -> float:
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left) if right > left else low
    return points[-1][1]


def packed(parts: Sequence[Part], budget: float) -> float:
    """Share of the attention on whole blocks, packed by density under a share of the tokens (paper B.1)."""
    chosen = pack([part.density for part in parts], [part.tokens for part in parts], budget)
    return sum(parts[i].mass for i in chosen) / sum(part.mass for part in parts)


# -- the study --------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    data, attention = load_attention(arguments, settings)
    if attention is None:
        raise LabError(NEEDED)
    results = begin(NAME, arguments, files=dict(data.files), **attention.about)
    items = [(f"{number} {recording.id}", recording) for number, recording in enumerate(data.recordings)]
    for item, recording in remaining(results, items, NAME):
        turns = len(recording.turns())
        observed = attention.observe(recording, turns)
        curves = list(measure(recording, observed))
        results.add(item, session=item, turns=turns, missing=observed.missing, curves=curves)
    return results


def history_of(recording: Recording, observed: Observed, turn: int) -> list[Part]:
    """The blocks that stood before this turn, as far as they were observed."""
    start, _ = recording.turns()[turn - 1]
    readings = observed.turns[turn].replay.blocks
    before = (block for block in readings if recording.start_of(recording.blocks[block.ordinal]) < start)
    return [Part(block.tokens, block.mass) for block in before if block.tokens]


def measure(recording: Recording, observed: Observed) -> Iterator[Row]:
    """One row for each observed turn with a history that is long enough."""
    for turn in sorted(observed.turns):
        parts = history_of(recording, observed, turn)
        if len(parts) < BLOCKS_MIN or not any(part.mass for part in parts):
            continue
        points = curve(parts)
        yield {
            "turn": turn,
            "blocks": len(parts),
            "tokens": sum(part.tokens for part in parts),
            "held": [round(held(points, share), 6) for share in GRID],
            "needed": [round(needed(points, level), 6) for level in LEVELS],
            "packed": [round(packed(parts, budget), 6) for budget in BUDGETS],
        }


# -- the page ---------------------------------------------------------------------------------------------------------


def render(results: Results, folder: Path) -> str:
    rows = {row["session"]: row["curves"] for row in results.rows if row["curves"]}
    turns = [one for curves in rows.values() for one in curves]
    parts = [
        "## Concentration of attention",
        "Share of a finished turn's attention on a share of the history before it, the densest blocks first (paper "
        "Observation 1, Figure 6 left). Means over turns, then sessions, with the 95 % interval of a bootstrap over "
        "sessions.",
        provenance(results, command_of(NAME, *words_of(results.about))),
        "",
        f"{missing_of(results)} Histories of fewer than {BLOCKS_MIN} blocks do not count.",
        "",
    ]
    if not rows:
        return "\n".join([*parts, "No turn is left."]) + "\n"
    tokens, blocks = ([one[name] for one in turns] for name in ("tokens", "blocks"))
    parts += [
        f"{len(turns)} turns of {len(rows)} sessions; histories of {min(tokens):,} to {max(tokens):,} tokens in "
        f"{min(blocks)} to {max(blocks)} blocks.",
        "",
        *_tables(rows, results.about["seed"]),
        "",
    ]
    means = [_mean(rows, "held", i) for i in range(len(GRID))]
    series = {"observed": (GRID, means), "uniform": (GRID, GRID)}
    title = "Attention on the densest blocks"
    parts.append(plot_lines(folder / NAME, series, x="share of the tokens", y="share of the attention", title=title))
    return "\n".join(parts) + "\n"


def _mean(rows: Mapping[str, Sequence[Row]], field: str, index: int) -> float:
    return fmean(fmean(one[field][index] for one in curves) for curves in rows.values())


def _tables(rows: Mapping[str, Sequence[Row]], seed: int) -> Iterator[str]:
    def estimate(field: str, index: int) -> str:
        values = {session: [one[field][index] for one in curves] for session, curves in rows.items()}
        found = mean_of_sessions(values, seed=seed)
        return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"

    yield markdown_table(
        ["whole blocks under a share of the tokens", "their share of the attention", "paper, one session"],
        [[f"{budget:.0%}", estimate("packed", i), PAPER.get(budget)] for i, budget in enumerate(BUDGETS)],
    )
    yield ""
    yield markdown_table(
        ["share of the attention", "least share of the tokens that has it"],
        [[f"{level:.0%}", estimate("needed", i)] for i, level in enumerate(LEVELS)],
    )


STUDY = Study(
    NAME, "on how little of the history does attention lie? (Observation 1, Figure 6 left)", add_attention, run, render
)
