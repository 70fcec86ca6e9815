"""The compaction tests find what they look for: in requests, archives and lives that were spoiled on purpose."""

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphstore.selectors import SELECTORS, SelectorName
from proxy.cli import main
from proxy.dialects.base import DialectName
from proxy.dialects.content import NOTICE
from proxy.lab.compaction import adversarial, checks, differential, histories, horizon, needle, recovery, replay
from proxy.lab.compaction import retention as constraints
from proxy.lab.compaction.bench import Bench, Lab, Served, gap_of, members_of
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import made
from proxy.lab.drive import empty_archive
from proxy.lab.results import read_results
from proxy.settings import Settings
from tests.fakes.model_script import Step
from tests.fakes.provider_rules import Units
from tests.fakes.scripted_upstream import Fault, Received, ScriptedUpstream
from tests.fakes.wire_answers import Reply, ToolForm


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with empty_archive() as archive:
        yield Lab(Settings(), archive, 0)


def tally_of(lab: Lab, case: Case, selector: SelectorName = "recap") -> Tally:
    async def run() -> Tally:
        return await case.run(lab, SELECTORS[selector])

    return asyncio.run(run())


def named(cases: list[Case], name: str) -> Case:
    return next(case for case in cases if case.name == name)


def served(lab: Lab, dialect: DialectName = "chat") -> Served:
    """A real request of which something was left out."""

    async def run() -> Served:
        async with lab.bench("recency", dialect) as bench:
            return await bench.come_back(made(1, dialect, turns=5), histories.user(dialect, "Go on."))

    found = asyncio.run(run())
    assert len(found.upstream) < len(found.client) / 2
    return found


# -- requests ---------------------------------------------------------------------------------------------------------


def spoiled(request: Served, messages: list[bytes], more: bytes = b"") -> Served:
    field = '"messages"' if request.dialect == "chat" else '"input"'
    head = request.sent.partition(field.encode())[0]
    tail = b',"tools":' + members_of(request.original)["tools"] + more + b"}"
    return replace(request, sent=head + field.encode() + b":[" + b",".join(messages) + b"]" + tail)


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_a_request_that_is_as_it_should_be_has_no_faults(lab: Lab, dialect: DialectName) -> None:
    request = served(lab, dialect)
    assert checks.faults(request) == [] == checks.faults(spoiled(request, request.upstream))


def test_every_fault_of_a_request_is_found(lab: Lab) -> None:
    request = served(lab)
    sent = request.upstream
    users = [i for i, raw in enumerate(sent) if checks.role_of(raw) == "user"]
    result = next(i for i, raw in enumerate(sent) if checks.role_of(raw) == "tool")

    def found(messages: list[bytes], more: bytes = b"") -> str:
        return "; ".join(checks.faults(spoiled(request, messages, more)))

    assert "a constraint is missing" in found(sent[: users[0]] + sent[users[0] + 1 :])
    assert "the current turn lost" in found(sent[:-1])
    assert "lost its result" in found(sent[:result] + sent[result + 1 :])
    assert "lost its call" in found(sent[: result - 1] + sent[result:])
    changed = sent[result].replace(b"def ", b"DEF ")
    assert "not the client's bytes" in found([*sent[:result], changed, *sent[result + 1 :]])
    assert "the order of messages changed" in found([*sent[:-2], sent[-1], sent[-2]])
    assert "'tools' changed" not in found(sent) and "'temperature' changed" in found(sent, b',"temperature":0')


def test_a_fault_of_the_client_is_not_ours(lab: Lab) -> None:
    request = served(lab)
    broken = [raw for raw in request.client if checks.role_of(raw) != "tool"]
    theirs = replace(spoiled(request, broken), original=spoiled(request, broken).sent)
    assert checks.pairs(theirs.client) and checks.faults(theirs) == []


def test_budget_and_prefix_are_watched(lab: Lab) -> None:
    request, settings = served(lab), Settings()
    parameters, dialect = horizon.parameters_of(settings), horizon.ChatDialect(part_chars=settings.image_chars)
    over = spoiled(request, request.client[:-30] + request.client[-29:])
    assert checks.over_budget(request, SELECTORS["recency"], parameters, dialect) == []
    assert checks.over_budget(over, SELECTORS["recency"], parameters, dialect)
    assert checks.over_budget(over, SELECTORS["full"], parameters, dialect) == [], "has no budget"
    assert checks.extends(request, request) == [] != checks.extends(request, over)


def test_the_reader_takes_what_a_strict_one_refuses() -> None:
    raw = rb'{"messages": [ {"content":"\ud800 \/"} , {"a":[1,{"b":"]"}]} ], "n":1e400}'
    request = Served("chat", raw, raw)
    assert request.client == [rb'{"content":"\ud800 \/"}', b'{"a":[1,{"b":"]"}]}']
    assert members_of(raw)["n"] == b"1e400" and members_of(b"{}") == {}


# -- cases ------------------------------------------------------------------------------------------------------------


def test_needles_are_lost_and_kept_as_a_selector_does() -> None:
    """Asserted of the two selectors about which there is nothing to measure."""
    with empty_archive() as archive:
        case = named(needle.cases(0), "update, named")
        tallies = {name: tally_of(Lab(Settings(), archive, 0), case, name) for name in ("full", "user-messages")}
    assert (tallies["full"].passed, tallies["full"].trials) == (6, 6)
    assert (tallies["user-messages"].passed, tallies["user-messages"].trials) == (0, 6)
    assert "lost 'retry_limit = 8" in tallies["user-messages"].failures[0]
    assert not tallies["full"].broken and not tallies["user-messages"].broken


def test_no_word_of_a_paraphrase_stands_in_its_facts() -> None:
    for each in needle.NEEDLES:
        facts = " ".join(f"{fact.path} {fact.text}" for fact in each.facts).lower()
        words = [word.strip("?.,").lower() for word in each.paraphrased.split()]
        assert not [word for word in words if len(word) > 3 and word in facts], each.name


@pytest.mark.parametrize("kind", constraints.KINDS)
@pytest.mark.parametrize("dialect", constraints.DIALECTS)
def test_constraints_stay(lab: Lab, kind: str, dialect: DialectName) -> None:
    tally = tally_of(lab, named(constraints.cases(0), f"{kind}, {dialect}"), "user-messages")
    assert tally.broken == [] and tally.promised > 40 and tally.chars[0] < tally.chars[1] / 2


@pytest.mark.parametrize("kind", recovery.KINDS)
def test_what_was_left_out_can_be_had_back(lab: Lab, kind: str) -> None:
    tally = tally_of(lab, named(recovery.cases(0), kind))
    assert tally.broken == [] and tally.promised == 13 and tally.chars[0] < tally.chars[1] / 2


@pytest.mark.parametrize("name", ["text that forges the notice", "near-duplicates with other numbers"])
def test_hostile_results_change_no_protection(lab: Lab, name: str) -> None:
    tally = tally_of(lab, named(adversarial.cases(), name))
    assert tally.broken == [] and tally.trials in (3, 4)


def test_protection_is_compared_with_the_archive(lab: Lab) -> None:
    async def run() -> tuple[list[str], list[str]]:
        with lab.place("recap") as settings:
            bench = Bench(settings)
            request = await bench.come_back(made(1, turns=4), histories.user("chat", "Go on."))
            await bench.close()
            before = adversarial.protection_faults(settings.db, request, SELECTORS["recap"])
            spoil(settings.db, "UPDATE selection_blocks SET rule = 'score' WHERE rule = 'protected'")
            return before, adversarial.protection_faults(settings.db, request, SELECTORS["recap"])

    before, after = asyncio.run(run())
    assert before == [] and "is not protected" in after[0]


def test_a_long_session_keeps_every_promise(lab: Lab) -> None:
    (case,) = horizon.cases(26)
    tally = tally_of(lab, case)
    assert tally.broken == [] and tally.trials == 2 and tally.values["compactions"] == 8


# -- archives ---------------------------------------------------------------------------------------------------------


def spoil(path: str, statement: str) -> None:
    database = sqlite3.connect(path)
    with database:
        database.execute("PRAGMA foreign_keys = OFF")
        assert database.execute(statement).rowcount > 0
    database.close()


@pytest.mark.parametrize(
    ("statement", "live", "at_rest"),
    [
        ("DELETE FROM exchanges WHERE id = (SELECT max(id) FROM exchanges)", "requests were sent", "verify:"),
        ("UPDATE selection_blocks SET kept = 1", "is not what was left out", "messages went upstream"),
        (
            "UPDATE messages SET (codec, content) = (SELECT codec, content FROM messages ORDER BY id LIMIT 1 OFFSET 3)"
            " WHERE id = (SELECT min(message_id) FROM nodes)",
            "the history rebuilt is not what the client sent",
            "the history rebuilt is not what the client sent",
        ),
    ],
)
def test_a_spoiled_archive_is_found_out(lab: Lab, statement: str, live: str, at_rest: str) -> None:
    async def run() -> Iterator[str]:
        with lab.place("recap") as settings:
            bench = Bench(settings)
            await constraints.come_back_often(bench, made(1, turns=4))
            await bench.close()
            assert not [fault for _, faults in recovery.audit(settings.db) for fault in faults]
            spoil(settings.db, statement)
            found = [fault for faults in recovery.archive_faults(settings.db, bench.log) for fault in faults]
            found_at_rest = [fault for _, faults in recovery.audit(settings.db) for fault in faults]
        return iter(("; ".join(found), "; ".join(found_at_rest)))

    found, found_at_rest = asyncio.run(run())
    assert live in found and at_rest in found_at_rest


# -- kills ------------------------------------------------------------------------------------------------------------

KILLED = made("kill", turns=2, steps=1)
KILLS = [replay.Kill(2, "sent"), replay.Kill(2, "answered"), replay.Kill(3, "flushed"), replay.Kill(2, "commit")]


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_a_session_goes_on_after_a_kill(lab: Lab, kill: replay.Kill) -> None:
    async def run() -> tuple[bool, Tally]:
        tally = Tally()
        requests = replay.requests_of(KILLED, gap_of(lab.settings))
        assert [request.after_s > 1000 for request in requests] == [False, False, True, False, False]
        return await replay.die_and_go_on(lab, SELECTORS["recap"], KILLED, requests, kill, tally), tally

    has_died, tally = asyncio.run(run())
    assert has_died and tally.broken == []
    assert kill.moment != "sent" or tally.chars[0] < tally.chars[1], "what it goes on with was left out before"


def test_a_life_that_forgets_is_found_out(lab: Lab) -> None:
    """The same client, and an archive that knows nothing of what was sent, answered and flushed."""

    async def run() -> tuple[list[str], list[str]]:
        requests = replay.requests_of(KILLED, gap_of(lab.settings))
        messages = [KILLED.messages[: request.messages] for request in requests]
        async with lab.bench("recency") as bench:
            sent = [(await bench.send(m, after_s=r.after_s)).sent for m, r in zip(messages, requests, strict=True)]
        tally, lived = Tally(), replay.Lived(sent[:3], answered=2, flushed=2)
        with lab.place("recency") as settings:
            archived = replay.archive_faults_of(settings.db, lived)
            await replay.go_on(settings, KILLED, requests, lived, tally, "it")
        return archived, tally.broken

    archived, broken = asyncio.run(run())
    assert archived == ["2 answers were flushed, 0 are stored"]
    assert broken == ["it, request 3: asked again, it was sent as something else"]


# -- a model ----------------------------------------------------------------------------------------------------------


class Clerk(ScriptedUpstream):
    """Knows what stands in its prompt, and edits when it has seen code."""

    def _reply(self, received: Received, step: Step, tools: dict[str, ToolForm], units: Units) -> Reply:
        prompt = received.messages[0]["content"]
        if differential.ACTION in prompt:
            return super()._reply(received, Step(text=f"edit: {'' if 'def ' in prompt else 'in '}vain"), tools, units)
        (asked,) = (each for each in (*needle.NEEDLES, needle.UNANSWERABLE) if each.named in prompt)
        is_there = asked.answer and all(asked.facts[i].text in prompt for i in asked.wanted)
        return super()._reply(received, Step(text=f"`{asked.answer if is_there else 'Unknown'}`\n"), tools, units)


def command(folder: Path, *more: str) -> list[str]:
    return ["eval", "compaction", "--out", str(folder / "eval"), *more]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_results(folder / "eval" / "compaction.jsonl").rows


def test_a_model_is_asked_with_everything_and_as_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Clerk() as model:
        chosen = ["--family", "differential", "--selector", "full", "--selector", "user-messages", "--trials", "1"]
        assert main(command(tmp_path, *chosen, "--base-url", model.base_url, "--model", "m")) == 0
    rows = {(row["case"], row["selector"]): row for row in rows_of(tmp_path)}
    for each in needle.NEEDLES:
        assert rows[f"fact, {each.name}", "full"]["passed"] == 1
        assert rows[f"fact, {each.name}", "user-messages"]["passed"] == 0
        assert rows[f"fact, {each.name}, evidence alone", "full"]["passed"] == 1
    assert rows["fact, no answer", "user-messages"]["passed"] == 1
    action = "next action, made actions 0"
    full, bare = rows[action, "full"], rows[action, "user-messages"]
    assert (full["passed"], full["same_line"], bare["passed"], bare["same_line"]) == (3, 3, 3, 0)
    assert full["tokens_full"] and full["tokens_sent"] > 5 * bare["tokens_sent"] and not bare["cut"]
    assert bare["tokens_full"] == full["tokens_full"], "the baseline that each is compared with"
    assert "| user-messages | 0/3 |" in capsys.readouterr().out


@pytest.mark.parametrize("message", [{"content": None}, {"content": " \n"}, {"content": None, "tool_calls": []}])
def test_a_model_that_says_nothing_agrees_with_nobody(
    tmp_path: Path, message: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.dumps({"choices": [{"message": {"role": "assistant", **message}}], "usage": {"prompt_tokens": -1}})
    with Clerk() as model:
        model.inject(*[Fault(body=body.encode())] * 40)
        chosen = ["--family", "differential", "--selector", "full", "--trials", "1"]
        assert main(command(tmp_path, *chosen, "--base-url", model.base_url, "--model", "m")) == 0
    assert {row["passed"] for row in rows_of(tmp_path)} == {0}
    assert "| full | 0/3 | – | – | – |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "line", "tool"),
    [
        ("\n `read: src/A.py` \nmore", "read: src/a.py", "read"),
        ("> **bash(make)**", "bash(make)", "bash"),
        ("Answer:  all   done", "answer: all done", "answer"),
        ("", "", ""),
    ],
)
def test_the_form_of_an_answer_does_not_matter(said: str, line: str, tool: str) -> None:
    assert (differential.line_of(said), differential.tool_of(said)) == (line, tool)


def test_a_value_is_right_when_it_stands_alone() -> None:
    assert differential.is_right("retry_limit = 8", "8") and differential.is_right("The number is 39.", "39")
    assert not differential.is_right("18443", "8443") and not differential.is_right("8.5", "8")
    assert not differential.is_right("It is 3, later\n8", "8") and not differential.is_right("not now", "no")
    assert differential.is_right("Unknown.", None) and not differential.is_right("24", None)


# -- the command ------------------------------------------------------------------------------------------------------

SHORT = ["--family", "horizon", "--turns", "4", "--selector", "recency"]


def test_a_run_goes_on_and_its_page_says_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, *SHORT)) == 0
    page, rows = capsys.readouterr().out, rows_of(tmp_path)
    assert "`recap eval compaction --selector recency --family horizon --turns 4`" in page
    assert "No promise was broken." in page and "Not measured: no model was named." in page
    assert main(command(tmp_path, *SHORT)) == 0
    assert rows_of(tmp_path) == rows and capsys.readouterr().out == page
    assert main(command(tmp_path, *SHORT, "--seed", "1")) == 1
    assert "holds another run (it differs in seed)" in capsys.readouterr().err


def test_files_and_the_own_archive_are_tested_too(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(dialect: DialectName) -> None:
        bench = Bench(lab.settings_for("recap", tmp_path / "own.db"), dialect=dialect)
        await bench.come_back(made(dialect, dialect, turns=3), histories.user(dialect, "Go on."))
        await bench.close()

    for dialect in constraints.DIALECTS:
        asyncio.run(serve(dialect))
    digest = hashlib.sha256((tmp_path / "own.db").read_bytes()).hexdigest()
    session = b'{"id":"s","messages":[%s]}' % b",".join(made(2, turns=3).messages)
    (tmp_path / "s.jsonl").write_bytes(session)
    own = [str(tmp_path / "s.jsonl"), "--archive", str(tmp_path / "own.db")]
    assert main(command(tmp_path, *own, "--family", "recoverability", "--selector", "recency")) == 0
    rows = {row["case"]: row for row in rows_of(tmp_path)}
    assert not any(row["broken"] for row in rows.values())
    assert rows["archive as it stands"]["promised"] == 5, "two requests of two sessions, and the whole"
    assert rows["archive: driven anew"]["promised"] > rows["files: driven anew"]["promised"] > 5
    assert hashlib.sha256((tmp_path / "own.db").read_bytes()).hexdigest() == digest
    assert "recap eval compaction s.jsonl --archive own.db" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--turns", "0"], "--turns is 0: give at least 1"),
        (["--trials", "0"], "--trials is 0"),
        (["--model", "m"], "a model needs both"),
        (["--family", "differential"], "name it with --base-url and --model"),
        (["--base-url", "nowhere", "--model", "m"], "'nowhere' is no base URL"),
        (
            ["--base-url", "https://a.example/v1", "--model", "m", "--key-env", "NO_KEY_"],
            "the variable NO_KEY_ is empty",
        ),
        (["--archive", "none.db"], "none.db"),
        (["missing.jsonl"], "'missing.jsonl' cannot be read"),
    ],
)
def test_what_cannot_be_is_said(
    more: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command(tmp_path, *more)) == 1
    assert says in capsys.readouterr().err


def test_a_forged_notice_is_no_notice(lab: Lab) -> None:
    """A client's message that has the notice's words is the client's."""
    request = served(lab)
    forged = histories.user("chat", NOTICE)
    theirs = [*request.client[:-1], forged, request.client[-1]]
    body = spoiled(request, theirs).sent
    assert checks.places_of(replace(request, original=body, sent=body)) == list(range(len(theirs)))
