"""What the scripted model does next, read from the newest user message.

The user's text is the program: `[[tool {json}]]` is one step that calls a tool, `[[a {..} || b {..}]]` one step with
parallel calls, `[[= text]]` the final answer, `[[! {json}]]` a fault for the step after it; a step ends at the first
`]]`. The model keeps no state: the step to take is the number of steps that already follow that user message. This
module knows both wire formats' histories, and nothing of HTTP or of how an answer is written.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

DialectName = Literal["chat", "responses"]
Json = dict[str, Any]

_STEP = re.compile(r"\[\[(.+?)\]\](?!\])", re.DOTALL)
_CALL = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(\{.*\})?\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. `arguments` is the JSON text, or the free text of a `custom` tool."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Step:
    """Calls, or the final text when there are none. `fault` are keyword arguments of a `Fault`."""

    calls: tuple[Call, ...] = ()
    text: str = ""
    fault: Json | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a request stands: its newest user text and how many steps of the model follow it."""

    user_text: str
    steps_done: int


def next_step(position: Position, *, has_tools: bool) -> Step:
    """The model's next step. A request without tools (title, summary) gets the final text at once."""
    steps = parse_script(position.user_text)
    if not has_tools or position.steps_done >= len(steps):
        return Step(text=f"Done after {position.steps_done} tool steps.")
    return steps[position.steps_done]


def parse_script(text: str) -> tuple[Step, ...]:
    """Every `[[...]]` of a user message. What does not look like a step is not one; text without steps gives ()."""
    steps: list[Step] = []
    fault: Json | None = None
    for match in _STEP.finditer(_unquoted(text)):
        source = match.group(1)
        if source.startswith("!"):
            fault = json.loads(source[1:])
            continue
        if source.startswith("="):
            steps.append(Step(text=source[1:].strip(), fault=fault))
            fault = None
        elif calls := _parse_calls(source):
            steps.append(Step(calls=calls, fault=fault))
            fault = None
    if fault is not None:
        steps.append(Step(text="Done.", fault=fault))
    return tuple(steps)


def _parse_calls(source: str) -> tuple[Call, ...]:
    matches = [_CALL.fullmatch(part) for part in source.split("||")]
    if not all(matches):
        return ()
    return tuple(Call(match[1], match[2] or "{}") for match in matches if match)


def _unquoted(text: str) -> str:
    """OpenCode's command line wraps a prompt that holds spaces in quotes and escapes the inner ones."""
    start, end = text.find('"'), text.rfind('"')
    if start == 0 and end > 0 and "[[" in text:
        try:
            decoded = json.loads(text[: end + 1])
        except ValueError:
            return text
        return str(decoded)
    return text


def text_of(content: object) -> str:
    """Plain text of a `content` or `output` value in either dialect: a string, or parts that carry `text`."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return ""


def locate(dialect: DialectName, history: Sequence[Json]) -> Position:
    """Find the newest user message of a history and count the model's steps after it.

    A step is one assistant message (chat), or one run of model items (responses): consecutive calls belong together
    until an output or a message stands between them.
    """
    newest = max((i for i, item in enumerate(history) if item.get("role") == "user"), default=-1)
    user_text = text_of(history[newest].get("content")) if newest >= 0 else ""
    tail = history[newest + 1 :]
    if dialect == "chat":
        return Position(user_text, sum(item.get("role") == "assistant" for item in tail))
    done, inside = 0, False
    for item in tail:
        ours = _is_model_item(item)
        done += ours and not inside
        inside = ours
    return Position(user_text, done)


def _is_model_item(item: Json) -> bool:
    kind = item.get("type", "message")
    return kind == "reasoning" or str(kind).endswith("_call") or item.get("role") == "assistant"
