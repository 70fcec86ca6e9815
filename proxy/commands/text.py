"""Text for terminals: tables, numbers, times. Knows nothing of sessions."""

import shutil
import time
from collections.abc import Sequence

LINE_CHARS = 158  # of a table, indented by two it fits a terminal of 160 columns; a wider terminal is used
TEXT_CHARS_MIN = 20  # what a column of text keeps when the others are wide


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> str:
    """A plain table of at most `LINE_CHARS`, or the terminal's width; columns named in `right` are right-aligned.

    Cells are text or None (shown as '-'). What is too much is taken from the widest columns of text.
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    room = max(LINE_CHARS, shutil.get_terminal_size((0, 0)).columns - 2) - 2 * (len(header) - 1)
    widths = [max(len(line[i]) for line in (list(header), *cells)) for i in range(len(header))]
    texts = [i for i, name in enumerate(header) if name not in right or i == len(header) - 1]
    for i in texts:
        widths[i] = min(widths[i], room)
    while sum(widths) > room and widths[widest := max(texts, key=widths.__getitem__)] > TEXT_CHARS_MIN:
        widths[widest] -= 1
    cells = [[fitted(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells]

    def line(values: Sequence[str]) -> str:
        parts = (
            value.rjust(width) if name in right else value.ljust(width)
            for name, value, width in zip(header, values, widths, strict=True)
        )
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(header)), line(["─" * width for width in widths]), *(line(row) for row in cells)])


def short(text: str, chars: int) -> str:
    """At most `chars` characters; a cut is visible."""
    return text if len(text) <= chars else text[: chars - 1] + "…"


def fitted(text: str, chars: int) -> str:
    """At most `chars` characters: paths lose their first folders, the longest first, before the end is cut."""
    words = text.split(" ")
    while len(" ".join(words)) > chars:
        paths = [i for i, word in enumerate(words) if "/" in word.removeprefix("…/").strip("/")]
        if not paths:
            break
        i = max(paths, key=lambda at: len(words[at]))
        words[i] = "…/" + words[i].removeprefix("…/").lstrip("/").partition("/")[2]
    return short(" ".join(words), chars)


def count(amount: int, noun: str) -> str:
    """`1 block`, `2,000 blocks`."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


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
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
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
