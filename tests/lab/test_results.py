"""Rows of a run: one writer, one run to a file, and what is finished outlives whatever ends it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.commands.eval import STUDIES
from proxy.lab.errors import LabError
from proxy.lab.results import is_finished, open_results, page_of, read_results


def test_the_order_of_files_is_part_of_the_run(tmp_path: Path) -> None:
    """Items are numbered by it: sessions would count twice."""
    path = tmp_path / "x.jsonl"
    open_results(path, {"files": {"a": "1", "b": "2"}})
    with pytest.raises(LabError, match="differs in files"):
        open_results(path, {"files": {"b": "2", "a": "1"}})


def test_only_one_run_at_a_time_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    script = "import sys; from pathlib import Path; from proxy.lab.results import open_results\n"
    script += "r = open_results(Path(sys.argv[1]), {}); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(LabError, match="is being written by another run"):
            open_results(path, {})
        other.stdin.close()
    open_results(path, {}).add("a")


def test_a_report_leaves_the_torn_end_to_who_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    open_results(path, {}).add("a")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"item": "b')
    assert read_results(path).done == {"a"} and path.read_bytes() == whole + b'{"item": "b'
    open_results(path, {})
    assert path.read_bytes() == whole


def test_a_full_disk_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    results = open_results(path, {})
    results.add("a")
    whole = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(LabError, match=r"x.jsonl' cannot be written: No space left.*same command again"):
            results.add("b")
    assert path.read_bytes() == whole
    results.add("b", said="\ud800")
    assert open_results(path, {}).rows == [{"item": "a"}, {"item": "b", "said": "?"}]


def test_a_run_that_goes_on_is_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    open_results(path, {})
    page_of(path).write_text("done")
    with pytest.raises(LabError, match="another run"):
        open_results(path, {"seed": 1})
    assert is_finished(path)
    open_results(path, {})
    assert not is_finished(path)


@pytest.mark.parametrize("text", ["notes of mine", "notes\n", "[1]\n", '{"about": {}}\n{"item": 1}\n', "5\n{}\n"])
def test_a_file_that_is_no_result_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(LabError, match="delete"):
        open_results(path, {})
    with pytest.raises(LabError, match="delete"):
        read_results(path)
    assert path.read_text() == text


@pytest.mark.parametrize("study", [study.name for study in STUDIES])
def test_results_that_lack_something_are_named(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"{study}.jsonl").write_text('{"about": {"study": "x", "version": "0.0.1", "seed": 0}}\n')
    assert main(["eval", "report", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{study}.jsonl' lacks '" in said and "of version 0.0.1" in said and "run the study again" in said
