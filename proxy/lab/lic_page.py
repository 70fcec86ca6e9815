"""What `recap eval lic` shows: a row for each selector, and what the paper printed beside it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from graphstore.store.tokens import count_tokens
from proxy.lab.lic_tasks import SHIPPED, SYSTEM
from proxy.lab.pages import markdown_table
from proxy.lab.results import Results, Row
from proxy.lab.study import command_of, provenance

NAME = "lic"
FULL = "full"
SELECTORS = (FULL, "recency", "random", "recap", "recap-without-graph", "user-messages")
COMPACTORS = (
    "paragraph-blocks",
    "line-blocks",
    "summary",
    "llmlingua-2",
    "longllmlingua",
)  # change the text: never through the proxy
KV = "kv-eviction"  # of a local model alone
ROWS = (*SELECTORS, *COMPACTORS, KV)


@dataclass(frozen=True, slots=True)
class Published:
    """Accuracy with standard deviation, and context tokens, as the paper prints them."""

    qwen: str  # Qwen3-Coder-30B-A3B
    gpt_oss: str  # gpt-oss-20b


PUBLISHED = {
    FULL: Published("65.6 ± 1.82 (1,121)", "26.4 ± 3.44 (1,023)"),
    "recency": Published("59.0 ± 2.83 (248)", "22.6 ± 2.41 (174)"),
    "random": Published("75.2 ± 3.11 (170)", "33.2 ± 2.86 (158)"),
    "recap": Published("85.4 ± 1.95 (94)", "67.6 ± 3.58 (73)"),
    "recap-without-graph": Published("76.6 ± 1.95 (95)", "63.4 ± 2.61"),
    "paragraph-blocks": Published("83.2 ± 1.92 (152)", "–"),
    "line-blocks": Published("83.0 ± 2.45 (168)", "–"),
    "llmlingua-2": Published("48.8 ± 3.96 (253)", "19.2 ± 5.07 (17)"),
    "longllmlingua": Published("65.6 ± 4.56 (163)", "21.0 ± 2.83 (17)"),
    KV: Published("70.0 ± 3.58 (146)", "33.4 ± 2.87 (256)"),
    "summary": Published("75.4 ± 2.70 (372)", "36.8 ± 5.12 (602)"),
}
PUBLISHED_REPLAYED = Published("85.2 ± 2.17", "68.2 ± 3.49")  # Table 3, attention of Qwen3-0.6B


@dataclass(frozen=True, slots=True)
class Summary:
    """Percent of the tasks solved, by repeat, and what was sent."""

    repeats: tuple[float, ...]
    conversations: int
    requests: int
    context_tokens: float | None
    shortened: float  # share of the requests
    fell_back: int

    @property
    def mean(self) -> float:
        return fmean(self.repeats)

    @property
    def shown(self) -> str:
        deviation = f" ± {stdev(self.repeats):.2f}" if len(self.repeats) > 1 else ""
        return f"{self.mean:.1f}{deviation}"


def summary_of(rows: Sequence[Row], system_tokens: int) -> Summary:
    """Of one selector's rows, at least one."""
    repeats: dict[int, list[bool]] = {}
    for row in rows:
        repeats.setdefault(row["repeat"], []).append(row["solved"])
    tokens = [count for row in rows for count in row["prompt_tokens"]]
    known = [count - system_tokens for count in tokens if count is not None]
    return Summary(
        repeats=tuple(100 * fmean(solved) for _, solved in sorted(repeats.items())),
        conversations=len(rows),
        requests=len(tokens),
        context_tokens=fmean(known) if known else None,
        shortened=sum(row["shortened"] for row in rows) / len(tokens),
        fell_back=sum(row["fell_back"] for row in rows),
    )


def render(results: Results, folder: Path) -> str:
    system_tokens = count_tokens(SYSTEM)
    by_selector = {name: [row for row in results.rows if row["selector"] == name] for name in ROWS}
    found = {name: summary_of(rows, system_tokens) for name, rows in by_selector.items() if rows}
    return "\n".join(
        [
            "## Lost in Conversation, code",
            "Percent of the tasks that were solved: mean of the repeats ± their sample standard deviation (paper, "
            f"Tables 1-3). Context: mean prompt tokens of a request by the provider's usage, less {system_tokens} of "
            "the system prompt (o200k_base). Shortened: share of the requests that left something out. The last two "
            "columns are the paper's own numbers, of its own instances, models and attention: none was measured here.",
            provenance(results, command_of(NAME, *_words(results, found))),
            "",
            _table(found, replayed=bool(results.about["replay"])),
            *_compactions(by_selector),
            *(
                f"\n{name}: {summary.fell_back} requests were refused when shortened, and sent whole."
                for name, summary in found.items()
                if summary.fell_back
            ),
            "",
        ]
    )


def _compactions(by_selector: dict[str, list[Row]]) -> Iterator[str]:
    """What compactors took besides the answers (Table 1: +Pre., +Dec., +Lat.), a compaction."""
    lines = []
    for name in COMPACTORS:
        rows = [row["compaction"] for row in by_selector[name]]
        if count := sum(row["compactions"] for row in rows):
            whole = {key: [row[key] for row in rows] for key in ("prompt_tokens", "completion_tokens", "seconds")}
            means = [None if None in values else sum(values) / count for values in whole.values()]
            tokens = [None if mean is None else f"{mean:,.0f}" for mean in means[:2]]
            lines.append([name, count, sum(row["calls"] for row in rows), *tokens, means[2]])
    if lines:
        header = ["a compaction", "compactions", "model calls", "+ prompt tokens", "+ completion tokens", "+ seconds"]
        yield f"\n{markdown_table(header, lines)}"


def _words(results: Results, found: dict[str, Summary]) -> Iterator[str]:
    """The arguments that make these rows again."""
    about = results.about
    yield from ("--base-url", about["endpoint"], "--model", about["model"], "--selectors", ",".join(found))
    (file,) = about["tasks"]
    if file != SHIPPED.name:
        yield from ("--tasks", file)
    for flag, name in (("--instances", "task"), ("--conversations", "repeat")):
        yield from (flag, str(len({row[name] for row in results.rows})))
    yield from ("--temperature", str(about["temperature"]))
    if about["max_tokens"]:
        yield from ("--max-tokens", str(about["max_tokens"]))
    if about["replay"]:
        yield "--replay"
    if about.get("lingua_model"):
        yield from ("--lingua-model", about["lingua_model"])
    if about.get("kv_model"):
        yield from ("--kv-model", about["kv_model"])
    if about["seed"]:
        yield from ("--seed", str(about["seed"]))


def _table(found: dict[str, Summary], *, replayed: bool) -> str:
    header = [
        "selector", "solved %", "recap minus it", "context", "shortened %", "conversations", "requests",
        "paper: Qwen3-Coder-30B-A3B (context)", "paper: gpt-oss-20b (context)",
    ]  # fmt: skip
    recap = found.get("recap")
    rows = []
    for name, summary in found.items():
        published = PUBLISHED_REPLAYED if replayed and name == "recap" else PUBLISHED.get(name)
        difference = f"{recap.mean - summary.mean:+.1f}" if recap is not None and name != "recap" else ""
        context = f"{summary.context_tokens:,.0f}" if summary.context_tokens is not None else None
        rows.append(
            [
                name,
                summary.shown,
                difference,
                context,
                f"{100 * summary.shortened:.0f}",
                summary.conversations,
                summary.requests,
                published.qwen if published else None,
                published.gpt_oss if published else None,
            ]
        )
    return markdown_table(header, rows)
