"""A model behind an OpenAI-compatible endpoint, asked for one whole answer at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from proxy.dialects.content import content_texts, join_texts
from proxy.dialects.scan import Malformed, read_value
from proxy.lab.errors import LabError

Sleep = Callable[[float], Awaitable[object]]

PAUSES_S = (1.0, 5.0, 20.0)  # before it is asked again
PAUSE_S_MAX = 120.0  # of what a provider may ask for
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
SHOWN_CHARS = 300
GO_ON = "What is finished is kept: mend it, and give the same command again to go on"
TOKENS_MAX = 1 << 40  # of what a provider counts: more is no count


@dataclass(frozen=True, slots=True)
class Sampling:
    model: str
    temperature: float
    max_tokens: int | None  # None: as the provider has it


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` is "" when the model said nothing. Tokens are the provider's; None: it reported none. `shortened`: the
    model itself went without some of what it was asked with.
    """

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None = None
    shortened: bool = False


class ChatModel:
    """Errors that pass are waited for, a little; all others end the run with a `LabError`."""

    def __init__(
        self, client: httpx.AsyncClient, url: str, sampling: Sampling, *, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._client = client
        self._url = url
        self._sampling = sampling
        self._sleep = sleep

    async def ask(self, messages: Sequence[dict[str, str]], session: str) -> Answer:
        """`session` names the conversation for the proxy. Raises `LabError`."""
        body: dict[str, Any] = {"model": self._sampling.model, "messages": list(messages)}
        body["temperature"] = self._sampling.temperature
        if self._sampling.max_tokens is not None:
            body["max_tokens"] = self._sampling.max_tokens
        problem = ""
        for pause in (*PAUSES_S, None):
            response = None
            try:
                response = await self._client.post(self._url, json=body, headers={"x-session-id": session})
            except httpx.HTTPError as error:
                problem = f"did not answer ({type(error).__name__}: {error})"
            if response is not None:
                if response.status_code == 200:
                    return _answer(self._url, response)
                problem = f"answered {response.status_code}: {response.text[:SHOWN_CHARS]!r}"
                if response.status_code not in PASSING:
                    break
            if pause is not None:
                await self._sleep(_pause(response, pause))
        raise LabError(f"the model {self._sampling.model!r} at {self._url} {problem}. {GO_ON}")


def _pause(response: httpx.Response | None, pause: float) -> float:
    """What the provider asks for, within limits, or ours."""
    try:
        asked = float(response.headers.get("retry-after", "")) if response is not None else 0.0
    except ValueError:
        asked = 0.0
    return min(max(pause, asked), PAUSE_S_MAX)  # in this order, NaN is ours


def _answer(url: str, response: httpx.Response) -> Answer:
    try:
        body = read_value(response.content)
        choices = body["choices"]
    except (Malformed, KeyError, TypeError) as error:
        raise LabError(
            f"{url} answered with something that is no chat completion: {response.text[:SHOWN_CHARS]!r}; "
            f"check --base-url, which is what an SDK gets (it often ends in /v1). {GO_ON}"
        ) from error
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    text = join_texts(content_texts(message.get("content"))) if isinstance(message, dict) else ""
    usage = body.get("usage")
    given, made = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
    return Answer(text, given, made)


def _count(usage: object, name: str) -> int | None:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count <= TOKENS_MAX else None
