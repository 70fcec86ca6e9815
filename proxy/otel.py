"""OpenTelemetry spans and metrics of exchanges that have ended. Needs the extra `otel`; see `telemetry`.

Everything is made after the fact, in the recorder's thread, with the exchange's own times; the library's threads send
it. Its queues are bounded: what a slow collector does not take is dropped. Nothing global is set.
"""

import threading
from collections.abc import Mapping, Sequence, Set
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from graphstore.records import ExchangeRow
from proxy.metrics import Names
from proxy.telemetry import Signal, common, error_of, first_chunk_s, of_span, span_name

SCOPE = "recap"
CLOSE_S = 2.0
GIVE_UP_S = 1.0  # after that, for an attempt that is under way
NANOSECONDS = 1_000_000_000
TOKEN_BUCKETS = tuple(4**power for power in range(14))  # these and the next: as the conventions advise
SECONDS_BUCKETS = tuple(0.01 * 2**power for power in range(14))


def open_exporters(signals: Set[Signal], environ: Mapping[str, str]) -> "OpenTelemetry":
    """Exporters by OTLP over HTTP; where to, and how often, they read from the process's OTEL_ variables."""
    spans = OTLPSpanExporter() if "traces" in signals else None
    numbers = OTLPMetricExporter() if "metrics" in signals else None
    return OpenTelemetry(
        resource_of(environ),
        BatchSpanProcessor(spans) if spans is not None else None,
        PeriodicExportingMetricReader(numbers) if numbers is not None else None,
        exporters=[exporter for exporter in (spans, numbers) if exporter is not None],
    )


def resource_of(environ: Mapping[str, str]) -> Resource:
    """The variables' attributes; the service's name, where they give none, is ours."""
    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {"service.version": version("recap-proxy")}
    return Resource.create(own if named else own | {"service.name": "recap-proxy"})


class OpenTelemetry:
    """`telemetry.Telemetry`."""

    def __init__(
        self,
        resource: Resource,
        processor: SpanProcessor | None,
        reader: MetricReader | None,
        *,
        exporters: Sequence[OTLPSpanExporter | OTLPMetricExporter] = (),
    ) -> None:
        """`exporters`: those behind the two, which try again and again until they are told to stop."""
        self._exporters = exporters
        self._models = Names()
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        if processor is not None:
            self._spans.add_span_processor(processor)
        self._traces = processor is not None
        self._numbers = MeterProvider([reader] if reader is not None else [], resource, shutdown_on_exit=False)
        self._tracer = self._spans.get_tracer(SCOPE, version("recap-proxy"))
        meter = self._numbers.get_meter(SCOPE, version("recap-proxy"))
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens of an exchange, by the provider's count.",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            "s",
            "From a request's arrival to its end.",
            explicit_bucket_boundaries_advisory=SECONDS_BUCKETS,
        )
        self._first_chunk = meter.create_histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            "s",
            "From a request's arrival to the first chunk of a streamed answer.",
            explicit_bucket_boundaries_advisory=SECONDS_BUCKETS,
        )
        self._planning = meter.create_histogram(
            "recap.planning.duration",
            "s",
            "What a request waits for the proxy before it is sent.",
            explicit_bucket_boundaries_advisory=tuple(bound / 100 for bound in SECONDS_BUCKETS),
        )

    def planned(self, seconds: float) -> None:
        self._planning.record(seconds)

    def selected(self, seconds: float) -> None:
        """Part of what `planned` says."""

    def ended(self, row: ExchangeRow, upstream: str) -> None:
        ended_at = row.ended_at if row.ended_at is not None else row.started_at
        if self._traces:
            self._span(row, upstream, ended_at)
        accepted = row.status is not None and row.status < 400
        said = common(row, upstream, self._models.of(row.model, admits=accepted))
        self._duration.record(max(0.0, ended_at - row.started_at), said)
        if (first := first_chunk_s(row)) is not None:
            self._first_chunk.record(first, said)
        for kind, tokens in (("input", row.input_tokens), ("output", row.output_tokens)):
            if tokens is not None:
                self._tokens.record(tokens, said | {"gen_ai.token.type": kind})

    def _span(self, row: ExchangeRow, upstream: str, ended_at: float) -> None:
        span = self._tracer.start_span(
            span_name(row),
            Context(),
            SpanKind.CLIENT,
            of_span(row, upstream),
            start_time=round(row.started_at * NANOSECONDS),
        )
        if error_of(row) is not None:
            span.set_status(StatusCode.ERROR)
        span.end(round(ended_at * NANOSECONDS))

    def close(self) -> None:
        """Send what is left. A collector that is away is given up after `CLOSE_S`, and must not hold up the end."""
        closing = threading.Thread(target=self._shutdown, name="telemetry-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            for exporter in self._exporters:
                exporter.shutdown()
            closing.join(GIVE_UP_S)

    def _shutdown(self) -> None:
        self._spans.shutdown()
        self._numbers.shutdown(timeout_millis=1000 * CLOSE_S)
