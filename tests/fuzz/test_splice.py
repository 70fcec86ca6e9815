"""Histories in no order at all: what is sent is what the client sent, or that without whole, closed, older parts.

The oracle takes from the dialect what each message is and which ids it names, and knows nothing of blocks: a result
goes with the nearest call of its id before it.
"""

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from graphstore.blocks import Message, cut_blocks
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName, ParsedRequest
from proxy.ports import Arrival
from proxy.rewrite import GuardFailure, check_rewritten, render_rewritten
from tests.fuzz.wild import IDS, Json, damaged, messages
from tests.proxy.dialects.histories import ARRAY_NAMES, spell
from tests.proxy.dialogue import LUNCH_S, PATHS, Dialogue

NAMES: list[DialectName] = ["chat", "responses"]
FEWER = max(1, settings().max_examples // 5)  # of what takes five times as long


@st.composite
def histories(draw: st.DrawFn, dialect: DialectName) -> list[Json]:
    """Some order and any number of breaches. Messages are numbered, so that none is taken for another."""
    wildness = draw(st.sampled_from([0, 1, 5]))
    found: list[Json] = []
    for _ in range(draw(st.integers(1, 8))):
        found += [draw(messages(dialect))] if draw(st.integers(1, 6)) <= wildness else draw(steps(dialect))
    return [message | {"n": n} for n, message in enumerate(found)]


@st.composite
def steps(draw: st.DrawFn, dialect: DialectName) -> list[Json]:
    """What a client would send: a word, or calls and their results in any order."""
    ids = draw(st.lists(st.sampled_from(IDS), max_size=3, unique=True))
    text = draw(st.sampled_from(["", "parser_error", "long " * 50]))
    if not ids:
        return [{"role": draw(st.sampled_from(["user", "assistant"])), "content": text}]
    if dialect == "chat":
        calls: list[Json] = [{"role": "assistant", "tool_calls": [{"id": i, "function": {"name": "f"}} for i in ids]}]
        results: list[Json] = [{"role": "tool", "tool_call_id": i, "content": text} for i in ids]
    else:
        calls = [{"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in ids]
        results = [{"type": "function_call_output", "call_id": i, "output": text} for i in ids]
    return calls + draw(st.permutations(results))


def body_of(dialect: DialectName, history: list[Json], style: int) -> bytes:
    return spell({"model": "m", ARRAY_NAMES[dialect]: history}, random.Random(style)).encode()


def pairs(history: tuple[Message, ...]) -> Iterator[tuple[int, int]]:
    """Places of each result and its call."""
    latest: dict[str, int] = {}
    for place, message in enumerate(history):
        yield from ((latest[name], place) for name in message.answers[:1] if name in latest)
        latest |= dict.fromkeys(message.calls, place)


def check_sent(request: ParsedRequest, sent: bytes, notice: bytes | None, *, into_turn: bool = False) -> None:
    name = ARRAY_NAMES[request.dialect]
    before, after = json.loads(request.body), json.loads(sent)
    assert list(before) == list(after) and {**before, name: 0} == {**after, name: 0}
    numbers = [message.get("n") for message in after[name]]
    if notice is not None:
        assert numbers.pop(request.leading) is None and notice in sent
    assert numbers == sorted(numbers) and numbers[: request.leading] == list(range(request.leading))
    assert all(request.body[slice(*request.spans[n])] in sent for n in numbers), "byte for byte"
    kept = {n - request.leading for n in numbers}
    history = request.messages
    assert {place for place, message in enumerate(history) if message.role in ("user", "other", "instruction")} <= kept
    assert [(a, b) for a, b in pairs(history) if (a in kept) != (b in kept)] == []
    results = {message.answers[0] for message in history if message.answers}
    assert not [name for message in history for name in message.calls if name not in results], "a call in flight"
    users = [place for place, message in enumerate(history) if message.role == "user"]
    newest = len(history) - 1 if into_turn else users[-1] if users else 0
    assert set(range(newest, len(history))) <= kept and request.opaque is None


@pytest.mark.parametrize("dialect", NAMES)
@given(st.data(), st.booleans(), st.booleans())
def test_what_passes_the_guard_is_whole(
    dialect: DialectName, data: st.DataObject, with_notice: bool, into_turn: bool
) -> None:
    """Any choice of messages, sensible or not, and a body that may have been damaged on the way."""
    body = body_of(dialect, data.draw(histories(dialect)), data.draw(st.integers(0, 99)))
    request = DIALECTS[dialect].parse_request(body)
    places = st.integers(0, len(request.messages))
    blocks = st.sampled_from([set(block.messages) for block in cut_blocks(request.messages).blocks] or [set[int]()])
    left_out = data.draw(blocks | st.builds(set.union, blocks, blocks) | st.sets(places, max_size=4))
    notice = DIALECTS[dialect].render_notice(request.notice_role) if with_notice else None
    if not left_out and notice is None:
        return
    sent = render_rewritten(request, left_out, notice)
    sent = data.draw(st.just(sent) | damaged(sent)) if data.draw(st.integers(0, 3)) == 0 else sent
    try:
        check_rewritten(request, sent, left_out, notice, into_turn)
    except GuardFailure as refusal:
        assert str(refusal)
        return
    event("passes the guard")
    check_sent(request, sent, notice, into_turn=into_turn)
    assert len(json.loads(sent)[ARRAY_NAMES[dialect]]) == len(request.spans) - len(left_out) + with_notice


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for company or for a better time."""
    monkeypatch.setattr("graphstore.store.writer.LINGER_S", 0.001)
    monkeypatch.setattr("proxy.recorder.COLLECT_S", 0.001)


def scenes(dialect: DialectName) -> st.SearchStrategy[tuple[DialectName, list[Json], list[int]]]:
    """A history, and where requests before the last one end."""
    return st.tuples(st.just(dialect), histories(dialect), st.lists(st.integers(1, 8), max_size=3))


SHELL: list[Json] = [
    {"type": "local_shell_call", "id": "a", "call_id": "c", "action": {}, "n": 0},
    {"type": "local_shell_call_output", "id": "a", "output": "r", "n": 1},
]


@settings(max_examples=2 * FEWER, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(NAMES).flatmap(scenes), st.sampled_from([0, 0.3, 1]))
@example(scene=("responses", SHELL, []), beta=0)  # the pair has one id for the request, and another alone
def test_a_session_of_such_histories_is_served_whole_or_as_it_came(
    scene: tuple[DialectName, list[Json], list[int]], beta: float
) -> None:
    """A history that grows, is cut back, and is sent again; each request after a break, so that it may be compacted."""
    dialect, grown, ends = scene
    grown = [*grown, {"role": "user", "content": "go on", "n": len(grown)}]
    bodies = [body_of(dialect, grown[:end], 7) for end in [*ends, len(grown), len(grown)]]

    async def converse() -> list[tuple[bytes, bytes | None]]:
        with tempfile.TemporaryDirectory() as folder:
            given: dict[str, Any] = {"beta": beta, "mode": "always", "min_history_tokens": 0}
            dialogue = Dialogue(Path(folder), changes=given, dialect=dialect)
            sent = []
            for body in bodies:
                dialogue.clock.advance(LUNCH_S)
                headers = [(b"authorization", b"Bearer key"), (b"x-session-id", b"s")]
                plan = await dialogue.conversations.admit(Arrival(dialect, PATHS[dialect], headers, body))
                dialogue.finish(plan, {"role": "assistant", "content": "ok"})
                sent.append((body, plan.body))
            assert await dialogue.findings() == []
            return sent

    for body, sent in asyncio.run(converse()):
        if sent is not None:
            event("rewritten")
            request = DIALECTS[dialect].parse_request(body)
            check_sent(request, sent, DIALECTS[dialect].render_notice(request.notice_role))
