"""Graph and selection equal an independently computed golden file, and the script that checks it does its job."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.conformance import mismatches, read_cases, read_sessions

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/data/conformance/golden.json"
SESSIONS = ROOT / "tests/data/conformance/sessions.jsonl"


def test_every_turn_of_the_golden_file_is_met_exactly() -> None:
    cases = read_cases(GOLDEN)
    assert sum(len(case.turns) for case in cases) == 14
    assert list(mismatches(cases, read_sessions(SESSIONS))) == []


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path


def test_each_single_fact_is_compared(tmp_path: Path) -> None:
    """Changing any one expected number of a turn makes exactly one mismatch: nothing is skipped or masked."""
    cases = json.loads(GOLDEN.read_text())[:1]
    cases[0]["turns"] = cases[0]["turns"][:3]
    sessions = read_sessions(SESSIONS)
    turn = cases[0]["turns"][2]
    for part in ("graph", "selection"):
        for path in leaves(turn[part]):
            holder = turn[part]
            for key in path[:-1]:
                holder = holder[key]
            original = holder[path[-1]]
            holder[path[-1]] = original + (1e-7 if isinstance(original, float) else 1)
            (tmp_path / "golden.json").write_text(json.dumps(cases))
            found = list(mismatches(read_cases(tmp_path / "golden.json"), sessions))
            holder[path[-1]] = original
            assert len(found) == 1, (part, path, found)


@pytest.mark.parametrize(
    ("golden", "sessions", "says"),
    [
        ("[", None, "golden.json"),
        ("[]", None, "no cases"),
        ('[{"id": "x", "turns": []}]', None, "'x'"),
        ('[{"id": "x", "turns": 3}]', None, "turns"),
        (None, '{"id": "x"}', "line 1"),
        (None, "\n\xff", "line 2"),
    ],
)
def test_a_bad_file_is_named_and_exits_2(tmp_path: Path, golden: str | None, sessions: str | None, says: str) -> None:
    paths = []
    for name, content, default in (("golden.json", golden, GOLDEN), ("sessions.jsonl", sessions, SESSIONS)):
        paths.append(default if content is None else tmp_path / name)
        if content is not None:
            paths[-1].write_bytes(content.encode("latin-1"))
    ended = run_script(*paths)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_mismatch_is_printed_and_exits_1(tmp_path: Path) -> None:
    changed = json.loads(GOLDEN.read_text())
    changed[1]["turns"][0]["selection"]["budget"] += 1
    (tmp_path / "golden.json").write_text(json.dumps(changed))
    ended = run_script(tmp_path / "golden.json", SESSIONS)
    assert ended.returncode == 1
    assert "turn 1 selection.budget: expected 2269, found 2268" in ended.stdout


def test_the_shipped_files_exit_0() -> None:
    ended = run_script(GOLDEN, SESSIONS)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_impossible_observation_or_request_is_a_bad_file(tmp_path: Path) -> None:
    for change in ({"history_messages": 12}, {"rho_bar": {"0": -1}}, {"dep": [[5, 2, 0.5]]}):
        changed = json.loads(GOLDEN.read_text())
        changed[0]["turns"][0].update(change)
        (tmp_path / "golden.json").write_text(json.dumps(changed))
        assert run_script(tmp_path / "golden.json", SESSIONS).returncode == 2


def run_script(*paths: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "scripts/conformance.py"), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
