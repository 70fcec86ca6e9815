"""Does a refusal say that the context is too long, and which numbers does it give: a pure function of its body.

Providers agree on no field: OpenAI and Azure set the code `context_length_exceeded`, vLLM, DeepSeek and OpenRouter only
write "maximum context length", Anthropic "prompt is too long", Gemini "input token count", llama.cpp
`exceed_context_size_error`; gateways wrap one in another. So the whole body is searched, as text. A 413 says it
also without a word, or by words about bytes.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass

STATUSES = frozenset({400, 413, 422})  # refusals that may be about the length of the context
TOO_LARGE = 413
IN_ANSWER = 200  # an error within an answer that began well
SEARCHED_CHARS = 1 << 16  # of a refusal; one that repeats the request would be longer
WINDOWS_KEPT = 256
WINDOW_TOKENS_MIN, WINDOW_TOKENS_MAX = 256, 1 << 28  # what can be a model's window

_SAYS_SO = re.compile(
    r"context_length_exceeded|context_?window_?exceeded|exceed_context_size|model_max_prompt_tokens_exceeded"
    r"|context length|context window|context size|exceed context limit"
    r"|(?:prompt|input|request|conversation) is too long|prompt too long|input too long|maximum prompt length"
    r"|(?:prompt|input) exceeds (?:the )?max|maximum number of input tokens"
    r"|input token count|too many (?:input |prompt |total )?(?:tokens|text bytes)|exceeded model token limit"
    r"|(?:input|prompt) (?:length|tokens?) .{0,80}exceed|total tokens .{0,40}exceed"
    r"|reduce the length of the (?:messages|prompt|input)"
    r"|range of input length should be",
    re.IGNORECASE | re.DOTALL,
)
_TOO_LARGE = re.compile(r"too.large|maximum size|\A\s*\Z", re.IGNORECASE)
_OF_THE_MOMENT = re.compile(r"rate.?limit|tokens per (?:min|day|hour)|\bTPM\b|\bquota\b", re.IGNORECASE)

_N = r"(\d[\d,_]{0,14}\d)"  # bounded: a body may hold any number of digits
_WINDOW = re.compile(
    rf"(?:maximum (?:context|prompt) length (?:is|of)|context (?:length|window|size)(?: is| of)?| > ?|model maximum"
    rf"|limit of|maximum number of tokens allowed|token limit:?|input length should be \[\d+,)\W{{0,3}}{_N}"
    rf"|{_N} maximum context length|\"n_ctx\"\s*:\s*{_N}",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    rf"{_N} (?:(?:in|for)\s+the (?:completion|output)|output tokens|> \d)|tokens'? is too large: {_N}| \+ {_N} >",
    re.IGNORECASE,
)
_INPUT = re.compile(
    rf"{_N} (?:in (?:the messages|your prompt)|of text input|input tokens|\+ \d+ >)|resulted in {_N} tokens"
    rf"|(?:request contains|prompt contains|is too long:|token count(?: of)?|prompt tokens) ?\(?{_N}"
    rf"|\"n_prompt_tokens\"\s*:\s*{_N}",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Overflow:
    """What is known of a context that is too long, in the provider's tokens. None: it was not said.

    `window` is what the input may have: the model's window without the answer that was asked for.
    """

    window: int | None = None
    input: int | None = None


def overflow_of(status: int, body: bytes) -> Overflow | None:
    """None: this refusal is about something else. With `IN_ANSWER`, `body` is the error that the answer holds."""
    text = body[:SEARCHED_CHARS].decode("utf-8", "replace")
    says_so = status in STATUSES | {IN_ANSWER} and _SAYS_SO.search(text)
    says_so = says_so or (status == TOO_LARGE and _TOO_LARGE.search(text))
    if not says_so or _OF_THE_MOMENT.search(text):
        return None
    window, answer = _number(_WINDOW, text), _number(_ANSWER, text)
    room = (window or 0) - (answer or 0)
    return Overflow(room if WINDOW_TOKENS_MIN <= room <= WINDOW_TOKENS_MAX else None, _number(_INPUT, text))


class Windows:
    """Windows that upstreams told of when they refused a request, by upstream and model, in tokens by our own count.

    In memory: after a restart one more refusal tells it again.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], int] = OrderedDict()

    def of(self, upstream: str, model: str) -> int | None:
        return self._known.get((upstream, model))

    def learn(self, upstream: str, model: str, overflow: Overflow, sent_tokens: int) -> None:
        """A request of `sent_tokens` by our count was refused. An input that would fit says nothing of the window: the
        answer that was asked for was too long.
        """
        window, counted = overflow.window, overflow.input
        if window is None or (counted is not None and counted <= window) or sent_tokens <= 0:
            return
        ours = window * sent_tokens // counted if counted is not None and counted > sent_tokens else window
        self._known[upstream, model] = min(ours, sent_tokens)
        while len(self._known) > WINDOWS_KEPT:
            self._known.popitem(last=False)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    digits = next((group for group in match.groups() if group), None) if match else None
    return int(re.sub(r"\D", "", digits)) if digits else None
