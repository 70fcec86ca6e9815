"""Coverage by hand-made sessions whose numbers can be had on paper, and the study as a command."""

import gzip
import json
import os
import signal
from math import isnan, log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cli import main
from proxy.lab.coverage import SIGNALS, Transition, coverage, pack, read_identifiers, transitions
from proxy.lab.errors import LabError
from proxy.lab.recordings import Recording, read_recordings
from proxy.lab.results import open_results, read_results
from proxy.lab.statistics import paired_difference
from proxy.lab.units import Granularity, units_of
from tests.proxy.dialogue import Message, read, said, user


def recording(messages: list[Message], starts: list[int]) -> Recording:
    return Recording("s", tuple(json.dumps(m, separators=(",", ":")).encode() for m in messages), tuple(starts))


SESSION = recording(
    [
        user("see alpha_file"), *read("a", "alpha_one beta_two"), said("done gamma_three"),
        user("go on"), *read("b", "alpha_one other_word"), said("ok"),
        user("use beta_two"), *read("c", "alpha_one gamma_three"), said("beta_two"),
    ],
    [0, 4, 8],
)  # fmt: skip


def test_candidates_and_evidence_are_those_of_the_setting() -> None:
    (last,) = [t for t in transitions(SESSION, "B.1", "code") if t.turn == 3]
    assert last.words == (
        frozenset({"alpha_file"}), frozenset({"alpha_one", "beta_two"}), frozenset({"gamma_three"}),
    )  # fmt: skip
    assert last.query == {"beta_two"}
    named = {"alpha_one", "gamma_three", "beta_two", "filePath"}  # call names and arguments too
    assert last.future == named, "the request itself is no evidence"
    assert {"alpha_one", "other_word"} <= last.finished and "gamma_three" not in last.finished
    whole = [t for t in transitions(SESSION, "product", "code") if t.turn == 3]
    assert len(whole[0].words) == 6, "the completed turn too"


def test_a_user_is_known_wherever_the_role_stands() -> None:
    """Some tools write the content first."""
    turned = [dict(reversed(list(json.loads(raw).items()))) for raw in SESSION.messages]
    for setting in ("B.1", "product"):
        assert list(transitions(recording(turned, [0, 4, 8]), setting, "code")) == list(
            transitions(SESSION, setting, "code")
        )


def test_coverage_is_the_share_of_the_weight_that_stands_in_the_packed() -> None:
    t = Transition(
        "s", 2, (1, 1, 1, 1),
        (frozenset({"aa_a", "bb_b"}), frozenset({"aa_a"}), frozenset({"cc_c"}), frozenset()),
        frozenset(), frozenset(), frozenset({"aa_a", "cc_c", "dd_d"}),
    )  # fmt: skip
    rare, common = log(4 / 1), log(4 / 2)
    assert coverage(t, {0}) == pytest.approx(common / (common + rare))
    assert coverage(t, {1, 2}) == 1.0 and coverage(t, {3}) == 0.0
    nothing = Transition("s", 2, (1, 1), (frozenset(), frozenset()), frozenset(), frozenset(), frozenset({"dd_d"}))
    assert coverage(nothing, {0}) is None


def test_packing_skips_what_does_not_fit_and_the_oracle_is_the_best_of_equal_sizes() -> None:
    assert pack([3, 2, 1], [60, 30, 40], 0.55) == {0}
    assert pack([3, 2, 1], [100, 30, 40], 0.5) == {1, 2}
    (last,) = [t for t in transitions(SESSION, "B.1", "code") if t.turn == 3]
    best = max(SIGNALS, key=lambda name: coverage(last, pack(SIGNALS[name](last), (1, 1, 1), 0.34)) or 0.0)
    assert coverage(last, pack(SIGNALS["oracle"](last), (1, 1, 1), 0.34)) == coverage(
        last, pack(SIGNALS[best](last), (1, 1, 1), 0.34)
    )


def test_code_like_is_what_no_word_of_prose_is() -> None:
    text = "The function loadUser in store.writer reads utf8 and max_size with care"
    assert read_identifiers(text, "code") == {"loadUser", "store.writer", "utf8", "max_size"}
    assert read_identifiers(text, "any") >= {"reads", "care", "store", "writer"}


def test_a_paired_difference_sees_what_every_session_shares() -> None:
    """Sessions differ much and the sides by little: pairing finds it, and equal sides give exactly nothing."""
    left = {f"s{i}": [i / 10 + 0.05] for i in range(10)}
    right = {f"s{i}": [i / 10] for i in range(10)}
    found = paired_difference(left, right, seed=1, resamples=500)
    assert found.mean == pytest.approx(0.05) and found.low > 0.04 and found.high < 0.06
    assert paired_difference(left, left, seed=1, resamples=100).high == 0.0
    assert paired_difference(left, right, seed=1, resamples=500) == found
    assert isnan(paired_difference({}, right, seed=1).mean)


ANSWER = "One.\nTwo.\n\n\nThree:\n```py\na\n\nb\n```\n\n~~~~\n```\n~~~\n~~~~\nfour"


def test_an_answer_is_cut_by_paragraphs_and_lines_and_code_is_not() -> None:
    code, other = "```py\na\n\nb\n```\n", "~~~~\n```\n~~~\n~~~~\n"
    assert units_of(ANSWER, "paragraph") == ["One.\nTwo.\n\n\n", f"Three:\n{code}\n", f"{other}four"]
    assert units_of(ANSWER, "line") == ["One.\n", "Two.\n\n\n", "Three:\n", f"{code}\n", other, "four"]
    assert units_of(ANSWER, "block") == [ANSWER]
    assert units_of("```\nnever\n\nclosed", "line") == ["```\nnever\n\nclosed"]


@given(st.text("a`~ \n"), st.sampled_from(["paragraph", "line"]))
def test_no_character_is_lost_by_cutting(text: str, granularity: Granularity) -> None:
    units = units_of(text, granularity)
    assert "".join(units) == text and (all(units) or not text)


def test_finer_candidates_are_weighed_by_whole_blocks() -> None:
    session = recording(
        [user("a"), said("one_a\n\ntwo_b"), user("b"), said("three_c"), user("c"), said("two_b three_c")], [0, 2, 4]
    )
    (whole,) = [t for t in transitions(session, "product", "code") if t.turn == 3]
    (fine,) = [t for t in transitions(session, "product", "code", None, "paragraph") if t.turn == 3]
    assert [*map(len, (whole.words, fine.words))] == [4, 5] and fine.costs == (1, 7, 5, 1, 7)
    assert sum(whole.costs) == sum(fine.costs)
    assert coverage(fine, {2}) == coverage(whole, {1}) == pytest.approx(0.5), "each stands in one block of four"
    assert coverage(fine, {1}) == 0.0


# -- the command ------------------------------------------------------------------------------------------------------


def write_sessions(path: Path, *sessions: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return path


def as_json(name: str) -> dict[str, Any]:
    return {"id": name, "messages": [json.loads(raw) for raw in SESSION.messages], "turn_starts": [0, 4, 8]}


def test_a_run_writes_rows_tables_and_plots_and_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_sessions(tmp_path / "d.jsonl", as_json("one"), as_json("two")), tmp_path / "out"
    assert main(["eval", "reuse", str(data), "--out", str(out)]) == 0
    page = capsys.readouterr().out
    assert "past use + query" in page and "d.jsonl" in page and (out / "reuse.md").read_text() in page
    assert (out / "reuse-product-code.svg").exists() and (out / "reuse-b1-any.png").exists()
    file = out / "reuse.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:30])  # killed while the second row was written
    assert main(["eval", "reuse", str(data), "--out", str(out)]) == 0
    assert file.read_text().splitlines(keepends=True) == lines and capsys.readouterr().out == page
    assert main(["eval", "report", "--out", str(out)]) == 0
    assert "Reuse across turns" in capsys.readouterr().out


def test_the_granularity_is_part_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_sessions(tmp_path / "d.jsonl", as_json("one"))
    command = ["eval", "reuse", str(data), "--out", str(tmp_path / "out")]
    assert main([*command, "--granularity", "line"]) == 0
    assert "d.jsonl --granularity line`" in capsys.readouterr().out
    assert main(command) == 1 and "granularity" in capsys.readouterr().err
    assert main([*command, "--granularity", "line", "--model", "m"]) == 1
    assert "attention is of whole blocks" in capsys.readouterr().err


def test_another_run_is_never_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    one, two = (write_sessions(tmp_path / name, as_json(name)) for name in ("a.jsonl", "b.jsonl"))
    assert main(["eval", "reuse", str(one), "--out", str(out)]) == 0
    assert main(["eval", "reuse", str(two), "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "holds another run" in said and "files" in said and "--out" in said


CALL = b'{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"", "there is no session"),
        (b"{", "line 1: no JSON"),
        (b"[1]", "line 1: list instead of an object"),
        (gzip.compress(b"{}"), "line 1: no text in UTF-8; unpack it"),
        (b'{"messages": ' + b"[" * 10_000, "line 1: no JSON"),
        (b'{"turns": []}', "unknown format (keys: turns)"),
        (b'{"id": {}, "messages": [{"role": "user"}]}', "`$.id`"),
        (b'{"messages": [{"role": "robot"}]}', "'robot' - at `$.messages[0].role`"),
        (b'{"messages": [{"role": ["user"]}]}', "`$.messages[0].role`"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "`$.messages[0].content`"),
        (b'{"messages": [{"role": "user", "content": NaN}]}', "line 1: no JSON"),
        (b'{"messages": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}', "'input_text'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "`text` has no text"),
        (b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}', "'tool_use'"),
        (b'{"messages": [{"role": "assistant", "tool_calls": 5}]}', "`$.messages[0].tool_calls`"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}', "a call names no function"),
        (b'{"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}', "function_call`"),
        (b'{"messages": [{"role": "tool", "tool_call_id": "x"}]}', "result of 'x', which nothing calls"),
        (b'{"messages": [{"role": "tool"}]}', "result of None, which nothing calls"),
        (b'{"messages": [%s, {"role": "user", "content": "a"}]}' % CALL, "before the result of 'c'"),
        (b'{"messages": [%s]}' % CALL, "calls 'c', and the session ends without the result"),
        (b'{"messages": [%s, %s]}' % (CALL, CALL), "message 1 calls 'c', which waits for its result already"),
        (b'{"messages": [{"role": "user", "content": "a"}], "turn_starts": [4]}', "turn_starts [4]"),
        (b'{"messages": [{"role": "user", "content": "a"}], "turn_starts": [false]}', "`$.turn_starts[0]`"),
        (b'{"messages": [{"role": "user"}, {"role": "assistant"}], "turn_starts": [1]}', "turn_starts [1]"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no message of a user"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, text: bytes, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text + b"\n")
    assert main(["eval", "reuse", str(path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert wanted in said and "bad.jsonl" in said and "Traceback" not in said


def test_a_missing_file_and_a_missing_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "reuse", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]) == 1
    assert "none.jsonl' cannot be read" in capsys.readouterr().err
    with pytest.raises(Exception, match="cannot be written"):
        open_results(Path("/proc/none/reuse.jsonl"), {})


def test_an_export_is_a_session(tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    path.write_bytes(b"\n".join(SESSION.messages) + b"\n")
    (found,) = read_recordings([path]).recordings
    assert (found.id, found.turn_starts) == ("export", (0, 4, 8))


def test_calls_of_the_other_dialect_stand_in_messages_of_their_own(tmp_path: Path) -> None:
    """As `recap export` writes two calls of a turn: both are made before the first result."""
    calls = [{"role": "assistant", "content": "", "tool_calls": [call_of(name)]} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ba"]
    data = write_sessions(tmp_path / "d.jsonl", {"messages": [user("go"), *calls, *results, said("done")]})
    (found,) = read_recordings([data]).recordings
    assert [block.messages for block in found.blocks] == [(0,), (1, 2, 3, 4), (5,)]


def call_of(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_says_how_a_file_is_read(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps(as_json(name), ensure_ascii=False) + "\n" for name in ("one", "zwö")), encoding=encoding
    )
    assert [found.id for found in read_recordings([tmp_path / "d.jsonl"]).recordings] == ["one", "zwö"]


def test_half_a_surrogate_pair_reads_as_the_proxy_reads_it(tmp_path: Path) -> None:
    session = {"id": "\ud800", "messages": [{"role": "user", "content": "a \udc80"}]}
    (found,) = read_recordings([write_sessions(tmp_path / "d.jsonl", session)]).recordings
    assert (found.id, found.texts) == ("\ufffd", ("a \ufffd",))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [write_sessions(folder / "d.jsonl", as_json("one")) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(LabError, match="two files are named 'd.jsonl'"):
        read_recordings(files)


def test_a_plot_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_sessions(tmp_path / "d.jsonl", as_json("one")), tmp_path / "out"
    (out / "reuse-b1-any.svg").mkdir(parents=True)
    assert main(["eval", "reuse", str(data), "--out", str(out)]) == 1
    assert "reuse-b1-any.svg' cannot be written" in capsys.readouterr().err
    assert len(read_results(out / "reuse.jsonl").rows) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing_and_says_that_it_goes_on(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)

    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr("proxy.lab.simulation.measure", stopped)
    before = signal.getsignal(signal.SIGTERM)
    data = write_sessions(tmp_path / "d.jsonl", as_json("one"))
    assert main(["eval", "simulate", str(data), "--out", str(tmp_path / "out")]) == 130
    assert "give the same command again to go on" in capsys.readouterr().err
    assert not list((tmp_path / "scratch").iterdir()) and signal.getsignal(signal.SIGTERM) == before
