"""The load test in small, by number of requests; and that each of its checks can fail."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.load.__main__ import JUDGED_S, Length, Load, Model, Part, agents, beside, crowd, free_port, listening
from scripts.load.clients import Tally
from scripts.load.upstream import serve
from scripts.load.wire import Ask, DialectName, answer, digest

SMALL = Load(
    sessions=8,
    body_bytes=20_000,
    length=Length(requests=6),
    model=Model(think_s=0.02, piece_s=0.002),
    pause_s=0.02,
    requests=(2, 4),
)
Answering = Callable[[DialectName, Ask, str, int], tuple[bytes, ...]]


@pytest.mark.slow
async def test_many_at_once_get_their_own_answers(tmp_path: Path) -> None:
    part = await crowd(SMALL, tmp_path)
    part.judge()
    assert part.problems == []
    assert part.tally.requests >= 48 and part.tally.streaming_max > 1 and part.tally.left > 0


@pytest.mark.slow
async def test_many_at_once_beside_readers_and_removals(tmp_path: Path) -> None:
    part = await beside(SMALL, tmp_path, old=2)
    part.judge()
    assert part.problems == []
    assert part.tally.requests >= 48 and part.tally.rewritten > 0
    assert "0 answers" not in part.notes[-1] and "0 sessions forgotten" not in part.notes[-1]


# -- that it can fail ---------------------------------------------------------------------------------------------


def anothers() -> Answering:
    """The answer of another session that asked before."""
    before: list[Ask] = []

    def mixed_up(dialect: DialectName, ask: Ask, received: str, size: int) -> tuple[bytes, ...]:
        before.append(ask)
        return answer(dialect, next((a for a in before if a.tag != ask.tag), ask), received, size)

    return mixed_up


def damaged() -> Answering:
    def without_a_byte(dialect: DialectName, ask: Ask, received: str, size: int) -> tuple[bytes, ...]:
        *pieces, last = answer(dialect, ask, received, size)
        return (*pieces, last[:-1])

    return without_a_byte


@asynccontextmanager
async def faulty_upstream() -> AsyncIterator[int]:
    port = free_port()
    serving = asyncio.create_task(serve(port, 0.0, 0.0))
    try:
        await listening(port)
        yield port
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


async def asked(port: int, **more: Any) -> Part:
    part = Part("faulty")
    await agents(part, SMALL.work(port, 1, Length(requests=2), leaves=0.0, **more), 4)
    part.judge()
    return part


async def test_without_a_fault_there_is_no_problem() -> None:
    async with faulty_upstream() as port:
        assert (await asked(port)).problems == []


@pytest.mark.parametrize(("fault", "found"), [(anothers, "mixed up: "), (damaged, "error: ")])
async def test_an_answer_that_is_anothers_or_damaged_is_found(
    fault: Callable[[], Answering], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.load.upstream.answer", fault())
    async with faulty_upstream() as port:
        part = await asked(port)
    assert any(problem.startswith(found) for problem in part.problems)


async def test_a_body_that_is_not_the_agents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.load.upstream.digest", lambda body: digest(body + b" "))
    async with faulty_upstream() as port:
        assert any("another body" in problem for problem in (await asked(port)).problems)
        rewritten = await asked(port, exact=False)
    assert rewritten.problems == [] and rewritten.tally.rewritten == rewritten.tally.requests


async def test_a_body_with_words_of_two_sessions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.load.upstream.tags", lambda body: {b"one", b"two"})
    async with faulty_upstream() as port:
        part = await asked(port)
    assert part.problems and all(problem.startswith("mixed up: ") for problem in part.problems)


def test_memory_that_grows_is_found() -> None:
    grown = Part("grown", Tally(), seconds=JUDGED_S, resident=[float(mb) for mb in range(100, 200)])
    flat = Part("flat", Tally(), seconds=JUDGED_S, resident=[*range(100), *[200.0] * 300])
    grown.judge()
    flat.judge()
    assert len(grown.problems) == 1 and "memory grew" in grown.problems[0] and flat.problems == []
