"""OpenTelemetry, as far as it needs no library: whether it is wanted, and what is said of an exchange.

The names are those of the GenAI semantic conventions (semantic-conventions-genai, development status), written out here
because no package keeps them stable. What is said holds no content, no session, no account and no path. Input tokens
include cached ones, as the conventions want it.
"""

import logging
from collections.abc import Mapping
from typing import Literal, Protocol
from urllib.parse import urlsplit

from graphstore.records import ExchangeRow
from proxy.metrics import NAME_CHARS_MAX, input_kinds, output_kinds
from proxy.ports import Observer

log = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]
Attribute = str | int | float | bool
PROTOCOL = "http/protobuf"
API_TYPES = {"chat": "chat_completions", "responses": "responses"}
PROVIDERS = {  # end of a host's name -> its name in the conventions
    "openai.azure.com": "azure.ai.openai",
    "openai.com": "openai",
    "anthropic.com": "anthropic",
    "deepseek.com": "deepseek",
    "googleapis.com": "gcp.gemini",
    "groq.com": "groq",
    "mistral.ai": "mistral_ai",
    "x.ai": "x_ai",
}


class Telemetry(Observer, Protocol):
    """An observer that sends what it hears elsewhere."""

    def close(self) -> None:
        """Send what is left, within a few seconds."""


def open_telemetry(environ: Mapping[str, str]) -> Telemetry | None:
    """What the standard variables ask for; None, and a line in the log, where it cannot be had. Raises nothing."""
    wanted, problems = signals(environ)
    for problem in problems:
        log.warning("telemetry.refused %s", problem)
    if not wanted:
        return None
    try:
        from proxy.otel import open_exporters

        telemetry = open_exporters(wanted, environ)
    except ImportError as error:
        log.warning("telemetry.missing %s; pip install 'recap-proxy[otel]', or OTEL_SDK_DISABLED=true", error)
        return None
    except Exception as error:  # a wrong value of one of the many variables that the library reads
        log.warning("telemetry.failed %s; see the OTEL_ variables", error)
        return None
    log.info("telemetry.started signals=%s", ",".join(sorted(wanted)))
    return telemetry


def signals(environ: Mapping[str, str]) -> tuple[frozenset[Signal], list[str]]:
    """Which signals are to be sent, and what was asked for in vain. Nothing is, unless a variable names an exporter or
    an endpoint: the standard's default would send to localhost whatever runs there."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return frozenset(), []
    wanted: set[Signal] = set()
    problems = []
    for signal in ("traces", "metrics"):
        name, given = signal.upper(), f"OTEL_{signal.upper()}_EXPORTER"
        exporter = environ.get(given, "").strip()
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
        if exporter == "none" or not (exporter or any(environ.get(endpoint) for endpoint in endpoints)):
            continue
        protocol = environ.get(f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        if exporter not in ("", "otlp"):
            problems.append(f"{given}={exporter!r}: only 'otlp' and 'none' are known")
        elif protocol not in (None, "", PROTOCOL):
            problems.append(f"protocol {protocol!r} for {signal}: only {PROTOCOL!r} is known")
        else:
            wanted.add(signal)
    return frozenset(wanted), problems


def provider_of(upstream: str) -> str:
    host = urlsplit(upstream).hostname or ""
    return next((name for end, name in PROVIDERS.items() if host == end or host.endswith(f".{end}")), host)


def common(row: ExchangeRow, upstream: str, model: str) -> dict[str, Attribute]:
    """What spans and metrics both say. `model`: as it is to be called."""
    parts = urlsplit(upstream)
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider_of(upstream),
        "gen_ai.request.model": model,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (80 if parts.scheme == "http" else 443),
    }
    return found | ({"error.type": error} if (error := error_of(row)) else {})


def error_of(row: ExchangeRow) -> str | None:
    """Its kind: what an upstream wrote may hold content. A client that left is none."""
    if row.status is not None and row.status >= 400:
        return str(row.status)
    return row.ending.replace(" ", "_") if row.ending in ("upstream broken", "failed") else None


def span_name(row: ExchangeRow) -> str:
    return f"chat {model_of(row)}".strip()


def model_of(row: ExchangeRow) -> str:
    """Clients make these names up, and thousands of spans may wait for a slow collector."""
    return row.model[:NAME_CHARS_MAX]


def of_span(row: ExchangeRow, upstream: str) -> dict[str, Attribute]:
    found = common(row, upstream, model_of(row)) | {
        "gen_ai.request.stream": row.stream,
        "openai.api.type": API_TYPES.get(row.dialect, row.dialect),
        "recap.outcome": row.outcome,
        "recap.boundary": row.boundary,
        "recap.messages": row.messages_total,
        "recap.messages.sent": row.messages_sent,
        "recap.chars.left_out": max(0, row.chars_total - row.chars_sent),
        "recap.fell_back": row.fell_back,
    }
    if row.status is not None:
        found["http.response.status_code"] = row.status
    if (first := first_chunk_s(row)) is not None:
        found["gen_ai.response.time_to_first_chunk"] = first
    if row.input_tokens is not None:
        kinds = input_kinds(row)
        found["gen_ai.usage.input_tokens"] = row.input_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = kinds["cache_read"]
        found["gen_ai.usage.cache_creation.input_tokens"] = kinds["cache_write"]
    if row.output_tokens is not None:
        found["gen_ai.usage.output_tokens"] = row.output_tokens
        found["gen_ai.usage.reasoning.output_tokens"] = output_kinds(row)["reasoning"]
    return found


def first_chunk_s(row: ExchangeRow) -> float | None:
    if not row.stream or row.first_byte_at is None:
        return None
    return max(0.0, row.first_byte_at - row.started_at)
