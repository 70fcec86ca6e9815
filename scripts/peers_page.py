"""The measured parts of docs/benchmarks.md, made of a run's rows: tables, plots, goals, the profile.

What failed says why in its place. An added time is a quantile of a way's times less the same quantile of going direct.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench_rig import quantiles
from peers import DIRECT, WAYS

from proxy.lab.document import refill_between
from proxy.lab.pages import markdown_table, plot_bars
from proxy.lab.results import Results, Row

BEGIN = re.compile(r"^<!-- make bench-peers: (?P<part>[a-z]+) -->$")
IMAGES = Path("img/bench")
OURS = ("ours, off", "ours, warm", "ours, weighed", "ours, cold")
GOALS_MS = {"json p50": 5, "json p99": 15, "sse p50": 5, "cpu": 5}
SHARE, MEMORY_MB, GROWTH = 0.5, 150, 2
SELECT_MS = {132: 1, 10_000: 25}
UPDATE_MS, GRAPH_BYTES = 2, 12


@dataclass(frozen=True)
class Found:
    """A run's rows, asked by what they say."""

    rows: list[Row]

    @cached_property
    def why(self) -> dict[str, str]:
        """Why a way was not measured at all, or not all of it."""
        ran = {row["way"] for row in self.rows if "json_ms" in row}  # absent when the run began, not when it went on
        failed = (row for row in self.rows if "why" in row and not row["item"].startswith("profile "))
        return {row["way"]: row["why"] for row in failed if row["way"] not in ran or "absent" not in row["item"]}

    def times_ms(self, body: str, way: str, kind: str) -> list[float]:
        return [x for row in self._of(body=body, way=way) for x in row.get(kind, ())]

    def quantiles(self, body: str, way: str, kind: str) -> tuple[float, float] | None:
        """p50 and p99 in milliseconds."""
        times = self.times_ms(body, way, kind)
        return quantiles([ms / 1000 for ms in times]) if len(times) > 1 else None

    def added(self, body: str, way: str, kind: str) -> tuple[float, float] | None:
        own, direct = self.quantiles(body, way, kind), self.quantiles(body, DIRECT, kind)
        return (own[0] - direct[0], own[1] - direct[1]) if own and direct else None

    def cpu_ms(self, body: str, way: str) -> float | None:
        return _mean(row["cpu_ms"] for row in self._of(body=body, way=way) if "cpu_ms" in row)

    def per_s(self, think_ms: int, way: str) -> float | None:
        return _mean(row["per_s"] for row in self._of(think_ms=think_ms, way=way) if "per_s" in row)

    def share(self, think_ms: int, way: str) -> float | None:
        own, direct = self.per_s(think_ms, way), self.per_s(think_ms, DIRECT)
        return own / direct if own and direct else None

    def memory_mb(self, way: str) -> float | None:
        return _mean(row["mb"] for row in self._of(way=way) if "mb" in row)

    def named(self, item: str) -> Row | None:
        return next((row for row in self.rows if row["item"] == item), None)

    def _of(self, **about: object) -> Iterable[Row]:
        return (row for row in self.rows if all(row.get(key) == value for key, value in about.items()))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _pair(values: tuple[float, float] | None) -> str:
    return "–" if values is None else f"{values[0]:.1f} / {values[1]:.1f}"


def write_into(document: Path, results: Results) -> None:
    """Make the marked parts of the document, and the plots beside it. Raises `LabError`: the marks do not fit."""
    parts = parts_of(results, document.parent / IMAGES)
    document.write_text(refill_between(document.read_text(), BEGIN, lambda mark, old: parts.get(mark["part"], old)))


def parts_of(results: Results, images: Path) -> dict[str, str]:
    found, about = Found(results.rows), results.about
    return {"peers": peers(found, about, images), "goals": goals(found), "profile": profiles(found)}


def peers(found: Found, about: Row, images: Path) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"`make bench-peers` · {versions} · {about['machine']} · rounds of sessions: {about['rounds']}, of "
        f"{about['connections']} connections: {about['loads']} · upstream: {about['think_ms']} ms",
    ]
    for body, (size, messages) in about["bodies"].items():
        kinds = f"{about['rounds'] * about['steps'][body]} requests of each kind a way"
        lines += ["", f"### {body.title()} body: {size / 1000:.0f} kB, {messages} messages; {kinds}", ""]
        lines.append(_latencies(found, body))
    title = f"### The long body over {about['connections']} connections, and memory at the end"
    lines += ["", title, "", _loads(found)]
    lines += ["", *_missing(found)]
    lines += ["", _plot_added(found, images), "", _plot_cpu(found, images)]
    lines += ["", *(f"* **{way.name}**: {way.about}" for way in WAYS)]
    return "\n".join(lines)


def _latencies(found: Found, body: str) -> str:
    header = ["way", "p50 / p99, ms", "added p50 / p99", "first chunk p50 / p99, ms", "added p50 / p99"]
    header += ["opening a session, p50 ms", "CPU a request, ms"]
    rows = []
    for way in WAYS:
        row = [_pair(found.quantiles(body, way.name, "json_ms")), _pair(found.added(body, way.name, "json_ms"))]
        row += [_pair(found.quantiles(body, way.name, "sse_ms")), _pair(found.added(body, way.name, "sse_ms"))]
        first = found.quantiles(body, way.name, "opening_ms")
        row += [_number(first[0] if first else None), _number(found.cpu_ms(body, way.name))]
        if way.name == DIRECT:
            row[1] = row[3] = row[5] = ""
        rows.append([way.name, *row])
    return markdown_table(header, rows)


def _loads(found: Found) -> str:
    thinking = sorted({row["think_ms"] for row in found.rows if "think_ms" in row})
    header = ["way"]
    for ms in thinking:
        header += [f"upstream takes {ms} ms: requests/s", "share of direct"]
    rows = []
    for way in WAYS:
        row: list[str] = [way.name]
        for ms in thinking:
            row += [_number(found.per_s(ms, way.name), 0), _number(found.share(ms, way.name), 2)]
        rows.append([*row, "" if way.name == DIRECT else _number(found.memory_mb(way.name), 0)])
    return markdown_table([*header, "resident, MB"], rows)


def _missing(found: Found) -> list[str]:
    return [f"* **{way}**, not measured, or not all of it: {why}" for way, why in found.why.items()]


def _plot_added(found: Found, images: Path) -> str:
    kinds = {"JSON p50": ("json_ms", 0), "JSON p99": ("json_ms", 1), "first chunk p50": ("sse_ms", 0)}
    groups = {}
    for kind, (key, place) in kinds.items():
        values = {way.name: found.added("long", way.name, key) for way in WAYS if way.name != DIRECT}
        groups[kind] = {name: pair[place] for name, pair in values.items() if pair is not None}
    return _plotted(images, "added", groups, y="milliseconds", title="added to a request, long body")


def _plot_cpu(found: Found, images: Path) -> str:
    groups = {}
    for body in ("short", "long"):
        values = {way.name: found.cpu_ms(body, way.name) for way in WAYS if way.name != DIRECT}
        groups[f"{body} body"] = {name: value for name, value in values.items() if value is not None}
    return _plotted(images, "cpu", groups, y="milliseconds", title="CPU a request")


def _plotted(images: Path, name: str, groups: dict[str, dict[str, float]], *, y: str, title: str) -> str:
    shown = plot_bars(images / name, groups, y=y, title=title)
    (images / f"{name}.png").unlink(missing_ok=True)  # the document shows the other
    return shown.replace(f"({name}.svg)", f"({(IMAGES / name).as_posix()}.svg)")


# -- goals ------------------------------------------------------------------------------------------------------------


def goals(found: Found) -> str:
    rows = [*_goals_of_requests(found), *_goals_of_selection(found)]
    if (growth := found.named("growth")) is not None:
        ratio = growth["stored"] / growth["unique"]
        name = "database over 200 turns, times its unique bytes"
        rows.append(_of_one("ours, warm", name, f"≤ {GROWTH}", _met(ratio, GROWTH)))
    return markdown_table(["goal", "", *OURS], rows)


def _of_one(way: str, name: str, goal: str, value: str) -> list[str]:
    """The row of a goal that only one of our ways has."""
    return [name, goal, *(value if way == other else "" for other in OURS)]


def _met(value: float | None, most: float, digits: int = 1) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if value <= most else f"**{value:.{digits}f}**"


def _goals_of_requests(found: Found) -> Iterable[list[str]]:
    measures: dict[str, tuple[str, float, Callable[[str], float | None]]] = {
        "added, long body as JSON, p50": (
            "ms",
            GOALS_MS["json p50"],
            lambda way: _at(found.added("long", way, "json_ms"), 0),
        ),
        "added, long body as JSON, p99": (
            "ms",
            GOALS_MS["json p99"],
            lambda way: _at(found.added("long", way, "json_ms"), 1),
        ),
        "added to the first SSE chunk, p50": (
            "ms",
            GOALS_MS["sse p50"],
            lambda way: _at(found.added("long", way, "sse_ms"), 0),
        ),
        "CPU a request, long body": ("ms", GOALS_MS["cpu"], lambda way: found.cpu_ms("long", way)),
        "memory after load, no model in it": ("MB", MEMORY_MB, found.memory_mb),
    }
    for name, (unit, most, measure) in measures.items():
        yield [name, f"≤ {most:g} {unit}", *(_met(measure(way), most, 0 if unit == "MB" else 1) for way in OURS)]
    for think_ms in sorted({row["think_ms"] for row in found.rows if "think_ms" in row}):
        name = f"share of direct at many connections, upstream takes {think_ms} ms"
        shares = [found.share(think_ms, way) for way in OURS]
        cells = ["–" if s is None else f"{s:.2f}" if s >= SHARE else f"**{s:.2f}**" for s in shares]
        yield [name, f"≥ {SHARE}", *cells]


def _at(pair: tuple[float, float] | None, place: int) -> float | None:
    return pair[place] if pair is not None else None


def _goals_of_selection(found: Found) -> Iterable[list[str]]:
    """From what `scripts/bench_selection.py` printed: no model, and the worst of its lines."""
    said: Any = (found.named("selection") or {}).get("said", ())
    for size, most in SELECT_MS.items():
        lines = [line for line in said if line.split()[0] == str(size) and "select" in line]
        names = {"select": most, "with past use": most} | ({"update": UPDATE_MS} if size == min(SELECT_MS) else {})
        for name, limit in names.items():
            times = [float(match[1]) for line in lines if (match := re.search(rf"{name}\s+([\d.]+) ms", line))]
            label = {"select": "selection", "with past use": "selection with past use", "update": "graph update"}[name]
            value = _met(max(times, default=None), limit, 2)
            yield _of_one("ours, cold", f"{label}, {size:,} blocks", f"≤ {limit} ms", value)
    for line in said:
        if match := re.search(r"(\d+) blocks.*: ([\d.]+) bytes a node, ([\d.]+) bytes an edge", line):
            values = " / ".join(_met(float(value), GRAPH_BYTES) for value in match.groups()[1:])
            name = f"graph, bytes a node / an edge, {int(match[1]):,} blocks"
            yield _of_one("ours, warm", name, f"≤ {GRAPH_BYTES}", values)


# -- profile ----------------------------------------------------------------------------------------------------------


def profiles(found: Found) -> str:
    lines = ["Share of the samples of threads that do not wait (py-spy), by the innermost function of ours."]
    for way in OURS:
        row = found.named(f"profile {way}")
        lines += ["", f"### {way}", ""]
        if row is None or "where" not in row:
            lines.append(f"Not measured: {row['why'] if row else 'the proxy did not run'}")
            continue
        shares = [[where, below or "itself", f"{100 * share:.1f} %"] for where, below, share in row["where"]]
        lines.append(markdown_table(["function", "in", "share"], shares))
    return "\n".join(lines)
