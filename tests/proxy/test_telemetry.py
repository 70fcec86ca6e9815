"""OpenTelemetry: when it is wanted, what is said, and that nobody waits for it. Exports need the extra `otel`."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from proxy import telemetry
from proxy.metrics import NAME_CHARS_MAX
from proxy.telemetry import error_of, of_span, open_telemetry, provider_of, signals, span_name
from tests.proxy.dialogue import LUNCH_S, user
from tests.proxy.test_metrics import CANARIES, HISTORY, ROW, SESSION, measured

BASE = "https://api.openai.com/v1"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
COLLECTOR = {ENDPOINT: "http://127.0.0.1:4318"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, set()),
        ({"OTEL_SERVICE_NAME": "mine"}, set()),
        (COLLECTOR, {"traces", "metrics"}),
        (COLLECTOR | {"OTEL_SDK_DISABLED": "True"}, set()),
        (COLLECTOR | {"OTEL_METRICS_EXPORTER": "none"}, {"traces"}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c.test"}, {"traces"}),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, {"metrics"}),
        (COLLECTOR | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, {"traces", "metrics"}),
    ],
)
def test_the_standard_variables_say_what_is_sent(environ: dict[str, str], wanted: set[str]) -> None:
    assert signals(environ) == (frozenset(wanted), [])


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        (COLLECTOR | {"OTEL_TRACES_EXPORTER": "jaeger", "OTEL_METRICS_EXPORTER": "none"}, "jaeger"),
        (COLLECTOR | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_METRICS_EXPORTER": "none"}, "grpc"),
    ],
)
def test_what_cannot_be_had_is_said_and_not_sent(
    environ: dict[str, str], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_telemetry(environ) is None
    assert word in caplog.text and "telemetry.refused" in caplog.text


def test_without_the_extra_the_log_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "proxy.otel", None)  # as if its imports failed
    assert open_telemetry(COLLECTOR) is None
    assert "pip install 'recap-proxy[otel]'" in caplog.text


def test_nothing_is_imported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "proxy.otel", None)
    assert open_telemetry({}) is None


@pytest.mark.parametrize(
    ("upstream", "name"),
    [
        (BASE, "openai"),
        ("https://mine.openai.azure.com/openai/v1", "azure.ai.openai"),
        ("https://generativelanguage.googleapis.com/v1beta/openai", "gcp.gemini"),
        ("https://api.x.ai/v1", "x_ai"),
        ("https://notx.ai/v1", "notx.ai"),
        ("http://127.0.0.1:11434", "127.0.0.1"),
    ],
)
def test_providers_have_the_names_of_the_conventions(upstream: str, name: str) -> None:
    assert provider_of(upstream) == name


def test_a_span_says_what_the_conventions_name() -> None:
    row = replace(
        ROW, input_tokens=100, cached_tokens=60, cache_write_tokens=30, output_tokens=20, reasoning_tokens=5,
        messages_total=9, messages_sent=4, chars_total=5000, chars_sent=1000,
    )  # fmt: skip
    assert of_span(row, BASE) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-test",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 60,
        "gen_ai.usage.cache_creation.input_tokens": 30,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.reasoning.output_tokens": 5,
        "openai.api.type": "chat_completions",
        "server.address": "api.openai.com",
        "server.port": 443,
        "http.response.status_code": 200,
        "recap.outcome": "extension",
        "recap.boundary": "warm",
        "recap.messages": 9,
        "recap.messages.sent": 4,
        "recap.chars.left_out": 4000,
        "recap.fell_back": False,
    }
    assert "gen_ai.usage.input_tokens" not in of_span(ROW, BASE)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, None),
        ({"status": 429}, "429"),
        ({"ending": "upstream broken"}, "upstream_broken"),
        ({"ending": "failed", "status": None}, "failed"),
        ({"ending": "client gone"}, None),
    ],
)
def test_errors_are_kinds_and_not_what_an_upstream_wrote(changes: dict[str, Any], error: str | None) -> None:
    row = replace(ROW, error="canary", reason="pass-through: canary", **changes)
    assert error_of(row) == error and "canary" not in repr(of_span(row, BASE))


def test_a_name_without_end_is_cut() -> None:
    """A client's text in thousands of spans that wait for a collector which is away."""
    row = replace(ROW, model="m" * 1_000_000)
    assert of_span(row, BASE)["gen_ai.request.model"] == "m" * NAME_CHARS_MAX
    assert span_name(row) == "chat " + "m" * NAME_CHARS_MAX and span_name(replace(ROW, model="")) == "chat"


async def test_one_span_and_the_numbers_of_every_exchange(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from proxy.otel import OpenTelemetry, resource_of

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    observer = OpenTelemetry(resource_of({}), SimpleSpanProcessor(spans), reader)
    async with measured(tmp_path, observer) as at:
        await at.ask(HISTORY[:-1])
        await at.ask([*HISTORY, user("canary")], after_s=LUNCH_S)
        at.upstream.rejections.append(429)
        await at.ask([*HISTORY, user("canary")])
        counted = await at.numbers()
        name = (await at.client.get("/recap/api/sessions")).json()["sessions"][0]["name"]
        port = at.upstream.port
    metrics = reader.get_metrics_data()
    assert metrics is not None
    observer.close()

    first, second, refused = spans.get_finished_spans()
    assert [span.name for span in (first, second, refused)] == ["chat gpt-test"] * 3
    assert {(span.kind.name, span.parent, span.resource.attributes["service.name"]) for span in (first, second)} == {
        ("CLIENT", None, "recap-proxy")
    }
    said: dict[str, Any] = dict(second.attributes or {})
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.cache_read.input_tokens"]) == (1000, 128)
    assert (said["server.port"], said["recap.boundary"]) == (port, "cold")
    left_out: Any = [(span.attributes or {})["recap.chars.left_out"] for span in (first, second, refused)]
    assert sum(left_out) == counted["recap_left_out_chars_total"] > 0
    assert (refused.status.status_code.name, (refused.attributes or {})["error.type"]) == ("ERROR", "429")
    assert second.status.status_code.name == "UNSET" and second.end_time is not None and second.start_time is not None
    assert second.end_time >= second.start_time > 10**18

    points = {
        (metric.name, str((point.attributes or {}).get("gen_ai.token.type", ""))): point
        for resource in metrics.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if "error.type" not in (point.attributes or {})
    }
    tokens: Any = points["gen_ai.client.token.usage", "input"]
    assert (tokens.count, tokens.sum) == (2, 2000)
    assert ("gen_ai.client.operation.duration", "") in points and ("recap.planning.duration", "") in points
    everything = "".join(span.to_json() for span in (first, second, refused)) + metrics.to_json()
    assert [word for word in (*CANARIES, SESSION, name, str(tmp_path)) if word in everything] == []


def test_the_variables_name_the_service() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from proxy.otel import resource_of

    assert resource_of({}).attributes["service.name"] == "recap-proxy"
    named = resource_of({"OTEL_SERVICE_NAME": "mine"})  # the library itself reads the value from the process
    assert named.attributes["service.name"] != "recap-proxy"


@contextmanager
def collector() -> Iterator[tuple[str, list[str]]]:
    """A collector that takes everything: its address, and the paths that were posted to."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            paths.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_is_left_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    with collector() as (address, paths):
        monkeypatch.setenv(ENDPOINT, address)
        opened = open_telemetry(os.environ)
        assert opened is not None
        opened.planned(0.001)
        opened.ended(ROW, BASE)
        opened.close()
    assert set(paths) == {"/v1/traces", "/v1/metrics"}


def test_a_collector_that_is_away_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    from proxy.otel import CLOSE_S, GIVE_UP_S

    before = set(threading.enumerate())
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    opened = open_telemetry(os.environ)
    assert opened is not None
    began = time.perf_counter()
    for _ in range(5000):  # more than its queue holds
        opened.ended(ROW, BASE)
    handed_over = time.perf_counter()
    opened.close()
    assert handed_over - began < 5.0 and time.perf_counter() - handed_over < CLOSE_S + GIVE_UP_S + 2.0
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive(), thread.name


def test_a_library_that_fails_to_start_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    otel = pytest.importorskip("proxy.otel", reason="the extra `otel` is not installed")

    def fail(*_: object) -> None:
        raise ValueError("OTEL_BSP_MAX_QUEUE_SIZE must be a number")

    monkeypatch.setattr(otel, "open_exporters", fail)
    assert telemetry.open_telemetry(COLLECTOR) is None
    assert "OTEL_BSP_MAX_QUEUE_SIZE" in caplog.text
