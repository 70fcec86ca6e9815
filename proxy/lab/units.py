"""Blocks that are finer than whole messages (paper §5.4, Table 2): an answer by paragraphs or lines.

Only the lab cuts messages. The proxy sends them whole or not at all.
"""

import re
from typing import Literal

Granularity = Literal["block", "paragraph", "line"]

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def units_of(text: str, granularity: Granularity) -> list[str]:
    """The pieces of a text, in order; together they are the text. Fenced code is never cut.

    Blank lines belong to the piece that they follow. By lines, a fenced block is a piece of its own.
    """
    if granularity == "block" or not text:
        return [text]
    units: list[str] = []
    fence, after_blank = "", True
    for line in text.splitlines(keepends=True):
        is_blank, in_fence = not line.strip(), bool(fence)
        fence = _fence_after(line, fence)
        begins = not (in_fence or is_blank) and (after_blank or granularity == "line")
        if begins or not units:
            units.append(line)
        else:
            units[-1] += line
        after_blank = is_blank and not fence
    return units


def _fence_after(line: str, fence: str) -> str:
    """The fence that is open after a line; "": none."""
    found = _FENCE.match(line)
    if found is None:
        return fence
    marks, rest = found.groups()
    if not fence:
        return "" if marks[0] == "`" and "`" in rest else marks
    closes = marks.startswith(fence) and not rest.strip()
    return "" if closes else fence
