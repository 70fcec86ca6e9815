"""Pressure: a context that nears the window is compacted at a step, or once more when it was refused for its length."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from graphstore.store.archive import open_reader
from proxy.conversations import open_conversations
from proxy.dialects.base import DialectName
from proxy.overflow import Overflow, Windows, overflow_of
from proxy.ports import Plan, Shorter
from proxy.settings import Settings
from tests.archives import lay_out_archive
from tests.fakes.conversations import FakeConversations
from tests.fakes.provider_rules import error_body, reject_chat, reject_responses
from tests.fakes.scripted_upstream import Fault, Json, ScriptedUpstream
from tests.proxy.dialogue import LUNCH_S, PATHS, Dialogue, Message, Reply, said, turn, user
from tests.support import RunningProxy, running_proxy

ID = {"x-session-id": "s"}
WINDOW = 8_000
STEP_CHARS = 2_000  # about 500 tokens a step


def chars(reply: Reply) -> int:
    return sum(len(json.dumps(message)) for message in reply.messages)


def step(dialect: DialectName, number: int, size: int = STEP_CHARS, name: str = "read") -> list[Message]:
    """A step of its own in either dialect, as an agent sends it back: reasoning, call, result."""
    arguments = json.dumps({"filePath": f"file{number}.py", "content": "x"})
    text = f"def unique_{number}(): pass\n" + "filler text " * (size // 12)
    if dialect == "chat":
        call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        return [
            {"role": "assistant", "content": None, "reasoning_content": f"thought {number}", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": text},
        ]
    return [
        {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": "abc"},
        {"type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "name": name, "arguments": arguments},
        {"type": "function_call_output", "call_id": f"c{number}", "output": text},
    ]


def is_valid(dialect: DialectName, messages: list[Message]) -> bool:
    if dialect == "chat":
        return reject_chat(messages) is None
    owed = {m["id"]: m["id"].replace("fc", "rs") for m in messages if m.get("type") == "function_call"}
    return reject_responses(messages, stateful=False, led_to=owed) is None


@pytest.fixture(params=["chat", "responses"])
async def dialogue(request: Any, tmp_path: Path) -> AsyncIterator[Dialogue]:
    made = Dialogue(tmp_path, dialect=request.param, changes={"context_window_tokens": WINDOW})
    yield made
    assert await made.findings() == []


@pytest.fixture
async def unknown(tmp_path: Path) -> AsyncIterator[Dialogue]:
    """A window that nobody told us."""
    made = Dialogue(tmp_path)
    yield made
    assert await made.findings() == []


async def long_turn(dialogue: Dialogue, steps: int, start: int = 0) -> tuple[list[Message], list[Reply]]:
    """An autonomous turn after a short one; the replies to each step."""
    history = [user("hello"), said("hi"), user("please refactor everything")]
    replies = [await dialogue.send(history, headers=ID)]
    for number in range(start, start + steps):
        history = history + step(dialogue.dialect, number)
        replies.append(await dialogue.send(history, headers=ID))
    return history, replies


async def test_a_turn_of_a_hundred_steps_never_exceeds_the_window(dialogue: Dialogue) -> None:
    history, replies = await long_turn(dialogue, 100)
    assert len(json.dumps(history)) // 4 > 5 * WINDOW
    for number, reply in enumerate(replies):
        assert chars(reply) // 4 < WINDOW, number
        assert is_valid(dialogue.dialect, reply.messages)
        assert [m for m in reply.messages if m.get("role") == "user"] == [m for m in history if m.get("role") == "user"]
        newest = json.loads(reply.original)["messages" if dialogue.dialect == "chat" else "input"][-6:]
        assert reply.messages[-len(newest) :] == newest or number < 3, "the newest steps stay"
    rows = await dialogue.exchanges()
    pressed = [i for i, row in enumerate(rows) if row.boundary == "cold"]
    assert 5 <= len(pressed) <= 20
    assert all(b - a >= 4 for a, b in zip(pressed, pressed[1:], strict=False)), "not again at once"
    assert all("step inside the turn; pressure: " in rows[i].reason for i in pressed)
    for i, (before, after) in enumerate(zip(replies, replies[1:], strict=False), 1):
        if i not in pressed:
            assert after.messages[: len(before.messages)] == before.messages, "bytes are extended in between"


async def test_what_a_step_left_out_stays_out(dialogue: Dialogue) -> None:
    """Through retries, a restart, the next turn; all of it comes back in sight of a new selection."""
    history, replies = await long_turn(dialogue, 16)
    assert replies[-1].rewritten
    assert (await dialogue.send(history, headers=ID)).sent == replies[-1].sent
    await dialogue.restart()
    assert (await dialogue.send(history, headers=ID)).sent == replies[-1].sent
    history += step(dialogue.dialect, 99, size=50)
    longer = await dialogue.send(history, headers=ID)
    assert longer.messages[: len(replies[-1].messages)] == replies[-1].messages
    await dialogue.restart()
    history += [said("done"), user("and now?")]
    later = await dialogue.send(history, headers=ID)
    assert later.messages[: len(longer.messages)] == longer.messages
    assert later.messages[-1] == user("and now?")


async def test_nothing_is_sent_shorter_before_it_is_on_disk(
    dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await dialogue.conversations.flush()  # type: ignore[union-attr]

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    history, _ = await long_turn(dialogue, 10)
    await dialogue.conversations.flush()  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr("proxy.recorder.Recorder._batch", fail)
        for number in range(10, 16):
            history = history + step(dialogue.dialect, number)
            assert not (await dialogue.send(history, headers=ID)).rewritten
        await dialogue.conversations.flush()  # type: ignore[union-attr]
    history = history + step(dialogue.dialect, 16)
    assert (await dialogue.send(history, headers=ID)).rewritten


async def test_a_client_that_goes_back_gets_its_newest_steps_again(dialogue: Dialogue) -> None:
    """Undo inside the turn, to its request, and to the turn before."""
    history, replies = await long_turn(dialogue, 20)
    first_left_out = next(i for i, reply in enumerate(replies) if reply.rewritten)
    size = len(step(dialogue.dialect, 0))
    back = history[: 3 + size * 5]
    shown = await dialogue.send(back, headers=ID)
    assert shown.messages[-3 * size :] == back[-3 * size :]
    assert is_valid(dialogue.dialect, shown.messages)
    await dialogue.restart()
    again = await dialogue.send(back, headers=ID)
    assert again.sent == shown.sent, "what is shown again is shown after a restart, too"
    request = await dialogue.send(history[:3], headers=ID)
    assert request.messages == json.loads(request.original)["messages" if dialogue.dialect == "chat" else "input"]
    once_more = await dialogue.send([*history[:3], *step(dialogue.dialect, 500)], headers=ID)
    assert not once_more.rewritten
    assert first_left_out > 5


async def test_an_older_turn_that_becomes_the_current_one_is_shown_whole(dialogue: Dialogue) -> None:
    """Its steps were left out for a later turn: as for any selection, what is under way again is sent."""
    work = [message for number in range(6) for message in step(dialogue.dialect, number, size=200)]
    history = [user("first"), *work]
    await dialogue.send(history[:1], headers=ID)
    await dialogue.send(history, headers=ID)
    later = [*history, said("ok"), user("second")]
    cold = await dialogue.send(later, headers=ID, after_s=LUNCH_S)
    assert cold.rewritten
    assert not (await dialogue.send(history, headers=ID)).rewritten


async def test_a_branch_keeps_what_its_parent_left_out(dialogue: Dialogue) -> None:
    history, replies = await long_turn(dialogue, 16)
    size = len(step(dialogue.dialect, 0))
    branch = [*history[:-size], *step(dialogue.dialect, 77, size=100)]
    forked = await dialogue.send(branch, headers={"x-session-id": "other"})
    assert forked.rewritten
    assert forked.messages[:-size] == replies[-2].messages[: len(forked.messages) - size]
    assert is_valid(dialogue.dialect, forked.messages)
    assert (await dialogue.outcomes())[-1] == "fork"


async def test_an_old_result_that_the_client_replaces_stays_left_out(dialogue: Dialogue) -> None:
    """Pruning in place by the client, while the turn goes on."""
    history, replies = await long_turn(dialogue, 16)
    await dialogue.conversations.flush()  # type: ignore[union-attr]  # what changed in place is seen in the archive
    name = "content" if dialogue.dialect == "chat" else "output"
    place = next(i for i, m in enumerate(history) if name in m and i > 2 and m not in replies[-1].messages)
    place += dialogue.dialect == "chat"  # its result
    pruned = [*history[:place], history[place] | {name: "[cleared]"}, *history[place + 1 :]]
    pruned += step(dialogue.dialect, 60, size=50)
    reply = await dialogue.send(pruned, headers=ID)
    assert reply.messages[: len(replies[-1].messages)] == replies[-1].messages
    assert "client pruning" in await dialogue.outcomes()


async def test_pressure_that_nothing_can_relieve_leaves_the_turn_alone(dialogue: Dialogue) -> None:
    """The newest steps alone exceed the window: no selection helps, so the cache is not broken at every step."""
    history = [user("hello"), said("hi"), user("go")]
    await dialogue.send(history, headers=ID)
    for number in range(8):
        history = history + step(dialogue.dialect, number, size=3 * 4 * WINDOW // 7)
        reply = await dialogue.send(history, headers=ID)
        assert not reply.rewritten
    rows = await dialogue.exchanges()
    assert all(row.selection_id is None for row in rows)
    assert "no selection would help" in rows[-1].reason


@pytest.mark.parametrize("changes", [{"pressure": False}, {"mode": "off"}], ids=["off", "observing"])
async def test_switched_off_nothing_is_touched(dialogue: Dialogue, changes: dict[str, Any]) -> None:
    await dialogue.restart(**changes)
    history, replies = await long_turn(dialogue, 30)
    assert not any(reply.rewritten for reply in replies)
    assert await refused(replies[-1]) == Shorter(None)
    assert not (await dialogue.send([*history, said("ok"), user("next")], headers=ID)).rewritten


async def test_the_latest_edit_of_a_file_is_kept_while_the_window_allows(dialogue: Dialogue) -> None:
    history = [user("go")]
    await dialogue.send(history, headers=ID)
    history = history + step(dialogue.dialect, 0, name="write")
    for number in range(1, 18):
        history = history + step(dialogue.dialect, number)
        reply = await dialogue.send(history, headers=ID)
    assert reply.rewritten and "unique_0(" in reply.text
    assert sum(f"unique_{number}(" not in reply.text for number in range(18)) > 5


# -- refused for its length ---------------------------------------------------------------------------------------

TOO_LONG = json.dumps(error_body("Too long.", code="context_length_exceeded")).encode()


async def refused(reply: Reply, body: bytes = TOO_LONG, status: int = 400) -> Shorter | None:
    assert reply.plan.exchange is not None
    return await reply.plan.exchange.shorter(status, [], body)


async def test_a_refused_request_is_compacted_and_stays_so(unknown: Dialogue) -> None:
    history, _ = await long_turn(unknown, 12)
    history += step("chat", 50)
    reply = await unknown.send(history, headers=ID, finish=False)
    assert not reply.rewritten
    shorter = await refused(reply)
    assert shorter is not None and shorter.body is not None
    sent = Reply(Plan(shorter.body, reply.plan.exchange), reply.original)
    assert chars(sent) < chars(reply) // 2
    assert is_valid("chat", sent.messages)
    unknown.finish(reply.plan, said("ok"))
    await unknown.restart()
    history += step("chat", 51)
    later = await unknown.send(history, headers=ID)
    assert later.messages[: len(sent.messages)] == sent.messages
    rows = await unknown.exchanges()
    assert (rows[-2].boundary, rows[-2].error, rows[-2].bytes_sent) == ("cold", None, len(shorter.body))
    assert "refused with 400 for its length" in rows[-2].reason
    assert (await unknown.sessions())[0].state == "normal"


async def test_a_rewritten_request_that_is_still_too_long_is_compacted_further(unknown: Dialogue) -> None:
    await unknown.restart(beta=1.0)
    history, _ = await long_turn(unknown, 12)
    whole = await unknown.send(history, headers=ID, finish=False)
    assert (first := await refused(whole)) is not None and first.body is not None
    unknown.finish(whole.plan, said("ok"))
    second = await refused(reply := await unknown.send([*history, *step("chat", 70)], headers=ID, finish=False))
    assert reply.rewritten and second is not None and second.body is not None
    assert len(second.body) < len(reply.sent)
    unknown.finish(reply.plan, said("ok"))


async def test_a_second_refusal_takes_everything_back(unknown: Dialogue) -> None:
    history, _ = await long_turn(unknown, 12)
    reply = await unknown.send([*history, *step("chat", 50)], headers=ID, finish=False)
    assert await refused(reply) is not None
    assert reply.plan.exchange is not None
    reply.plan.exchange.refused_again("refused with 400")
    unknown.finish(reply.plan, said("never"), status=400)
    await unknown.restart()
    again = await unknown.send([*history, *step("chat", 50)], headers=ID)
    assert not again.rewritten
    rows = await unknown.exchanges()
    assert rows[-2].error == "sent again, shorter: refused with 400"
    assert rows[-2].messages_sent == rows[-2].messages_total
    assert (await unknown.sessions())[0].state == "normal"


async def test_nothing_is_compacted_when_the_session_has_moved_on(unknown: Dialogue) -> None:
    history, _ = await long_turn(unknown, 12)
    slow = await unknown.send([*history, *step("chat", 50)], headers=ID, finish=False)
    await unknown.send([*history, *step("chat", 50), *step("chat", 51)], headers=ID)
    assert await refused(slow) == Shorter(None)
    unknown.finish(slow.plan, said("ok"), status=400)


async def test_other_refusals_are_none_of_this(unknown: Dialogue) -> None:
    history, _ = await long_turn(unknown, 12)
    reply = await unknown.send([*history, *step("chat", 50)], headers=ID, finish=False)
    assert await refused(reply, b'{"error":{"message":"Invalid schema for function"}}') is None
    assert await refused(reply, TOO_LONG, status=500) is None
    unknown.finish(reply.plan, said("ok"))


async def test_a_told_window_presses_the_next_steps(unknown: Dialogue) -> None:
    """One refusal is enough: from then on steps are compacted before they are too long."""
    history, _ = await long_turn(unknown, 12)
    history += step("chat", 50)
    reply = await unknown.send(history, headers=ID, finish=False)
    said_so = error_body(f"This model's maximum context length is {WINDOW} tokens, and you sent more.")
    assert await refused(reply, json.dumps(said_so).encode()) is not None
    unknown.finish(reply.plan, said("ok"))
    for number in range(60, 90):
        history = history + step("chat", number)
        assert chars(await unknown.send(history, headers=ID)) // 4 < WINDOW
    other = await unknown.send(history, headers=ID, model="other-model")
    assert other.plan.exchange is not None, "another model has another window"


@pytest.mark.parametrize(
    ("text", "window", "counted"),
    [
        ("This model's maximum context length is 8192 tokens. However, your messages resulted in 8545 ", 8192, None),
        ("maximum context length is 8192 tokens. However, your messages resulted in 8545 tokens.", 8192, 8545),
        (
            "This model's maximum context length is 131072 tokens. However, you requested 131134 tokens (122942 in the "
            "messages, 8192 in the completion).",
            122880,
            122942,
        ),
        ("prompt is too long: 213462 tokens > 200000 maximum", 200_000, 213_462),
        ("Your input exceeds the context window of this model.", None, None),
        (
            "The input token count (1,196,265) exceeds the maximum number of tokens allowed (1,048,575)",
            1048575,
            1196265,
        ),
        ("This model's maximum prompt length is 131072 but the request contains 537812 tokens", 131072, 537812),
        ('{"error":{"type":"exceed_context_size_error","n_prompt_tokens":9000,"n_ctx":4096}}', 4096, 9000),
        ("Input is too long for requested model.", None, None),
        (
            "This model's maximum context length is 202752 tokens. However, you requested 65536 output tokens and your "
            "prompt contains at least 137217 input tokens, for a total of at least 202753 tokens.",
            137_216,
            137_217,
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 8192. This model's maximum context length is 65536 "
            "tokens and your request has 57879 input tokens (8192 > 65536 - 57879).",
            57_344,
            57_879,
        ),
        (
            "input length and `max_tokens` exceed context limit: 196437 + 16384 > 200000, decrease input length",
            183_616,
            196_437,
        ),
        ("prompt tokens (400007) exceed model maximum (278528) for some-model", 278_528, 400_007),
        ("prompt token count of 175000 exceeds the limit of 128000", 128_000, 175_000),
        ("Prompt contains 140000 tokens, too large for model with 131072 maximum context length", 131_072, 140_000),
        ("Prompt exceeds max length", None, None),
        ("litellm.ContextWindowExceededError: the upstream refused", None, None),
        ("Input exceeds the max input token limit", None, None),
        ("ollama: context length exceeded for llama3", None, None),
        ("total tokens exceeds the model's max of 4096", None, None),
        ("<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 129024]", 129024, None),
    ],
)
def test_refusals_for_length_are_known_with_their_numbers(text: str, window: int | None, counted: int | None) -> None:
    assert overflow_of(400, text.encode()) == Overflow(window, counted)
    wrapped = json.dumps({"error": {"message": "Provider returned error", "metadata": {"raw": text}}})
    assert overflow_of(413, wrapped.encode()) is not None
    assert overflow_of(500, text.encode()) is None


@pytest.mark.parametrize(
    "text",
    [
        "An assistant message with 'tool_calls' must be followed by tool messages",
        "string too long. Expected a string with maximum length 1048576",
        "",
    ],
)
def test_what_is_not_about_the_window(text: str) -> None:
    assert overflow_of(400, text.encode()) is None


@pytest.mark.parametrize(
    "text", ["", "<html>413 Request Entity Too Large</html>", '{"error":{"type":"request_too_large"}}']
)
def test_a_413_need_not_speak_of_tokens(text: str) -> None:
    """Cerebras sends one without a body, Anthropic and web servers one about bytes."""
    assert overflow_of(413, text.encode()) == Overflow()
    assert overflow_of(413, b"simulated") is None
    moment = (
        b"Request too large on tokens per minute (TPM): Limit 6000, Requested 9000. Reduce the length of the messages"
    )
    assert overflow_of(413, moment) is None


def test_windows_are_learned_in_tokens_of_our_own_count() -> None:
    windows = Windows()
    windows.learn("u", "m", Overflow(8000, 10_000), 5_000)
    assert windows.of("u", "m") == 4_000, "the provider counts twice what we do"
    windows.learn("u", "n", Overflow(8000), 12_000)
    assert windows.of("u", "n") == 8_000
    windows.learn("u", "o", Overflow(4096, 2104), 2_000)
    assert windows.of("u", "o") is None, "the input fits: the answer that was asked for was too long"
    windows.learn("u", "p", Overflow(), 2_000)
    assert windows.of("u", "p") is None


# -- through a real proxy -----------------------------------------------------------------------------------------


def script(steps: int) -> str:
    return " ".join(f'[[read {{"path": "f{number}.py"}}]]' for number in range(steps)) + " [[= all done]]"


async def run_agent(client: httpx.AsyncClient, dialect: DialectName, steps: int) -> list[httpx.Response]:
    """An agent that takes so many steps; every result is 1,200 characters long.

    The scripted model counts the steps that it is shown, so it repeats itself when it is shown fewer.
    """
    name = "messages" if dialect == "chat" else "input"
    tool: dict[str, Any] = {"name": "read", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": tool}] if dialect == "chat" else [{"type": "function", **tool}]
    history: list[Message] = [user(script(steps))]
    answers: list[httpx.Response] = []
    for _ in range(steps):
        body = {"model": "m", name: history, "tools": tools}
        answers.append(answer := await client.post(PATHS[dialect], json=body, headers=ID))
        if answer.status_code != 200:
            return answers
        if dialect == "chat":
            given = [answer.json()["choices"][0]["message"]]
            calls = [call["id"] for call in given[0].get("tool_calls") or ()]
        else:
            given = answer.json()["output"]
            calls = [item["call_id"] for item in given if item["type"] == "function_call"]
        text = f"result {len(answers)} " + "filler text " * 100
        history += given + [
            {"role": "tool", "tool_call_id": call, "content": text}
            if dialect == "chat"
            else {"type": "function_call_output", "call_id": call, "output": text}
            for call in calls
        ]
    return answers


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("window", [0, 6_000], ids=["told by refusals", "known"])
async def test_an_agent_finishes_a_turn_that_is_longer_than_the_window(
    dialect: DialectName, window: int, tmp_path: Path
) -> None:
    settings = {"db": str(tmp_path / "recap.db"), "min_history_tokens": 0, "context_window_tokens": window}
    lay_out_archive(Path(str(settings["db"])))
    async with ScriptedUpstream(window_tokens=6_000) as upstream:
        given = Settings(upstream=upstream.base_url, **settings)  # type: ignore[arg-type]
        async with (
            running_proxy(given, open_conversations(given, lambda: 0.0)) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30) as client,
        ):
            answers = await run_agent(client, dialect, 40)
        assert [answer.status_code for answer in answers] == [200] * 40
        rejected = [received for received in upstream.conversations if received.rejected]
        assert len(rejected) <= 3, "a window that was told presses"
        assert all("maximum context length" in (received.rejected or "") for received in rejected)
        assert len(upstream.conversations) == 40 + len(rejected)


async def test_without_pressure_the_same_agent_fails(tmp_path: Path) -> None:
    lay_out_archive(tmp_path / "recap.db")
    async with ScriptedUpstream(window_tokens=6_000) as upstream:
        given = Settings(upstream=upstream.base_url, db=str(tmp_path / "recap.db"), pressure=False)
        async with (
            running_proxy(given, open_conversations(given, lambda: 0.0)) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30) as client,
        ):
            answers = await run_agent(client, "chat", 40)
        assert (answers[-1].status_code, len(upstream.conversations)) == (400, len(answers))
        assert answers[-1].json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("second", [400, 429, 500])
async def test_when_the_shorter_one_fails_too_the_client_gets_the_first_answer(second: int, tmp_path: Path) -> None:
    first = Fault(status=400, body=TOO_LONG, headers=(("x-first", "yes"),), encoding="gzip")
    lay_out_archive(tmp_path / "recap.db")
    async with ScriptedUpstream() as upstream:
        given = Settings(upstream=upstream.base_url, db=str(tmp_path / "recap.db"))
        async with (
            running_proxy(given, open_conversations(given, lambda: 0.0)) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30) as client,
        ):
            upstream.inject(first, when=lambda received: len(received.messages) > 20)
            upstream.inject(Fault(status=second), when=lambda received: len(upstream.conversations) >= 11)
            answers = await run_agent(client, "chat", 15)
            sent = [len(received.body) for received in upstream.conversations]
        assert answers[-1].status_code == 400
        assert answers[-1].headers["x-first"] == "yes"
        assert answers[-1].content == TOO_LONG
        assert len(sent) == len(answers) + 1, "sent again once"
        assert sent[-1] < sent[-2] // 2


# -- refused within an answer that began with 200 -------------------------------------------------------------------

STREAM = "text/event-stream"
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","error":null}}\n\n'
FAILED = (
    b'event: response.failed\ndata: {"type":"response.failed","response":{"id":"r","status":"failed","error":'
    b'{"code":"context_length_exceeded","message":"Your input exceeds the context window of this model."}}}\n\n'
)
ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOLD = b'data: {"error":{"message":"maximum context length is 9000 tokens","code":400}}\n\ndata: [DONE]\n\n'
WAITING = b": OPENROUTER PROCESSING\n\n"


@asynccontextmanager
async def after_fifteen_steps(
    folder: Path, dialect: DialectName, **changes: Any
) -> AsyncIterator[tuple[ScriptedUpstream, RunningProxy, httpx.AsyncClient, Json]]:
    """A proxy with an agent that took so many steps, half of the window; the body is that of its last request."""
    lay_out_archive(folder / "recap.db")
    async with ScriptedUpstream() as upstream:
        changes = {"context_window_tokens": WINDOW} | changes
        given = Settings(upstream=upstream.base_url, db=str(folder / "recap.db"), **changes)
        async with (
            running_proxy(given, open_conversations(given, lambda: 0.0)) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30, headers=ID) as client,
        ):
            answers = await run_agent(client, dialect, 15)
            assert [answer.status_code for answer in answers] == [200] * 15
            yield upstream, proxy, client, upstream.conversations[-1].json


REFUSED_WITHIN: list[tuple[DialectName, bytes, bytes]] = [  # dialect, answer, what of it is on its way at once
    ("responses", CREATED + FAILED, b""),
    ("responses", WAITING + CREATED + FAILED, WAITING),
    ("responses", b'data: {"type":"error","code":"context_length_exceeded","message":""}\n\n', b""),
    ("chat", TOLD, b""),
    ("chat", ROLE + TOLD, b""),
    ("chat", b'event: error\r\ndata: {"message":"prompt is too long: 9 tokens"}\r\n\r\n', b""),
    ("chat", TOLD.partition(b"\n")[0], b""),
    ("chat", b'\n\n {"error": {"message": "prompt is too long"}}', b"\n\n"),
    ("chat", b'{"object":"error","message":"maximum context length is 9000 tokens"}', b""),
]


@pytest.mark.parametrize("kind", [STREAM, "application/json"], ids=["chunked", "with a length"])
@pytest.mark.parametrize(("dialect", "body", "seen"), REFUSED_WITHIN)
async def test_a_refusal_within_an_answer_is_compacted_too(
    dialect: DialectName, body: bytes, seen: bytes, kind: str, tmp_path: Path
) -> None:
    async with after_fifteen_steps(tmp_path, dialect) as (upstream, _, client, request):
        upstream.inject(Fault(body=body, content_type=kind, split=7))
        answer = await client.post(PATHS[dialect], json=request | {"stream": kind == STREAM})
        first, second = upstream.conversations[-2:]
        assert len(second.body) < len(first.body) // 2
        assert answer.status_code == 200
        begin = answer.content.removeprefix(seen) if kind == STREAM else answer.content
        assert begin.startswith((b"event: response.created", b"data: {", b"{")) and b"exceed" not in begin
        assert begin.count(b"event: response.created") == (dialect == "responses" and kind == STREAM)
    with open_reader(tmp_path / "recap.db") as reader:
        row = reader.session_exchanges(1)[-1]
    assert (row.boundary, row.status, row.error) == ("cold", 200, None)
    assert row.messages_sent < row.messages_total and "refused with 200 for its length" in row.reason


@pytest.mark.parametrize(
    "second",
    [
        Fault(status=400),
        Fault(body=TOLD, content_type=STREAM),
        Fault(body=ROLE, content_type=STREAM, truncate_after=20),
        Fault(encoding="gzip"),
        Fault(body=b"{}"),
    ],
    ids=["400", "within", "broken", "encoded", "of another kind"],
)
@pytest.mark.parametrize("first", [WAITING + ROLE + TOLD, TOLD])
async def test_what_began_is_ended_when_the_shorter_one_fails(first: bytes, second: Fault, tmp_path: Path) -> None:
    """The client gets each byte of the first answer once, and the session is as it was."""
    async with after_fifteen_steps(tmp_path, "chat") as (upstream, _, client, request):
        upstream.inject(Fault(body=first, content_type=STREAM), second)
        answer = await client.post(PATHS["chat"], json=request | {"stream": True})
        assert (answer.status_code, answer.content) == (200, first)
        again = await client.post(PATHS["chat"], json=request)
        assert again.status_code == 200 and upstream.conversations[-1].json == request


async def test_a_rewritten_request_that_no_shorter_one_helps_goes_out_as_it_came() -> None:
    """The refusal may only repeat words of the request, and the rewriting be what it is about."""
    conversations = FakeConversations(lambda _: b'{"model":"m","messages":[{"role":"user","content":"x"}]}')
    async with (
        ScriptedUpstream() as upstream,
        running_proxy(Settings(upstream=upstream.base_url), conversations) as proxy,
        httpx.AsyncClient(base_url=proxy.url, timeout=30) as client,
    ):
        upstream.inject(Fault(status=400, body=TOO_LONG))
        answer = await client.post(PATHS["chat"], json={"model": "m", "messages": [user("hello")]})
        assert answer.status_code == 200
        assert b"hello" not in upstream.conversations[0].body and b"hello" in upstream.conversations[1].body


async def test_a_refusal_by_status_whose_shorter_request_is_refused_within_stands(tmp_path: Path) -> None:
    async with after_fifteen_steps(tmp_path, "chat") as (upstream, _, client, request):
        upstream.inject(Fault(status=400, body=TOO_LONG), Fault(body=ROLE + TOLD, content_type=STREAM))
        answer = await client.post(PATHS["chat"], json=request | {"stream": True})
        assert (answer.status_code, answer.content) == (400, TOO_LONG)
        await client.post(PATHS["chat"], json=request)
        assert upstream.conversations[-1].json == request


SAID = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SAID, TOLD),
        (ROLE + SAID, TOLD),
        (ROLE + WAITING, TOLD),
        (b'data: {"error":{"message":"overloaded"}}\n\n', TOLD),
        (b'data: {"error":{"message":"rate limit: too many tokens"}}\n\n', b""),
        (b"data: [DONE]\n\n", TOLD),
        (b"data: no json\n\n", TOLD),
        (b"<html>", TOLD),
        (b'{"id":"c","choices":[]', b"}"),
    ],
)
async def test_nothing_is_sent_again_once_an_answer_says_something(before: bytes, after: bytes, tmp_path: Path) -> None:
    """And it passes at once: the upstream waits for the client to have it."""
    async with after_fifteen_steps(tmp_path, "chat") as (upstream, _, client, request):
        count = len(upstream.conversations)
        upstream.inject(Fault(body=before + after, content_type=STREAM, stall_after=len(before)))
        async with client.stream("POST", PATHS["chat"], json=request | {"stream": True}) as answer:
            got = b""
            pieces = answer.aiter_raw()
            while len(got) < len(before):
                got += await anext(pieces)
            upstream.release()
            got += b"".join([piece async for piece in pieces])
        assert got == before + after
        assert len(upstream.conversations) == count + 1


async def test_comments_pass_while_an_answer_has_not_begun(tmp_path: Path) -> None:
    async with after_fifteen_steps(tmp_path, "chat") as (upstream, _, client, request):
        upstream.inject(Fault(body=WAITING * 2 + ROLE + TOLD, content_type=STREAM, stall_after=2 * len(WAITING)))
        async with client.stream("POST", PATHS["chat"], json=request | {"stream": True}) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == 2 * WAITING
            upstream.release()
            rest = b"".join([piece async for piece in pieces])
        assert rest.startswith(b"data: {") and b"error" not in rest and rest.count(b"data: [DONE]") == 1


@pytest.mark.parametrize(("dialect", "seen", "refusal"), [("chat", ROLE, TOLD), ("responses", CREATED, FAILED)])
async def test_nothing_is_held_back_of_an_answer_to_a_request_that_will_fit(
    dialect: DialectName, seen: bytes, refusal: bytes, tmp_path: Path
) -> None:
    """No client waits longer for its first event than without us; the first event may be a refusal all the same."""
    async with after_fifteen_steps(tmp_path, dialect, context_window_tokens=0) as (upstream, _, client, request):
        upstream.inject(Fault(body=seen + refusal, content_type=STREAM, stall_after=len(seen)))
        async with client.stream("POST", PATHS[dialect], json=request | {"stream": True}) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == seen
            upstream.release()
            assert b"".join([piece async for piece in pieces]) == refusal
        upstream.inject(Fault(body=refusal, content_type=STREAM))
        answer = await client.post(PATHS[dialect], json=request | {"stream": True})
        assert b"context_length_exceeded" not in answer.content and b"maximum context" not in answer.content


@pytest.mark.parametrize(("dialect", "seen", "refusal"), [("chat", ROLE, TOLD), ("responses", CREATED, FAILED)])
async def test_the_sdk_reads_the_answer_to_a_shorter_request_and_its_session_goes_on(
    dialect: DialectName, seen: bytes, refusal: bytes, tmp_path: Path
) -> None:
    """Its helpers collect a stream, and refuse one whose end is of another response than its beginning."""
    field = "messages" if dialect == "chat" else "input"
    async with after_fifteen_steps(tmp_path, dialect) as (upstream, proxy, _, request):
        upstream.inject(Fault(body=seen + refusal, content_type=STREAM))
        async with AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", default_headers=ID, max_retries=0) as sdk:
            if dialect == "chat":
                state = ChatCompletionStreamState()
                async for chunk in await sdk.chat.completions.create(**request | {"stream": True}):
                    state.handle_chunk(chunk)
                message = state.current_completion_snapshot.choices[0].message
                assert message.role == "assistant"
                given = [message.model_dump(exclude_none=True, exclude={"parsed"})]
                results = [
                    {"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls or ()
                ]
            else:
                async with sdk.responses.stream(**request) as stream:
                    output = (await stream.get_final_response()).output
                given = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in output]
                calls = [item.call_id for item in output if item.type == "function_call"]
                results = [{"type": "function_call_output", "call_id": call, "output": "x"} for call in calls]
            assert results, "the answer calls a tool"
            more = {field: [*request[field], *given, *results]}
            await (sdk.chat.completions if dialect == "chat" else sdk.responses).create(**request | more)
    with open_reader(tmp_path / "recap.db") as reader:
        shortened, after = reader.session_exchanges(1)[-2:]
    assert (shortened.ending, shortened.error, after.outcome, after.status) == ("complete", None, "extension", 200)


async def test_a_client_that_leaves_while_a_beginning_is_held_ends_its_request(tmp_path: Path) -> None:
    async with after_fifteen_steps(tmp_path, "responses") as (upstream, _, client, request):
        count = len(upstream.conversations)
        upstream.inject(Fault(body=CREATED + FAILED, content_type=STREAM, stall_after=len(CREATED)))
        async with client.stream("POST", PATHS["responses"], json=request | {"stream": True}) as answer:
            assert answer.status_code == 200
        await asyncio.to_thread(upstream.wait_for, lambda log: log[-1].disconnected)
        assert len(upstream.conversations) == count + 1


async def test_a_response_in_the_background_is_named_at_once(tmp_path: Path) -> None:
    async with after_fifteen_steps(tmp_path, "responses") as (upstream, _, client, request):
        upstream.inject(Fault(body=CREATED + FAILED, content_type=STREAM, stall_after=len(CREATED)))
        more = {"stream": True, "background": True}
        async with client.stream("POST", PATHS["responses"], json=request | more) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == CREATED
            upstream.release()
            assert b"".join([piece async for piece in pieces]) == FAILED


@pytest.mark.parametrize("is_rewritten", [False, True])
async def test_a_refusal_of_another_kind_is_relayed_byte_by_byte(is_rewritten: bool) -> None:
    """The beginning of a refusal is read to see what it is about; the client gets all of it nevertheless."""
    conversations = FakeConversations(
        lambda _: b'{"model":"m","messages":[{"role":"user","content":"x"}]}' if is_rewritten else None
    )
    body = b"no " * (700 << 10)
    async with (
        ScriptedUpstream() as upstream,
        running_proxy(Settings(upstream=upstream.base_url), conversations) as proxy,
    ):
        upstream.inject(*[Fault(status=400, body=body)] * 2)
        async with httpx.AsyncClient(base_url=proxy.url, timeout=30) as client:
            answer = await client.post(PATHS["chat"], json={"model": "m", "messages": [user("hello")]})
        assert (answer.status_code, answer.content) == (400, body)
        assert len(upstream.conversations) == (2 if is_rewritten else 1)


async def test_history_before_the_turn_is_selected_from_as_well(dialogue: Dialogue) -> None:
    if dialogue.dialect == "responses":
        pytest.skip("chat messages")
    history = [*turn("first", "one", 9000), *turn("second", "two", 9000), user("third")]
    await dialogue.send(history[:1], headers=ID)
    await dialogue.send(history, headers=ID)
    for number in range(8):
        history = history + step("chat", number)
        reply = await dialogue.send(history, headers=ID)
    assert reply.rewritten and "unique_one" not in reply.text
