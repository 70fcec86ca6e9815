"""/recap/metrics: numbers that agree with the archive, and nothing by which a person or a session could be known."""

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from graphstore.records import ExchangeRow
from proxy.conversations import open_conversations
from proxy.ledger import Price
from proxy.metrics import NAMES_MAX, OTHER, Meters, Names
from proxy.observers import Observers
from proxy.ports import Observer
from proxy.settings import Settings
from tests.clock import VirtualClock
from tests.fakes.recording_upstream import RecordingUpstream
from tests.proxy.dialogue import LUNCH_S, SYSTEM, TOOLS, Message, turn, user
from tests.support import running_proxy

DOC = (Path(__file__).resolve().parents[2] / "docs" / "savings.md").read_text("utf-8")
HISTORY = [m for name in ("alpha", "beta", "gamma", "delta") for m in turn(f"Where is {name}?", name)]
SESSION = "ses_canary_session"
CANARIES = ("canary", "alpha", "filler", "Where", "coding agent")
ROW = ExchangeRow(
    1, 1, 1, 0, 100.0, "/v1/chat/completions", "chat", "gpt-test", True, "extension", "warm", "idle",
    ended_at=102.0, first_byte_at=100.5, status=200, ending="complete",
)  # fmt: skip
Numbers = dict[str, float]


@dataclass
class Measured:
    """A proxy that is measured, with a client of it."""

    client: httpx.AsyncClient
    upstream: RecordingUpstream
    conversations: Any
    clock: VirtualClock
    database: Path

    async def ask(self, history: list[Message], *, after_s: float = 5.0, model: str = "gpt-test") -> None:
        self.clock.advance(after_s)
        body = {"model": model, "messages": [SYSTEM, *history], "tools": TOOLS, "stream": True}
        headers = {"authorization": "Bearer canary-key", "x-session-id": SESSION}
        await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def numbers(self) -> Numbers:
        await self.conversations.flush()
        return numbers_of((await self.client.get("/recap/metrics")).text)


def numbers_of(text: str) -> Numbers:
    """Name with labels -> value, as Prometheus itself would read it."""
    return {
        sample.name + ",".join([f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@asynccontextmanager
async def measured(folder: Path, *observers: Observer, **changes: Any) -> AsyncIterator[Measured]:
    upstream, clock, meters = RecordingUpstream(), VirtualClock(), Meters()
    async with upstream.running():
        given: dict[str, Any] = {
            "mode": "idle",
            "upstream": upstream.url,
            "db": str(folder / "recap.db"),
            "min_history_tokens": 0,
        }
        settings = Settings(**(given | changes))
        conversations = open_conversations(settings, clock, (meters, *observers))
        async with (
            running_proxy(settings, conversations, clock=clock, meters=meters) as proxy,
            httpx.AsyncClient(base_url=proxy.url) as client,
        ):
            yield Measured(client, upstream, conversations, clock, Path(settings.db))


async def test_what_happened_is_counted_as_it_is_archived(tmp_path: Path) -> None:
    async with measured(tmp_path, prices={"*": Price(input=3.0, cached=0.3)}) as at:
        await at.ask(HISTORY[:-1])
        await at.ask([*HISTORY, user("more")], after_s=LUNCH_S)
        at.upstream.rejections.append(429)
        await at.ask([*HISTORY, user("more")], model="refused-model")
        found = await at.numbers()
        savings = (await at.client.get("/recap/api/savings")).json()["total"]
        with closing(sqlite3.connect(at.database)) as db:
            archived = db.execute(
                "SELECT sum(input_tokens - cached_tokens), sum(cached_tokens), sum(output_tokens),"
                " sum(chars_total - chars_sent) FROM exchanges"
            ).fetchone()
    host = at.upstream.url.split("/")[2]
    where = f"{{model=gpt-test}},{{upstream={host}}}"
    of = f"{{ending=complete}},{{model=gpt-test}},{{status=2xx}},{{upstream={host}}}"
    refused = f"{{ending=complete}},{{model={OTHER}}},{{status=4xx}},{{upstream={host}}}"
    assert found[f"recap_requests_total{of}"] == 2 and found[f"recap_requests_total{refused}"] == 1
    assert found["recap_decisions_total{boundary=cold},{outcome=extension}"] == 1
    kinds = ("input_tokens_total{kind=uncached}", "input_tokens_total{kind=cache_read}")
    counted = [found[f"recap_{kind},{where}"] for kind in (*kinds, "output_tokens_total{kind=visible}")]
    assert counted == list(archived[:3])
    assert found["recap_left_out_chars_total"] == archived[3] > 0
    assert found["recap_rewritten_requests_total"] == savings["rewritten"]
    assert round(found["recap_saved_input_tokens"]) == savings["saved_tokens"] > 0
    assert found["recap_saved_cost"] == pytest.approx(savings["saved_cost"])
    assert found["recap_requests_without_usage_total"] == 1
    assert found["recap_request_duration_seconds_count"] == found["recap_planning_seconds_count"] == 3
    assert found["recap_selection_seconds_count"] >= 1 and found["recap_planning_seconds_sum"] > 0
    assert found["recap_recording"] == 1 and found["recap_batches_waiting"] == found["recap_batches_lost_total"] == 0
    assert found["recap_archive_bytes"] > 4096 and found["recap_sessions{arm=none}"] == 1


async def test_the_page_names_every_number_and_no_other(tmp_path: Path) -> None:
    named = dict(re.findall(r"^\| `(recap_\w+)` \| ([^|]*) \|", DOC, re.MULTILINE))
    async with measured(tmp_path, prices={"*": Price(input=3.0)}) as at:
        await at.ask(HISTORY[:-1])
        await at.conversations.flush()
        families = list(text_string_to_metric_families((await at.client.get("/recap/metrics")).text))
    ours = [family for family in families if family.name.startswith("recap_")]
    suffix = {"counter": "_total"}
    assert named.keys() == {family.name + suffix.get(family.type, "") for family in ours}
    for family in ours:
        labels = set().union(*(sample.labels for sample in family.samples)) - {"le"}
        told = named[family.name + suffix.get(family.type, "")]
        assert told.startswith(family.type) and labels <= set(re.findall(r"`(\w+)`", told)), family.name


async def test_a_refused_rewrite_is_a_fallback(tmp_path: Path) -> None:
    async with measured(tmp_path) as at:
        await at.ask(HISTORY[:-1])
        at.upstream.rejections.append(400)
        await at.ask([*HISTORY, user("more")], after_s=LUNCH_S)
        found = await at.numbers()
    assert found["recap_fallbacks_total"] == 1 and found["recap_left_out_chars_total"] == 0


async def test_neither_content_nor_sessions_nor_keys_get_out(tmp_path: Path) -> None:
    async with measured(tmp_path) as at:
        await at.ask([*HISTORY, user("canary")])
        await at.conversations.flush()
        reply = await at.client.get("/recap/metrics")
        name = (await at.client.get("/recap/api/sessions")).json()["sessions"][0]["name"]
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert [word for word in (*CANARIES, name, str(tmp_path)) if word in reply.text] == []


async def test_it_stands_behind_the_gate_and_never_goes_upstream(tmp_path: Path) -> None:
    async with measured(tmp_path, proxy_key="sesame") as at:
        assert (await at.client.get("/recap/metrics")).status_code == 401
        key = {"x-recap-key": "sesame"}
        assert (await at.client.get("/recap/metrics", headers=key)).status_code == 200
        assert (await at.client.get("/recap/metrics", headers=key | {"host": "evil.com"})).status_code == 403
        assert (
            await at.client.get("/recap/metrics", headers=key | {"sec-fetch-site": "cross-site"})
        ).status_code == 403
        assert (await at.client.post("/recap/metrics", headers=key)).status_code in (403, 405)
    assert at.upstream.bodies == []


async def test_without_an_archive_there_are_numbers_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with measured(tmp_path, db=str(tmp_path / "file" / "recap.db")) as at:
        await at.ask([user("hello")])
        found = await at.numbers()
    assert found["recap_recording"] == 0 and "recap_archive_bytes" not in found
    assert any(name.startswith("recap_info") for name in found)


def test_names_that_clients_make_up_are_not_labels_without_end() -> None:
    meters = Meters()
    for number in range(10 * NAMES_MAX):
        meters.ended(replaced(model=f"model-{number}"), f"https://host-{number}/v1")
    found = numbers_of(meters.render([]).decode())
    models = {name.split("{model=")[1].split("}")[0] for name in found if "{model=" in name}
    assert models == {OTHER, *(f"model-{number}" for number in range(NAMES_MAX))}
    assert sum(value for name, value in found.items() if name.startswith("recap_requests_total")) == 10 * NAMES_MAX


def test_what_the_upstream_refused_or_is_absurd_takes_no_place() -> None:
    names = Names(2)
    assert [names.of(n, admits=False) for n in ("a", "b", "c")] == [OTHER] * 3
    assert [names.of(n) for n in ("", "x" * 1000, "a", "b", "c", "a")] == [OTHER, OTHER, "a", "b", OTHER, "a"]
    assert names.of("a", admits=False) == "a"


def replaced(**changes: Any) -> ExchangeRow:
    return replace(ROW, **changes)


@pytest.mark.parametrize(
    ("reported", "counted"),
    [
        ((None, None), (10, 0, 0)),
        ((4, 5), (1, 4, 5)),
        ((14, 5), (0, 10, 0)),
        ((4, 9), (0, 4, 6)),
    ],
)
def test_kinds_of_input_add_up_to_what_the_provider_counted(
    reported: tuple[int | None, int | None], counted: tuple[int, int, int]
) -> None:
    meters = Meters()
    row = replaced(input_tokens=10, cached_tokens=reported[0], cache_write_tokens=reported[1])
    meters.ended(row, "https://u.test/v1")
    found = numbers_of(meters.render([]).decode())
    kinds = {
        k.split("{kind=")[1].split("}")[0]: v for k, v in found.items() if k.startswith("recap_input_tokens_total")
    }
    assert (kinds["uncached"], kinds["cache_read"], kinds["cache_write"]) == counted


def test_a_hostile_name_stays_one_label() -> None:
    meters = Meters()
    meters.ended(replaced(model='m"} 1\nevil_total{a="b'), "https://u.test/v1")
    found = numbers_of(meters.render([]).decode())
    assert not any(name.startswith("evil") for name in found)


def test_two_proxies_in_one_process_count_apart() -> None:
    one, other = Meters(), Meters()
    one.ended(ROW, "https://u.test/v1")
    assert "recap_requests_total{" in one.render([]).decode()
    assert "recap_requests_total{" not in other.render([]).decode()


async def test_an_observer_that_fails_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def planned(self, seconds: float) -> None:
            raise RuntimeError("broken")

        selected = planned

        def ended(self, row: ExchangeRow, upstream: str) -> None:
            raise RuntimeError("broken")

    meters = Meters()
    observers = Observers((Broken(), meters))
    observers.planned(1.0)
    observers.selected(1.0)
    observers.ended(ROW, "https://u.test/v1")
    assert caplog.text.count("RuntimeError: broken") == 3
    found = numbers_of(meters.render([]).decode())
    assert found["recap_planning_seconds_count"] == found["recap_selection_seconds_count"] == 1
    assert found["recap_request_duration_seconds_count"] == 1
