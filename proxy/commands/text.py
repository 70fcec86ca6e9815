"""Text for terminals: tables, numbers, times. Knows nothing of sessions."""

import time
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> str:
    """A plain table; columns named in `right` are right-aligned. Cells are text or None (shown as '-')."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in (list(header), *cells)) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        parts = (
            value.rjust(width) if name in right else value.ljust(width)
            for name, value, width in zip(header, values, widths, strict=True)
        )
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(header)), line(["─" * width for width in widths]), *(line(row) for row in cells)])


def number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.0f} %"


def moment(seconds: float | None) -> str:
    """Local time, to the second."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def score(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def plain(text: str) -> str:
    """One line without control characters: archived text must not drive the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
