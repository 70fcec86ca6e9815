"""Recorded sessions as the requests that an agent would have sent, in either dialect."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DATA = Path(__file__).parent / "data" / "sessions"
TOOLS = ("Bash", "Read", "Edit")


@dataclass(frozen=True)
class RecordedSession:
    id: str
    messages: list[dict[str, Any]]  # chat completions, instructions included
    turn_starts: list[int]


@dataclass(frozen=True)
class Step:
    """One request of a session: the history that goes out and whether the user has just spoken."""

    at_user_request: bool
    turn: int
    history: list[dict[str, Any]]  # in the dialect of the step
    answer: dict[str, Any]  # the assistant message that the agent received (chat form)
    body: bytes


def load_sessions() -> list[RecordedSession]:
    found = []
    for path in sorted(DATA.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found.append(RecordedSession(record["id"], record["messages"], record["turn_starts"]))
    return found


def steps(session: RecordedSession, dialect: Literal["chat", "responses"]) -> Iterator[Step]:
    """Every request of the session: one before each assistant message."""
    starts = set(session.turn_starts)
    turn, fresh = 0, False
    for index, message in enumerate(session.messages):
        if index in starts:
            turn, fresh = turn + 1, True
        if message["role"] != "assistant" or turn == 0:
            continue
        history = session.messages[:index]
        sent = history if dialect == "chat" else [item for m in history for item in response_items(m)]
        instructions = {"role": "system", "content": "You are a coding agent."}
        if history[0]["role"] != "system":
            sent = [instructions, *sent]
        yield Step(fresh, turn, sent, message, render(sent, dialect))
        fresh = False


def render(history: list[dict[str, Any]], dialect: Literal["chat", "responses"]) -> bytes:
    if dialect == "chat":
        tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in TOOLS]
        body = {"model": "gpt-test", "messages": history, "tools": tools, "stream": True}
    else:
        tools = [{"type": "function", "name": name, "parameters": {}} for name in TOOLS]
        body = {"model": "gpt-test", "input": history, "tools": tools, "stream": True, "store": False}
    return json.dumps(body, ensure_ascii=False).encode()


def response_items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat message as the items that a Responses client sends for it; every agent step begins with reasoning."""
    content = message.get("content") or ""
    match message["role"]:
        case "tool":
            return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}]
        case "assistant":
            return [
                {"type": "reasoning", "summary": [], "encrypted_content": f"sealed:{len(content)}"},
                *([_said("assistant", "output_text", content)] if content else []),
                *(
                    {
                        "type": "function_call",
                        "call_id": call["id"],
                        "name": call["function"]["name"],
                        "arguments": call["function"]["arguments"],
                    }
                    for call in message.get("tool_calls") or ()
                ),
            ]
        case role:
            return [_said(role, "input_text", content)]


def _said(role: str, kind: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
