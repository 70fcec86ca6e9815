"""Histories that agents could send, in both dialects, and bodies that spell them in any whitespace and key order."""

import json
import random
from typing import Any

from hypothesis import strategies as st

from proxy.dialects.base import DialectName

Json = dict[str, Any]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ARRAY_NAMES: dict[DialectName, str] = {"chat": "messages", "responses": "input"}
_UNKNOWN: st.SearchStrategy[Json] = st.sampled_from(
    [
        {},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"annotations": [], "名前": None},
        {"x_vendor": [{"deep": [True, {"é😀": '\\"\n'}], "n": 10**30}, -1.5e-7, ""]},
    ]
)


@st.composite
def _exchange(draw: st.DrawFn, dialect: DialectName) -> list[Json]:
    """A user request and what the agent did about it. Call ids are reused in every step."""
    history = [_said(dialect, "user", draw(TEXTS)) for _ in range(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(0, 3))):
        history += draw(_step(dialect))
    if draw(st.booleans()):
        history += _answer(dialect, draw(TEXTS), reasons=draw(st.booleans()))
    if draw(st.integers(0, 5)) == 0:
        history.append(_said(dialect, "system", draw(TEXTS)))
    if draw(st.integers(0, 5)) == 0:
        history.append({"role": "narrator", "type": "novel", "content": draw(TEXTS)})
    return history


@st.composite
def _step(draw: st.DrawFn, dialect: DialectName) -> list[Json]:
    """Parallel calls and their results, in any order; a user may speak in between."""
    count = draw(st.integers(1, 5))
    calls, outputs = (_chat_calls if dialect == "chat" else _response_calls)(count, draw(TEXTS))
    outputs = draw(st.permutations(outputs))
    if dialect == "responses" and draw(st.booleans()):
        calls = [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, *calls]
    if draw(st.integers(0, 5)) == 0:
        outputs = [outputs[0], _said(dialect, "user", "by the way"), *outputs[1:]]
    return [*calls, *outputs]


def _chat_calls(count: int, text: str) -> tuple[list[Json], list[Json]]:
    ids = [f"call_{number}" for number in range(count)]
    body = {"name": "edit", "arguments": json.dumps({"path": f"{text}.py"})}
    calls = [{"id": call, "type": "function", "function": body} for call in ids]
    message = {"role": "assistant", "content": None, "reasoning_content": text, "tool_calls": calls}
    return [message], [{"role": "tool", "tool_call_id": call, "content": text} for call in ids]


def _response_calls(count: int, text: str) -> tuple[list[Json], list[Json]]:
    forms = [("function_call", "arguments"), ("custom_tool_call", "input")]
    chosen = [(*forms[number % 2], f"call_{number}") for number in range(count)]
    calls = [{"type": kind, "call_id": call, "name": "run", member: text} for kind, member, call in chosen]
    return calls, [{"type": f"{kind}_output", "call_id": call, "output": text} for kind, _, call in chosen]


def _said(dialect: DialectName, role: str, text: str) -> Json:
    if dialect == "chat":
        return {"role": role, "content": text}
    return {"role": role, "content": [{"type": "input_text", "text": text}]}


def _answer(dialect: DialectName, text: str, *, reasons: bool) -> list[Json]:
    if dialect == "chat":
        return [{"role": "assistant", "content": text}]
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return [{"type": "reasoning", "summary": []}, message] if reasons else [message]


@st.composite
def histories(draw: st.DrawFn, dialect: DialectName) -> list[Json]:
    """Instructions, at least one exchange, and a user request at the end."""
    role = "system" if dialect == "chat" else "developer"
    history = [_said(dialect, role, draw(TEXTS)) for _ in range(draw(st.integers(0, 2)))]
    for exchange in draw(st.lists(_exchange(dialect), min_size=1, max_size=4)):
        history += exchange
    history.append(_said(dialect, "user", draw(TEXTS)))
    return [message | draw(_UNKNOWN) for message in history]


def spell(value: Any, style: random.Random) -> str:
    """`value` as JSON, with white space and escapes as `style` likes, and object keys in any order."""

    def space() -> str:
        return style.choice(["", "", " ", "\n", "\t ", "\r\n"])

    def separated(parts: list[str]) -> str:
        return space() + ",".join(f"{space()}{part}{space()}" for part in parts)

    match value:
        case dict():
            members = [f"{json.dumps(key)}{space()}:{space()}{spell(inner, style)}" for key, inner in value.items()]
            style.shuffle(members)
            return "{" + separated(members) + "}"
        case list():
            return "[" + separated([spell(inner, style) for inner in value]) + "]"
        case _:
            return json.dumps(value, ensure_ascii=style.random() < 0.5)


@st.composite
def bodies(draw: st.DrawFn, dialect: DialectName) -> bytes:
    body: Json = {"model": "m", ARRAY_NAMES[dialect]: draw(histories(dialect)), "stream": draw(st.booleans())}
    style = random.Random(draw(st.integers(0, 2**32)))
    return f"{style.choice(['', ' ', chr(10)])}{spell(body | draw(_UNKNOWN), style)}".encode()
