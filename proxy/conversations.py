"""`Conversations` over an archive: the order of requests, their deadlines and their ends.

Requests are planned one after the other, so sessions need no locks: small ones on the event loop, in a millisecond or
two; what touches the disk or takes long in a thread, while the next request waits its turn. Whatever fails here, the
client's bytes go out as they came.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from graphstore.evidence import Rule
from graphstore.parameters import Parameters
from graphstore.records import Ending, ExchangeRow, SessionRow
from graphstore.selectors import Selector, selector_named
from graphstore.store.archive import Archive
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.forget import Forget, Forgotten, with_side_sessions
from graphstore.store.reader import Reader
from graphstore.store.report import recent_exchanges
from proxy.attention import attention_health
from proxy.boundary import Policy
from proxy.dialects.base import Answer, Dialect, DialectName
from proxy.dialects.chat import ChatDialect
from proxy.dialects.responses import ResponsesDialect
from proxy.economics.outlook import Economics
from proxy.economics.warmth import WarmthBook
from proxy.encodings import Undecodable, decode_body
from proxy.headers import tokens_of
from proxy.keeping import Keeper
from proxy.observers import Observers
from proxy.overflow import Overflow, overflow_of
from proxy.planning import Clock, Draft, Planner, Shortened
from proxy.ports import Arrival, Headers, Observer, Plan, Shorter
from proxy.recorder import Recorder
from proxy.sessions import NeedsDisk, Session
from proxy.settings import Settings, profiles_of

log = logging.getLogger(__name__)

T = TypeVar("T")

EXCHANGES_LEARNED = 5_000  # the latest, from which the warmth of caches is learned at start
ADMIT_DEADLINE_S = 10.0  # a stuck disk must not hold a request for ever; normal planning takes milliseconds
REOPEN_INTERVAL_S = 15.0
INLINE_BODY_BYTES = 1 << 20  # parsing a longer body would be felt by every open stream
ANSWER_BYTES_MAX = 64 << 20  # decoded; larger answers are relayed but not archived


def open_conversations(
    settings: Settings, clock: Clock, observers: Sequence[Observer] = (), selector: Selector | None = None
) -> "ArchivedConversations | WithoutArchive":
    """The session logic of these settings. Without a usable archive everything passes through, and health says why.

    `selector`: one that no setting names.
    """
    observer = Observers(observers)
    selector = selector or selector_for(settings)
    try:
        return _open(settings, clock, observer, selector)
    except ArchiveUnavailable as error:
        log.warning("archive.unavailable; requests pass through untouched: %s", error)
        return WithoutArchive(settings.db, str(error), lambda: _open(settings, clock, observer, selector), clock)


def _open(settings: Settings, clock: Clock, observer: Observer, selector: Selector) -> "ArchivedConversations":
    archive = Archive.open(settings.db, clock=clock, redacts=settings.redact)
    dialects: dict[DialectName, Dialect] = {
        "chat": ChatDialect(part_chars=settings.image_chars),
        "responses": ResponsesDialect(part_chars=settings.image_chars),
    }
    book = read_book(archive.reader)
    recorder = Recorder(archive.writer, archive.reader, book, observer)
    planner = Planner(
        archive,
        recorder,
        policy=policy_of(settings),
        parameters=parameters_of(settings),
        dialects=dialects,
        upstream=settings.upstream,
        notice=settings.notice,
        rule=rule_of(settings),
        selector=selector,
        economics=Economics(profiles_of(settings), book),
        holdout=settings.holdout,
        clock=clock,
    )
    return ArchivedConversations(
        archive,
        recorder,
        planner,
        dialects,
        clock,
        attention=lambda reader: attention_health(reader, settings),
        observer=observer,
        upstream=settings.upstream,
        keep_days=settings.keep_days,
        keep_bytes=settings.keep_bytes,
    )


def read_book(reader: Reader) -> WarmthBook:
    """What the latest exchanges say of providers' caches."""
    book = WarmthBook()
    for session, rows in recent_exchanges(reader, EXCHANGES_LEARNED):
        book.note_all(session.upstream, rows)
    return book


def selector_for(settings: Settings) -> Selector:
    return selector_named(settings.selector, tool_results_kept=settings.tool_results_kept)


def rule_of(settings: Settings) -> Rule | None:
    """The evidence rule that the user set; None: by the model that observed a session."""
    return None if settings.evidence == "auto" else settings.evidence


def policy_of(settings: Settings) -> Policy:
    return Policy(
        mode=settings.mode,
        idle_after_s=settings.idle_after,
        min_history_tokens=settings.min_history_tokens,
        context_window_tokens=settings.context_window_tokens,
        pressure=settings.pressure,
    )


def parameters_of(settings: Settings) -> Parameters:
    return Parameters(
        beta=settings.beta,
        lam=settings.lam,
        eps=settings.eps,
        kappa=settings.kappa,
        delta=settings.delta,
        request_cap_chars=settings.request_cap_chars,
        seed=settings.seed,
    )


class WithoutArchive:
    """`Conversations` whose archive cannot be used: nothing is recorded or left out until it can.

    It is tried again every now and then: the database may only have been locked by the proxy that ran before.
    """

    def __init__(
        self, database: str, problem: str, reopen: "Callable[[], ArchivedConversations]", clock: Clock
    ) -> None:
        self._database = database
        self._problem = problem
        self._reopen = reopen
        self._clock = clock
        self._next_try_at = clock() + REOPEN_INTERVAL_S
        self._trying: asyncio.Task[None] | None = None
        self._opened: ArchivedConversations | None = None
        self._is_open = asyncio.Event()

    async def admit(self, arrival: Arrival) -> Plan:
        if self._opened is not None:
            return await self._opened.admit(arrival)
        if self._trying is None and self._clock() >= self._next_try_at:
            self._trying = asyncio.create_task(self._try())
        return Plan(None, None)

    async def _try(self) -> None:
        try:
            self._opened = await asyncio.to_thread(self._reopen)
            self._is_open.set()
            log.info("archive.available database=%s", self._database)
        except ArchiveUnavailable as error:
            self._problem = str(error)
            self._next_try_at = self._clock() + REOPEN_INTERVAL_S
        finally:
            self._trying = None

    def health(self) -> dict[str, object]:
        if self._opened is not None:
            return self._opened.health()
        return {"state": "unavailable", "database": self._database, "problem": self._problem}

    async def ready(self) -> None:
        await self._is_open.wait()

    async def keep(self) -> None:
        await self.ready()
        assert self._opened is not None
        await self._opened.keep()

    async def flush(self) -> None:
        if self._trying is not None:
            await self._trying
        if self._opened is not None:
            await self._opened.flush()

    async def close(self) -> None:
        if self._trying is not None:
            await self._trying
        if self._opened is not None:
            await self._opened.close()


class ArchivedConversations:
    """Every request is archived and planned; see `ports.Conversations`."""

    def __init__(
        self,
        archive: Archive,
        recorder: Recorder,
        planner: Planner,
        dialects: Mapping[DialectName, Dialect],
        clock: Clock,
        *,
        attention: Callable[[Reader], dict[str, object]],
        observer: Observer,
        upstream: str,
        keep_days: int,
        keep_bytes: int,
    ) -> None:
        """`attention` says how the replay worker is, for health; `upstream` is that of requests without a session."""
        self.keeper = Keeper(
            archive,
            keep_days=keep_days,
            keep_bytes=keep_bytes,
            active=planner.registry.last_active,
            remove=self.forget,
            clock=clock,
        )
        self._attention = attention
        self._observer = observer
        self._upstream = upstream
        self._archive = archive
        self._recorder = recorder
        self._planner = planner
        self._dialects = dialects
        self._clock = clock
        self._turn = asyncio.Lock()  # fair: what could not be done at once is done in the order in which it came
        self._tasks: set[asyncio.Task[object]] = set()

    async def admit(self, arrival: Arrival) -> Plan:
        began = time.perf_counter()
        try:
            job = self._plan_now(arrival)
        except Exception:
            log.exception("admit.failed path=%s; the request goes through untouched", arrival.path)
            return Plan(None, None)
        plan = job if isinstance(job, Plan) else await self._wait_for(job, arrival)
        self._observer.planned(time.perf_counter() - began)
        return plan

    async def _wait_for(self, job: "asyncio.Task[Plan]", arrival: Arrival) -> Plan:
        try:
            await asyncio.wait((job,), timeout=ADMIT_DEADLINE_S)
            if job.done():
                return job.result()
            log.warning("admit.late deadline_s=%s path=%s", ADMIT_DEADLINE_S, arrival.path)
        except asyncio.CancelledError:
            job.add_done_callback(_abandon)
            raise
        except Exception:
            log.exception("admit.failed path=%s; the request goes through untouched", arrival.path)
            return Plan(None, None)
        job.add_done_callback(_abandon)
        return Plan(None, None)

    async def ready(self) -> None:
        """It is open."""

    def health(self) -> dict[str, object]:
        """`state`: ok, or failing (nothing new is left out; what is served stays)."""
        failure = self._archive.writer.failure
        return {
            "state": "ok" if failure is None else "failing",
            "database": str(self._archive.path),
            "problem": str(failure) if failure is not None else None,
            "batches_waiting": self._archive.writer.pending,
            "batches_lost": self._archive.writer.lost,
            "matches_without_client_id": self._planner.registry.matches_by_history,
            "cache_falls": self._recorder.cache_falls(),
            "attention": self._attention(self._archive.reader),
            "retention": self.keeper.health(),
        }

    async def shorten(self, exchange: "_Exchange", status: int, headers: Headers, body: bytes) -> Shorter | None:
        """See `ports.Exchange.shorter`."""
        overflow = overflow_of(status, _plain(headers, body) or b"")
        if overflow is None:
            return None
        draft = exchange.draft
        if draft is None:
            return Shorter(None)
        job = self._start(self._shorten(draft, status, overflow))
        try:
            await asyncio.wait((job,), timeout=ADMIT_DEADLINE_S)
        except asyncio.CancelledError:
            job.add_done_callback(lambda _: self._take_back(draft, job))
            raise
        if not job.done():
            log.warning("shorten.late deadline_s=%s path=%s", ADMIT_DEADLINE_S, exchange.row.path)
            job.add_done_callback(lambda _: self._take_back(draft, job))
            return Shorter(None)
        if job.exception() is not None:
            log.error("shorten.failed path=%s; the refusal stands", exchange.row.path, exc_info=job.exception())
            return Shorter(None)
        exchange.shortened = job.result()
        return Shorter(exchange.shortened.body if exchange.shortened is not None else None)

    def _take_back(self, draft: Draft, job: "asyncio.Task[Shortened | None]") -> None:
        """Nobody waited for this shorter request, so it is never sent."""
        if not job.cancelled() and job.exception() is None and (shortened := job.result()) is not None:
            self.refused_again(draft, shortened)

    def can_shorten(self, draft: Draft) -> bool:
        """See `ports.Exchange.may_be_shortened`."""
        return self._planner.can_shorten(draft)

    def may_be_too_long(self, draft: Draft) -> bool:
        """See `ports.Exchange.may_be_too_long`."""
        return self._planner.may_be_too_long(draft)

    async def _shorten(self, draft: Draft, status: int, overflow: Overflow) -> Shortened | None:
        async with self._turn:
            began = time.perf_counter()
            shortened = await asyncio.to_thread(self._planner.shorten, draft, status, overflow)
            self._observer.selected(time.perf_counter() - began)
            return shortened

    def refused_again(self, draft: Draft, shortened: Shortened) -> None:
        if self._tasks:
            self._start(self._restore(draft, shortened))
        else:
            self._planner.restore(draft, shortened)

    async def _restore(self, draft: Draft, shortened: Shortened) -> None:
        async with self._turn:
            self._planner.restore(draft, shortened)

    async def forget(self, what: Forget, *, unless_active_after: float = math.inf) -> Forgotten:
        """Remove sessions from memory and from the archive. Their clients' next requests begin new ones.

        Requests wait while they go from memory, not while the archive is written. Nothing is removed when one of them
        turns out to have been active after the given time.
        """
        removal = await asyncio.shield(self._start(self._forget(what, unless_active_after)))
        return await asyncio.shield(asyncio.wrap_future(removal)) if removal is not None else Forgotten(0)

    async def _forget(self, what: Forget, unless_active_after: float) -> "Future[Forgotten] | None":
        async with self._turn:
            rows = await asyncio.to_thread(self._to_forget, what)
            active = self._planner.registry.last_active()
            if any(active.get(id, 0.0) > unless_active_after for id in what.session_ids):
                return None
            self._planner.registry.forget([row.id for row in rows])
            queued = self._recorder.forget(what, [row.name for row in rows])
        return await asyncio.wrap_future(queued)

    def _to_forget(self, what: Forget) -> list[SessionRow]:
        reader = self._archive.reader
        with reader.snapshot() as db:
            ids = with_side_sessions(db, what.session_ids)
        return [row for row in map(reader.load_session, ids) if row is not None]

    async def keep(self) -> None:
        await self.keeper.run()

    async def flush(self) -> None:
        """Wait until everything that has been planned and recorded so far is in the archive."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.wrap_future(self._recorder.settled())

    async def close(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._recorder.close()
        self._archive.close()

    def _start(self, work: "Coroutine[object, object, T]") -> "asyncio.Task[T]":
        """Run to the end, whoever stops waiting for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _plan_now(self, arrival: Arrival) -> "Plan | asyncio.Task[Plan]":
        """A plan at once, if nobody is before us and neither disk nor patience is needed; else the task making it."""
        if self._tasks or len(arrival.body) > INLINE_BODY_BYTES:
            return self._start(self._plan(arrival))
        draft = self._planner.read(arrival)
        if draft.incoming is not None:
            try:
                self._planner.identify(draft, disk=False)
            except NeedsDisk:
                return self._start(self._plan(arrival))
            self._planner.decide(draft)
        return self._start(self._secure(draft)) if draft.must_be_secured else self._finished(draft)

    async def _plan(self, arrival: Arrival) -> Plan:
        async with self._turn:
            draft = await asyncio.to_thread(self._planner.read, arrival)
            if draft.incoming is not None:
                await asyncio.to_thread(self._planner.identify, draft, disk=True)
                self._planner.decide(draft)
                if draft.must_be_secured:
                    await self._secured(draft)
            return self._finished(draft)

    async def _secure(self, draft: Draft) -> Plan:
        async with self._turn:
            await self._secured(draft)
            return self._finished(draft)

    async def _secured(self, draft: Draft) -> None:
        selects, began = draft.decision.select, time.perf_counter()
        await asyncio.to_thread(self._planner.secure, draft)
        if selects:
            self._observer.selected(time.perf_counter() - began)

    def _finished(self, draft: Draft) -> Plan:
        row = self._planner.finish(draft)
        detach = draft.incoming is not None and draft.incoming.parsed.background
        return Plan(draft.body, _Exchange(self, row, draft), detach=detach)

    def ended(self, exchange: "_Exchange", end: "_End") -> None:
        if self._tasks:
            self._start(self._end_in_turn(exchange, end))
        else:
            self._end(exchange, end)

    async def _end_in_turn(self, exchange: "_Exchange", end: "_End") -> None:
        async with self._turn:
            self._end(exchange, end)

    def _end(self, exchange: "_Exchange", end: "_End") -> None:
        row, session = _row_at_end(exchange, end), exchange.session
        dialect = self._dialects[row.dialect]  # type: ignore[index]  # written from a DialectName
        if session is not None:
            session.in_flight -= 1
            if session.forgotten:
                return
            if row.outcome != "side":
                session.row = replace(session.row, last_active_at=end.at)
            if exchange.rejection is not None:
                _stop_rewriting(session, exchange.rejection, blame=end.status is None or end.status < 400)
            if row.outcome == "side":  # the client's next history may begin with this answer
                answer = _answer(dialect, end)
                if answer is not None and answer.complete:
                    self._planner.registry.remember_summary(session, answer.text)
        upstream = session.row.upstream if session is not None else self._upstream
        self._recorder.ended(
            row, session, dialect, lambda: _answer(dialect, end), upstream=upstream, recorded=exchange.recorded
        )


@dataclass(frozen=True, slots=True)
class _End:
    at: float
    ending: Ending
    status: int | None
    headers: Headers
    body: bytes | None
    error: str | None


class _Exchange:
    """`ports.Exchange`: collects on the event loop, hands over when it ends."""

    __slots__ = (
        "_finished",
        "_is_watched",
        "_owner",
        "draft",
        "first_byte_at",
        "recorded",
        "rejection",
        "row",
        "session",
        "shortened",
    )

    def __init__(self, owner: ArchivedConversations, row: ExchangeRow, draft: Draft) -> None:
        self._owner = owner
        self._finished = False
        self._is_watched = False
        self.row = row
        assert draft.recorded is not None
        self.session = draft.session
        self.recorded = draft.recorded
        self.draft: Draft | None = draft  # until the answer begins: it holds the request
        self.shortened: Shortened | None = None
        self.first_byte_at: float | None = None
        self.rejection: str | None = None

    def first_byte(self) -> None:
        if self.first_byte_at is None:
            self.first_byte_at = self._owner._clock()
            if not self._is_watched:
                self.draft = None

    def may_be_shortened(self) -> bool:
        self._is_watched = self.draft is not None and self._owner.can_shorten(self.draft)
        return self._is_watched

    def may_be_too_long(self) -> bool:
        return self.draft is not None and self._owner.may_be_too_long(self.draft)

    def begun(self) -> None:
        self.draft = None

    async def shorter(self, status: int, headers: Headers, body: bytes) -> Shorter | None:
        return await self._owner.shorten(self, status, headers, body)

    def refused_again(self, why: str) -> None:
        if self.shortened is not None and self.draft is not None:
            self._owner.refused_again(self.draft, self.shortened)
            self.row = replace(self.row, error=f"sent again, shorter: {why}")
            self.shortened = None

    def fall_back(self, status: int, body: bytes) -> None:
        text = body[:300].decode("utf-8", "replace")
        self.rejection = f"the upstream rejected the rewritten request with {status}: {text}"

    def finish(
        self, ending: Ending, *, status: int | None, headers: Headers, body: bytes | None, error: str | None = None
    ) -> None:
        if not self._finished:
            self._finished = True
            self.draft = None
            self._owner.ended(self, _End(self._owner._clock(), ending, status, headers, body, error))


def _row_at_end(exchange: _Exchange, end: _End) -> ExchangeRow:
    shortened = exchange.shortened
    row = replace(
        shortened.row if shortened is not None else exchange.row,
        first_byte_at=exchange.first_byte_at,
        ended_at=end.at,
        status=end.status,
        ending=end.ending,
        error=end.error or exchange.rejection or exchange.row.error,
        fell_back=exchange.rejection is not None,
    )
    if exchange.rejection is None:
        return row
    return replace(
        row,
        blocks_left_out=0,
        messages_sent=row.messages_total,
        chars_sent=row.chars_total,
        bytes_sent=row.bytes_total,
    )


def _stop_rewriting(session: Session, why: str, *, blame: bool) -> None:
    """The original went out instead. Unless that was rejected too, this session is left alone from now on."""
    session.drop_selection()
    session.sent = None
    if blame:
        log.warning("session.pass_through session=%s why=%s", session.row.name, why)
        session.row = replace(session.row, state="pass-through", state_reason=why)


def _answer(dialect: Dialect, end: _End) -> Answer | None:
    """Read what the upstream sent, after the client has it. Errors and lost bodies have no answer."""
    if end.body is None or end.status is None or end.status >= 400:
        return None
    types = [value for name, value in end.headers if name.lower() == b"content-type"]
    plain = _plain(end.headers, end.body)
    if plain is None:
        return None
    return dialect.parse_answer(plain, types[0].decode("latin-1") if types else "")


def _plain(headers: Headers, body: bytes) -> bytes | None:
    """The decoded body of an answer, None when it cannot be decoded."""
    try:
        return decode_body(body, tokens_of(headers, b"content-encoding"), ANSWER_BYTES_MAX)
    except Undecodable as error:
        log.warning("answer.undecodable error=%s", error)
        return None


def _abandon(job: "asyncio.Task[Plan]") -> None:
    """The shell no longer waits for this plan: close the exchange that it opened."""
    if not job.cancelled() and job.exception() is None and (exchange := job.result().exchange) is not None:
        exchange.finish("failed", status=None, headers=(), body=None, error="planned too late, sent as it came")
