"""What monitoring may know of this proxy, in Prometheus' text format: numbers, and neither content nor sessions.

`Meters` counts what happens while the process runs. What the archive knows beyond that is read when somebody asks.
Model names come from clients, so only so many of them become labels: the rest are `other`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphstore.records import ExchangeRow
from graphstore.store.reader import Reader
from proxy.savings import Savings, sum_up

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAMES_MAX = 32  # distinct values of one label
NAME_CHARS_MAX = 80
OTHER = "other"
REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OWN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 10)


class Names:
    """The first distinct values of a label as they are, all others as `other`."""

    def __init__(self, most: int = NAMES_MAX) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, value: str, *, admits: bool = True) -> str:
        """`admits`: a value that is new may take one of the places; what an upstream refused must not."""
        if value not in self._known:
            if not admits or not 0 < len(value) <= NAME_CHARS_MAX or len(self._known) >= self._most:
                return OTHER
            self._known.add(value)
        return value


class Meters:
    """An observer of the conversations (`ports.Observer`) with a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._models, self._upstreams = Names(), Names()
        self._requests = self._counter(
            "requests", "Requests to conversation endpoints that ended.", "upstream", "model", "ending", "status"
        )
        self._decisions = self._counter("decisions", "The same, by what was decided of them.", "outcome", "boundary")
        self._input = self._counter(
            "input_tokens", "Input tokens by the provider's count, cached ones apart.", "upstream", "model", "kind"
        )
        self._output = self._counter(
            "output_tokens", "Output tokens by the provider's count, reasoning apart.", "upstream", "model", "kind"
        )
        self._without_usage = self._counter("requests_without_usage", "Requests whose usage was not reported.")
        self._rewritten = self._counter("rewritten_requests", "Requests that were sent without some messages.")
        self._left_out = self._counter("left_out_chars", "Characters of messages that were left out.")
        self._fallbacks = self._counter("fallbacks", "Rewritten requests that were refused, and sent as they came.")
        self._duration = self._histogram("request_duration", "From a request's arrival to its end.", REQUEST_S)
        self._first_byte = self._histogram("time_to_first_byte", "From its arrival to the answer's begin.", REQUEST_S)
        self._planning = self._histogram("planning", "What a request waits for us, before it is sent.", OWN_S)
        self._selection = self._histogram("selection", "Of that: to select anew, and write it to the disk.", OWN_S)

    def planned(self, seconds: float) -> None:
        self._planning.observe(seconds)

    def selected(self, seconds: float) -> None:
        self._selection.observe(seconds)

    def ended(self, row: ExchangeRow, upstream: str) -> None:
        host = self._upstreams.of(urlsplit(upstream).netloc.rpartition("@")[2])
        model = self._models.of(row.model, admits=row.status is not None and row.status < 400)
        status = f"{row.status // 100}xx" if row.status is not None else "none"
        self._requests.labels(host, model, row.ending, status).inc()
        self._decisions.labels(row.outcome, row.boundary).inc()
        for kind, tokens in input_kinds(row).items():
            self._input.labels(host, model, kind).inc(tokens)
        for kind, tokens in output_kinds(row).items():
            self._output.labels(host, model, kind).inc(tokens)
        if row.input_tokens is None:
            self._without_usage.inc()
        if row.messages_sent < row.messages_total:
            self._rewritten.inc()
            self._left_out.inc(max(0, row.chars_total - row.chars_sent))
        if row.fell_back:
            self._fallbacks.inc()
        if row.ended_at is not None:
            self._duration.observe(max(0.0, row.ended_at - row.started_at))
        if row.first_byte_at is not None:
            self._first_byte.observe(max(0.0, row.first_byte_at - row.started_at))

    def render(self, archive: Iterable[Metric]) -> bytes:
        """The text of all numbers, with those of the archive as they are now."""
        asked = CollectorRegistry()
        asked.register(_Collected([*map(_without_births, self._registry.collect()), *archive]))
        return generate_latest(asked)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"recap_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"recap_{name}_seconds", text, buckets=buckets, registry=self._registry)


def input_kinds(row: ExchangeRow) -> dict[str, int]:
    """Kind -> tokens, which add up to the provider's count; none without usage."""
    if row.input_tokens is None:
        return {}
    read = min(row.cached_tokens or 0, row.input_tokens)
    written = min(row.cache_write_tokens or 0, row.input_tokens - read)
    return {"uncached": row.input_tokens - read - written, "cache_read": read, "cache_write": written}


def output_kinds(row: ExchangeRow) -> dict[str, int]:
    """The same of the output. Reasoning is part of what the provider counts."""
    if row.output_tokens is None:
        return {}
    reasoning = min(row.reasoning_tokens or 0, row.output_tokens)
    return {"visible": row.output_tokens - reasoning, "reasoning": reasoning}


def _without_births(metric: Metric) -> Metric:
    """The library adds to every number when it was first counted, which doubles the text and helps nobody here."""
    metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metric


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def without_archive(said: Mapping[str, object]) -> list[Metric]:
    """What can be told of an archive that cannot be read; `said` is what /recap/health says."""
    archive = said.get("archive")
    told: Mapping[str, object] = archive if isinstance(archive, dict) else {}
    names = {"version": str(said.get("version", "")), "mode": str(said.get("mode", ""))}
    found: list[Metric] = [
        _labelled("info", "Of this proxy; always 1.", names),
        GaugeMetricFamily("recap_recording", "1: what happens is archived.", value=told.get("state") == "ok"),
    ]
    if isinstance(waiting := told.get("batches_waiting"), int):
        found.append(GaugeMetricFamily("recap_batches_waiting", "For the archive's writer.", value=waiting))
    if isinstance(lost := told.get("batches_lost"), int):
        found.append(CounterMetricFamily("recap_batches_lost", "That could not be written.", value=lost))
    if isinstance(falls := told.get("cache_falls"), dict):
        text = "Sessions that the provider's cache serves much worse than it did."
        found.append(GaugeMetricFamily("recap_cache_falls", text, value=len(falls)))
    return found


def of_archive(savings: Savings, reader: Reader, said: Mapping[str, object]) -> list[Metric]:
    """Everything that is there to be told. `saved` numbers are the ledger's, and may fall."""
    sums, path = sum_up(savings, reader), Path(savings.settings.db)
    size = sum(part.stat().st_size for part in (path, path.with_name(path.name + "-wal")) if part.exists())
    jobs = GaugeMetricFamily("recap_replay_jobs", "Replays of finished turns, by state.", labels=["state"])
    for state, amount in sorted(reader.count_jobs().items()):
        jobs.add_metric([state], amount)
    arms = GaugeMetricFamily("recap_sessions", "Archived sessions, by arm of the hold-out.", labels=["arm"])
    rows = [session.arm or "none" for session, _ in sums.sessions]
    for arm in sorted({"none", *rows}):
        arms.add_metric([arm], rows.count(arm))
    text = "Of all archived requests against the untouched history: an estimate"
    found = [
        *without_archive(said),
        GaugeMetricFamily("recap_archive_bytes", "Of the database with its log.", value=size),
        arms,
        jobs,
        GaugeMetricFamily(
            "recap_reasoning_removed",
            "Reasoning items that the provider says it removed, of all archived requests.",
            value=sums.total.reasoning_removed,
        ),
        GaugeMetricFamily(
            "recap_saved_input_tokens", f"{text}, negative where more were sent.", value=sums.total.saved
        ),
    ]
    if sums.total.priced:
        cost = sums.total.saved_cost
        found.append(GaugeMetricFamily("recap_saved_cost", f"{text}, in the currency of the prices.", value=cost))
    return found


def _labelled(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    metric = GaugeMetricFamily(f"recap_{name}", text, labels=list(labels))
    metric.add_metric(list(labels.values()), 1)
    return metric
