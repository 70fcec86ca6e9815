"""Markdown tables, and plots as SVG and PNG. Knows no study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.lab.errors import LabError
from proxy.lab.study import INSTALL

SIZE_INCHES = (7.5, 4.2)
DPI = 110


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The first column is text, the others are numbers."""
    rule = ["---"] + ["--:"] * (len(header) - 1)
    lines = [header, rule, *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return "–" if value != value else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")


def plot_lines(
    path: Path, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str, title: str
) -> str:
    """Draw `path`.svg and .png; returns the Markdown that shows it. Series: name -> (xs, ys)."""
    figure, axes = _figure(x, y, title)
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, marker="o", markersize=3, label=name)
    return _saved(figure, path, title)


def plot_bars(path: Path, groups: Mapping[str, Mapping[str, float]], *, y: str, title: str) -> str:
    """Bars side by side: group -> series -> value."""
    figure, axes = _figure("", y, title)
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        places = [n + i * width for n in range(len(groups))]
        axes.bar(places, [group.get(name, 0.0) for group in groups.values()], width, label=name)
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(groups))], list(groups))
    return _saved(figure, path, title)


def _figure(x: str, y: str, title: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LabError(f"the lab needs tqdm and matplotlib: {INSTALL}") from error
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    return figure, axes


def _saved(figure: Any, path: Path, title: str) -> str:
    """The same numbers make the same bytes: no date, fixed ids. Words stay words, for readers and for size."""
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path.with_suffix(".svg"), metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    figure.savefig(path.with_suffix(".png"))
    return f"![{title}]({path.name}.svg)"
