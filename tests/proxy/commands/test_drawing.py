"""Maps of sessions: lines for a terminal and SVG, with nothing of the archive taken for markup or control."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphstore.records import Mark
from graphstore.store.session_map import MapBlock, MapRow, SessionMap
from proxy.commands.drawing import RAMP, as_lines, as_svg, strength
from tests.proxy.commands.conftest import Recap

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\x1b[31m & \x00"


@dataclass(frozen=True)
class Drawn:
    """A block in a row of a test's map."""

    block: MapBlock
    density: float | None
    is_sent: bool


def segment(
    ordinal: int, tokens: int, density: float | None = None, *, is_sent: bool = True, is_edit: bool = False,
    label: str | None = None,
) -> Drawn:  # fmt: skip
    return Drawn(MapBlock(ordinal, "tools", label or f"read {ordinal}", tokens, is_edit, None), density, is_sent)


def drawn(*rows: tuple[int, str | None, tuple[Drawn, ...]]) -> SessionMap:
    """A map of these rows: turn, reason of a cold boundary, blocks."""
    return SessionMap(
        {one.block.ordinal: one.block for _, _, segments in rows for one in segments},
        tuple(
            MapRow(
                turn, 0.0, reason, tuple(one.block.ordinal for one in segments),
                frozenset(one.block.ordinal for one in segments if not one.is_sent),
                {one.block.ordinal: one.density for one in segments if one.density is not None},
                {},
            )
            for turn, reason, segments in rows
        ),
    )  # fmt: skip


MAP = drawn(
    (1, None, (segment(0, 10), segment(1, 30, 0.001))),
    (12, f"idle {HOSTILE}", (segment(0, 10, 1.0), segment(1, 30, 0.0, is_sent=False), segment(2, 40))),
)


def test_a_row_is_as_long_as_its_tokens_and_says_what_was_sent() -> None:
    assert as_lines(MAP, 88, colour=False) == [
        "turn 1  ··········" + "░" * 30,
        "        " + "▔" * 40,
        *as_lines(MAP, 88, colour=False)[2:3],
        "turn 12 ██████████" + "░" * 30 + "·" * 40,
        "        " + "▔" * 10 + " " * 30 + "▔" * 40,
    ]
    boundary = as_lines(MAP, 88, colour=False)[2]
    assert "cold: idle </title>" in boundary and boundary.startswith("- -") and len(boundary) <= 88


def test_colour_is_by_attention_and_control_characters_of_the_archive_never_arrive() -> None:
    lines = as_lines(MAP, 88, colour=True)
    assert lines[3].count(f"\x1b[48;5;{RAMP[-1]}m") == 10 and lines[3].count(f"\x1b[48;5;{RAMP[0]}m") == 30
    assert "\x1b[31m" not in "".join(lines) and "\x00" not in "".join(lines)


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_terminal_gets_fewer_cells(width: int) -> None:
    """A cell shows the block in it that attention went to most."""
    rows = drawn((1, None, (*(segment(i, 10, 0.001) for i in range(50)), segment(50, 1, 1.0), segment(51, 500))))
    line, sent = as_lines(rows, width, colour=False)
    assert len(line) == max(len("turn 1 ") + 1, width) and "█" in line and len(sent) == len(line)


def test_a_session_of_nothing_is_drawn_too() -> None:
    assert as_lines(drawn(), 80, colour=False) == []
    assert as_lines(drawn((1, None, ())), 80, colour=False)[0].strip() == "turn 1"
    ET.fromstring(as_svg(drawn(), "none"))
    ET.fromstring(as_svg(drawn((1, None, ())), "none"))


def test_the_scale_is_a_cube_root_of_the_largest() -> None:
    assert (strength(None, 1.0), strength(0.001, 1.0), strength(0.5, 0.5)) == (None, pytest.approx(0.1), 1.0)
    assert strength(0.0, 0.0) == 0.0


def test_the_picture_has_every_block_and_takes_no_text_for_markup() -> None:
    rows = drawn((1, HOSTILE, (segment(0, 10, 0.5, label=HOSTILE, is_edit=True), segment(1, 30, is_sent=False))))
    picture = ET.fromstring(as_svg(rows, HOSTILE))
    assert not list(picture.iter(f"{SVG}script")) and "\x1b" not in as_svg(rows, HOSTILE)
    blocks = picture.findall(f"{SVG}g")
    titles = [title.text or "" for g in blocks if (title := g.find(f"{SVG}title")) is not None]
    assert titles[0].startswith("block 0, tools, 10 tokens, density 0.5, sent: </title><script>")
    assert titles[1] == "block 1, tools, 30 tokens, not observed, left out: read 1"
    (band, strip), (unseen, out) = (g.findall(f"{SVG}rect") for g in blocks)
    assert (band.get("class"), strip.get("class"), unseen.get("fill"), out.get("class")) == (
        "edit", "sent", "url(#unseen)", "out",
    )  # fmt: skip
    assert float(unseen.get("width", 0)) == pytest.approx(3 * float(band.get("width", 0)), abs=0.02)
    assert len(picture.findall(f"{SVG}line")) == 1, "one cold boundary"


def test_a_picture_tells_pinned_muted_user_and_edit_apart() -> None:
    kinds: tuple[tuple[str, bool, Mark | None], ...] = (
        ("user", False, None), ("tools", True, None), ("tools", True, "pin"), ("tools", False, "mute"),
        ("pinned", False, None), ("tools", False, None),
    )  # fmt: skip
    blocks = [Drawn(MapBlock(i, kind, "", 1, edit, mark), None, True) for i, (kind, edit, mark) in enumerate(kinds)]
    picture = ET.fromstring(as_svg(drawn((1, None, tuple(blocks))), "one"))
    bands = [g.findall(f"{SVG}rect")[0].get("class") for g in picture.findall(f"{SVG}g")]
    assert bands == ["user", "edit", "pin", "mute", "pin", None]
    assert [rect.get("class") for rect in picture.findall(f"{SVG}rect")] == ["user", "edit", "pin", "mute"]
    assert {"user", "edit", "pinned", "muted"} <= {text.text for text in picture.findall(f"{SVG}text")}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_no_encoding_of_a_terminal_ends_a_command(archive: tuple[Path, str], encoding: str) -> None:
    database, name = archive

    def printed(*arguments: str) -> str:
        command = [sys.executable, "-m", "proxy", *arguments, name, "--db", str(database)]
        done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(encoding)

    assert "\\u2591" in printed("show", "--map")
    assert "·" in "".join(ET.fromstring(printed("plot")).itertext())


def test_the_commands_draw_a_session(recap: Recap, name: str, tmp_path: Path) -> None:
    shown = recap("show", name, "--map")
    assert shown.code == 0 and [line for line in shown.lines if line.startswith("turn 3")]
    assert "cold: idle for 4000 s" in shown.out and "\x1b" not in shown.out
    file = tmp_path / "map.svg"
    assert recap("plot", name, "-o", str(file)).code == 0
    assert file.read_text() == recap("plot", name).out
    assert len(ET.parse(file).getroot().findall(f"{SVG}g")) > 6
    done = recap("plot", name, "-o", str(tmp_path / "none" / "map.svg"))
    assert done.code == 1 and "cannot be written" in done.err and "-o" in done.err
