"""recap eval concentration: on how little of the history does attention lie? (paper Observation 1, Figures 2, 6 left)

A finished turn's attention over the blocks that stood before the turn, normalised to that history. Blocks are sorted by
attention a token, the densest first; the curve says which share of the attention so large a share of the history has,
in tokens and in blocks. Between two blocks it is straight, as if a block could be cut. Uniform attention is the
diagonal of tokens. One row in the results for each session; figures are means over its turns, then over sessions.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from proxy.lab.attention import NEEDED, Observed, add_attention, load_attention, words_of
from proxy.lab.coverage import pack
from proxy.lab.errors import LabError
from proxy.lab.pages import markdown_table, plot_lines
from proxy.lab.recordings import Recording
from proxy.lab.results import Results, Row
from proxy.lab.reuse import unread_of
from proxy.lab.statistics import mean_of_sessions
from proxy.lab.study import Study, begin, command_of, provenance, remaining
from proxy.settings import Settings

NAME = "concentration"
BLOCKS_MIN = 5  # fewer make no curve
GRID = tuple(step / 20 for step in range(21))
LEVELS = (0.5, 0.8, 0.9)  # shares of the attention
BUDGET = 0.10  # of the history's tokens (paper B.1)

Points = Sequence[tuple[float, float]]  # ascending, from (0, 0) to (1, 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A block of the history. `mass` is the attention that it received, in any unit; `tokens` is above 0."""

    tokens: int
    mass: float

    @property
    def density(self) -> float:
        return self.mass / self.tokens


def curve(parts: Sequence[Part], *, by_tokens: bool) -> Points:
    """Share of the history -> share of the attention, the densest first. Needs some attention."""
    ordered = sorted(parts, key=lambda part: -part.density)
    sizes = [float(part.tokens) if by_tokens else 1.0 for part in ordered]
    whole, mass = sum(sizes), sum(part.mass for part in ordered)
    xs, ys = accumulate(sizes), accumulate(part.mass for part in ordered)
    return [(0.0, 0.0), *((x / whole, y / mass) for x, y in zip(xs, ys, strict=True))]


def held(points: Points, share: float) -> float:
    """The share of the attention that this share of the history has."""
    return _between(points, share)


def needed(points: Points, level: float) -> float:
    """The least share of the history that has this share of the attention."""
    return _between([(y, x) for x, y in points], level)


def _between(points: Points, x: float) -> float:
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
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
        results.add(item, session=item, turns=turns, unread=observed.unread, curves=list(measure(recording, observed)))
    return results


def history_of(recording: Recording, observed: Observed, turn: int) -> list[Part]:
    """The blocks that stood before this turn, as far as they were observed."""
    start, _ = recording.turns()[turn - 1]
    readings = observed.turns[turn].replay.blocks
    before = (block for block in readings if recording.start_of(recording.blocks[block.ordinal]) < start)
    return [Part(block.tokens, block.mass) for block in before if block.tokens]


def measure(recording: Recording, observed: Observed) -> Iterable[Row]:
    """One row for each observed turn with a history that is long enough."""
    for turn in sorted(observed.turns):
        parts = history_of(recording, observed, turn)
        if len(parts) < BLOCKS_MIN or not any(part.mass for part in parts):
            continue
        tokens, blocks = curve(parts, by_tokens=True), curve(parts, by_tokens=False)
        yield {
            "turn": turn,
            "blocks": len(parts),
            "tokens": sum(part.tokens for part in parts),
            "by_tokens": [round(held(tokens, x), 6) for x in GRID],
            "by_blocks": [round(held(blocks, x), 6) for x in GRID],
            "tokens_needed": [round(needed(tokens, level), 6) for level in LEVELS],
            "blocks_needed": [round(needed(blocks, level), 6) for level in LEVELS],
            "packed": round(packed(parts, BUDGET), 6),
        }


def render(results: Results, folder: Path) -> str:
    rows = [row for row in results.rows if row["curves"]]
    turns = [one for row in rows for one in row["curves"]]
    parts = [
        "## Concentration of attention",
        "Share of a finished turn's attention over the share of the history before it, the densest blocks first (paper "
        "Observation 1, Figure 2 left). Means over turns, then sessions, with the 95 % interval of a bootstrap over "
        "sessions.",
        provenance(results, command_of(NAME, *words_of(results.about))),
        "",
        f"{unread_of(results)} Histories of fewer than {BLOCKS_MIN} blocks do not count.",
        "",
    ]
    if not rows:
        return "\n".join([*parts, "No turn is left."]) + "\n"
    sizes = f"{min(one['tokens'] for one in turns):,} to {max(one['tokens'] for one in turns):,} tokens"
    parts += [f"{len(turns)} turns of {len(rows)} sessions; histories of {sizes}.", "", _table(results, rows), ""]
    axes = {"tokens": "by_tokens", "blocks": "by_blocks"}
    curves = {f"by {axis}": (GRID, [_mean(rows, field, i) for i in range(len(GRID))]) for axis, field in axes.items()}
    curves["uniform"] = (GRID, GRID)
    title = "Attention on the densest blocks"
    parts.append(plot_lines(folder / NAME, curves, x="share of the history", y="share of the attention", title=title))
    return "\n".join(parts) + "\n"


def _mean(rows: Sequence[Row], field: str, index: int) -> float:
    return fmean(fmean(one[field][index] for one in row["curves"]) for row in rows)


def _table(results: Results, rows: Sequence[Row]) -> str:
    def estimate(values: dict[str, list[float]]) -> str:
        found = mean_of_sessions(values, seed=results.about["seed"])
        return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"

    lines = [
        [
            f"{level:.0%} of the attention",
            *(
                estimate({row["session"]: [one[field][i] for one in row["curves"]] for row in rows})
                for field in ("tokens_needed", "blocks_needed")
            ),
        ]
        for i, level in enumerate(LEVELS)
    ]
    held_by = estimate({row["session"]: [one["packed"] for one in row["curves"]] for row in rows})
    said = f"Whole blocks packed under {BUDGET:.0%} of the tokens hold {held_by} of the attention (paper: 0.65)."
    return f"{markdown_table(['to hold', 'share of tokens', 'share of blocks'], lines)}\n\n{said}"


STUDY = Study(
    NAME, "on how little of the history does attention lie? (Observation 1, Figure 2 left)", add_attention, run, render
)
