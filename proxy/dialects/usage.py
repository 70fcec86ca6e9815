"""Token counts as the providers report them, brought to one meaning.

The raw object is kept elsewhere; this only reads it. Fields that we do not know are ignored, and a count that is no
plausible integer is not reported.
"""

from typing import Any

from proxy.dialects.base import Usage
from proxy.dialects.scan import Malformed, read_value

_COUNT_MAX = 10**9  # tokens: no context of any model comes near it


def parse_usage(raw: bytes) -> Usage:
    """Counts of one usage object: OpenAI in both dialects, DeepSeek, Kimi, OpenRouter, Anthropic, Gemini. Total."""
    try:
        usage = read_value(raw)
    except Malformed:
        return Usage()
    if not isinstance(usage, dict):
        return Usage()
    inputs = _details(usage, "prompt_tokens_details", "input_tokens_details")
    outputs = _details(usage, "completion_tokens_details", "output_tokens_details")
    cached = _first(inputs.get("cached_tokens"), *_named(usage, _CACHED))
    written = _first(inputs.get("cache_write_tokens"), usage.get("cache_creation_input_tokens"))
    total = _first(*_named(usage, ("prompt_tokens", "input_tokens", "promptTokenCount")))
    if total is not None and _counts_cached_apart(usage):
        total += (cached or 0) + (written or 0)
    output = _first(*_named(usage, ("completion_tokens", "output_tokens")))
    thoughts = _first(usage.get("thoughtsTokenCount"))
    if output is None and (said := _first(usage.get("candidatesTokenCount"))) is not None:
        output = said + (thoughts or 0)  # Gemini counts them apart
    return Usage(
        input=total,
        cached=cached,
        cache_write=written,
        output=output,
        reasoning=_first(outputs.get("reasoning_tokens"), thoughts),
    )


_CACHED = ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens", "cachedContentTokenCount")


def _counts_cached_apart(usage: dict[str, Any]) -> bool:
    """Anthropic's own form: `input_tokens` without what was read from or written to the cache."""
    apart = "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage
    return apart and "prompt_tokens" not in usage and "input_tokens_details" not in usage


def _details(usage: dict[str, Any], *names: str) -> dict[str, Any]:
    return next((usage[name] for name in names if isinstance(usage.get(name), dict)), {})


def _named(usage: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    return [usage.get(name) for name in names]


def _first(*values: Any) -> int | None:
    counts = (value for value in values if type(value) is int and 0 <= value <= _COUNT_MAX)
    return next(counts, None)
