"""Thousands of seeded histories under fire, and proof that the simulation sees what it is there to see.

`TEST_HISTORIES` is their number, `TEST_HISTORIES_FROM` the first seed. A seed that fails is printed with its story and
kept in `seeds.txt`, whose seeds are played first in every run. `python -m tests.simulation SEED` plays one again.
"""

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from graphstore.records import Batch
from graphstore.store import engine, writer
from proxy import conversations, planning, rewrite, selecting
from proxy.commands import repair
from proxy.sessions import Registry
from tests.simulation import disk, world
from tests.simulation.damage import DAMAGES
from tests.simulation.disk import TROUBLES
from tests.simulation.histories import keep, kept_seeds, play, play_all
from tests.simulation.machine import Machine

HISTORIES = int(os.environ.get("TEST_HISTORIES") or (10_000 if os.environ.get("CI") else 300))
FIRST = int(os.environ.get("TEST_HISTORIES_FROM") or 0)
STORIES_SHOWN = 3
PLANTED_IN = 400  # histories, the first of which to see the fault ends the search
SEEN_BY_ALL = frozenset(
    {*world.ACTIONS, *(f"disk {trouble}" for trouble in TROUBLES)}
    | {f"damage {damage}" for damage in DAMAGES}
    | {"new", "extension", "retry", "undo", "fork", "side", "amendment", "client pruning", "client compaction"}
    | {"cold", "warm", "step", "none", "rewritten", "original", "fell back", "pass-through", "not saved", "unrecorded"}
    | {"died", "ended"}
)
ENOUGH = 1_000  # histories in which everything that can happen has happened


def test_every_promise_holds_in_every_history() -> None:
    seen: Counter[str] = Counter()
    seeds = list(dict.fromkeys([*kept_seeds(), *range(FIRST, FIRST + HISTORIES)]))
    failures = []
    for outcome in play_all(seeds):
        seen += outcome.seen
        if outcome.broken is not None:
            failures.append(outcome)
    keep(failures)
    stories = "\n\n".join(failure.story for failure in failures[:STORIES_SHOWN])
    assert not failures, f"seeds {[failure.seed for failure in failures]} of {len(seeds)} failed\n{stories}"
    if HISTORIES >= ENOUGH:
        assert SEEN_BY_ALL <= seen.keys(), f"never happened: {sorted(SEEN_BY_ALL - seen.keys())}"


def test_a_history_follows_from_its_seed() -> None:
    for seed in (1, 2, 3):
        first, second = play(seed), play(seed)
        assert first.seen and first == second


# -- faults that are planted ----------------------------------------------------------------------------------------


def _left_out_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The splice drops one message more, and the guard sleeps."""
    render = rewrite.render_rewritten

    def wrong(request: Any, left_out: Any, notice: Any) -> bytes:
        stays = [i for i in range(len(request.messages)) if i not in left_out]
        return render(request, {*left_out, stays[len(stays) // 2]}, notice)

    monkeypatch.setattr(planning, "render_rewritten", wrong)
    monkeypatch.setattr(planning, "check_rewritten", lambda *_: None)


def _changes_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    render = rewrite.render_rewritten
    monkeypatch.setattr(planning, "render_rewritten", lambda *given: render(*given).replace(b"look at", b"look on", 1))
    monkeypatch.setattr(planning, "check_rewritten", lambda *_: None)


def _fails_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that the proxy cannot end in its books is not ended for the client either."""

    def end(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(conversations.ArchivedConversations, "admit", end)
    monkeypatch.setattr("proxy.endpoints.Plan", end)


def _forgets_to_be_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision counts as saved once it is queued."""
    submit = writer.Writer.submit

    def careless(self: Any, batch: Any, *, durable: bool = False) -> "Future[None]":
        done = submit(self, batch)
        if not (durable and batch.selections):
            return done
        at_once: Future[None] = Future()
        at_once.set_result(None)
        return at_once

    monkeypatch.setattr(writer.Writer, "submit", careless)


def _loses_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then the archive takes a batch and forgets it."""
    submit, number = writer.Writer.submit, count(1)

    def forgetful(self: Any, batch: Any, *, durable: bool = False) -> "Future[None]":
        return submit(self, batch if durable or next(number) % 5 else Batch(), durable=durable)

    monkeypatch.setattr(writer.Writer, "submit", forgetful)


def _forgets_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that comes back from the archive sends everything again."""
    restore = Registry._restore

    def forgetful(self: Any, row: Any) -> Any:
        session = restore(self, row)
        session.left_out = session.stored = frozenset()
        session.row = replace(session.row, selection_id=None)
        return session

    monkeypatch.setattr(Registry, "_restore", forgetful)


def _selects_at_a_whim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm request is sent with less than the one before."""
    finish = planning.Planner.finish

    def whim(self: Any, draft: Any) -> Any:
        if draft.session is not None and draft.decision.boundary == "warm" and draft.session.left_out:
            draft.session.left_out = frozenset(sorted(draft.session.left_out)[1:])
        return finish(self, draft)

    monkeypatch.setattr(planning.Planner, "finish", whim)


def _gives_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    row_of = planning._row
    monkeypatch.setattr(planning, "_row", lambda draft: replace(row_of(draft), reason=""))


def _invents_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = writer.Writer.submit

    def kind(self: Any, batch: Any, **given: Any) -> Any:
        rows = tuple(replace(row, usage='{"prompt_tokens": 1}' if row.usage else None) for row in batch.exchanges)
        return submit(self, replace(batch, exchanges=rows), **given)

    monkeypatch.setattr(writer.Writer, "submit", kind)


def _waits_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = selecting.choose

    def slow(*given: Any, **more: Any) -> Any:
        Machine.current.sleep(2.0)
        return choose(*given, **more)

    monkeypatch.setattr(planning, "choose", slow)


def _writes_blocks_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = writer._Transaction._blocks

    def empty(self: Any, rows: Any) -> None:
        blocks(self, [replace(row, node_ids=()) if row.ordinal % 4 == 3 else row for row in rows])

    monkeypatch.setattr(writer._Transaction, "_blocks", empty)


def _gives_up_when_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody holds the file for longer than the timeout, and the batch counts as refused."""
    explain = engine.explain

    def hasty(error: BaseException) -> Any:
        trouble = explain(error)
        return None if trouble is not None and trouble.kind == "locked" else trouble

    monkeypatch.setattr(writer, "explain", hasty)


def _says_that_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    well = {"state": "ok", "problem": None}
    monkeypatch.setattr(conversations.WithoutArchive, "health", lambda _: well)


def _throws_the_damaged_file_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "_set_aside", lambda path: path)


def _reads_what_was_not_committed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader without a transaction."""
    made = engine._engine

    def loose(path: Any, mode: str, *, begin: str, pool_size: int) -> Any:
        return made(path, mode, begin="SELECT 1" if begin == "BEGIN" else begin, pool_size=pool_size)

    monkeypatch.setattr(engine, "_engine", loose)
    monkeypatch.setattr(disk, "_FREE", {})


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], frozenset[str]]] = {
    "a splice that drops a message": (_left_out_too_much, frozenset({"never break"})),
    "a splice that changes a byte": (_changes_a_byte, frozenset({"never break"})),
    "an error that reaches the client": (_fails_the_client, frozenset({"never break"})),
    "a decision that is not on the disk": (_forgets_to_be_durable, frozenset({"never lose"})),
    "a batch that is not written": (_loses_a_batch, frozenset({"never lose", "verify", "explain"})),
    "a selection that a restart forgets": (_forgets_the_selection, frozenset({"never chill"})),
    "a selection that changes while the cache is warm": (_selects_at_a_whim, frozenset({"never chill"})),
    "a plan without a reason": (_gives_no_reason, frozenset({"explain"})),
    "usage that is not the provider's": (_invents_usage, frozenset({"explain"})),
    "a plan that waits for a model": (_waits_for_a_model, frozenset({"never wait"})),
    "a batch given up because somebody holds the lock": (_gives_up_when_locked, frozenset({"never lose"})),
    "a broken archive that health calls well": (_says_that_all_is_well, frozenset({"explain"})),
    "a repair that throws the damaged file away": (_throws_the_damaged_file_away, frozenset({"never lose"})),
    "a reader that sees half of a change": (_reads_what_was_not_committed_together, frozenset({"explain"})),
    "blocks without messages": (_writes_blocks_of_nothing, frozenset({"verify", "explain"})),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, promises = PLANTED[name]
    plant(monkeypatch)
    found = next((outcome for outcome in map(play, range(PLANTED_IN)) if outcome.broken is not None), None)
    assert found is not None, f"nothing was seen in {PLANTED_IN} histories"
    assert found.broken in promises, found.story
