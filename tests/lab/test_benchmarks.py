"""The benchmark beside other proxies, in small: what cannot run is named, the rest is measured."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.lab.results import open_results

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DOCUMENT = "".join(
    f"# Ours\n\n<!-- make bench-peers: {part} -->\nold part\n<!-- end -->\n" for part in ("peers", "goals", "profile")
)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script, and forgets it afterwards."""
    monkeypatch.syspath_prepend(SCRIPTS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (SCRIPTS / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture
def small(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark with ourselves, a proxy that does not start and one that cannot be installed."""
    bench, peers = scripts("bench_peers"), scripts("peers")
    broken = peers.Way("broken", "", lambda place: (sys.executable, "-c", "print('no such port')"))
    absent = peers.Way("absent", "", lambda place: ("none",), "absent", "no-such-package")

    def not_there(home: Path, package: str) -> None:
        raise peers.NotMeasured(f"pip could not install {package}")

    ways = (peers.WAYS[0], next(way for way in peers.WAYS if way.name == "ours, cold"), broken, absent)
    for module in (bench, scripts("peers_page")):
        monkeypatch.setattr(module, "WAYS", ways)
    monkeypatch.setattr(bench, "HOMES", tmp_path)
    monkeypatch.setattr(bench, "ensure_installed", not_there)
    for name, value in {"RECORDED_S": 0, "THINK_MS": 0, "LOADS_MS": (0,), "LOAD_STEPS": 1}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "STEPS", {"long": 2, "short": 2})
    monkeypatch.setattr(bench, "apart", lambda results: None)

    async def no_profile(leader: int, asked: Any, homes: Path) -> None:
        asked.close()
        raise peers.NotMeasured("no sampler here")

    monkeypatch.setattr(bench, "profile", no_profile)
    return bench


def run(bench: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[dict[str, Any]]:
    rows = folder / "results.jsonl"
    (folder / "page.md").write_text(DOCUMENT)
    words = (*words, "--rounds", "1", "--connections", "2", "--results", str(rows), "--into", str(folder / "page.md"))
    monkeypatch.setattr(sys, "argv", ["bench_peers", *words])
    assert bench.main() == 0
    return [json.loads(line) for line in rows.read_text().splitlines()]


def test_what_cannot_run_is_named_and_the_rest_is_measured(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run(small, tmp_path, monkeypatch)
    text = (tmp_path / "page.md").read_text()
    assert "old part" not in text and text.count("# Ours\n") == 3
    assert "* **broken**, not measured, or not all of it:" in text and "no such port" in text
    assert "* **absent**, not measured, or not all of it:" in text and "no-such-package" in text
    assert "| broken | – |" in text and "Not measured: no sampler here" in text
    measured = [row for row in rows if row.get("way") == "ours, cold" and "json_ms" in row]
    assert {row["body"] for row in measured} == {"long", "short"} and all(len(row["json_ms"]) == 2 for row in measured)
    assert (tmp_path / "img/bench/added.svg").exists()

    kept = (tmp_path / "page.md").read_bytes()
    (tmp_path / "page.md").write_text(DOCUMENT)
    run(small, tmp_path, monkeypatch, "--written")
    assert (tmp_path / "page.md").read_bytes() == kept


def test_a_stopped_run_goes_on_and_a_finished_one_begins_anew(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(small, tmp_path, monkeypatch)
    rows = tmp_path / "results.jsonl"
    (tmp_path / "results.md").unlink()  # as if it had been stopped ...
    rows.write_text("".join(line + "\n" for line in rows.read_text().splitlines()[:-2]))
    again = run(small, tmp_path, monkeypatch)
    assert [row for row in again if "json_ms" in row] == [row for row in first if "json_ms" in row]
    assert again[-1]["item"] == first[-1]["item"]
    anew = run(small, tmp_path, monkeypatch)
    assert [row for row in anew if "json_ms" in row] != [row for row in first if "json_ms" in row]


def test_bodies_are_of_the_size_that_is_said_and_no_two_sessions_share_a_message(scripts: Any) -> None:
    bench = scripts("bench_peers")
    history = bench.history_of("long")
    one, other = (json.loads(bench.session(history, mark, 1, stream=True)[0]) for mark in ("a", "b"))
    assert 180_000 < len(json.dumps(one)) < 240_000
    told = [[m["content"] for m in body["messages"][1:] if m.get("content")] for body in (one, other)]
    assert len(told[0]) > 100 and not set(told[0]) & set(told[1])
    assert history[-1]["role"] != "user" and bench.session(history, "a", 2, stream=False)[2].count(b'"go on"') == 2


def test_added_times_goals_and_misses_are_those_of_the_rows(scripts: Any, tmp_path: Path) -> None:
    page = scripts("peers_page")
    about = {"versions": {"ours": "1"}, "machine": "m", "rounds": 1, "loads": 1, "connections": 32, "think_ms": 0}
    results = open_results(tmp_path / "r.jsonl", {**about, "bodies": {"long": [200_000, 9]}, "steps": {"long": 3}})

    def add(way: str, ms: float, cpu: float) -> None:
        times = {"json_ms": [ms] * 3, "sse_ms": [ms] * 3, "opening_ms": [ms] * 2, "cpu_ms": cpu}
        results.add(f"long 0 {way}", way=way, body="long", **times)

    add("direct", 20, 0)
    add("ours, warm", 24, 3)
    add("ours, cold", 50, 20)
    results.add("load direct", way="direct", think_ms=0, per_s=100)
    results.add("load warm", way="ours, warm", think_ms=0, per_s=60)
    parts = page.parts_of(results, tmp_path / "img/bench")
    assert "| ours, warm | 24.0 / 24.0 | 4.0 / 4.0 |" in parts["peers"]
    goals = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2:] for line in parts["goals"].splitlines()}
    assert goals["added, long body as JSON, p50"] == ["–", "4.0", "–", "**30.0** |"]
    assert goals["CPU a request, long body"] == ["–", "3.0", "–", "**20.0** |"]
    assert goals["share of direct at many connections, upstream takes 0 ms"] == ["–", "0.60", "–", "– |"]


def test_a_profile_counts_threads_that_work_by_our_innermost_function(scripts: Any) -> None:
    profile = scripts("peers_profile")
    ours, site = f"{profile.ROOT}/proxy/relay.py", f"{profile.ROOT}/.venv/lib/site-packages/aiohttp/client.py"
    stacks = [
        f"<module> ({ours}:1);relay ({ours}:9);Session.send ({site}:3) 6",
        f"<module> ({ours}:1);relay ({ours}:7) 3",
        "run (/lib/asyncio/events.py:80) 1",
        f"<module> ({ours}:1);EpollSelector.select (/lib/selectors.py:468) 90",
    ]
    assert profile.ranked(stacks) == [
        ["proxy/relay.py: relay", "aiohttp", 0.6],
        ["proxy/relay.py: relay", "", 0.3],
        ["none of ours", "events", 0.1],
    ]


def test_others_see_nothing_of_this_process_and_report_nothing(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = scripts("peers")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    for way in peers.WAYS[1:]:
        place = peers.Place(1, 2, tmp_path, "sk-of-the-run")
        command, environment = peers.command_line(way, place, tmp_path)
        assert "sk-canary" not in str((command, environment)) and environment["HOME"] == str(tmp_path)
        if way.package:
            assert {"DO_NOT_TRACK", "HF_HUB_OFFLINE"} <= environment.keys() and "127.0.0.1:2" in "".join(
                [*command, *(path.read_text() for path in tmp_path.glob("*.yaml"))]
            )
