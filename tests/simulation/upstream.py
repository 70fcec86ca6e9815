"""A model provider directly beneath the HTTP client: it answers, stalls, cuts, rejects, fails, and lies about usage."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from proxy.dialects.base import DialectName
from proxy.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnreachable
from proxy.headers import value_of
from proxy.ports import Headers

Kind = Literal["answer", "cut", "stall", "unreachable", "rejects rewritten", "rejects", "fails"]
STATUSES: dict[Kind, tuple[int, ...]] = {
    "rejects rewritten": (400, 413, 422),
    "rejects": (400, 401, 403, 404, 408, 429),
    "fails": (500, 502, 503, 529),
}
READ_TIMEOUT_S = 600.0
CALL_HEADER = b"x-simulated-call"
LIES: tuple[Any, ...] = (
    None,
    {},
    [],
    "much",
    {"prompt_tokens": -5, "completion_tokens": 1},
    {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1_000_000}},
    {"prompt_tokens": 2**70, "completion_tokens": 2**63, "prompt_tokens_details": {"cached_tokens": 2**64}},
    {"input_tokens": 2**70, "output_tokens": -(2**70), "input_tokens_details": {"cached_tokens": -1}},
    {"prompt_tokens": "12", "input_tokens": True, "prompt_tokens_details": 7, "input_tokens_details": [None]},
    {"prompt_tokens": 1.5, "input_tokens": 1e308, "completion_tokens": None, "deep": {"a": [{"b": "\u0000\ud83d"}]}},
)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the provider takes one call, whatever is sent for it."""

    kind: Kind = "answer"
    status: int = 200
    stream: bool = False
    latency_s: float = 0.5
    usage: Any = None
    text: str = "ok"


def behaviour(random: Random, *, stream: bool, is_rough: bool) -> Behaviour:
    """At random; mostly an answer."""
    kinds: tuple[Kind, ...] = ("cut", "stall", "unreachable", "rejects rewritten", "rejects", "fails")
    kind: Kind = random.choice(kinds) if random.random() < (0.4 if is_rough else 0.12) else "answer"
    honest = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
    return Behaviour(
        kind=kind,
        status=random.choice(STATUSES.get(kind, (200,))),
        stream=stream,
        latency_s=random.choice((0.01, 0.5, 3.0, 40.0)),
        usage=random.choice(LIES) if random.random() < 0.15 else honest,
    )


@dataclass(slots=True)
class Attempt:
    """One request as the provider got it, and what it gave back."""

    body: bytes
    status: int | None = None
    given: bytes = b""
    is_complete: bool = False


Ask = Callable[[int, bytes], tuple[Behaviour, Attempt, bool, DialectName]]


class Answer:
    """Stands for `proxy.upstream.client.Answer`."""

    def __init__(self, how: Behaviour, attempt: Attempt, pieces: list[bytes], content_type: bytes) -> None:
        self.status = how.status if attempt.status is None else attempt.status
        self.headers: Headers = [(b"content-type", content_type)]
        self._how, self._attempt, self._pieces = how, attempt, pieces

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for number, piece in enumerate(self._pieces):
            if self._how.kind == "cut" and number == len(self._pieces) - 1:
                raise UpstreamBroken("the connection was lost")
            await asyncio.sleep(self._how.latency_s / 10)
            self._attempt.given += piece
            yield piece
        self._attempt.is_complete = True

    async def aclose(self) -> None:
        pass


@dataclass
class SimulatedUpstream:
    """Stands for `proxy.upstream.client.Upstream`. `ask` says how the call of this number is taken."""

    ask: Ask
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, method: str, url: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None) -> Answer:
        assert isinstance(body, bytes)
        how, attempt, is_original, dialect = self.ask(int(value_of(headers, CALL_HEADER)), body)
        await asyncio.sleep(how.latency_s)
        if how.kind == "unreachable":
            raise UpstreamUnreachable("no connection")
        if how.kind == "stall":
            with suppress(TimeoutError):
                await asyncio.wait_for(self.released.wait(), READ_TIMEOUT_S)
            raise UpstreamTimeout("no answer in time")
        accepts = how.kind not in STATUSES or (how.kind == "rejects rewritten" and is_original)
        attempt.status = 200 if accepts else how.status
        if not accepts:
            error = json.dumps({"error": {"message": f"simulated {how.status}"}}).encode()
            return Answer(how, attempt, [error], b"application/json")
        if how.stream:
            return Answer(how, attempt, _stream(dialect, how), b"text/event-stream")
        whole = json.dumps(_whole(dialect, how)).encode()
        return Answer(how, attempt, [whole[: len(whole) // 2], whole[len(whole) // 2 :]], b"application/json")


def _whole(dialect: DialectName, how: Behaviour) -> dict[str, Any]:
    if dialect == "chat":
        message = {"role": "assistant", "content": how.text}
        return {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": how.usage}
    content = [{"type": "output_text", "text": how.text}]
    item = {"type": "message", "role": "assistant", "content": content}
    return {"id": "r", "status": "completed", "output": [item], "usage": how.usage}


def _stream(dialect: DialectName, how: Behaviour) -> list[bytes]:
    if dialect == "chat":
        half = len(how.text) // 2
        deltas = [{"role": "assistant", "content": how.text[:half]}, {"content": how.text[half:]}]
        choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
        events: list[Any] = [{"id": "c", "choices": choice} for choice in choices]
        events.append({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        events.append({"id": "c", "choices": [], "usage": how.usage})
        return [*(b"data: %s\n\n" % json.dumps(event).encode() for event in events), b"data: [DONE]\n\n"]
    whole = _whole(dialect, how)
    created = {"type": "response.created", "response": {"id": "r", "status": "in_progress", "output": []}}
    done = {"type": "response.output_item.done", "output_index": 0, "item": whole["output"][0]}
    events = [created, done, {"type": "response.completed", "response": whole}]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]
