"""Who is calling, by headers alone: the client's name, its own session id, and what it says of this request.

Ids that name one conversation are trusted. `prompt_cache_key` is not: applications use one key for many conversations,
and Codex shares it between a parent and its sub-agents.
"""

from dataclasses import dataclass

import msgspec

from proxy.ports import Headers

# In this order: Codex shares `session-id` with its sub-agents, `thread-id` is one conversation.
ID_HEADERS = ("thread-id", "x-session-id", "x-opencode-session", "x-session-affinity", "session-id", "session_id")
PARENT_HEADERS = ("x-codex-parent-thread-id", "x-parent-session-id")
CREDENTIALS = (b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key")
# Agents that send tools with every real turn: a request without tools is a title, a summary or the like.
TOOL_USERS = frozenset({"opencode", "codex", "qwen"})


class _TurnMetadata(msgspec.Struct):
    request_kind: str | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    client: str
    client_id: str | None
    parent_id: str | None
    window: str | None  # Codex counts its own compactions here
    compacting: bool  # the client says that this request asks for a summary of the history

    @property
    def always_sends_tools(self) -> bool:
        return self.client in TOOL_USERS


def recognise(headers: Headers) -> Caller:
    """Total: unknown clients are `other` without an id."""
    values = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    return Caller(
        client=_client(values),
        client_id=next((values[name] for name in ID_HEADERS if values.get(name)), None),
        parent_id=next((values[name] for name in PARENT_HEADERS if values.get(name)), None),
        window=values.get("x-codex-window-id"),
        compacting=_request_kind(values.get("x-codex-turn-metadata", "")) == "compaction",
    )


def credential(headers: Headers) -> bytes:
    """The bytes that tell one account from another. Only ever used inside a keyed hash, never stored or logged."""
    return b"\0".join(value for name, value in headers if name.lower() in CREDENTIALS)


def _client(values: dict[str, str]) -> str:
    agent = f"{values.get('originator', '')} {values.get('user-agent', '')}".lower()
    for mark, name in (
        ("opencode", "opencode"),
        ("codex", "codex"),
        ("qwencode", "qwen"),
        ("aider", "aider"),
        ("openai/python", "openai-sdk"),
        ("openai/js", "openai-sdk"),
    ):
        if mark in agent:
            return name
    return "other"


def _request_kind(metadata: str) -> str | None:
    try:
        return msgspec.json.decode(metadata, type=_TurnMetadata).request_kind
    except (msgspec.MsgspecError, UnicodeError):
        return None
