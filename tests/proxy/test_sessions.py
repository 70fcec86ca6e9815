"""Which conversation a history belongs to: every outcome by name, for clients with ids and without."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from graphstore.store.archive import open_reader
from graphstore.store.marks import set_mark
from tests.observed import observe, replay_of
from tests.proxy.dialogue import LUNCH_S, SYSTEM, Dialogue, Message, read, said, turn, user

OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk", "x-session-id": "ses_1"}
QWEN = {"user-agent": "QwenCode/0.15.10 (linux; x64)"}
CODEX = {"originator": "codex_exec", "session-id": "S", "thread-id": "S", "x-codex-window-id": "S:0"}
SDK = {"user-agent": "OpenAI/Python 3.57.0"}
TITLE: Message = {"role": "system", "content": "You write titles."}
EVERY_CLIENT = pytest.mark.parametrize(
    "headers", [OPENCODE, CODEX, QWEN, SDK], ids=["opencode", "codex", "qwen", "sdk"]
)


@pytest.fixture
async def dialogue(tmp_path: Path) -> AsyncIterator[Dialogue]:
    made = Dialogue(tmp_path)
    yield made
    assert await made.findings() == []


@EVERY_CLIENT
async def test_extension_and_retry(dialogue: Dialogue, headers: dict[str, str]) -> None:
    await dialogue.send([user("a")], headers=headers)
    await dialogue.send([user("a"), *read("f", "x")], headers=headers)
    await dialogue.send([user("a"), *read("f", "x")], headers=headers)
    assert await dialogue.outcomes() == ["new", "extension", "retry"]
    assert [row.turns for row in await dialogue.sessions()] == [1]


@EVERY_CLIENT
async def test_undo_keeps_the_session(dialogue: Dialogue, headers: dict[str, str]) -> None:
    first, second = turn("one", "a"), turn("two", "b")
    await dialogue.send([*first, user("two")], headers=headers)
    await dialogue.send([*first, *second, user("three")], headers=headers)
    await dialogue.send([*first, user("two")], headers=headers)
    assert (await dialogue.outcomes())[-1] == "undo"
    assert len(await dialogue.sessions()) == 1


@EVERY_CLIENT
async def test_an_edited_request_starts_a_branch_with_its_parent(dialogue: Dialogue, headers: dict[str, str]) -> None:
    first = turn("one", "a")
    await dialogue.send([user("one")], headers=headers)
    await dialogue.send([*first, user("fix the parser, please")], headers=headers)
    await dialogue.send([*first, user("write the manual instead")], headers=headers)
    assert (await dialogue.outcomes())[-1] == "fork"
    parent, branch = await dialogue.sessions()
    assert (branch.parent_id, branch.fork_depth) == (parent.id, len(first))


async def test_a_fork_under_another_client_id_knows_its_parent(dialogue: Dialogue) -> None:
    first = turn("one", "a")
    await dialogue.send([user("one")], headers=OPENCODE)
    await dialogue.send([*first, user("two")], headers=OPENCODE)
    await dialogue.send([*first, user("two"), said("ok"), user("three")], headers=OPENCODE | {"x-session-id": "ses_2"})
    parent, branch = await dialogue.sessions()
    assert (await dialogue.outcomes())[-1] == "fork"
    assert (branch.client_id, branch.parent_id) == ("ses_2", parent.id)


async def test_a_branch_goes_on_from_what_was_sent_of_its_parent(dialogue: Dialogue) -> None:
    first = turn("one", "a")
    await dialogue.send([user("one")], headers=OPENCODE)
    await dialogue.send([*first, user("two")], headers=OPENCODE)
    await dialogue.send([*first, user("otherwise")], headers=OPENCODE)
    await dialogue.send([*first, user("and again")], headers=OPENCODE, model="another")
    rows = await dialogue.exchanges()
    assert [(row.outcome, row.prefix_messages) for row in rows] == [
        ("new", 0), ("extension", 1), ("fork", len(first)), ("fork", 0),
    ]  # fmt: skip


async def test_a_reminder_that_moves_on_is_an_amendment(dialogue: Dialogue) -> None:
    """OpenCode's plan agent adds a part to the newest user message only."""
    reminded = user("please refactor the parser <system-reminder>plan mode is active</system-reminder>")
    plain = user("please refactor the parser")
    await dialogue.send([reminded], headers=OPENCODE)
    await dialogue.send([reminded, *read("f", "x")], headers=OPENCODE)
    await dialogue.send([plain, *read("f", "x"), said("planned"), user("go <system-reminder>")], headers=OPENCODE)
    assert await dialogue.outcomes() == ["new", "extension", "amendment"]
    assert len(await dialogue.sessions()) == 1


@EVERY_CLIENT
async def test_client_pruning_keeps_the_session_and_the_selection(dialogue: Dialogue, headers: dict[str, str]) -> None:
    first, second = turn("one", "a"), turn("two", "b")
    await dialogue.send([user("one")], headers=headers)
    await dialogue.send([*first, user("two")], headers=headers)
    chosen = await dialogue.send([*first, *second, user("three")], headers=headers, after_s=LUNCH_S)
    assert chosen.rewritten
    pruned = [*first[:2], first[2] | {"content": "[Old tool result content cleared]"}, *first[3:]]
    after = await dialogue.send([*pruned, *second, user("three"), said("ok"), user("four")], headers=headers)
    assert (await dialogue.outcomes())[-1] == "client pruning"
    assert "unique_a" not in after.text
    assert len(await dialogue.sessions()) == 1


async def test_opencode_compaction_is_recognised_by_its_summary(dialogue: Dialogue) -> None:
    await dialogue.send([user("one")], headers=OPENCODE)
    await dialogue.send([*turn("one", "a"), user("two")], headers=OPENCODE)
    summary = "The user wants one and two; a.py was read."
    await dialogue.send([user("<conversation>…</conversation>")], headers=OPENCODE, system=TITLE, tools=None,
                        answer=said(summary))  # fmt: skip
    await dialogue.send([user("What did we do so far?"), said(summary), user("three")], headers=OPENCODE)
    assert await dialogue.outcomes() == ["new", "extension", "side", "client compaction"]


async def test_what_a_person_said_of_a_block_outlives_a_compaction(dialogue: Dialogue) -> None:
    """The client sends its latest messages again, behind a summary: they are other blocks, with the same words."""
    files = [f"file{i}" for i in range(1, 7)]
    history = [m for name in files for m in turn(name, name)]
    for end in range(0, len(history), 4):
        await dialogue.send(history[: end + 1], headers=OPENCODE)
    await dialogue.send(history[:-1], headers=OPENCODE)
    await dialogue.conversations.flush()
    with open_reader(dialogue.settings.db) as reader:
        numbers = {b.label: b.ordinal for b, _ in reader.load_blocks(1)}
    for name, mark in (("file5", "pin"), ("file6", "mute"), ("file1", "pin")):
        set_mark(dialogue.settings.db, 1, numbers[f"read {name}.py"], mark, clock=lambda: 0.0)  # type: ignore[arg-type]
    summary = "Five files were read, and then a sixth."
    await dialogue.send([*history, user("Summarise")], headers=OPENCODE, tools=None, answer=said(summary))
    again = [user(summary), said("understood"), *history[-12:], user("of unique_file6")]
    reply = await dialogue.send(again, headers=OPENCODE)
    assert "def unique_file5" in reply.text and "def unique_file6" not in reply.text
    await dialogue.conversations.flush()
    with open_reader(dialogue.settings.db) as reader:
        standing = {b.ordinal: b.label for b, _ in reader.load_blocks(1) if b.ordinal > max(numbers.values())}
        marked = {standing[o]: mark for o, mark in reader.marks(1).items() if o in standing}
    assert marked == {"read file5.py": "pin", "read file6.py": "mute"}
    await dialogue.restart()
    later = [*again, said("ok"), user("of unique_file6, again")]
    reply = await dialogue.send(later, headers=OPENCODE, after_s=LUNCH_S)
    assert "def unique_file5" in reply.text and "def unique_file6" not in reply.text
    assert (await dialogue.outcomes())[-2:] == ["client compaction", "extension"]


async def test_codex_compaction_is_recognised_by_its_window(dialogue: Dialogue) -> None:
    await dialogue.send([user("env"), user("one")], headers=CODEX)
    await dialogue.send([user("env"), *turn("one", "a"), user("two")], headers=CODEX)
    after = CODEX | {"x-codex-window-id": "S:1"}
    await dialogue.send([user("env"), user("one"), user("two"), user("summary"), user("three")], headers=after)
    assert (await dialogue.outcomes())[-1] == "client compaction"
    assert len(await dialogue.sessions()) == 1


async def test_qwen_compression_without_any_id(dialogue: Dialogue) -> None:
    history = [user("env"), said("Got it. Thanks for the context!"), *turn("one", "a")]
    await dialogue.send(history[:3], headers=QWEN)
    await dialogue.send([*history, user("two")], headers=QWEN)
    summary = "<state_snapshot>one was done, two is open</state_snapshot>"
    await dialogue.send([*history, user("two"), user("First, reason about the history.")], headers=QWEN, tools=None,
                        answer=said(summary))  # fmt: skip
    await dialogue.send([user(summary), said("Got it. Thanks for the additional context!"), user("two")], headers=QWEN)
    assert await dialogue.outcomes() == ["new", "extension", "side", "client compaction"]
    assert len(await dialogue.sessions()) == 1


async def test_titles_stay_beside_the_session_whenever_they_come(dialogue: Dialogue) -> None:
    title = [user("Generate a title for this conversation:"), user("one")]
    await dialogue.send(title, headers=OPENCODE, system=TITLE, tools=None)
    await dialogue.send([user("one")], headers=OPENCODE)
    await dialogue.send(title, headers=OPENCODE, system=TITLE, tools=None)
    await dialogue.send([*turn("one", "a"), user("two")], headers=OPENCODE)
    assert await dialogue.outcomes() == ["side", "new", "side", "extension"]
    assert [row.kind for row in await dialogue.sessions()].count("agent") == 1


async def test_a_side_request_over_the_whole_history_is_never_rewritten(dialogue: Dialogue) -> None:
    """A summary of a selection would lose what the selection left out."""
    history = [*turn("one", "a"), *turn("two", "b")]
    await dialogue.send([user("one")], headers=CODEX)
    await dialogue.send([*turn("one", "a"), user("two")], headers=CODEX)
    chosen = await dialogue.send([*history, user("three")], headers=CODEX, after_s=LUNCH_S)
    asked = await dialogue.send([*history, user("three"), said("ok"), user("summarise")], headers=CODEX, tools=None)
    again = await dialogue.send([*history, user("three"), said("ok"), user("four")], headers=CODEX)
    assert chosen.rewritten and not asked.rewritten and again.rewritten
    assert await dialogue.outcomes() == ["new", "extension", "extension", "side", "extension"]


async def test_another_agent_over_the_same_history_leaves_the_session_alone(dialogue: Dialogue) -> None:
    """Qwen Code's memory extraction resends the history under its own instructions and with its own tools."""
    history = [*turn("one", "a"), *turn("two", "b")]
    for length in (1, 3, 5, 7):
        await dialogue.send(history[:length], headers=QWEN)
    memory = [*history, user("Scan the recent conversation history and update the memory.")]
    tools = [{"type": "function", "function": {"name": "write_memory", "parameters": {}}}]
    asked = await dialogue.send(memory, headers=QWEN, system=TITLE, tools=tools)
    step = await dialogue.send([*memory, *read("m", "x")], headers=QWEN, system=TITLE, tools=tools)
    after = await dialogue.send([*history, user("three")], headers=QWEN)
    assert not (asked.rewritten or step.rewritten or after.rewritten)
    assert (await dialogue.outcomes())[-3:] == ["side", "extension", "extension"]
    assert (await dialogue.exchanges())[-1].boundary == "warm"


async def test_sub_agents_have_sessions_of_their_own(dialogue: Dialogue) -> None:
    await dialogue.send([user("one")], headers=CODEX)
    child = CODEX | {"thread-id": "T", "x-codex-parent-thread-id": "S", "x-codex-window-id": "T:0"}
    await dialogue.send([user("do the job")], headers=child)
    await dialogue.send([*turn("one", "a"), user("two")], headers=CODEX)
    await dialogue.send([user("do the job"), *read("f", "x")], headers=child)
    assert await dialogue.outcomes() == ["new", "new", "extension", "extension"]
    parent, sub = await dialogue.sessions()
    assert (parent.client_id, sub.client_id, sub.parent_id) == ("S", "T", parent.id)


@EVERY_CLIENT
async def test_equal_beginnings_stay_apart_from_their_first_difference(
    dialogue: Dialogue, headers: dict[str, str]
) -> None:
    """Two chats that open with the same greeting: what one leaves out must not leak into the other."""
    other = headers | ({"x-session-id": "ses_9", "thread-id": "U"} if headers in (OPENCODE, CODEX) else {})
    one, two = turn("hello", "a"), turn("hello", "b")
    await dialogue.send([user("hello")], headers=headers)
    await dialogue.send([user("hello")], headers=other)
    await dialogue.send([*one, user("next")], headers=headers)
    await dialogue.send([*two, user("next")], headers=other)
    long = [*one, user("next"), *read("c", "def unique_c(): pass " * 200), said("ok")]
    chosen = await dialogue.send([*long, user("more")], headers=headers, after_s=LUNCH_S)
    assert chosen.rewritten
    second = await dialogue.send([*two, user("next"), said("ok"), user("more")], headers=other)
    assert not second.rewritten or "unique_b" in second.text or "unique_a" not in second.text
    third = await dialogue.send([*long, user("more"), said("ok"), user("go on")], headers=headers)
    assert third.rewritten
    assert len(await dialogue.sessions()) == 2


async def test_two_accounts_never_share_a_session(dialogue: Dialogue) -> None:
    history = [*turn("one", "a"), user("two")]
    await dialogue.send(history, headers=SDK | {"authorization": "Bearer first"})
    await dialogue.send(history, headers=SDK | {"authorization": "Bearer second"})
    assert await dialogue.outcomes() == ["new", "new"]


async def test_an_account_that_sends_anothers_id_gets_nothing_of_its_session(dialogue: Dialogue) -> None:
    """Nor does it move it: a longer history with a shortened result would be a pruning, were it the same account."""
    one, two = ({**OPENCODE, "authorization": f"Bearer {name}"} for name in ("first", "second"))
    history = [*turn("one", "a"), *turn("two", "b"), user("three")]
    await dialogue.send(history, headers=one)
    pruned = [message | {"content": "gone"} if message["role"] == "tool" else message for message in history]
    await dialogue.send([*pruned, said("ok"), user("unique_a")], headers=two)
    before = await dialogue.send([*history, said("ok"), user("and?")], headers=one, after_s=LUNCH_S)
    other = await dialogue.send([*pruned, said("ok"), user("unique_a")], headers=two, after_s=LUNCH_S)
    assert before.rewritten and "def unique_a" not in other.text
    first, second = await dialogue.sessions()
    assert first.scope != second.scope and first.client_id == second.client_id
    assert [row.outcome for row in await dialogue.exchanges()] == ["new", "new", "extension", "retry"]


async def test_a_cache_key_does_not_merge_conversations(dialogue: Dialogue) -> None:
    """Applications use one `prompt_cache_key` for many conversations."""
    await dialogue.send([*turn("one", "a"), user("x")], headers=SDK, more={"prompt_cache_key": "app"})
    await dialogue.send([*turn("two", "b"), user("y")], headers=SDK, more={"prompt_cache_key": "app"})
    assert await dialogue.outcomes() == ["new", "new"]


async def test_a_constant_session_id_does_not_merge_conversations(dialogue: Dialogue) -> None:
    constant = SDK | {"x-session-id": "always-the-same"}
    first, second = turn("one", "a"), turn("two", "b")
    await dialogue.send([user("one")], headers=constant)
    await dialogue.send([user("two")], headers=constant)
    await dialogue.send([*first, user("x")], headers=constant)
    await dialogue.send([*second, user("y")], headers=constant)
    assert await dialogue.outcomes() == ["new", "new", "extension", "extension"]


async def test_a_new_day_changes_a_first_message(dialogue: Dialogue) -> None:
    """Qwen Code's first message holds the date; it sends no id."""
    day = "This is Qwen Code. Today's date is Monday. Folder: /home/user/project with a.py and b.py"
    rest = [said("Got it. Thanks for the context!"), *turn("one", "a")]
    await dialogue.send([user(day), *rest[:2]], headers=QWEN)
    await dialogue.send([user(day), *rest, user("two")], headers=QWEN)
    later = [user(day.replace("Monday", "Tuesday")), *rest, user("two"), said("ok"), user("three")]
    await dialogue.send(later, headers=QWEN)
    assert (await dialogue.outcomes())[-1] == "amendment"
    assert len(await dialogue.sessions()) == 1


async def test_a_changed_date_in_the_instructions_keeps_the_session(dialogue: Dialogue) -> None:
    await dialogue.send([user("one")], headers=OPENCODE, system=SYSTEM)
    tomorrow = {"role": "system", "content": "You are a coding agent. Today is another day."}
    reply = await dialogue.send([*turn("one", "a"), user("two")], headers=OPENCODE, system=tomorrow)
    assert await dialogue.outcomes() == ["new", "extension"]
    assert (await dialogue.exchanges())[-1].reason == "instructions changed"
    assert reply.rewritten


async def test_a_plain_chat_without_tools_is_a_session_not_a_side_request(dialogue: Dialogue) -> None:
    await dialogue.send([user("one")], headers=SDK, tools=None)
    await dialogue.send([user("one"), said("ok"), user("two")], headers=SDK, tools=None)
    assert await dialogue.outcomes() == ["new", "extension"]


@EVERY_CLIENT
async def test_a_restart_finds_the_session_again(dialogue: Dialogue, headers: dict[str, str]) -> None:
    first, second = turn("one", "a"), turn("two", "b")
    await dialogue.send([user("one")], headers=headers)
    await dialogue.send([*first, user("two")], headers=headers)
    chosen = await dialogue.send([*first, *second, user("three")], headers=headers, after_s=LUNCH_S)
    await dialogue.restart()
    again = await dialogue.send([*first, *second, user("three"), *read("c", "x")], headers=headers)
    assert again.rewritten
    assert again.messages[: len(chosen.messages)] == chosen.messages
    assert (await dialogue.outcomes())[-1] == "extension"
    assert len(await dialogue.sessions()) == 1


async def test_a_branch_inherits_what_the_graph_knows_of_the_shared_part_only(dialogue: Dialogue) -> None:
    """Beyond the fork the same block numbers name other blocks."""
    first, second = turn("one", "a"), turn("two", "b")
    await dialogue.send([user("one")], headers=OPENCODE)
    await dialogue.send([*first, *second, user("three")], headers=OPENCODE)
    await dialogue.close()
    seen = replay_of(dict.fromkeys(range(7), 0.5), [(0, 1, 0.5), (1, 4, 0.5)])
    observe(dialogue.settings.db, 1, seen, turn=50)
    await dialogue.restart()
    await dialogue.send([*first, user("another way"), *read("c", "x")], headers=OPENCODE)
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        known = {state.ordinal: (state.u, state.stale) for _, state in reader.load_blocks(2) if state.observed}
        assert known == {0: (0.6, False), 1: (0.6, False), 2: (0.6, False)}
        assert [(edge.support, edge.dependent) for edge in reader.load_edges(2)] == [(0, 1)]
