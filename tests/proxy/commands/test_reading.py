"""What the reading commands print of one small session, and how they say that something is not there.

Each test names the lines that a person acts upon; dates and scores are left to others.
"""

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

from graphstore.store.archive import open_reader
from proxy.commands.text import LINE_CHARS, duration, fitted, table
from tests.proxy.commands.conftest import HISTORY, REQUEST, Recap, build, newest_name
from tests.proxy.dialogue import LUNCH_S, Dialogue, said, turn, user


def rows(text: str) -> dict[str, list[str]]:
    """Lines of a table by their first word."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_sessions_lists_agents_and_with_all_side_requests_too(recap: Recap, name: str) -> None:
    shown = recap("sessions")
    assert rows(shown.out)[name][:8] == [name, "opencode", "gpt-test", "3", "5", "500", "0", "%"]
    assert rows(shown.out)[name][8:10] == ["1", "block"] and shown.out.count("Where is alpha?") == 1
    assert recap("sessions", "--all").out.count("Where is alpha?") == 2


def test_a_limit_says_how_many_it_hides(recap: Recap) -> None:
    assert recap("sessions", "--all", "--limit", "1").lines[-1] == "1 more: --limit 2"


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_wrong_limit_is_not_an_empty_archive(limit: str, recap: Recap) -> None:
    done = recap("sessions", f"--limit={limit}")
    assert done.code == 2 and done.out == "" and f"{limit!r} is not a number from 1 on" in done.err


async def only_a_title(folder: Path) -> str:
    dialogue = Dialogue(folder)
    headers = {"user-agent": "opencode/1.18.33 ai-sdk", "x-session-id": "ses_1"}
    await dialogue.send([user("hi")], tools=None, headers=headers)
    await dialogue.close()
    return dialogue.settings.db


def test_side_requests_alone_are_not_called_no_sessions(recap: Recap, tmp_path: Path) -> None:
    database = asyncio.run(only_a_title(tmp_path))
    assert "recap sessions --all" in recap("sessions", "--db", database).out


def test_show_tells_every_turn_and_numbers_that_add_up(recap: Recap, name: str) -> None:
    shown = recap("show", name)
    heads = [line for line in shown.lines if line.startswith("turn ")]
    assert [head.split("  ", 2)[2] for head in heads] == [
        "left alone: no history yet",
        "warm: idle for 5 s, cold after 3600 s",
        "cold: idle for 4000 s",
    ]
    steps = [line.split() for line in shown.lines if " complete " in line]
    full, sent = (sum(int(step[i].replace(",", "")) for step in steps) for i in (4, 5))
    assert f"5 requests, {full:,} tokens as the client sent them, {sent:,} as sent on (" in shown.out
    assert "provider: 500 input tokens in 5 answers, 0 of them cached (0 %)" in shown.out
    assert "in 1 rewritten request (" in shown.out
    assert "left out 1 block; --turn 3 lists every one" in shown.out


async def long_then_short(folder: Path) -> str:
    """The provider counts 50 tokens beside the words in every request, and of the words half as many as we do."""
    dialogue = Dialogue(folder)
    history = [*turn("one", "alpha", 30_000), *turn("two", "beta", 30_000)]
    await dialogue.send([*history[:4], user("two")], usage={"prompt_tokens": 2600})
    await dialogue.send([*history, user("three")], after_s=LUNCH_S, usage={"prompt_tokens": 60})
    await dialogue.close()
    return dialogue.settings.db


def test_what_was_saved_is_never_more_than_the_provider_would_have_counted(recap: Recap, tmp_path: Path) -> None:
    """Scaled from a request of which little was sent, what each request costs beside its words was multiplied too."""
    database = asyncio.run(long_then_short(tmp_path))
    name = newest_name(database)
    shown = recap("show", name, "--db", database)
    (saved,) = [line for line in shown.lines if line.startswith("saved: about")]
    first, second = [line.split() for line in shown.lines if " complete " in line]
    full, sent = (int(second[i].replace(",", "")) for i in (4, 5))
    ratio = 2600 / int(first[5].replace(",", ""))
    assert int(saved.split()[2].replace(",", "")) == round((full - sent) * ratio)
    assert f"{ratio:.2f} of its tokens for one of ours" in saved


def test_show_of_a_turn_lists_every_block_with_its_reason(recap: Recap, name: str) -> None:
    lines = [line.strip() for line in recap("show", name, "--turn", "3").lines]
    blocks = [line for line in lines if line.startswith(("kept", "left out  "))]
    assert len(blocks) == 6
    assert [line for line in blocks if line.startswith("left out")] == [
        next(line for line in blocks if "did not fit" in line and line.endswith("read alpha.py"))
    ]
    assert "protected: user message" in blocks[0] and blocks[0].endswith("Where is alpha?")


def test_show_of_a_turn_that_is_not_there_names_those_that_are(recap: Recap, name: str) -> None:
    done = recap("show", name, "--turn", "9")
    assert (done.code, done.lines[-1]) == (1, "no turn 9: there are requests of turns 1 to 3")


def test_explain_tells_the_latest_selection(recap: Recap, name: str) -> None:
    shown = recap("explain", name)
    assert shown.lines[0] == f"{name}: selection of turn 3, idle for 4000 s"
    assert "kept 5 of 6 blocks" in shown.lines[1]
    assert "0.5 z(words) + 0 explore, less 2 if stale" in shown.out


def test_explain_of_a_turn_tells_the_selection_of_that_turn(recap: Recap, name: str) -> None:
    assert recap("explain", name, "--turn", "3").out == recap("explain", name).out
    done = recap("explain", name, "--turn", "1")
    assert done.code == 1 and "nothing had been selected for turn 1" in done.err


def test_a_table_that_is_too_wide_is_cut_where_there_is_text() -> None:
    rows = [("kept", "because " * 9, 123_456, "x" * 90, "what it says " * 9)]
    lines = table(("", "why", "tokens", "id", "what"), rows, right=("tokens", "id")).splitlines()
    assert max(map(len, lines)) <= LINE_CHARS and "123456" in lines[2] and "x" * 90 in lines[2]


def test_a_table_uses_a_wide_terminal_and_cuts_its_widest_texts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("kept", "because " * 20, 123_456, "what it says " * 20)]
    for columns in ("160", "200", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = table(("", "why", "tokens", "what"), rows, right=("tokens",)).splitlines()
        assert len(lines[1]) == max(LINE_CHARS, int(columns) - 2)
        why, what = (len(rule) for rule in lines[1].split()[1::2])
        assert abs(why - what) <= 1


@pytest.mark.parametrize(
    ("text", "chars", "fits"),
    [
        ("read proxy/dialects/content.py", 30, "read proxy/dialects/content.py"),
        ("read proxy/dialects/content.py", 28, "read …/dialects/content.py"),
        ("read /etc/app/a.py, read proxy/b/c.py", 29, "read …/a.py, read …/b/c.py"),
        ("grep x a/b.py", 12, "grep x …/b.…"),
        ("protected: latest edit of a_long_name.py", 20, "protected: latest e…"),
    ],
)
def test_a_path_that_is_too_long_loses_its_beginning(text: str, chars: int, fits: str) -> None:
    assert fitted(text, chars) == fits and len(fits) <= chars


def test_explain_of_a_query_sees_the_whole_history_and_its_words(recap: Recap, name: str) -> None:
    """The last request and its answer are history by the time that the next request comes."""
    shown = recap("explain", name, "--query", "what of unique_alpha?", "--beta", "0.6")
    assert shown.lines[0] == f"{name}: what would be kept now for 'what of unique_alpha?'"
    found = [line for line in shown.lines if line.startswith(("kept ", "left out "))]
    assert [line.removeprefix("left out").split()[0 if line.startswith("left out") else 1] for line in found] == [
        str(i) for i in range(8)
    ]
    assert found[-2].endswith("Fix unique_beta now") and found[-1].endswith("beta is fixed")
    assert found[1].startswith("kept") and found[1].endswith("read alpha.py")
    assert found[4].startswith("left out") and found[4].endswith("read beta.py")


def test_explain_of_a_query_says_what_would_come_of_it(recap: Recap, name: str) -> None:
    query = ("explain", name, "--query", "alpha", "--min-history-tokens")
    idle = ("--mode", "idle")
    assert recap(*query, "0", *idle).lines[1] == "it would be sent: idle for 3600 s"
    assert recap(*query, "9000", *idle).lines[1].startswith("nothing would be left out: idle for 3600 s; left")
    assert recap(*query, "0", "--mode", "off").lines[1].startswith("mode off: it would be recorded and not sent")
    assert recap(*query, "0").lines[1].startswith("mode auto: idle for 1950 s, it would be sent if")


def test_no_line_is_wider_than_a_terminal(recap: Recap, name: str) -> None:
    for arguments in (["sessions"], ["show", name], ["show", name, "--turn", "3"], ["explain", name]):
        assert max(map(len, recap(*arguments).lines)) <= LINE_CHARS + 2, arguments


def test_a_wide_table_cuts_its_last_column_visibly() -> None:
    lines = table(("a", "what"), [("x" * 100, "y" * 100), ("x", "short")]).splitlines()
    assert [len(line) for line in lines[1:3]] == [LINE_CHARS, LINE_CHARS]
    assert lines[2].endswith("y…") and lines[3].endswith("short")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0174, "17 ms"), (0.9994, "999 ms"), (0.9999, "1.0 s"), (59.5, "59.5 s"), (600, "10 min"), (7200, "2.0 h")],
)
def test_durations_keep_their_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_mode_off_says_that_nothing_was_left_out(recap: Recap, tmp_path: Path) -> None:
    name, database = asyncio.run(build(tmp_path, "off")), str(tmp_path / "recap.db")
    shown = recap("show", name, "--db", database).out
    assert "would have sent (mode off) 5 of 6 history blocks" in shown and "rewritten" not in shown
    assert "would have left out 1 block" in shown
    assert recap("explain", name, "--db", database).lines[0].endswith("(mode off: recorded, not sent)")


def test_export_is_the_history_and_the_answer_that_followed(recap: Recap, name: str) -> None:
    expected = [*HISTORY, REQUEST, said("beta is fixed")]
    assert [json.loads(line) for line in recap("export", name).lines] == expected
    assert [json.loads(line) for line in recap("export", "--raw", name).lines] == expected


REASONED = [
    {"type": "message", "role": "user", "content": "Where is alpha?"},
    {"type": "reasoning", "id": "rs_1", "encrypted_content": "sealed", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a.py"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "alpha = 1"},
    {"type": "reasoning", "id": "rs_2", "encrypted_content": "sealed", "summary": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Here is alpha."}]},
]


async def reasoned(folder: Path) -> str:
    dialogue = Dialogue(folder, dialect="responses")
    await dialogue.send([*REASONED, user("Thanks")], answer=said("Welcome"))
    await dialogue.close()
    return dialogue.settings.db


def test_sealed_reasoning_is_no_empty_chat_message_and_no_name_of_a_block(recap: Recap, tmp_path: Path) -> None:
    database = asyncio.run(reasoned(tmp_path))
    with open_reader(database) as reader:
        name = reader.list_sessions()[0].name
        labels = [block.label for block, _ in reader.load_blocks(reader.list_sessions()[0].id)]
    assert labels == ["Where is alpha?", "read a.py", "Here is alpha.", "Thanks"]
    chat = [json.loads(line) for line in recap("export", name, "--db", database).lines]
    assert [message["role"] for message in chat] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    raw = [json.loads(line) for line in recap("export", "--raw", name, "--db", database).lines]
    assert raw[: len(REASONED)] == REASONED


async def parallel(folder: Path) -> str:
    dialogue = Dialogue(folder, dialect="responses")
    calls = [
        {
            "type": "function_call",
            "call_id": f"c{i}",
            "name": "read",
            "arguments": json.dumps({"path": f"{'ab'[i]}.py"}),
        }
        for i in range(2)
    ]
    results = [{"type": "function_call_output", "call_id": f"c{i}", "output": "text"} for i in range(2)]
    await dialogue.send([user("Read both"), *calls, *results, user("Thanks")])
    await dialogue.close()
    return dialogue.settings.db


def test_a_block_of_parallel_calls_is_named_by_all_of_them(tmp_path: Path) -> None:
    with open_reader(asyncio.run(parallel(tmp_path))) as reader:
        labels = [block.label for block, _ in reader.load_blocks(reader.list_sessions()[0].id)]
    assert labels == ["Read both", "read a.py, read b.py", "Thanks"]


def test_verify_finds_what_was_changed_by_hand(recap: Recap, tmp_path: Path) -> None:
    database = tmp_path / "recap.db"
    asyncio.run(build(tmp_path))
    assert recap("verify", "--db", str(database)).out == f"{database}: everything agrees\n"
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE messages SET content = 'x', codec = 'raw' WHERE id = (SELECT max(id) FROM messages)")
    connection.close()
    done = recap("verify", "--db", str(database))
    assert done.code == 1 and done.lines[0].startswith("messages ")
    assert done.lines[-1] == f"{database}: {len(done.lines) - 1} finding{'s' * (len(done.lines) > 2)}"


def test_a_name_is_enough_as_far_as_it_is_unique(recap: Recap, name: str) -> None:
    assert recap("export", name[:4]).out == recap("export", name).out
    assert recap("show", "none-such").err == "recap: no session is called 'none-such'; `recap sessions` lists them\n"


async def many(folder: Path) -> str:
    dialogue = Dialogue(folder)
    for index in range(12):
        await dialogue.send([user(f"question {index}")])
    await dialogue.close()
    return dialogue.settings.db


def test_an_ambiguous_name_does_not_list_the_whole_archive(recap: Recap, tmp_path: Path) -> None:
    done = recap("show", "", "--db", asyncio.run(many(tmp_path)))
    assert done.code == 1 and done.err.count(", ") == 7 and done.err.endswith("or 4 more; type more of the name\n")


async def one_request(folder: Path) -> str:
    dialogue = Dialogue(folder)
    await dialogue.send(turn("one", "a")[:1], finish=False)
    await dialogue.close()
    return dialogue.settings.db


def test_explain_of_a_first_request_has_nothing_to_choose_from(recap: Recap, tmp_path: Path) -> None:
    database = asyncio.run(one_request(tmp_path))
    name = newest_name(database)
    done = recap("explain", name, "--db", database)
    assert done.code == 0 and done.lines[-1] == "no history yet: there is nothing to choose from"


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + b"\xaa" * 8000], ids=["text", "garbage"])
def test_a_broken_archive_is_named_with_its_remedy(content: bytes, recap: Recap, tmp_path: Path) -> None:
    path = tmp_path / "recap.db"
    path.write_bytes(content)
    done = recap("sessions", "--db", str(path))
    assert done.code == 1 and done.err.startswith(f"recap: {str(path)!r}: ") and "move the file away" in done.err


def test_usage_names_the_commands_own_options_first(recap: Recap) -> None:
    """Two dozen settings in every usage line hide the one argument that is missing."""
    done = recap("explain")
    assert done.code == 2 and "usage: recap explain [-h] [--query TEXT | --turn N] session [SETTING ...]\n" in done.err
