"""The measured parts of a document: tables, plots and how they were made, between marks in prose that people write.

    <!-- recap eval STUDY -->
    made of STUDY.jsonl
    <!-- end -->

`STUDY in FOLDER` takes the results of a folder below the one that is named: a study that was run in two ways has two
parts. The plots are SVG files in `img/eval/` beside the document. The same results make the same bytes.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.lab.errors import LabError
from proxy.lab.results import is_finished, read_results
from proxy.lab.study import MADE_BY, Study

IMAGES = Path("img/eval")
BEGIN = re.compile(r"^<!-- recap eval (?P<study>[a-z]+)(?: in (?P<folder>[a-z]+))? -->$")
END = "<!-- end -->"
PLOT = re.compile(r"(!\[[^\]]*\]\()([^)/]+\.svg)\)")


@dataclass(frozen=True, slots=True)
class Mark:
    """What a part is made of."""

    study: str
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.study} in {self.folder}" if self.folder else self.study

    @property
    def file(self) -> Path:
        return Path(self.folder, f"{self.study}.jsonl")


def refill(text: str, fill: Callable[[Mark, str], str]) -> str:
    """The document with every part as `fill` makes it of mark and old part. Raises `LabError`: the marks do not fit."""

    def filled(begins: re.Match[str], old: str) -> str:
        return fill(Mark(begins["study"], begins["folder"] or ""), old)

    return refill_between(text, BEGIN, filled)


def refill_between(text: str, begin: re.Pattern[str], fill: Callable[[re.Match[str], str], str]) -> str:
    """The same for parts that other lines begin. Raises `LabError`: the marks do not fit."""
    lines: list[str] = []
    open_mark, inside = None, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        begins = begin.match(line)
        if begins is None and line != END:
            (lines if open_mark is None else inside).append(line)
        elif begins is not None and open_mark is None:
            open_mark, inside = begins, []
            lines.append(line)
        elif begins is None and open_mark is not None:
            lines += [*fill(open_mark, "\n".join(inside)).splitlines(), line]
            open_mark = None
        else:
            wanted = f"`{END}` of {_name(open_mark)}" if open_mark is not None else "mark that begins a part"
            raise LabError(f"line {number} is {line!r}, but the {wanted} is missing before it")
    if open_mark is not None:
        raise LabError(f"the part of {_name(open_mark)} has no `{END}`")
    return "\n".join(lines) + "\n"


def _name(begins: re.Match[str]) -> str:
    return " in ".join(filter(None, begins.groups()))


def parts_of(text: str) -> list[tuple[Mark, str]]:
    """Every mark with its part."""
    found: list[tuple[Mark, str]] = []

    def note(mark: Mark, part: str) -> str:
        found.append((mark, part))
        return part

    refill(text, note)
    return found


def measured_of(page: str) -> str:
    """A study's page from the line on that says how it was made: the document has its own words for what is above."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(MADE_BY))
    return "\n".join(lines[start:]).strip()


def write_into(document: Path, folder: Path, studies: Mapping[str, Study]) -> list[Mark]:
    """Make the marked parts of the results in `folder`. Returns those without a finished run, which are left alone."""
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise LabError(f"{str(document)!r} cannot be read: {error.strerror}; name a document with --into") from error
    left: list[Mark] = []

    def fill(mark: Mark, old: str) -> str:
        if mark.study not in studies:
            raise LabError(f"a mark names {mark.study!r}; the studies are {', '.join(studies)}")
        if not is_finished(folder / mark.file):
            left.append(mark)
            return old
        return _part(studies[mark.study], folder / mark.file, document.parent, IMAGES / mark.folder)

    try:
        filled = refill(text, fill)
    except LabError as error:
        raise LabError(f"{str(document)!r}: {error}") from error
    if filled != text:
        document.write_text(filled, encoding="utf-8")
    return left


def _part(study: Study, file: Path, beside: Path, images: Path) -> str:
    """Of one run. The plots that its page shows are copied to `images`, seen from the document."""
    with tempfile.TemporaryDirectory() as scratch:
        page = measured_of(study.page(read_results(file), Path(scratch)))
        plots = [name for _, name in PLOT.findall(page)]
        if plots:
            (beside / images).mkdir(parents=True, exist_ok=True)
        for name in plots:
            shutil.copyfile(Path(scratch, name), beside / images / name)
    return PLOT.sub(lambda found: f"{found[1]}{(images / found[2]).as_posix()})", page)
