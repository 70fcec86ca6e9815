"""A session map as lines for a terminal and as SVG. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from html import escape
from itertools import accumulate

from graphstore.store.session_map import Outline, Segment, SessionMap
from proxy.commands.text import number, plain, short

SHADES = "░▒▓█"
RAMP = (254, 152, 116, 80, 44, 38, 32, 26, 20)  # of 256 colours, by attention
UNSEEN, SENT, LEFT_OUT = "·", "▔", " "
LABEL_CHARS = 160

KEY = "width: tokens · colour: attention a token (cube root) · hatched: not observed · strip: sent"
OUTLINES: dict[Outline, str] = {"user": "user", "edit": "edit", "pin": "pinned", "mute": "muted"}
WIDTH, LEFT, BAND, STRIP, GAP, CAPTION = 1200, 70, 16, 4, 8, 14  # of the SVG, pixels
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333 }
rect { stroke: none } .user, .edit, .pin, .mute { stroke-width: 1.5 } .user { stroke: #b45309 }
.edit { stroke: #7c3aed } .pin { stroke: #be185d } .mute { stroke: #555; stroke-dasharray: 3 2 }
.sent { fill: #2a7 } .out { fill: #ccc }
.cold { stroke: #b33; stroke-dasharray: 5 4 } .why { fill: #b33 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .mute { stroke: #ccc } .out { fill: #444 } }
"""


def strength(density: float | None, most: float) -> float | None:
    """0 to 1 on a cube-root scale, on which small densities can be told apart (paper, Figure 2); None: not observed."""
    if density is None:
        return None
    return (density / most) ** (1 / 3) if most > 0 else 0.0


def most_of(shown: SessionMap) -> float:
    return max((density for row in shown.rows for density in row.density.values()), default=0.0)


# -- for a terminal ---------------------------------------------------------------------------------------------------


def as_lines(shown: SessionMap, width: int, *, colour: bool) -> list[str]:
    """Two lines a turn, attention and below it what was sent, and one for a cold boundary. At most `width` columns."""
    segments = [list(shown.segments(row)) for row in shown.rows]
    most, longest = most_of(shown), max(map(_length, segments), default=0)
    label = max((len(str(row.turn)) for row in shown.rows), default=1) + len("turn  ")
    cells = max(1, width - label)
    lines = []
    for row, whole in zip(shown.rows, segments, strict=True):
        if row.reason is not None:
            lines.append(short(f"{'- ' * (label // 2)}cold: {plain(row.reason)} {'- ' * cells}", width).rstrip("…"))
        drawn = _cells(whole, longest / cells if longest else 1.0)
        lines.append(f"turn {row.turn}".ljust(label) + "".join(_painted(s, most, colour) for s in drawn))
        lines.append(" " * label + "".join(SENT if s.is_sent else LEFT_OUT for s in drawn))
    return lines


def _length(segments: Sequence[Segment]) -> int:
    return sum(max(1, segment.tokens) for segment in segments)


def _cells(segments: Sequence[Segment], tokens: float) -> list[Segment]:
    """For each cell of so many tokens the block in it that attention went to most; every row has one cell at least."""
    ends = list(accumulate(max(1, segment.tokens) for segment in segments))
    cells = max(1, round(ends[-1] / tokens)) if ends else 0
    spans = ((bisect_right(ends, i * tokens), bisect_left(ends, (i + 1) * tokens)) for i in range(cells))
    within = (segments[min(first, len(ends) - 1) : last + 1] for first, last in spans)
    return [max(cell, key=lambda s: -1.0 if s.density is None else s.density) for cell in within]


def _painted(segment: Segment, most: float, colour: bool) -> str:
    value = strength(segment.density, most)
    if value is None:
        return UNSEEN
    if colour:
        return f"\x1b[48;5;{RAMP[min(int(value * len(RAMP)), len(RAMP) - 1)]}m \x1b[0m"
    return SHADES[min(int(value * len(SHADES)), len(SHADES) - 1)]


# -- as a picture -----------------------------------------------------------------------------------------------------


def as_svg(shown: SessionMap, title: str) -> str:
    """Readable in light and dark; every block says what it is when the pointer rests on it."""
    segments = [list(shown.segments(row)) for row in shown.rows]
    most, longest = most_of(shown), max(map(_length, segments), default=0)
    scale, parts, y = (WIDTH - LEFT - 10) / max(1, longest), [_legend(2 * CAPTION)], 3 * CAPTION + GAP
    for row, whole in zip(shown.rows, segments, strict=True):
        if row.reason is not None:
            parts.append(f'<line class="cold" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="why" x="{LEFT}" y="{y + CAPTION - 2}">cold: {_text(row.reason)}</text>')
            y += CAPTION + 2
        parts.append(f'<text x="4" y="{y + BAND - 4}">turn {row.turn}</text>')
        x = float(LEFT)
        for segment in whole:
            width = max(1, segment.tokens) * scale
            parts.append(_block(segment, x, y, width, most))
            x += width
        y += BAND + STRIP + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" role="img">'
    hatch = (
        '<defs><pattern id="unseen" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="5" height="5" fill="#999" fill-opacity="0.15"/>'
        '<rect width="1.2" height="5" fill="#999"/></pattern></defs>'
    )
    name = f"<title>{_text(title)}</title><style>{STYLE}</style>{hatch}"
    caption = f'<text x="4" y="{CAPTION}">{_text(title)} · {KEY}</text>'
    return "\n".join([head, name, caption, *parts, "</svg>"]) + "\n"


def _legend(y: int) -> str:
    """What the outlines mean, on the line at `y`."""
    return "".join(
        f'<rect class="{outline}" x="{4 + 90 * i}" y="{y - 9}" width="14" height="9" fill="none"/>'
        f'<text x="{24 + 90 * i}" y="{y}">{meaning}</text>'
        for i, (outline, meaning) in enumerate(OUTLINES.items())
    )


def _block(segment: Segment, x: float, y: int, width: float, most: float) -> str:
    value = strength(segment.density, most)
    fill = "url(#unseen)" if value is None else f"hsl(215 70% {92 - 60 * value:.0f}%)"
    seen = "not observed" if segment.density is None else f"density {segment.density:.3g}"
    sent = "sent" if segment.is_sent else "left out"
    block = segment.block
    said = f"block {block.ordinal}, {block.kind}, {number(segment.tokens)} tokens, {seen}, {sent}: {block.label}"
    place = f'x="{x:.2f}" width="{width:.2f}"'
    marked = f' class="{block.outline}"' if block.outline is not None else ""
    return (
        f'<g><title>{_text(said)}</title><rect{marked} {place} y="{y}" height="{BAND}" fill="{fill}"/>'
        f'<rect class="{"sent" if segment.is_sent else "out"}" {place} y="{y + BAND + 1}" height="{STRIP}"/></g>'
    )


def _text(text: str) -> str:
    """Archived text is text, whatever it spells."""
    return escape(short(plain(text), LABEL_CHARS))
