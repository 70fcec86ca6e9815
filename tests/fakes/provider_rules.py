"""What a strict provider accepts, and what its prompt cache would have kept.

`reject_chat` and `reject_responses` return the error body that OpenAI's API sends for a history that breaks its rules,
or None. `PrefixCache` counts tokens as a quarter of the prompt's bytes and serves the longest prefix it has seen
lately. No HTTP here, and no opinion on what a proxy should have sent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Units = tuple[bytes, ...]

CACHE_STEP_TOKENS = 128
CACHE_MIN_TOKENS = 1024
BYTES_PER_TOKEN = 4

_CHAT_ROLES = ("system", "assistant", "user", "function", "tool", "developer")
_OUTPUT_OF = {
    "function_call_output": "function call output",
    "custom_tool_call_output": "custom tool call output",
    "local_shell_call_output": "local shell call output",
    "shell_call_output": "shell call output",
    "apply_patch_call_output": "apply patch call output",
}
_CALLS = {kind.removesuffix("_output") for kind in _OUTPUT_OF}


def error_body(message: str, *, param: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def reject_body(body: object, history_field: str) -> Json | None:
    """Rules that both dialects share: an object with a model and a history."""
    if not isinstance(body, dict):
        return error_body("We could not parse the JSON body of your request.")
    if not isinstance(body.get("model"), str):
        return error_body("you must provide a model parameter")
    history = body.get(history_field)
    if history is None:
        return error_body(f"Missing required parameter: '{history_field}'.", param=history_field)
    if isinstance(history, list) and not history:
        return _empty_array(history_field)
    return None


def _empty_array(param: str) -> Json:
    text = f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got an empty array instead."
    return error_body(text, param=param, code="empty_array")


def reject_chat(messages: Sequence[object]) -> Json | None:
    """Roles, contents, and that each call is answered directly after it and each answer was asked for."""
    open_ids: list[str] = []
    legacy_name: str | None = None
    for index, message in enumerate(messages):
        where = f"messages.[{index}].role"
        if not isinstance(message, dict) or message.get("role") not in _CHAT_ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            return error_body(f"Invalid value: {role!r}. Supported values are: {_listed(_CHAT_ROLES)}.", param=where)
        role = message["role"]
        if role == "tool":
            if message.get("tool_call_id") not in open_ids:
                return error_body(
                    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
                    "'tool_calls'.",
                    param=where,
                )
            open_ids.remove(message["tool_call_id"])
            continue
        if open_ids:
            return _unanswered(open_ids, where)
        if role == "function" and message.get("name") != legacy_name:
            return error_body(
                "Invalid parameter: messages with role 'function' must be a response to a preceeding message with "
                "'function_call'.",
                param=where,
            )
        legacy_name = None
        if role == "assistant":
            if fault := _reject_assistant(message, index):
                return fault
            open_ids = [call["id"] for call in message.get("tool_calls") or ()]
            legacy_name = (message.get("function_call") or {}).get("name")
        elif message.get("content") is None:
            return error_body("Invalid value for 'content': expected a string, got null.", param=where)
    return _unanswered(open_ids, "messages") if open_ids else None


def _reject_assistant(message: Json, index: int) -> Json | None:
    if message.get("tool_calls") == []:
        return _empty_array(f"messages[{index}].tool_calls")
    speaks = message.get("content") is not None or message.get("refusal")
    if not (speaks or message.get("tool_calls") or message.get("function_call") or message.get("audio")):
        return error_body(
            "Invalid value for 'content': expected a string, got null.", param=f"messages.[{index}].content"
        )
    return None


def _unanswered(ids: Sequence[str], param: str) -> Json:
    return error_body(
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(ids)}",
        param=param,
    )


def _listed(values: Sequence[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


def reject_responses(items: Sequence[object], *, stateful: bool, led_to: Mapping[str, str]) -> Json | None:
    """Calls and outputs pair by `call_id`, reasoning is followed by what it led to, ids occur once.

    `stateful`: the server holds earlier items (previous_response_id, conversation, item_reference), so an output may
    answer a call that is not in this body. `led_to` maps the id of each item we produced to its reasoning item's id.
    """
    seen: set[str] = set()
    open_calls: list[str] = []
    dangling: str | None = None
    for item in items:
        if not isinstance(item, dict):
            return error_body("Invalid type for 'input': expected an object, got something else.", param="input")
        kind = str(item.get("type", "message"))
        if kind == "message" and item.get("role") not in ("user", "assistant", "system", "developer"):
            return error_body(f"Invalid value: {item.get('role')!r}.", param="input")
        if fault := _reject_item_id(item, kind, seen, led_to):
            return fault
        if kind == "reasoning":
            dangling = str(item.get("id", "rs_unknown"))
        elif dangling is not None:
            if kind in _OUTPUT_OF or (kind == "message" and item.get("role") != "assistant"):
                return _dangling(dangling)
            dangling = None
        call = item.get("call_id") or item.get("id")
        if kind in _CALLS:
            open_calls.append(str(call))
        elif kind in _OUTPUT_OF:
            if call in open_calls:
                open_calls.remove(str(call))
            elif not stateful:
                return error_body(f"No tool call found for {_OUTPUT_OF[kind]} with call_id {call}.", param="input")
    if open_calls:
        return error_body(f"No tool output found for function call {open_calls[0]}.", param="input")
    return _dangling(dangling) if dangling is not None else None


def _reject_item_id(item: Json, kind: str, seen: set[str], led_to: Mapping[str, str]) -> Json | None:
    identity = item.get("id")
    if not isinstance(identity, str) or kind in ("item_reference", "local_shell_call_output"):
        return None
    if identity in seen:
        return error_body(f"Duplicate item found with id {identity}.", param="input")
    seen.add(identity)
    reasoning = led_to.get(identity)
    if reasoning is not None and reasoning not in seen:
        return error_body(
            f"Item '{identity}' of type '{kind}' was provided without its required 'reasoning' item: '{reasoning}'.",
            param="input",
        )
    return None


def _dangling(identity: str) -> Json:
    return error_body(
        f"Item '{identity}' of type 'reasoning' was provided without its required following item.", param="input"
    )


def prompt_units(body: Json, history_field: str) -> Units:
    """The prompt as the cache sees it: tools, then instructions, then each message, as compact JSON bytes."""
    history = body.get(history_field)
    parts = [body.get("tools") or body.get("functions"), body.get("instructions")]
    parts += history if isinstance(history, list) else [history]
    return tuple(
        json.dumps(part, separators=(",", ":"), ensure_ascii=True).encode() for part in parts if part is not None
    )


def count_tokens(units: Units) -> int:
    return -(-sum(map(len, units)) // BYTES_PER_TOKEN)


def reject_overflow(body: Json, history_field: str, window_tokens: int) -> Json | None:
    """A prompt that leaves no token of the window for an answer."""
    tokens = count_tokens(prompt_units(body, history_field))
    if tokens < window_tokens:
        return None
    return error_body(
        f"This model's maximum context length is {window_tokens} tokens. However, your messages resulted in {tokens} "
        "tokens. Please reduce the length of the messages.",
        param=history_field,
        code="context_length_exceeded",
    )


@dataclass(slots=True)
class _Entry:
    units: Units
    used_at: float


@dataclass(slots=True)
class PrefixCache:
    """Prompts of the last `ttl_seconds`, per model and credential; a hit refreshes the prompt that served it."""

    clock: Callable[[], float]
    ttl_seconds: float
    _entries: dict[tuple[str, str], list[_Entry]] = field(default_factory=dict)

    def serve(self, units: Units, *, model: str, credential: str) -> int:
        """Tokens of `units` that are cached, in whole steps; the prompt itself is cached from now on."""
        now = self.clock()
        entries = self._entries.setdefault((model, credential), [])
        entries[:] = [entry for entry in entries if now - entry.used_at < self.ttl_seconds]
        best = max(entries, key=lambda entry: common_bytes(entry.units, units), default=None)
        tokens = 0
        if best is not None:
            tokens = common_bytes(best.units, units) // BYTES_PER_TOKEN // CACHE_STEP_TOKENS * CACHE_STEP_TOKENS
            if tokens < CACHE_MIN_TOKENS:
                tokens = 0
            else:
                best.used_at = now
        entries.append(_Entry(units, now))
        return tokens


def common_bytes(left: Units, right: Units) -> int:
    """Length of the longest common prefix of two prompts in bytes."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            return length + next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        length += len(a)
    return length
