"""The life of a request between the client and the upstream: identify, archive, decide, select, rewrite, record.

One thread plans: requests are identified and decided one after the other, so sessions need no locks, and nothing here
runs on the event loop. Another thread records: it reads answers and builds what the archive writes. The archive's own
thread commits. Whatever fails here, the client's bytes go out as they came.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from itertools import count

from graphstore.blocks import Cut
from graphstore.graph import ContextGraph
from graphstore.identity import row_id, scope_digest
from graphstore.parameters import Parameters
from graphstore.records import Ending, ExchangeRow
from graphstore.store.archive import Archive
from graphstore.store.engine import ArchiveUnavailable
from proxy.boundary import Decision, Facts, Policy, decide
from proxy.clients import credential, recognise
from proxy.dialects.base import Answer, Dialect, DialectName, ParsedRequest, UnreadableRequest
from proxy.dialects.chat import ChatDialect
from proxy.dialects.responses import ResponsesDialect
from proxy.encodings import Undecodable, decode_body
from proxy.ports import Arrival, Headers, Plan
from proxy.recorder import Recorder, Sent
from proxy.rewrite import GuardFailure, check_rewritten, render_rewritten
from proxy.selecting import IdentifierCache, choose
from proxy.sessions import Identified, Incoming, Registry, Session, user_runs
from proxy.settings import Settings

log = logging.getLogger(__name__)

ADMIT_DEADLINE_S = 10.0  # a stuck disk must not hold a request for ever; normal planning takes milliseconds
DURABLE_DEADLINE_S = 5.0  # a decision that is not on disk by then is not taken
SETTLE_DEADLINE_S = 0.5  # for the rare look at an old message that may still be on its way to the disk
ANSWER_BYTES_MAX = 64 * 2**20  # decoded; larger answers are relayed but not archived
NOTICE_MARK = b"notice"
CHARS_PER_TOKEN = 4  # estimate for thresholds; what is shown is counted

Clock = Callable[[], float]


def open_conversations(settings: Settings, clock: Clock) -> "ArchivedConversations":
    """The session logic of these settings. Without a usable archive it passes everything through, and says so."""
    archive, trouble = None, None
    try:
        archive = Archive.open(settings.db, clock=clock)
    except ArchiveUnavailable as error:
        trouble = str(error)
        log.warning("archive.unavailable; requests pass through untouched: %s", error)
    return ArchivedConversations(
        archive,
        policy=Policy(
            mode=settings.mode,
            idle_after_s=settings.idle_after,
            min_history_tokens=settings.min_history_tokens,
            context_window_tokens=settings.context_window_tokens,
        ),
        parameters=parameters_of(settings),
        dialects={
            "chat": ChatDialect(part_chars=settings.image_chars),
            "responses": ResponsesDialect(part_chars=settings.image_chars),
        },
        upstream=settings.upstream,
        notice=settings.notice,
        clock=clock,
        database=settings.db,
        trouble=trouble,
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


@dataclass(slots=True)
class _Outgoing:
    """What one request becomes."""

    body: bytes | None  # None: the client's bytes
    left_out: frozenset[int]  # message indexes
    reason: str


class ArchivedConversations:
    """`Conversations` over an archive. Without one (`archive` None) everything passes through."""

    def __init__(
        self,
        archive: Archive | None,
        *,
        policy: Policy,
        parameters: Parameters,
        dialects: Mapping[DialectName, Dialect],
        upstream: str,
        notice: bool,
        clock: Clock,
        database: str,
        trouble: str | None = None,
    ) -> None:
        self._archive = archive
        self._policy = policy
        self._parameters = parameters
        self._dialects = dialects
        self._upstream = upstream
        self._notice = notice
        self._clock = clock
        self._database = database
        self._trouble = trouble
        self._identifiers = IdentifierCache()
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="recap-plan")
        if archive is not None:
            ids = archive.reader.next_ids()
            self._exchange_ids = count(ids.exchanges)
            self._selection_ids = count(ids.selections)
            self._recorder = Recorder(archive.writer, archive.reader)
            self._registry = Registry(archive.reader, settle=self._settle, next_session_id=ids.sessions)

    # -- Conversations ------------------------------------------------------------------------------------------

    async def admit(self, arrival: Arrival) -> Plan:
        if self._archive is None:
            return Plan(None, None)
        job = self._planner.submit(self._plan, arrival)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(job)), ADMIT_DEADLINE_S)
        except TimeoutError:
            log.warning("admit.late deadline_s=%s path=%s", ADMIT_DEADLINE_S, arrival.path)
        except asyncio.CancelledError:
            job.add_done_callback(_abandon)
            raise
        except Exception:
            log.exception("admit.failed path=%s; the request goes through untouched", arrival.path)
            return Plan(None, None)
        job.add_done_callback(_abandon)
        return Plan(None, None)

    def health(self) -> dict[str, object]:
        """`state`: ok, failing (nothing new is left out, what is served stays) or unavailable (all passes through)."""
        trouble = self._archive_trouble()
        facts: dict[str, object] = {
            "state": "unavailable" if self._archive is None else "failing" if trouble else "ok",
            "database": self._database,
            "problem": trouble,
            "attention": "none: every importance is 0",
        }
        if self._archive is not None:
            facts |= {"batches_waiting": self._archive.writer.pending, "batches_lost": self._archive.writer.lost}
        return facts

    async def flush(self) -> None:
        """Wait until everything that has been planned and recorded so far is in the archive."""
        if self._archive is not None:
            await asyncio.wrap_future(self._planner.submit(lambda: None))
            await asyncio.to_thread(lambda: self._recorder.mark().result().result())

    def _settle(self) -> None:
        """Let the archive catch up before it is read; after the deadline it is read as it is."""
        with contextlib.suppress(FutureTimeout):
            self._recorder.mark().result(SETTLE_DEADLINE_S).result(SETTLE_DEADLINE_S)

    async def close(self) -> None:
        if self._archive is None:
            return
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        assert self._archive is not None
        self._planner.shutdown()
        self._recorder.close()
        self._archive.close()

    # -- planning, in the planner's thread ----------------------------------------------------------------------

    def _plan(self, arrival: Arrival) -> Plan:
        at = self._clock()
        dialect = self._dialects[arrival.dialect]
        row = ExchangeRow(
            id=next(self._exchange_ids), session_id=None, turn=0, step=0, started_at=at, path=arrival.path,
            dialect=arrival.dialect, model="", stream=False, outcome="opaque", boundary="none", reason="",
            bytes_total=len(arrival.body), bytes_sent=len(arrival.body),
        )  # fmt: skip
        try:
            if arrival.unreadable:
                raise UnreadableRequest(arrival.unreadable)
            parsed = dialect.parse_request(arrival.body)
        except UnreadableRequest as error:
            return Plan(None, self._recorded(replace(row, reason=f"not understood: {error}"), None, None))

        caller = recognise(arrival.headers)
        scope = scope_digest(self._secret, upstream=self._upstream, credential=credential(arrival.headers))
        incoming = Incoming.of(parsed, caller, dialect, scope=scope, upstream=self._upstream, at=at)
        row = replace(row, model=parsed.model, stream=parsed.stream)
        if parsed.opaque is not None:
            session = self._registry.named(incoming)
            decision = decide(Facts(opaque=parsed.opaque), self._policy)
            row = replace(row, reason=decision.reason, session_id=session.row.id if session else None)
            return Plan(None, self._recorded(row, session, incoming), detach=parsed.background)

        found = self._registry.identify(incoming)
        if found.outcome == "side":
            return Plan(None, self._beside(row, found, incoming), detach=parsed.background)
        return self._forward(row, found, incoming)

    @property
    def _secret(self) -> bytes:
        assert self._archive is not None
        return self._archive.secret

    def _forward(self, row: ExchangeRow, found: Identified, incoming: Incoming) -> Plan:
        session, parsed = found.session, incoming.parsed
        cut, ordinals = session.cut_history(parsed.messages, found.known)
        facts = self._facts(found, incoming, cut, ordinals)
        decision = decide(facts, self._policy)
        self._count_turn(found, facts, cut, parsed)
        row = replace(
            row,
            session_id=session.row.id,
            turn=session.row.turns,
            step=session.step,
            outcome=found.outcome,
            boundary=decision.boundary,
            idle_s=facts.idle_s,
        )

        if decision.select:
            decision = self._select(row, found, incoming, cut, ordinals, decision)
        outgoing = self._outgoing(session, parsed, cut, ordinals, decision.reason)
        sent = self._sent(session, parsed, outgoing.left_out, facts.changed)
        session.row = replace(
            session.row,
            model=parsed.model,
            instructions_id=incoming.instructions_id,
            tools_id=incoming.tools_id,
            head_node_id=row_id(session.chain[-1]) if session.chain else None,
            last_active_at=incoming.at,
        )
        row = replace(
            row,
            reason=outgoing.reason,
            selection_id=session.row.selection_id,
            head_node_id=session.row.head_node_id,
            instructions_id=incoming.instructions_id,
            tools_id=incoming.tools_id,
            blocks_total=len(cut.blocks),
            blocks_left_out=sum(1 for o in ordinals if o in session.left_out) if outgoing.left_out else 0,
            messages_total=len(parsed.messages),
            messages_sent=len(parsed.messages) - len(outgoing.left_out),
            chars_total=sum(m.cost for m in parsed.messages),
            chars_sent=sum(m.cost for i, m in enumerate(parsed.messages) if i not in outgoing.left_out),
            bytes_sent=len(outgoing.body) if outgoing.body is not None else len(parsed.body),
            prefix_messages=sent.prefix_messages,
            prefix_bytes=sent.prefix_bytes,
        )
        self._recorder.arrived(row, found, incoming, cut, ordinals)
        return Plan(outgoing.body, self._recorded(row, session, incoming), detach=parsed.background)

    def _beside(self, row: ExchangeRow, found: Identified, incoming: Incoming) -> "_Exchange":
        """A side request: archived with its own history, moving nothing."""
        decision = decide(Facts(side=True), self._policy)
        row = replace(
            row,
            session_id=found.session.row.id,
            turn=found.session.row.turns,
            outcome="side",
            boundary=decision.boundary,
            reason=decision.reason,
            head_node_id=row_id(incoming.chain[-1]) if incoming.chain else None,
            instructions_id=incoming.instructions_id,
            tools_id=incoming.tools_id,
            messages_total=len(incoming.parsed.messages),
            messages_sent=len(incoming.parsed.messages),
            chars_total=sum(m.cost for m in incoming.parsed.messages),
            chars_sent=sum(m.cost for m in incoming.parsed.messages),
        )
        if found.session.row.kind == "side":  # a history of its own, not one that goes beyond an agent's
            found.session.row = replace(found.session.row, head_node_id=row.head_node_id)
            cut, ordinals = found.session.cut_history(incoming.parsed.messages, found.known)
            self._recorder.arrived(row, found, incoming, cut, ordinals)
        else:
            self._recorder.arrived(row, found, incoming, None, ())
        return self._recorded(row, found.session, incoming)

    def _facts(self, found: Identified, incoming: Incoming, cut: Cut, ordinals: list[int]) -> Facts:
        session, row, parsed = found.session, found.session.row, incoming.parsed
        history = cut.blocks[: cut.turn_start]
        changed = tuple(
            name
            for name, before, now in (
                ("model", row.model, parsed.model),
                ("tools", row.tools_id, incoming.tools_id),
                ("instructions", row.instructions_id, incoming.instructions_id),
            )
            if before != now
        )
        served = sum(b.cost for b, o in zip(cut.blocks, ordinals, strict=True) if o not in session.left_out)
        fixed = len(parsed.instructions) + len(parsed.tools)
        return Facts(
            passing_through=row.state_reason if row.state == "pass-through" else None,
            open_calls=bool(cut.open_calls),
            retry=found.outcome == "retry",
            at_user_request=cut.is_boundary,
            mid_turn=bool(history) and history[-1].kind == "tools",
            history_blocks=len(history),
            history_tokens=sum(block.cost for block in history) // CHARS_PER_TOKEN,
            served_tokens=(served + fixed) // CHARS_PER_TOKEN,
            first_seen=found.outcome == "new",
            in_flight=session.in_flight > 0,
            idle_s=None if found.outcome == "new" else max(0.0, incoming.at - row.last_active_at),
            client_compacted=found.outcome == "client compaction",
            changed=changed,
            archive_trouble=self._archive_trouble(),
        )

    def _count_turn(self, found: Identified, facts: Facts, cut: Cut, parsed: ParsedRequest) -> None:
        session = found.session
        idle = facts.idle_s is not None and facts.idle_s >= self._policy.idle_after_s
        if found.outcome == "retry":
            return
        if found.outcome == "new":
            session.row, session.step = replace(session.row, turns=max(1, user_runs(parsed.messages))), 0
        elif facts.at_user_request and (idle or not facts.mid_turn):
            session.row, session.step = replace(session.row, turns=session.row.turns + 1), 0
        else:
            session.step += 1

    def _select(
        self,
        row: ExchangeRow,
        found: Identified,
        incoming: Incoming,
        cut: Cut,
        ordinals: list[int],
        decision: Decision,
    ) -> Decision:
        """Choose anew and make the choice durable; only then may anything be left out."""
        session = found.session
        choice = choose(
            incoming.dialect, incoming.parsed, cut, ordinals, self._graph(found), self._parameters, self._identifiers,
            session=session.row.name, turn=session.row.turns,
        )  # fmt: skip
        applied = self._policy.mode != "off"
        selection = choice.selection.to_row(
            id=next(self._selection_ids),
            session_id=session.row.id,
            exchange_id=row.id,
            turn=session.row.turns,
            created_at=incoming.at,
            applied=applied,
            reason=decision.reason,
            parameters=self._parameters,
            notice=self._notice,
        )
        before = session.left_out, session.row
        if applied:
            session.left_out = choice.left_out
            session.row = replace(session.row, selection_id=selection.id)
            try:
                self._outgoing_body(session, incoming.parsed, cut, ordinals)
            except GuardFailure as failure:
                session.left_out, session.row = frozenset(), replace(session.row, selection_id=None)
                return replace(decision, reason=f"{decision.reason}; original sent: {failure}")
        saved = self._recorder.decided(row, found, incoming, cut, ordinals, selection)
        try:
            saved.result(DURABLE_DEADLINE_S)
        except Exception as error:  # disk full, locked, or simply late: the original is always right
            session.left_out, session.row = frozenset(), replace(before[1], selection_id=None)
            why = "late" if isinstance(error, FutureTimeout) else str(error)
            log.warning("selection.not_saved session=%s why=%s", session.row.name, why)
            return replace(decision, reason=f"{decision.reason}; original sent: decision not saved ({why})")
        return decision

    def _graph(self, found: Identified) -> ContextGraph:
        assert self._archive is not None
        source = found.parent.row.id if found.parent is not None else found.session.row.id
        try:
            nodes = [state for _, state in self._archive.reader.load_blocks(source)]
            return ContextGraph.from_rows(nodes, self._archive.reader.load_edges(source))
        except Exception:
            log.exception("graph.unreadable session=%s; selecting without it", found.session.row.name)
            return ContextGraph.from_rows([], [])

    def _outgoing(
        self, session: Session, parsed: ParsedRequest, cut: Cut, ordinals: list[int], reason: str
    ) -> _Outgoing:
        """The bytes to send under the session's present selection, checked; the client's own if the check fails."""
        try:
            body, left_out = self._outgoing_body(session, parsed, cut, ordinals)
        except GuardFailure as failure:
            log.warning("rewrite.refused session=%s why=%s", session.row.name, failure)
            session.left_out = frozenset()
            session.row = replace(session.row, selection_id=None)
            return _Outgoing(None, frozenset(), f"{reason}; original sent: {failure}")
        return _Outgoing(body, left_out, reason)

    def _outgoing_body(
        self, session: Session, parsed: ParsedRequest, cut: Cut, ordinals: list[int]
    ) -> tuple[bytes | None, frozenset[int]]:
        if self._policy.mode == "off" or session.row.state == "pass-through" or not session.left_out:
            return None, frozenset()
        left_out = frozenset(
            i
            for ordinal, block in zip(ordinals, cut.blocks, strict=True)
            if ordinal in session.left_out
            for i in block.messages
        )
        if not left_out:
            return None, frozenset()
        if cut.open_calls:
            raise GuardFailure("a tool call has no result yet")
        notice = self._notice_bytes(parsed)
        body = render_rewritten(parsed, left_out, notice)
        check_rewritten(parsed, body, left_out, notice)
        return body, left_out

    def _notice_bytes(self, parsed: ParsedRequest) -> bytes | None:
        return self._dialects[parsed.dialect].render_notice(parsed.notice_role) if self._notice else None

    def _sent(
        self, session: Session, parsed: ParsedRequest, left_out: frozenset[int], changed: tuple[str, ...]
    ) -> Sent:
        """What stands in the message array as sent, and how much of it the previous request began with."""
        mark = (NOTICE_MARK,) if left_out and self._notice else ()
        kept = [i for i in range(len(parsed.digests)) if i not in left_out]
        now = mark + tuple(parsed.digests[i] for i in kept)
        before = () if changed or session.sent is None else session.sent
        shared = 0
        for old, new in zip(before, now, strict=False):
            if old != new:
                break
            shared += 1
        session.sent = now
        messages = max(0, shared - len(mark))
        size = sum(end - start for start, end in (parsed.spans[parsed.leading + i] for i in kept[:messages]))
        return Sent(messages, size)

    def _archive_trouble(self) -> str | None:
        if self._archive is None:
            return self._trouble or "no archive"
        failure = self._archive.writer.failure
        return str(failure) if failure is not None else None

    def _recorded(self, row: ExchangeRow, session: Session | None, incoming: Incoming | None) -> "_Exchange":
        if session is not None:
            session.in_flight += 1
        elif incoming is None or row.session_id is None:
            self._recorder.noted(row)
        return _Exchange(self, row, session, incoming)

    def ended(self, exchange: "_Exchange", end: "_End") -> None:
        """Note the end of an exchange, in the planner's thread and then in the recorder's."""
        self._planner.submit(self._ended, exchange, end)

    def _ended(self, exchange: "_Exchange", end: "_End") -> None:
        session, row = exchange.session, exchange.row
        row = replace(
            row,
            first_byte_at=exchange.first_byte_at,
            ended_at=end.at,
            status=end.status,
            ending=end.ending,
            error=end.error or exchange.rejection,
            fell_back=exchange.rejection is not None,
        )
        if exchange.rejection is not None:
            row = replace(row, messages_sent=row.messages_total, blocks_left_out=0, bytes_sent=row.bytes_total,
                          chars_sent=row.chars_total)  # fmt: skip
        if session is not None:
            session.in_flight -= 1
            if session.row.kind == "agent" and row.outcome != "side":
                session.row = replace(session.row, last_active_at=end.at)
            if exchange.rejection is not None:
                self._stop_rewriting(session, exchange.rejection, blame=end.status is None or end.status < 400)
        dialect = self._dialects[row.dialect]  # type: ignore[index]  # written from a DialectName
        answer = _answer(dialect, end)
        if row.outcome == "side" and session is not None and answer is not None and answer.complete:
            self._registry.remember_summary(session, answer.text)
        self._recorder.ended(row, session, dialect, answer)

    def _stop_rewriting(self, session: Session, why: str, *, blame: bool) -> None:
        """The original went out instead. Unless that was rejected too, this session is left alone from now on."""
        session.left_out = frozenset()
        session.sent = None
        session.row = replace(session.row, selection_id=None)
        if blame:
            log.warning("session.pass_through session=%s why=%s", session.row.name, why)
            session.row = replace(session.row, state="pass-through", state_reason=why)


@dataclass(frozen=True, slots=True)
class _End:
    at: float
    ending: Ending
    status: int | None
    headers: Headers
    body: bytes | None
    error: str | None


def _answer(dialect: Dialect, end: _End) -> Answer | None:
    """Read what the upstream sent, after the client has it. Errors and lost bodies have no answer."""
    if end.body is None or end.status is None or end.status >= 400:
        return None
    types = [value for name, value in end.headers if name.lower() == b"content-type"]
    encodings = [
        coding.strip().lower()
        for name, value in end.headers
        if name.lower() == b"content-encoding"
        for coding in value.split(b",")
    ]
    try:
        plain = decode_body(end.body, encodings, ANSWER_BYTES_MAX)
    except Undecodable as error:
        log.warning("answer.undecodable error=%s", error)
        return None
    return dialect.parse_answer(plain, types[0].decode("latin-1") if types else "")


class _Exchange:
    """`Exchange`: collects on the event loop, hands over to the planner when it ends."""

    __slots__ = ("_finished", "_owner", "first_byte_at", "incoming", "rejection", "row", "session")

    def __init__(
        self, owner: ArchivedConversations, row: ExchangeRow, session: Session | None, incoming: Incoming | None
    ) -> None:
        self._owner = owner
        self._finished = False
        self.row = row
        self.session = session
        self.incoming = incoming
        self.first_byte_at: float | None = None
        self.rejection: str | None = None

    def first_byte(self) -> None:
        if self.first_byte_at is None:
            self.first_byte_at = self._owner._clock()

    def fall_back(self, status: int, body: bytes) -> None:
        text = body[:300].decode("utf-8", "replace")
        self.rejection = f"the upstream rejected the rewritten request with {status}: {text}"

    def finish(
        self, ending: Ending, *, status: int | None, headers: Headers, body: bytes | None, error: str | None = None
    ) -> None:
        if not self._finished:
            self._finished = True
            self._owner.ended(self, _End(self._owner._clock(), ending, status, headers, body, error))


def _abandon(job: "Future[Plan]") -> None:
    """The shell no longer waits for this plan: close the exchange that it opened."""
    if not job.cancelled() and job.exception() is None and (exchange := job.result().exchange) is not None:
        exchange.finish("failed", status=None, headers=(), body=None, error="planned too late, sent as it came")
