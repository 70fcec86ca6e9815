"""Whole sessions through a real proxy: every sum that is shown, against what the upstream itself counted."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.cli import main
from proxy.conversations import open_conversations
from proxy.metrics import Meters
from proxy.settings import Settings
from tests.clock import VirtualClock
from tests.fakes.scripted_upstream import Fault, ScriptedUpstream
from tests.proxy.dialogue import LUNCH_S, TOOLS, read, said, user
from tests.proxy.test_metrics import numbers_of
from tests.support import running_proxy

# What an upstream may say -> uncached, read, written, said; None: nothing that counts.
USAGES: list[tuple[Any, tuple[int, int, int, int] | None]] = [
    ({"prompt_tokens": 900, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 512}}, (388, 512, 0, 7)),
    ({"prompt_tokens": 900, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 901}}, (0, 900, 0, 7)),
    ({"prompt_tokens": 0, "completion_tokens": 0}, (0, 0, 0, 0)),
    ({"prompt_tokens": 900, "prompt_tokens_details": None}, (900, 0, 0, 0)),
    (
        {"input_tokens": 900, "input_tokens_details": {"cached_tokens": 500, "cache_write_tokens": 600}},
        (0, 500, 400, 0),
    ),
    ({"input_tokens": 9, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 50}, (9, 100, 50, 0)),
    ({"prompt_tokens": "900", "completion_tokens": -1}, None),
    ({"prompt_tokens": 10**30}, None),
    ({"prompt_tokens": 2**53}, None),
    ({"prompt_tokens": None, "prompt_tokens_details": {"cached_tokens": 5}}, None),
    (None, None),
    ([1], None),
    ("many", None),
]
SIZE = 6_000
WINDOW = 8_000  # tokens, by the upstream's count: half of what the longest histories have
OUTPUT = 6  # what the script says at once, by the upstream's count


def answered(dialect: str, usage: Any, *, stream: bool) -> Fault:
    """A whole answer with this usage."""
    if dialect == "chat":
        whole: dict[str, Any] = {"id": "c", "choices": [{"index": 0, "message": said("ok"), "finish_reason": "stop"}]}
        chunk = {"id": "c", "choices": [{"index": 0, "delta": said("ok"), "finish_reason": "stop"}], "usage": None}
        events = [chunk, {"id": "c", "choices": [], "usage": usage}]
    else:
        item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
        whole = {"id": "r", "status": "completed", "output": [item]}
        events = [
            {"type": "response.created", "response": {"id": "r", "usage": None}},
            {"type": "response.completed", "response": whole | {"usage": usage}},
        ]
    if not stream:
        return Fault(body=json.dumps(whole | {"usage": usage}).encode())
    return Fault(
        body=b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events),
        content_type="text/event-stream",
    )


class Expected:
    """Sums straight from what the upstream said, by model and over all."""

    def __init__(self) -> None:
        self.sums: dict[str, Counter[str]] = defaultdict(Counter)

    def note(self, model: str, counts: tuple[int, int, int, int] | None) -> None:
        uncached, cached, written, output = counts or (0, 0, 0, 0)
        for name in (f"model {model}", "total"):
            self.sums[name] += Counter(requests=1, with_usage=int(counts is not None))
            self.sums[name] += Counter(input_tokens=uncached + cached + written, cached_tokens=cached)
            self.sums[name] += Counter(written_tokens=written, output_tokens=output)

    def compare(self, shown: dict[str, Any], numbers: dict[str, float]) -> None:
        """`shown`: savings as JSON; `numbers`: /recap/metrics."""
        total = self.sums["total"]
        assert told(shown["total"]) == total
        for model in ("m-one", "m-two"):
            assert [told(line) for line in shown["models"] if line["model"] == model] == [self.sums[f"model {model}"]]
        by_session: Counter[str] = Counter()
        for line in shown["sessions"]:
            by_session.update(told(line))
        assert by_session == total
        by_day: Counter[str] = Counter()
        for line in shown["days"]:
            by_day.update(told(line))
        assert by_day == total and len(shown["days"]) > 1

        def counted(name: str, word: str = "") -> float:
            return sum(value for key, value in numbers.items() if key.startswith(name) and word in key)

        kinds = [
            counted("recap_input_tokens_total", f"kind={kind}") for kind in ("uncached", "cache_read", "cache_write")
        ]
        cached, written = total["cached_tokens"], total["written_tokens"]
        assert kinds == [total["input_tokens"] - cached - written, cached, written]
        assert counted("recap_output_tokens_total") == total["output_tokens"]
        assert counted("recap_requests_total") == total["requests"]
        assert counted("recap_requests_without_usage_total") == total["requests"] - total["with_usage"]


FIELDS = ("requests", "with_usage", "input_tokens", "cached_tokens", "written_tokens", "output_tokens")


def told(line: dict[str, Any]) -> dict[str, int]:
    return {name: line[name] for name in FIELDS if line[name]}


def history(steps: int, session: str, dialect: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(steps):
        found += [user(f"{session} {step}: look at {session}_{step}.py")]
        if dialect == "chat":
            found += read(
                f"{session}_{step}.py", f"def {session}_{step}(): pass\n" + "words " * (SIZE // 6), f"c{step}"
            )
        found += [said("ok")]
    return found


async def ask(
    client: httpx.AsyncClient, dialect: str, session: str, steps: int, *, model: str, stream: bool, **more: Any
) -> int:
    messages = [*history(steps, session, dialect), user(f"{session} {steps}: look at {session}_{steps}.py")]
    body: dict[str, Any] = {"model": model, "stream": stream, "tools": TOOLS} | more
    if dialect == "chat":
        body |= {"messages": messages} | ({"stream_options": {"include_usage": True}} if stream else {})
    else:
        body |= {"input": messages, "tools": [{"type": "function", "name": "read", "parameters": {}}]}
    path = "/v1/chat/completions" if dialect == "chat" else "/v1/responses"
    headers = {"authorization": "Bearer k", "x-session-id": session}
    try:
        return (await client.post(path, json=body, headers=headers)).status_code
    except httpx.RemoteProtocolError:
        return 0  # the answer was cut off


def plays() -> Iterator[tuple[str, bool, str, Any]]:
    """Dialect, whether streamed, model, and how it goes: a usage, a status, or words for the rest."""
    for number, (usage, counts) in enumerate(USAGES):
        for dialect in ("chat", "responses"):
            for stream in (False, True):
                yield dialect, stream, ("m-one", "m-two")[number % 2], (usage, counts)
                yield dialect, stream, "m-one", "as it comes"
                yield dialect, stream, "m-one", (429, "cut", 400, "again")[number % 4]


@pytest.mark.parametrize(("mode", "window"), [("off", None), ("idle", None), ("auto", None), ("auto", WINDOW)])
async def test_every_sum_is_the_upstreams_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: Any, window: int | None
) -> None:
    clock, meters, expected = VirtualClock(), Meters(), Expected()
    steps: Counter[str] = Counter()
    async with ScriptedUpstream(clock=clock, reasons=False, window_tokens=window) as upstream:
        settings = Settings(
            mode=mode, upstream=upstream.base_url, db=str(tmp_path / "recap.db"), min_history_tokens=0, beta=0.05
        )
        conversations = open_conversations(settings, clock, (meters,))
        async with (
            running_proxy(settings, conversations, clock=clock, meters=meters) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30) as client,
        ):
            for number, (dialect, stream, model, way) in enumerate(plays()):
                session = f"{dialect}{int(stream)}"
                step, steps[session] = steps[session], min(steps[session] + 1, 12)
                clock.advance(LUNCH_S if number % 7 == 0 else 20.0)
                if isinstance(way, tuple):
                    upstream.inject(answered(dialect, way[0], stream=stream))
                elif isinstance(way, int):
                    upstream.inject(Fault(status=way))
                elif way == "cut":
                    upstream.inject(Fault(truncate_after=40))
                more = {"previous_response_id": "resp_1"} if dialect == "responses" and number % 11 == 0 else {}
                for _ in range(2 if way == "again" else 1):
                    seen = len(upstream.log)
                    await ask(client, dialect, session, step, model=model, stream=stream, **more)
                    last = upstream.log[-1]
                    counts: tuple[int, int, int, int] | None = None
                    was_too_long = any(received.rejected for received in upstream.log[seen:])
                    if isinstance(way, tuple) and not was_too_long:
                        counts = way[1]
                    elif last.status == 200 and (way != "cut" or was_too_long):
                        fresh = last.input_tokens - last.cached_tokens
                        counts = (fresh, last.cached_tokens, 0, OUTPUT)
                    expected.note(model, counts)
            await conversations.flush()
            numbers = numbers_of((await client.get("/recap/metrics")).text)
            shown = (await client.get("/recap/api/savings")).json()
            listed = (await client.get("/recap/api/sessions")).json()["sessions"]
            pages = [(await client.get(f"/recap/api/sessions/{row['name']}")).json() for row in listed]
    main(["savings", "--json", "--db", settings.db])
    assert json.loads(capsys.readouterr().out) == shown
    expected.compare(shown, numbers)
    for name in ("input_tokens", "cached_tokens"):
        sums = {row["session"]: row[name] for row in shown["sessions"]}
        assert {row["name"]: row[name] for row in listed} == sums
        assert {page["session"]["name"]: page["session"][name] for page in pages} == sums
        assert {page["session"]["name"]: sum(turn[name] or 0 for turn in page["turns"]) for page in pages} == sums
    refused = [received.rejected is not None for received in upstream.log]
    assert any(refused) == (window is not None)
    rewritten, resent = shown["total"]["rewritten"], shown["total"]["resent"]
    assert (rewritten > 0) == (resent > 0) == (mode != "off"), "what was meant to happen has happened"
