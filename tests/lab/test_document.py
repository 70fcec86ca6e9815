"""The measured parts of a document are what the studies' pages say, and the same results make the same bytes."""

import json
import re
from itertools import chain
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.commands.eval import STUDIES
from proxy.lab.document import IMAGES, Mark, measured_of, parts_of
from tests.proxy.dialogue import SYSTEM, turn

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/evaluation.md"
TURNS = [turn(f"look at unique_{name}", name, 2000) for name in ("alpha", "beta", "gamma")]
SESSIONS = {"one": [SYSTEM, *chain(*TURNS)], "two": [SYSTEM, *chain(*TURNS[::-1])]}
RUNS: dict[str, list[str]] = {  # of the studies that need no model: what keeps them small
    "reuse": [],
    "simulate": ["--selector", "recap", "--p-warm", "0.5"],
    "modes": ["--profile", "local"],
    "costs": [],
    "compaction": ["--family", "constraints", "--selector", "recency"],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of each, and reuse in a folder of its own too."""
    folder = tmp_path_factory.mktemp("lab")
    data, out = folder / "d.jsonl", folder / "eval"
    data.write_text("".join(json.dumps({"id": name, "messages": m}) + "\n" for name, m in SESSIONS.items()))
    for name, words in RUNS.items():
        assert main(["eval", name, str(data), *words, "--out", str(out)]) == 0
    assert main(["eval", "reuse", str(data), "--seed", "7", "--out", str(out / "again")]) == 0
    return out


def part(name: str, body: str = "made before\n") -> str:
    return f"<!-- recap eval {name} -->\n{body}<!-- end -->\n"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_part_is_what_the_study_renders_and_a_second_time_changes_nothing(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = [*RUNS, "reuse in again"]
    document = tmp_path / "page.md"
    document.write_text("# Ours\n\n" + "\nOurs too.\n".join(map(part, marks)))
    assert main(["eval", "report", "--out", str(out), "--into", str(document)]) == 0
    assert capsys.readouterr().err == ""
    text = document.read_text()
    assert text.startswith("# Ours\n") and text.count("\nOurs too.\n") == len(marks) - 1 and "made before" not in text
    made = dict(re.findall(r"<!-- recap eval ([\w ]+) -->\n(.*?)\n<!-- end -->", text, re.DOTALL))
    assert list(made) == marks
    for name, body in made.items():
        study, _, folder = name.partition(" in ")
        page = (out / folder / f"{study}.md").read_text()
        assert re.sub(r"\]\(img/eval/(again/)?", "](", body) == measured_of(page)
        assert body.startswith(f"`recap eval {study}") and "seed" in body.splitlines()[0] and "| --: |" in body
        assert name == "compaction" or re.search(r"files d.jsonl [0-9a-f]{16}", body)
    assert "hardware" in made["costs"].splitlines()[0] and "seed 7" in made["reuse in again"]
    shown = set(re.findall(r"\]\((img/[^)]+)\)", text))
    first = files_of(tmp_path)
    assert set(first) == {"page.md", *shown} and any(name.startswith("img/eval/again/") for name in shown)
    assert main(["eval", "report", "--out", str(out), "--into", str(document)]) == 0
    assert files_of(tmp_path) == first


def test_a_part_without_a_finished_run_stays_as_it_is(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "page.md"
    document.write_text(part("queries") + part("reuse in elsewhere"))
    (tmp_path / "eval/elsewhere").mkdir(parents=True)
    (tmp_path / "eval/elsewhere/reuse.jsonl").write_bytes((out / "reuse.jsonl").read_bytes())  # was stopped: no page
    before = files_of(tmp_path)
    assert main(["eval", "report", "--out", str(tmp_path / "eval"), "--into", str(document)]) == 0
    said = capsys.readouterr().err
    assert "queries is left as it is" in said and "reuse in elsewhere is left as it is" in said
    assert files_of(tmp_path) == before


def test_a_new_run_has_no_page_until_it_is_finished(out: Path, tmp_path: Path) -> None:
    data, own = tmp_path / "d.jsonl", tmp_path / "eval"
    data.write_text(json.dumps({"id": "one", "messages": SESSIONS["one"]}))
    assert main(["eval", "reuse", str(data), "--out", str(own)]) == 0
    (own / "reuse.jsonl").unlink()
    data.write_text("{")
    assert main(["eval", "reuse", str(data), "--out", str(own)]) == 1
    document = tmp_path / "page.md"
    document.write_text(part("reuse"))
    assert main(["eval", "report", "--out", str(own), "--into", str(document)]) == 0
    assert document.read_text() == part("reuse")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (part("guesses"), "a mark names 'guesses'; the studies are reuse, "),
        ("<!-- recap eval reuse -->\n", "the part of reuse has no `<!-- end -->`"),
        ("\n<!-- end -->\n", "line 2 is '<!-- end -->', but the mark that begins a part is missing"),
        ("<!-- recap eval reuse -->\n" + part("costs"), "but the `<!-- end -->` of reuse is missing before it"),
    ],
)
def test_marks_that_do_not_fit_are_named_and_nothing_is_written(
    text: str, says: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "page.md"
    document.write_text(text)
    assert main(["eval", "report", "--out", str(out), "--into", str(document)]) == 1
    assert says in capsys.readouterr().err and document.read_text() == text
    assert main(["eval", "report", "--out", str(out), "--into", str(tmp_path / "none.md")]) == 1
    assert "none.md' cannot be read" in capsys.readouterr().err


# -- the one that ships -----------------------------------------------------------------------------------------------


def test_the_document_has_a_part_for_every_study_and_says_how_each_was_made() -> None:
    parts = parts_of(DOCUMENT.read_text())
    assert {mark.study for mark, _ in parts} == {study.name for study in STUDIES}
    for mark, body in parts:
        if mark.folder == "provider":
            assert body.startswith("**Not measured**"), mark
        else:
            assert body.startswith(f"`recap eval {mark.study}"), mark
            assert re.search(r"\bseed \d", body.splitlines()[0]), mark


def test_the_documents_plots_are_those_that_are_there() -> None:
    shown = set(re.findall(r"\]\((img/eval/[^)]+)\)", DOCUMENT.read_text()))
    assert shown == {path.relative_to(DOCUMENT.parent).as_posix() for path in (ROOT / "docs" / IMAGES).rglob("*.*")}


def test_make_runs_what_the_document_has_a_part_for() -> None:
    recipes = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    recipes = recipes.replace("$(PROVIDER)", "--out eval/provider").replace("$(LOCAL)", "--out eval/small")
    run = {
        Mark(study, folder)
        for study, folder in re.findall(r"^\t\$\(EVAL\) (?!report)(\w+)(?:.*--out eval/(\w+))?", recipes, re.MULTILINE)
    }
    assert run == {mark for mark, _ in parts_of(DOCUMENT.read_text())}
