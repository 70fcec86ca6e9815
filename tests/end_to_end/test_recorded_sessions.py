"""Real sessions, request by request, through a real server with idle gaps on a virtual clock.

Every outgoing request must be valid for a strict provider, keep its prefix between cold boundaries and hold every user
message; the archive must equal the client's history byte for byte.
"""

import os.path
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from graphstore.store.archive import open_reader
from graphstore.store.verify import verify
from proxy.commands.verify import recut
from proxy.conversations import open_conversations
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName
from proxy.settings import Settings
from tests.archives import lay_out_archive
from tests.clock import VirtualClock
from tests.fakes.recording_upstream import RecordingUpstream
from tests.recorded import RecordedSession, Step, load_sessions, steps
from tests.support import running_proxy

LUNCH_S = 4000.0
STEP_S = 5.0
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}
SESSIONS = load_sessions()


def settings_for(upstream: RecordingUpstream, folder: Path, **changes: Any) -> Settings:
    given: dict[str, Any] = {
        "mode": "idle",
        "upstream": upstream.url,
        "db": str(folder / "recap.db"),
        "min_history_tokens": 0,
    }
    return Settings(**(given | changes))


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("with_id", [True, False], ids=["session id", "no id"])
@pytest.mark.parametrize("session", SESSIONS, ids=[session.id for session in SESSIONS])
async def test_a_recorded_session(
    session: RecordedSession, dialect: DialectName, with_id: bool, tmp_path: Path
) -> None:
    clock = VirtualClock()
    sent: list[tuple[Step, bytes]] = []
    async with RecordingUpstream().running() as upstream:
        settings = settings_for(upstream, tmp_path)
        lay_out_archive(Path(settings.db))
        async with (
            running_proxy(settings, open_conversations(settings, clock)) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30) as client,
        ):
            headers = {"content-type": "application/json", "authorization": "Bearer canary"}
            headers |= {"x-session-id": session.id} if with_id else {}
            for step in steps(session, dialect):
                clock.advance(LUNCH_S if step.at_user_request and step.turn % 2 == 0 else STEP_S)
                upstream.answers.append(step.answer)
                answer = await client.post(PATHS[dialect], content=step.body, headers=headers)
                assert answer.status_code == 200
                assert answer.content  # the stream reached us whole
                sent.append((step, upstream.bodies[-1]))

    rewritten = [step for step, body in sent if body != step.body]
    assert rewritten or len(SESSIONS) == 0, "no request was ever compacted: the test would prove nothing"
    previous: list[bytes] = []
    for step, body in sent:
        check_valid(dialect, step, body)
        array = messages_of(dialect, body)
        cold = step.at_user_request and step.turn % 2 == 0
        if not cold:
            assert array[: len(previous)] == previous, f"turn {step.turn} does not extend what was sent before"
        previous = array
    check_archive(Path(settings.db), dialect, sent)


def messages_of(dialect: DialectName, body: bytes) -> list[bytes]:
    field = "messages" if dialect == "chat" else "input"
    return [bytes(raw) for raw in msgspec.json.decode(msgspec.json.decode(body, type=dict[str, msgspec.Raw])[field],
                                                      type=list[msgspec.Raw])]  # fmt: skip


def check_valid(dialect: DialectName, step: Step, body: bytes) -> None:
    """Pairs complete, order kept, every user message there, the last messages untouched."""
    ours, theirs = messages_of(dialect, body), messages_of(dialect, step.body)
    notice = DIALECTS[dialect].render_notice("system")
    kept = [raw for raw in ours if raw != notice]
    remaining = iter(theirs)
    assert all(any(raw == other for other in remaining) for raw in kept), "order changed"
    users = [raw for raw in theirs if b'"role": "user"' in raw]
    assert [raw for raw in kept if b'"role": "user"' in raw] == users
    calls, answers = pairs(kept)
    assert calls == answers


def pairs(messages: Sequence[bytes]) -> tuple[list[str], list[str]]:
    calls, answers = [], []
    for raw in messages:
        message = msgspec.json.decode(raw)
        calls += [call["id"] for call in message.get("tool_calls") or ()]
        if message.get("type") == "function_call":
            calls.append(message["call_id"])
        if message.get("role") == "tool":
            answers.append(message["tool_call_id"])
        if message.get("type") == "function_call_output":
            answers.append(message["call_id"])
    return sorted(calls), sorted(answers)


def check_archive(path: Path, dialect: DialectName, sent: list[tuple[Step, bytes]]) -> None:
    with open_reader(path) as reader:
        (found,) = [row for row in reader.list_sessions() if row.kind == "agent"]
        assert found.head_node_id is not None
        assert reader.path_contents(found.head_node_id) == messages_of(dialect, sent[-1][0].body)[1:]
        exchanges = reader.session_exchanges(found.id)
        assert len(exchanges) == len(sent)
        assert {row.outcome for row in exchanges} == {"new", "extension"}
        assert all(row.ending == "complete" for row in exchanges)
        assert {(row.input_tokens, row.cached_tokens) for row in exchanges} == {(1000, 128)}
        assert [(row.bytes_total, row.bytes_sent) for row in exchanges] == [
            (len(step.body), len(body)) for step, body in sent
        ]
        assert [row.prefix_messages for row in exchanges] == shared_messages(dialect, sent)
        assert [row.messages_sent for row in exchanges] == [
            len(messages_of(dialect, body)) - 1 - (body != step.body) for step, body in sent
        ]
        assert verify(reader, recut) == []


def shared_messages(dialect: DialectName, sent: list[tuple[Step, bytes]]) -> list[int]:
    """How many of the client's messages each outgoing array shares with the one before it, instructions aside."""
    found = []
    before: list[bytes] = []
    for step, body in sent:
        now = messages_of(dialect, body)
        common = len(os.path.commonprefix([before, now]))
        has_notice = body != step.body
        found.append(max(0, common - 1 - has_notice))
        before = now
    return found
