"""Replay jobs: each turn at most once, nothing lost or counted twice, whoever dies; graphs that can be rebuilt."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from graphstore.evidence import RULES, Rule
from graphstore.parameters import Parameters
from graphstore.records import Batch, Fork, NodeState, ReplayRequest, WorkerStatus
from graphstore.replays import BlockReading, LayerReading, Replay
from graphstore.store import replays
from graphstore.store.archive import Archive, open_queue
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.forget import Forget
from graphstore.store.marks import set_mark
from graphstore.store.replays import ATTEMPTS_MAX, ReplayQueue
from graphstore.store.verify import verify
from tests.graphstore.store.conftest import open_archive
from tests.graphstore.store.history import START, History, exchange_row, session_row
from tests.observed import observe, plant, replay_of

DEADLINE_S = 30
DENSITY = {0: 0.5, 1: 0.25, 2: 0.125}
EDGES = ((0, 1, 0.5), (0, 2, 0.04), (1, 2, 0.01))


def request(turn: int, session: int = 1, at: float = 0.0) -> ReplayRequest:
    return ReplayRequest(session, turn, 1, at or float(turn))


def grown(archive: Archive, *sessions: int) -> None:
    """Sessions of four blocks each."""
    for session in sessions or (1,):
        history = History(session)
        batch = history.grow("one", "two", "three", "four", exchange=False)
        archive.writer.submit(batch).result(DEADLINE_S)
        archive.writer.submit(Batch(exchanges=(exchange_row(session, session),))).result(DEADLINE_S)


def submit(archive: Archive, *requests: ReplayRequest) -> None:
    archive.writer.submit(Batch(replays=requests)).result(DEADLINE_S)


def queue_of(archive: Archive) -> ReplayQueue:
    return open_queue(archive.path, clock=lambda: START)


def states(archive: Archive, session: int = 1) -> dict[str, int]:
    return {f"{job.turn} {job.state}": job.attempts for job in archive.reader.load_jobs(session)}


# -- jobs ----------------------------------------------------------------------------------------------------------


def test_the_latest_turn_wins_and_older_ones_are_folded_into_it(archive: Archive) -> None:
    grown(archive)
    submit(archive, request(1), request(2), request(3))
    with queue_of(archive) as queue:
        job = queue.claim()
        assert job is not None and (job.turn, job.since_turn, job.attempts) == (3, 1, 1)
        assert states(archive) == {"1 folded": 0, "2 folded": 0, "3 claimed": 1}
        assert queue.claim() is None
        assert queue.finish(job, replay_of(DENSITY), {}, "paper")
        submit(archive, request(5))
        job = queue.claim()
        assert job is not None and (job.turn, job.since_turn) == (5, 4)


def test_the_session_that_was_busy_last_comes_first(archive: Archive) -> None:
    grown(archive, 1, 2)
    submit(archive, request(1, at=5.0), ReplayRequest(2, 1, 2, 9.0))
    with queue_of(archive) as queue:
        claimed = [job.session_id for job in iter(queue.claim, None)]
    assert claimed == [2, 1]


def test_a_turn_is_replayed_at_most_once(archive: Archive) -> None:
    """A retry ends the same turn again; a late job of an older turn adds nothing."""
    grown(archive)
    submit(archive, request(2))
    with queue_of(archive) as queue:
        job = queue.claim()
        assert job is not None
        submit(archive, request(2, at=9.0))
        assert queue.finish(job, replay_of(DENSITY), {}, "paper")
        assert not queue.finish(job, replay_of({0: 1.0}), {}, "paper")
        submit(archive, request(2, at=10.0), request(1))
        assert queue.claim() is None
    assert states(archive) == {"1 folded": 0, "2 done": 1}
    assert len(archive.reader.load_observations(1)) == 1


def test_a_waiting_job_follows_the_latest_exchange_of_its_turn(archive: Archive) -> None:
    grown(archive)
    archive.writer.submit(Batch(exchanges=(exchange_row(7),))).result(DEADLINE_S)
    submit(archive, request(1), ReplayRequest(1, 1, 7, 2.0))
    with queue_of(archive) as queue:
        job = queue.claim()
    assert job is not None and job.exchange_id == 7


def test_only_one_worker_claims(archive: Archive) -> None:
    with queue_of(archive), pytest.raises(ArchiveUnavailable) as refused:
        queue_of(archive)
    assert refused.value.kind == "in use" and "a worker" in refused.value.problem
    assert "--attention off" in refused.value.remedy


def test_a_job_that_kills_the_worker_every_time_fails_in_the_end(archive: Archive) -> None:
    grown(archive)
    submit(archive, request(1))
    with queue_of(archive) as queue:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            job = queue.claim()
            assert job is not None and job.attempts == attempt
            assert queue.recover() == 1
        assert queue.claim() is None
    (job_row,) = archive.reader.load_jobs(1)
    assert (job_row.state, job_row.attempts) == ("failed", ATTEMPTS_MAX)
    assert job_row.error == "the worker ended while it replayed this turn"
    assert archive.reader.last_failed_job() == job_row


def test_a_failure_keeps_its_reason_and_may_be_tried_again(archive: Archive) -> None:
    grown(archive)
    submit(archive, request(1))
    with queue_of(archive) as queue:
        job = queue.claim()
        assert job is not None
        queue.fail(job, "out of memory; choose a smaller model", again=True)
        assert archive.reader.load_jobs(1)[0].error == "out of memory; choose a smaller model"
        again = queue.claim()
        assert again is not None and again.attempts == 2
        queue.fail(again, "NaN in the rows; report it", again=False)
    assert archive.reader.count_jobs() == {"failed": 1}


@pytest.mark.parametrize("end", ["fail", "release", "finish"])
def test_a_job_whose_session_was_forgotten_ends_nobody_elses(archive: Archive, end: str) -> None:
    """SQLite gives its number to the next job; another session's turn must not fail for what it never did."""
    grown(archive, 1, 2)
    submit(archive, request(1))
    with queue_of(archive) as queue:
        job = queue.claim()
        assert job is not None
        archive.writer.forget(Forget(frozenset([1]), thorough=True)).result(DEADLINE_S)
        submit(archive, replace(request(1, session=2), exchange_id=2))
        (other,) = archive.reader.load_jobs(2)
        assert other.id == job.id
        if end == "fail":
            queue.fail(job, "its history is gone", again=False)
        elif end == "release":
            queue.release(job)
        else:
            assert not queue.finish(job, replay_of(DENSITY), {}, "paper")
        assert archive.reader.load_jobs(2) == [other]
    assert verify(archive.reader) == []


def test_a_released_job_has_lost_no_attempt(archive: Archive) -> None:
    grown(archive)
    submit(archive, request(1))
    with queue_of(archive) as queue:
        for _ in range(ATTEMPTS_MAX + 2):
            job = queue.claim()
            assert job is not None and job.attempts == 1
            queue.release(job)


def test_the_queue_is_bounded(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "JOBS_MAX", 3)
    grown(archive)
    submit(archive, *(request(turn) for turn in range(1, 6)))
    assert states(archive) == {"1 folded": 0, "2 folded": 0, "3 queued": 0, "4 queued": 0, "5 queued": 0}
    assert archive.reader.load_jobs(1)[0].error == "more than 3 turns waited"


def test_the_worker_says_how_it_is(archive: Archive) -> None:
    assert archive.reader.worker_status() is None
    with queue_of(archive) as queue:
        for problem in (None, "no weights; install them"):
            status = WorkerStatus(1, "unavailable" if problem else "idle", "test/model", "cpu", problem, START)
            queue.set_status(status)
            assert archive.reader.worker_status() == status


# -- observations --------------------------------------------------------------------------------------------------


def test_what_a_replay_measured_comes_back_as_it_was(archive: Archive) -> None:
    grown(archive)
    layers = tuple(
        LayerReading(layer, group, 0.25 * layer, 0.5)  # exact in float32
        for layer in (1, 2)
        for group in replays.GROUPS
    )
    replay = Replay(
        model="test/model", parameters=123, device="cuda", dtype="bfloat16", layers=(1, 2), dependency_layer=2,
        tokens=1000, tokens_computed=10, rows=640, rows_assistant=100, unobserved=(3,), seconds=1.5,
        blocks=(BlockReading(0, 7, 0.5, 0.1, 0.25, 0.05, layers), BlockReading(2, 9, 0.1, 0.01, 0.0, 0.0)),
        edges=((0, 2, 0.5),),
    )  # fmt: skip
    observe(archive.path, 1, replay, identifiers={})
    (stored,) = archive.reader.load_observations(1)
    assert stored.replay == replay
    assert (stored.turn, stored.since_turn, stored.exchange_id, stored.replaced) == (1, 1, 1, frozenset())


def test_an_observation_changes_the_graph_by_the_equations(archive: Archive) -> None:
    grown(archive)
    words = frozenset({"alpha", "beta", "gamma"})
    observe(archive.path, 1, replay_of({0: 0.1, 1: 0.5, 2: 0.25}, EDGES), identifiers={0: words, 1: words})
    nodes, edges = archive.reader.load_graph(1)
    assert nodes == [
        NodeState(0, 0.6 * (0.1 / 0.5), True, True),  # block 1 says the same and drew five times the attention
        NodeState(1, 0.6, True, False),
        NodeState(2, 0.6 * 0.5, True, False),
        NodeState(3, 0.0, False, False),
    ]
    assert [(edge.support, edge.dependent, edge.weight) for edge in edges] == [(0, 1, 0.5), (0, 2, 0.04)]
    assert archive.reader.graph_rule(1) == "paper"
    assert verify(archive.reader) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_rebuilt_graph_is_the_one_that_the_rule_would_have_made(archive: Archive, rule: Rule) -> None:
    grown(archive, 1, 2)
    seen = [replay_of({0: 0.5, 1: 0.25}, EDGES[:1], mass={0: 0.1, 1: 0.9}), replay_of(DENSITY, EDGES)]
    for turn, replay in enumerate(seen, 1):
        observe(archive.path, 1, replay, turn=turn, rule="paper")
        observe(archive.path, 2, replay, turn=turn, rule=rule, exchange_id=2)
    before = archive.reader.load_graph(1)
    with queue_of(archive) as queue:
        assert queue.rebuild(1, rule)
        assert archive.reader.load_graph(1) == archive.reader.load_graph(2)
        assert verify(archive.reader) == []
        assert queue.rebuild(1, "paper")
    assert archive.reader.load_graph(1) == before
    assert archive.reader.derived_graph(1, rule, Parameters()).to_rows()[1] == archive.reader.load_graph(2)[1]


def test_a_replay_under_another_rule_takes_the_whole_graph_along(archive: Archive) -> None:
    grown(archive, 1, 2)
    seen = [replay_of({0: 0.5, 1: 0.25}, mass={0: 0.1, 1: 0.9}), replay_of(DENSITY)]
    for session, rules in ((1, ("paper", "mass")), (2, ("mass", "mass"))):
        for turn, (replay, rule) in enumerate(zip(seen, rules, strict=True), 1):
            observe(archive.path, session, replay, turn=turn, rule=rule, exchange_id=session)  # type: ignore[arg-type]
    assert archive.reader.load_graph(1) == archive.reader.load_graph(2)


def test_a_session_without_observations_is_not_rebuilt(archive: Archive) -> None:
    grown(archive)
    with queue_of(archive) as queue:
        assert not queue.rebuild(1, "paper")


@pytest.mark.parametrize(
    "replay",
    [
        replay_of({0: float("nan")}),
        replay_of({0: -0.1}),
        replay_of({0: 0.1}, mass={0: float("inf")}),
        replay_of({0: 0.1, 1: 0.1}, [(1, 0, 0.5)]),
    ],
)
def test_numbers_that_no_replay_measures_are_refused(archive: Archive, replay: Replay) -> None:
    grown(archive)
    with pytest.raises(ValueError, match=r"must be finite"):
        observe(archive.path, 1, replay)
    assert archive.reader.load_observations(1) == []


def test_an_update_is_all_or_nothing(archive: Archive) -> None:
    """Whatever statement of it fails, nothing of it stays and the job can be finished afterwards."""
    grown(archive)
    submit(archive, request(1))
    with queue_of(archive) as queue:
        job = queue.claim()
        assert job is not None
        statements = 0

        def fail_at(position: int) -> Any:
            def hook(*_: object) -> None:
                nonlocal statements
                statements += 1
                if statements == position:
                    raise sqlite3.OperationalError("made to fail")

            return hook

        before = archive.reader.load_graph(1)
        for position in range(1, 50):
            statements, hook = 0, fail_at(position)
            event.listen(queue._engine, "before_cursor_execute", hook)
            try:
                done = queue.finish(job, replay_of(DENSITY, EDGES), {}, "paper")
            except DBAPIError:
                assert archive.reader.load_graph(1) == before
                assert archive.reader.load_observations(1) == []
                continue
            finally:
                event.remove(queue._engine, "before_cursor_execute", hook)
            break
        assert done and position > 8, "every statement failed once"
    assert verify(archive.reader) == []


def test_a_branch_goes_on_from_what_it_shares(archive: Archive) -> None:
    """Its graph follows from its parent's replays up to the fork and its own, under every rule."""
    grown(archive)
    observe(archive.path, 1, replay_of(DENSITY, EDGES, mass={0: 0.2, 1: 0.3, 2: 0.5}))
    branch = History(2)
    batch = branch.grow("one", "two", "other", exchange=False)
    fork = Fork(2, 1, frozenset({0, 1}))
    archive.writer.submit(batch).result(DEADLINE_S)
    archive.writer.submit(Batch(forks=(fork,), exchanges=(exchange_row(2, 2),))).result(DEADLINE_S)
    inherited = archive.reader.load_graph(2)
    assert [node.observed for node in inherited[0]] == [True, True, False]
    assert [(edge.support, edge.dependent) for edge in inherited[1]] == [(0, 1)]
    assert verify(archive.reader) == []

    observe(archive.path, 1, replay_of({0: 1.0}), turn=2)  # the parent goes on: no business of the branch
    archive.writer.submit(Batch(forks=(fork,))).result(DEADLINE_S)
    assert archive.reader.load_graph(2) == inherited
    with queue_of(archive) as queue:
        submit(archive, ReplayRequest(2, 2, 2, 0.0))
        job = queue.claim()
        assert job is not None and (job.session_id, job.since_turn) == (2, 2), "turn 1 was observed in the parent"
        assert queue.finish(job, replay_of({0: 0.1, 2: 0.4}), {}, "paper")
        for rule in RULES:
            assert queue.rebuild(2, rule)
            assert verify(archive.reader) == []


def test_a_branch_has_the_marks_of_what_it_shares(archive: Archive) -> None:
    """Set beside a proxy that has the archive open; its own marks are its own from then on."""
    grown(archive)
    for ordinal, mark in ((0, "pin"), (1, "mute"), (3, "mute")):
        set_mark(archive.path, 1, ordinal, mark, clock=lambda: START)  # type: ignore[arg-type]
    set_mark(archive.path, 1, 1, "pin", clock=lambda: START)
    batch = History(2).grow("one", "two", "other", exchange=False)
    archive.writer.submit(batch).result(DEADLINE_S)
    archive.writer.submit(Batch(forks=(Fork(2, 1, frozenset({0, 1})),))).result(DEADLINE_S)
    set_mark(archive.path, 1, 0, None, clock=lambda: START)
    assert archive.reader.marks(1) == {1: "pin", 3: "mute"}
    assert archive.reader.marks(2) == {0: "pin", 1: "pin"}
    archive.writer.submit(Batch(forks=(Fork(2, 1, frozenset({0, 1})),))).result(DEADLINE_S)
    assert archive.reader.marks(2) == {0: "pin", 1: "pin"}
    assert verify(archive.reader) == []


def test_what_a_branch_says_itself_is_replayed_however_far_its_parent_went(archive: Archive) -> None:
    """Back from turn 6 to turn 2: the branch counts its turns from 2 on, and none of them has been observed."""
    grown(archive)
    observe(archive.path, 1, replay_of(DENSITY), turn=6)
    for session, parent in ((2, 1), (3, 2)):  # and a branch of the branch, from which nothing was observed
        batch = History(session).grow("one", "two", f"other {session}", exchange=False)
        archive.writer.submit(batch).result(DEADLINE_S)
        row = replace(exchange_row(session, session), turn=2)
        fork = Fork(session, parent, frozenset({0, 1}))
        archive.writer.submit(Batch(forks=(fork,), exchanges=(row,))).result(DEADLINE_S)
    with queue_of(archive) as queue:
        for session in (2, 3):
            submit(archive, ReplayRequest(session, 2, session, 0.0))
            job = queue.claim()
            assert job is not None and (job.session_id, job.turn, job.since_turn) == (session, 2, 2)
            assert queue.finish(job, replay_of({0: 0.1, 2: 0.4}), {}, "paper")
    assert verify(archive.reader) == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.dictionaries(st.integers(0, 3), st.floats(0, 1), min_size=1),
            st.sampled_from(RULES),
        ),
        max_size=6,
    )
)
def test_replays_in_any_order_keep_the_graph_rebuildable(
    tmp_path_factory: pytest.TempPathFactory, seen: list[tuple[int, dict[int, float], Rule]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "recap.db"
    with open_archive(path) as archive:
        grown(archive)
        latest = 0
        with open_queue(path, clock=lambda: START) as queue:
            for turn, density, rule in seen:
                queue.add(request(turn))
                job = queue.claim()
                assert (job is not None) == (turn > latest)
                if job is None:
                    continue
                pairs = [(a, b, density[a]) for a in density for b in density if a < b]
                assert queue.finish(job, replay_of(density, pairs), {}, rule)
                latest = turn
        assert [stored.turn for stored in archive.reader.load_observations(1)] == sorted(
            {stored.turn for stored in archive.reader.load_observations(1)}
        )
        assert verify(archive.reader) == []


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE blocks SET u = 0.5 WHERE ordinal = 1", "1/1"),
        ("UPDATE blocks SET stale = 1 WHERE ordinal = 1", "1/1"),
        ("UPDATE blocks SET observed = 1 WHERE ordinal = 3", "1/3"),
        ("UPDATE edges SET weight = 0.9", "1/0-1"),
        ("DELETE FROM edges", "1"),
        ("UPDATE observation_blocks SET density = 0.01 WHERE ordinal = 2", "1/2"),
        ("UPDATE observation_blocks SET density = -1 WHERE ordinal = 2", "1"),
        ("UPDATE sessions SET evidence = 'guess'", "1"),
        ("DELETE FROM observation_edges", "1"),
    ],
)
def test_verify_names_what_does_not_follow_from_the_replays(archive: Archive, statement: str, named: str) -> None:
    grown(archive)
    observe(archive.path, 1, replay_of(DENSITY, EDGES))
    assert verify(archive.reader) == []
    with closing(sqlite3.connect(archive.path)) as db:
        db.execute(statement)
        db.commit()
    assert named in [finding.row for finding in verify(archive.reader)]


def test_a_graph_from_nowhere_is_found(archive: Archive) -> None:
    grown(archive)
    plant(archive.path, 1, [NodeState(1, 0.5, True, False)])
    assert [(finding.table, finding.row) for finding in verify(archive.reader)] == [("blocks", "1/1")]


# -- two processes -------------------------------------------------------------------------------------------------

WORKER = textwrap.dedent(
    """
    import os, signal, sys
    from sqlalchemy import event
    from graphstore.store.archive import open_queue
    from tests.observed import replay_of

    path, die_at = sys.argv[1], int(sys.argv[2])
    with open_queue(path, clock=lambda: 0.0) as queue:
        steps = 0

        def step(*_):
            global steps
            steps += 1
            if steps == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        event.listen(queue._engine, "before_cursor_execute", step)
        event.listen(queue._engine, "commit", step)
        queue.recover()
        while (job := queue.claim()) is not None:
            queue.finish(job, replay_of({0: 0.5, 1: 0.25}, [(0, 1, 0.5)]), {}, "paper")
    """
)


@pytest.mark.slow
def test_a_worker_killed_anywhere_loses_no_observation_and_applies_none_twice(tmp_path: Path) -> None:
    """The worker is killed at its nth statement or commit; the next one finishes the work."""
    died = 0
    for die_at in range(1, 60, 2):
        path = tmp_path / f"{die_at}" / "recap.db"
        with open_archive(path) as archive:
            grown(archive)
            submit(archive, request(1))
        command = [sys.executable, "-c", WORKER, str(path), str(die_at)]
        first = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if first.returncode == 0:
            break
        assert first.returncode == -signal.SIGKILL, first.stderr
        died += 1
        subprocess.run([*command[:-1], "0"], check=True, timeout=120)
        with open_archive(path) as archive:
            (stored,) = archive.reader.load_observations(1)
            assert stored.turn == 1
            assert archive.reader.load_graph(1)[0][0] == NodeState(0, 0.6, True, False), "applied once"
            assert archive.reader.count_jobs() == {"done": 1}
            assert verify(archive.reader) == []
    else:
        pytest.fail("the worker never got to its end")
    assert died > 5


def test_proxy_and_worker_write_at_the_same_time(archive: Archive) -> None:
    """Two writers of one file: each waits for the other, and neither ever sees a lock."""
    sessions = range(1, 6)
    grown(archive, *sessions)
    stop = threading.Event()
    written = 0

    def proxy() -> None:
        nonlocal written
        while not stop.is_set():
            written += 1
            row = session_row(1 + written % 5, title=str(written))
            requests = tuple(ReplayRequest(s, written, s, float(written)) for s in sessions)
            archive.writer.submit(Batch(sessions=(row,), replays=requests), durable=True).result(DEADLINE_S)

    writer = threading.Thread(target=proxy)
    writer.start()
    observed = 0
    try:
        with queue_of(archive) as queue:
            while observed < 40:
                job = queue.claim()
                if job is not None:
                    observed += queue.finish(job, replay_of(DENSITY, EDGES), {}, "paper")
    finally:
        stop.set()
        writer.join(DEADLINE_S)
    assert archive.writer.failure is None and archive.writer.lost == 0
    assert written > 1 and observed == 40
    assert os.path.exists(archive.path)
    assert verify(archive.reader) == []
