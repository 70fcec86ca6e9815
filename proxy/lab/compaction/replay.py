"""Replay after a kill (10.20.2): the proxy dies at each step of a session, a new one goes on with its archive.

Promises. A request that went out is sent as the same bytes when the client asks again, and is gone on from when it does
not; an exchange without an answer is not stored as complete, one that was flushed is not lost; the session stays one,
goes on to its end, and its archive is sound.

A kill is a SIGKILL of a process of its own: after each step of each request, and before each commit of the archive.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec
from sqlalchemy import Engine, event

from graphstore.selectors import Selector
from graphstore.store.archive import open_reader
from proxy.dialects.base import DialectName
from proxy.lab.compaction import checks
from proxy.lab.compaction.bench import Bench, Lab, Served, gap_of
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import History, made
from proxy.lab.compaction.recovery import audit
from proxy.lab.drive import OWN_ROLES, STARTS_AT, STEP_S, Clock
from proxy.lab.errors import LabError
from proxy.settings import Settings

FAMILY = "replay"
TURNS, STEPS = 3, 1
DIALECTS: tuple[DialectName, ...] = ("chat", "responses")
Moment = Literal["sent", "answering", "answered", "flushed"]  # what has just happened
CHILD_S = 60.0  # a process that lives longer hangs


class Request(NamedTuple):
    """Number of messages sent, end of the answer to them, seconds before it."""

    messages: int
    answer_end: int
    after_s: float


class Kill(NamedTuple):
    """After a moment of a request, or before the n-th commit, both counted from 0."""

    at: int
    moment: Moment | Literal["commit"]

    def __str__(self) -> str:
        return f"before commit {self.at + 1}" if self.moment == "commit" else f"request {self.at + 1} {self.moment}"


class Life(NamedTuple):
    """What a process is told. `notes` is a folder: a file for every moment that it lived to see."""

    settings: bytes
    history: History
    requests: Sequence[Request]
    kill: Kill
    notes: Path


def cases(seed: int) -> list[Case]:
    return [
        Case(FAMILY, dialect, partial(run, history=made(f"kill {seed}", dialect, turns=TURNS, steps=STEPS)), once=True)
        for dialect in DIALECTS
    ]


def requests_of(history: History, gap_s: float) -> list[Request]:
    """One before each run of the agent's own messages; the user is away before every turn but the first."""
    is_own = [role in OWN_ROLES for role in history.roles]
    starts = [i for i in range(1, len(is_own)) if is_own[i] and not is_own[i - 1]]
    ends = [next((j for j in range(i, len(is_own)) if not is_own[j]), len(is_own)) for i in starts]
    opens = [history.roles[i - 1] == "user" and i > starts[0] for i in starts]
    return [Request(i, end, gap_s if away else STEP_S) for i, end, away in zip(starts, ends, opens, strict=True)]


async def run(lab: Lab, selector: Selector, *, history: History) -> Tally:
    tally = Tally()
    requests = requests_of(history, gap_of(lab.settings))
    kills: list[Kill] = [Kill(at, moment) for at in range(len(requests)) for moment in get_args(Moment)]
    for kill in kills:
        if not await die_and_go_on(lab, selector, history, requests, kill, tally):
            raise LabError(f"the process that should die at {kill} lived on; this is a defect of the lab")
    commits = 0
    while await die_and_go_on(lab, selector, history, requests, Kill(commits, "commit"), tally):
        commits += 1
    tally.values = {"kills": len(kills) + commits}
    return tally


async def die_and_go_on(
    lab: Lab, selector: Selector, history: History, requests: Sequence[Request], kill: Kill, tally: Tally
) -> bool:
    """False: there was no such moment, and nothing died."""
    with lab.place(selector.name) as settings:
        notes = Path(settings.db).parent / "notes"
        notes.mkdir()
        if not _killed(Life(msgspec.json.encode(settings), history, requests, kill, notes)):
            return False
        lived = _lived(notes)
        tally.promise(archive_faults_of(settings.db, lived), f"{kill}")
        await go_on(settings, history, requests, lived, tally, f"{kill}")
        for where, faults in audit(settings.db):
            tally.promise(faults, f"{kill}, {where}")
    return True


class Lived(NamedTuple):
    """What the dead process lived to see: what it sent for each request, number of answers, how many were flushed."""

    sent: list[bytes]
    answered: int
    flushed: int


def _lived(notes: Path) -> Lived:
    sent, answered, flushed = (sorted(notes.glob(f"*-{moment}")) for moment in ("sent", "answered", "flushed"))
    return Lived([path.read_bytes() for path in sent], len(answered), len(flushed))


def archive_faults_of(path: str, lived: Lived) -> list[str]:
    with open_reader(path) as reader:
        rows = [row for session in reader.list_sessions() for row in reader.session_exchanges(session.id)]
    complete = sum(row.ending == "complete" for row in rows)
    unknown = [f"{complete} answers are stored as complete, {lived.answered} came"] * (complete > lived.answered)
    lost = [f"{lived.flushed} answers were flushed, {complete} are stored"] * (complete < lived.flushed)
    return unknown + lost


async def go_on(
    settings: Settings, history: History, requests: Sequence[Request], lived: Lived, tally: Tally, kill: str
) -> None:
    """The client asks again what was not answered, and goes on to the end."""
    sent, first = lived.sent, lived.answered
    bench = Bench(settings, Clock(STARTS_AT + sum(r.after_s for r in requests[: len(sent)])), dialect=history.dialect)
    before = _served(bench, history, requests[first - 1], sent[first - 1]) if first else None
    for i in range(first, len(requests)):
        request, where = requests[i], f"{kill}, request {i + 1}"
        again = sent[i] if i < len(sent) else None
        served = await bench.send(
            history.messages[: request.messages],
            after_s=STEP_S if again else request.after_s,
            answer=history.messages[request.messages : request.answer_end],
        )
        tally.watch(served, where)
        if again:
            tally.promise([] if served.sent == again else ["asked again, it was sent as something else"], where)
        elif before and request.after_s == STEP_S:
            tally.promise(checks.extends(before, served), where)
        before = served
    await bench.close()
    with open_reader(settings.db) as reader:
        sessions = len(reader.list_sessions())
    tally.promise([] if sessions == 1 else [f"the session became {sessions}"], kill)


def _served(bench: Bench, history: History, request: Request, sent: bytes) -> Served:
    return Served(history.dialect, bench.body_of(history.messages[: request.messages]), sent)


# -- the process that dies --------------------------------------------------------------------------------------------


def _killed(life: Life) -> bool:
    """Whether it was killed. Raises `LabError` when it failed otherwise."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_live, args=(life,))
    process.start()
    process.join(CHILD_S)
    code = process.exitcode
    if code is None:
        process.kill()
    if code not in (0, -signal.SIGKILL):
        raise LabError(f"the process that should die at {life.kill} ended with {code}; its last words are above")
    return code != 0


def _live(life: Life) -> None:
    if life.kill.moment == "commit":
        left = count(life.kill.at, -1)

        @event.listens_for(Engine, "commit")
        def _(connection: object) -> None:
            if not next(left):
                _die()

    asyncio.run(_serve(life))


async def _serve(life: Life) -> None:
    history = life.history
    bench = Bench(msgspec.json.decode(life.settings, type=Settings), dialect=history.dialect)

    def note(at: int, moment: Moment, content: bytes = b"") -> None:
        (life.notes / f"{at}-{moment}").write_bytes(content)
        if life.kill == (at, moment):
            _die()

    for i, request in enumerate(life.requests):
        served = await bench.plan(history.messages[: request.messages], after_s=request.after_s)
        note(i, "sent", served.sent)
        bench.first_byte()
        note(i, "answering")
        bench.finish(history.messages[request.messages : request.answer_end])
        note(i, "answered")
        await bench.conversations.flush()
        note(i, "flushed")
    await bench.close()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
