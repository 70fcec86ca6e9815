"""What one request becomes: identified, decided, selected anew where that is due, rewritten, ready to be recorded.

A `Planner` works on values and on the sessions in memory; it awaits nothing. Two of its steps may touch the disk and
say so: `identify` (a session that is not in memory) and `secure` (nothing is left out before it is on disk).
The caller runs those in a thread, and sees to it that requests are planned one after the other.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from itertools import count

from graphstore.blocks import Cut
from graphstore.evidence import Rule, default_rule, restricted
from graphstore.graph import ContextGraph
from graphstore.identity import row_id, scope_digest
from graphstore.parameters import Parameters
from graphstore.records import BoundaryKind, ExchangeRow, Mark, SelectionRow
from graphstore.selection import OWED, narrowed
from graphstore.selectors import Selector
from graphstore.store.archive import Archive
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.reader import load_evidence
from graphstore.store.report import turn_openings
from proxy.boundary import RELIEVED_TO, Decision, Facts, Policy, decide, decide_again, is_idle
from proxy.clients import credential, recognise
from proxy.dialects.base import Dialect, DialectName, ParsedRequest, UnreadableRequest
from proxy.economics.outlook import Economics
from proxy.economics.weighing import CHARS_PER_TOKEN, Weighed, ways_of
from proxy.holdout import draw
from proxy.overflow import Overflow, Windows
from proxy.ports import Arrival
from proxy.recorder import Recorder, Sent
from proxy.rewrite import GuardFailure, check_rewritten, render_rewritten
from proxy.selecting import Choice, IdentifierCache, choose
from proxy.sessions import Identified, Incoming, Registry, Session, user_runs

log = logging.getLogger(__name__)

DURABLE_DEADLINE_S = 5.0  # a decision that is not on disk by then is not taken
SETTLE_DEADLINE_S = 0.5  # for the rare look at an old message that may still be on its way to the disk
NOTICE_MARK = b"notice"
LARGE_TOKENS = 64_000  # half of the smallest window that models of coding agents have
OPENINGS_READ = 64  # turns of a session by which its next ones are judged

Clock = Callable[[], float]


@dataclass(slots=True)
class Draft:
    """A request on its way to a plan. `found` is None for one that belongs to no known session."""

    id: int
    arrival: Arrival
    at: float
    problem: str | None = None  # why the request is not understood
    incoming: Incoming | None = None
    found: Identified | None = None
    cut: Cut = Cut((), ())
    ordinals: list[int] = field(default_factory=list)
    facts: Facts = Facts()
    decision: Decision = Decision("none", "")
    leaves_new: bool = False  # the present selection leaves out a message that came with this request
    shows_again: bool = False  # ... or leaves out less than the archive says
    body: bytes | None = None  # what to send; None: the client's bytes
    left_out: frozenset[int] = frozenset()  # message indexes that `body` lacks
    sent_before: tuple[bytes, ...] | None = None  # what the request before it sent, as `Session.sent`
    recorded: "Future[object] | None" = None  # see `Recorder.arrived`
    tried: "Tried | None" = None  # what a new selection makes of the request, found out before it was saved

    @property
    def session(self) -> Session | None:
        return self.found.session if self.found is not None else None

    @property
    def must_be_secured(self) -> bool:
        return self.decision.select or self.leaves_new or self.shows_again


@dataclass(frozen=True, slots=True)
class Tried:
    """A checked body, and the selection (`Session.left_out`) under which it was made."""

    under: frozenset[int]
    body: bytes | None
    left_out: frozenset[int]


@dataclass(frozen=True, slots=True)
class Shortened:
    """A request selected anew after it was refused, and what its session sent before."""

    row: ExchangeRow
    body: bytes
    left_out: frozenset[int]
    stored: frozenset[int]
    selection_id: int | None
    into_turn: int | None
    unrelieved: int | None


class Planner:
    def __init__(
        self,
        archive: Archive,
        recorder: Recorder,
        *,
        policy: Policy,
        parameters: Parameters,
        dialects: Mapping[DialectName, Dialect],
        upstream: str,
        notice: bool,
        rule: Rule | None,
        selector: Selector,
        economics: Economics,
        holdout: float,
        clock: Clock,
    ) -> None:
        """`rule` is the evidence rule of every session; None: each session's by the model that observed it."""
        ids = archive.reader.next_ids()
        self._archive = archive
        self._recorder = recorder
        self._policy = policy
        self._parameters = parameters
        self._dialects = dialects
        self._upstream = upstream
        self._notice = notice
        self._rule = rule
        self._selector = selector
        self._economics = economics
        self._clock = clock
        self._identifiers = IdentifierCache()
        self._windows = Windows()
        self._exchange_ids = count(ids.exchanges)
        self._selection_ids = count(ids.selections)
        self.registry = Registry(
            archive.reader,
            settle=self._settle,
            next_session_id=ids.sessions,
            draw=lambda name: draw(archive.secret, name, holdout),
        )

    # -- steps, in order ----------------------------------------------------------------------------------------

    def read(self, arrival: Arrival) -> Draft:
        """Parse a request and name its sender. What is not understood has no `incoming`."""
        draft = Draft(next(self._exchange_ids), arrival, self._clock())
        dialect = self._dialects[arrival.dialect]
        try:
            if arrival.unreadable:
                raise UnreadableRequest(arrival.unreadable)
            parsed = dialect.parse_request(arrival.body)
        except UnreadableRequest as error:
            draft.problem = f"not understood: {error}"
            return draft
        upstream = arrival.upstream or self._upstream
        scope = scope_digest(self._archive.secret, upstream=upstream, credential=credential(arrival.headers))
        caller = recognise(arrival.headers)
        draft.incoming = Incoming.of(parsed, caller, dialect, scope=scope, upstream=upstream, at=draft.at)
        return draft

    def identify(self, draft: Draft, *, disk: bool) -> None:
        """Find the session. Raises `NeedsDisk`, with nothing changed, when `disk` is not allowed and is needed."""
        assert draft.incoming is not None
        if draft.incoming.parsed.opaque is None:
            draft.found = self.registry.identify(draft.incoming, disk=disk)
        elif (session := self.registry.named(draft.incoming, disk=disk)) is not None:
            draft.found = Identified(session, "opaque", 0)

    def decide(self, draft: Draft) -> None:
        """Cut the history into blocks and decide what this request may become."""
        assert draft.incoming is not None
        parsed = draft.incoming.parsed
        if parsed.opaque is not None:
            draft.facts = Facts(opaque=parsed.opaque)
        elif draft.found is not None and draft.found.outcome == "side":
            draft.facts = Facts(side=True)
            if draft.found.session.row.kind == "side":  # a history of its own, not one that goes beyond an agent's
                draft.cut, draft.ordinals = draft.found.session.cut_history(parsed.messages, draft.found.known)
        elif draft.found is not None:
            draft.cut, draft.ordinals = draft.found.session.cut_history(parsed.messages, draft.found.known)
            _show_turn(draft.found.session, draft.cut, draft.ordinals)
            draft.facts = self._facts(draft.found, draft.incoming, draft.cut, draft.ordinals)
            self._count_turn(draft.found, draft.facts, parsed)
            draft.leaves_new = _leaves_new(draft.found, draft.cut, draft.ordinals)
            session = draft.found.session
            draft.shows_again = session.row.selection_id is not None and session.left_out != session.stored
        draft.decision = decide(draft.facts, self._policy_for(draft.incoming))

    def secure(self, draft: Draft) -> None:
        """Make durable what may then be left out: a new selection, or new versions of messages left out already.

        A selection that leaves out less than it did is a new one too, so that it is the same after a restart. Touches
        the disk.
        """
        if draft.decision.select and self._select(draft):
            return
        if draft.leaves_new or draft.shows_again:
            self._save(draft, self._lessened(draft) if draft.shows_again else None)

    def _select(self, draft: Draft) -> bool:
        """False: the present selection stays, for another would not pay."""
        window = self._policy_for(draft.incoming).context_window_tokens
        choice, parameters = self._choose(draft, window * CHARS_PER_TOKEN if draft.decision.pressed else None)
        if draft.decision.weigh:
            weighed = self._weigh(draft, choice)
            boundary: BoundaryKind = "warm" if weighed.is_warm and not weighed.pays else "cold"
            reason = f"{draft.decision.reason}; {weighed}"
            draft.decision = replace(draft.decision, boundary=boundary, reason=reason, select=weighed.pays)
            if not weighed.pays:
                return False
        self._adopt(draft, choice, parameters)
        return True

    def _choose(self, draft: Draft, room_chars: int | None) -> tuple[Choice, Parameters]:
        """A selection and the parameters that it was made with. `room_chars`: what the window holds, under pressure."""
        assert draft.found is not None and draft.incoming is not None
        session, incoming = draft.found.session, draft.incoming
        rule, graph, marks = self._evidence(draft)

        def chosen(parameters: Parameters) -> Choice:
            return choose(
                incoming.dialect,
                incoming.parsed,
                draft.cut,
                draft.ordinals,
                graph,
                parameters,
                self._identifiers,
                session=session.row.name,
                turn=session.row.turns,
                rule=rule,
                marks=marks,
                selector=self._selector,
                into_turn=draft.decision.pressed,
            )

        if room_chars is not None:
            least = _cost(incoming.parsed, draft.cut, _expendable(draft.cut))
            cap = max(min(int(room_chars * RELIEVED_TO), self._parameters.request_cap_chars), least, 1)
            tight = replace(self._parameters, request_cap_chars=cap)
            choice = chosen(tight)
            if not choice.selection.over_cap:
                return choice, tight
        return chosen(self._parameters), self._parameters

    def _adopt(self, draft: Draft, choice: Choice, parameters: Parameters) -> None:
        """Let this selection be the session's, once it is on disk. If that fails the original is sent."""
        assert draft.found is not None and draft.incoming is not None
        session, incoming = draft.found.session, draft.incoming
        session.unrelieved = self._unrelieved(draft, choice.left_out)
        applied = self._policy.mode != "off"
        reaches = draft.decision.pressed and draft.cut.steps_start > draft.cut.turn_start
        request = draft.cut.request if reaches else None
        into_turn = draft.ordinals[request] if request is not None else None
        selection = choice.selection.to_row(
            id=next(self._selection_ids),
            session_id=session.row.id,
            exchange_id=draft.id,
            turn=session.row.turns,
            created_at=incoming.at,
            applied=applied,
            reason=draft.decision.reason,
            parameters=parameters,
            notice=self._notice,
            into_turn=into_turn,
        )
        if applied:
            session.left_out, session.row = choice.left_out, replace(session.row, selection_id=selection.id)
            session.stored, session.into_turn = session.left_out, into_turn
            try:
                made = self._rewritten(session, incoming.parsed, draft.cut, draft.ordinals)
                draft.tried = Tried(session.left_out, *made)
            except GuardFailure as failure:
                self._keep_original(draft, session, str(failure))
                return
        self._save(draft, selection)

    def _weigh(self, draft: Draft, choice: Choice) -> Weighed:
        """The present way against this choice."""
        assert draft.found is not None and draft.incoming is not None
        session, incoming = draft.found.session, draft.incoming
        try:
            openings = turn_openings(self._archive.reader, session.row.id, OPENINGS_READ)
        except Exception:
            log.exception("turns.unreadable session=%s", session.row.name)
            openings = []
        ways = ways_of(
            draft.cut.blocks,
            draft.ordinals,
            incoming.parsed.messages,
            known=draft.found.known,
            present=session.left_out,
            proposed=choice.left_out,
            marked=choice.selection.marked,
            head=len(incoming.parsed.instructions) + len(incoming.parsed.tools),
            noticed=self._notice,
        )
        return self._economics.weigh(ways, incoming.upstream, incoming.parsed.model, draft.facts.idle_s or 0, openings)

    def _unrelieved(self, draft: Draft, left_out: frozenset[int]) -> int | None:
        """Tokens beyond the least possible that this selection sends, when that is still too much for the window."""
        assert draft.incoming is not None
        parsed, limit = draft.incoming.parsed, self._policy_for(draft.incoming).limit_tokens
        served = _cost(parsed, draft.cut, _positions(draft.ordinals, left_out)) // CHARS_PER_TOKEN
        least = _cost(parsed, draft.cut, _expendable(draft.cut)) // CHARS_PER_TOKEN
        return served - least if 0 < limit < served else None

    def _policy_for(self, incoming: Incoming | None) -> Policy:
        """With the window that this upstream itself told of, when it is smaller than the one in the settings."""
        assert incoming is not None
        known, told = self._policy.context_window_tokens, self._windows.of(incoming.upstream, incoming.parsed.model)
        return self._policy if told is None or 0 < known <= told else replace(self._policy, context_window_tokens=told)

    # -- a request that was refused for its length ----------------------------------------------------------------

    def can_shorten(self, draft: Draft) -> bool:
        """Whether there is anything that `shorten` might leave out. A response in the background is not looked at: its
        client wants its name at once."""
        if draft.found is None or draft.incoming is None or draft.incoming.parsed.background:
            return False
        gone = _positions(draft.ordinals, draft.found.session.left_out if draft.body else ())
        return decide_again(draft.facts, self._policy, "").select and bool(_expendable(draft.cut) - gone)

    def may_be_too_long(self, draft: Draft) -> bool:
        """Whether what is sent fills half of the window, or is large for a model whose window is not known."""
        if draft.found is None or draft.incoming is None:
            return False
        window = self._policy_for(draft.incoming).context_window_tokens
        return self._sent_chars(draft) >= CHARS_PER_TOKEN * (window // 2 or LARGE_TOKENS)

    @staticmethod
    def _sent_chars(draft: Draft) -> int:
        assert draft.found is not None and draft.incoming is not None
        gone = _positions(draft.ordinals, draft.found.session.left_out if draft.body else ())
        return _cost(draft.incoming.parsed, draft.cut, gone)

    def shorten(self, draft: Draft, status: int, overflow: Overflow) -> Shortened | None:
        """Select anew for a request that was refused for its length. None, with nothing changed: no shorter one can be
        sent, or its session has moved on. Touches the disk.
        """
        found, incoming = draft.found, draft.incoming
        if found is None or incoming is None:
            return None
        session = found.session
        if session.chain is not incoming.chain or session.forgotten:
            return None
        sent = self._sent_chars(draft)
        self._windows.learn(incoming.upstream, incoming.parsed.model, overflow, sent // CHARS_PER_TOKEN)
        failure = self._archive.writer.failure
        facts = replace(draft.facts, archive_trouble=str(failure) if failure is not None else None)
        policy = self._policy_for(incoming)
        refusal = f"pressure: refused with {status} for its length, {sent // CHARS_PER_TOKEN} tokens by our count"
        decision = decide_again(facts, policy, refusal)
        if not decision.select:
            return None
        before = (session.left_out, session.stored, session.row.selection_id, session.into_turn, session.unrelieved)
        again = replace(draft, decision=decision, body=None, left_out=frozenset(), tried=None)
        room = min(sent, policy.context_window_tokens * CHARS_PER_TOKEN or sent)
        choice, parameters = self._choose(again, room)
        if _cost(incoming.parsed, draft.cut, _positions(draft.ordinals, choice.left_out)) >= sent:
            return None
        sent_now, session.sent = session.sent, draft.sent_before
        self._adopt(again, choice, parameters)
        sent_again = self._render(again, session, incoming)
        if again.body is None or not again.decision.select:
            session.sent = sent_now
            self._go_back(session, *before)
            return None
        row = replace(_row(again), prefix_messages=sent_again.prefix_messages, prefix_bytes=sent_again.prefix_bytes)
        return Shortened(row, again.body, *before)

    def restore(self, draft: Draft, shortened: Shortened) -> None:
        """That was refused as well: what the session sent before holds, unless it has moved on."""
        assert draft.session is not None and draft.incoming is not None
        session, made = draft.session, shortened
        if session.chain is draft.incoming.chain and session.row.selection_id == made.row.selection_id:
            session.sent = None
            self._go_back(session, made.left_out, made.stored, made.selection_id, made.into_turn, made.unrelieved)

    @staticmethod
    def _go_back(
        session: Session,
        left_out: frozenset[int],
        stored: frozenset[int],
        selection_id: int | None,
        into_turn: int | None,
        unrelieved: int | None,
    ) -> None:
        session.left_out, session.stored = left_out, stored
        session.into_turn, session.unrelieved = into_turn, unrelieved
        session.row = replace(session.row, selection_id=selection_id)

    def _lessened(self, draft: Draft) -> SelectionRow | None:
        """The session's selection over the blocks that stand now, without those that are shown again; None, and no
        selection, if it is lost."""
        assert draft.found is not None
        session = draft.found.session
        former = self._archive.reader.load_selection(session.row.selection_id or 0) if session.left_out else None
        if former is None:
            session.drop_selection()
            return None
        costs = {ordinal: block.cost for ordinal, block in zip(draft.ordinals, draft.cut.blocks, strict=True)}
        selection = replace(
            narrowed(former, costs, session.left_out),
            id=next(self._selection_ids),
            session_id=session.row.id,
            exchange_id=draft.id,
            turn=session.row.turns,
            created_at=draft.at,
            reason=f"{former.reason}; changed: {draft.found.outcome}",
        )
        session.row, session.stored = replace(session.row, selection_id=selection.id), session.left_out
        return selection

    def _save(self, draft: Draft, selection: SelectionRow | None) -> None:
        """Commit the whole history with `selection`, or drop the selection that the session has."""
        assert draft.found is not None and draft.incoming is not None
        saved = self._recorder.decided(_row(draft), draft.found, draft.incoming, draft.cut, draft.ordinals, selection)
        try:
            saved.result(DURABLE_DEADLINE_S)
        except Exception as error:  # disk full, locked, or simply late: the original is always right
            why = "late" if isinstance(error, FutureTimeout) else str(error)
            log.warning("selection.not_saved session=%s why=%s", draft.found.session.row.name, why)
            self._keep_original(draft, draft.found.session, f"decision not saved ({why})")

    def finish(self, draft: Draft) -> ExchangeRow:
        """Render what to send, note what stands in it, and hand the request to the recorder."""
        found, incoming = draft.found, draft.incoming
        if found is None or incoming is None or found.outcome == "opaque":
            row = _row(draft)
            draft.recorded = self._recorder.noted(row, draft.session)
        else:
            draft.sent_before = found.session.sent
            sent = Sent(0, 0) if found.outcome == "side" else self._render(draft, found.session, incoming)
            self._move(found, incoming)
            row = replace(_row(draft), prefix_messages=sent.prefix_messages, prefix_bytes=sent.prefix_bytes)
            draft.recorded = self._recorder.arrived(row, found, incoming, draft.cut, draft.ordinals)
        if found is not None:
            found.session.in_flight += 1
        return row

    # -- parts --------------------------------------------------------------------------------------------------

    def _render(self, draft: Draft, session: Session, incoming: Incoming) -> Sent:
        try:
            if draft.tried is not None and draft.tried.under is session.left_out:
                draft.body, draft.left_out = draft.tried.body, draft.tried.left_out
            else:
                draft.body, draft.left_out = self._rewritten(session, incoming.parsed, draft.cut, draft.ordinals)
        except GuardFailure as failure:
            log.warning("rewrite.refused session=%s why=%s", session.row.name, failure)
            self._keep_original(draft, session, str(failure))
        return _sent(session, incoming.parsed, draft.left_out, notice=self._notice, is_broken=bool(draft.facts.changed))

    @staticmethod
    def _move(found: Identified, incoming: Incoming) -> None:
        """The session now stands at the end of this request. A side request moves only a session of its own."""
        session = found.session
        if found.outcome == "side" and session.row.kind == "agent":
            return
        session.row = replace(
            session.row,
            model=incoming.parsed.model,
            instructions_id=incoming.instructions_id,
            tools_id=incoming.tools_id,
            head_node_id=row_id(session.chain[-1]) if session.chain else None,
            last_active_at=incoming.at,
        )

    def _facts(self, found: Identified, incoming: Incoming, cut: Cut, ordinals: list[int]) -> Facts:
        session, row, parsed = found.session, found.session.row, incoming.parsed
        turn_start = cut.turn_start
        costs = [block.cost for block in cut.blocks]
        changed = tuple(
            name
            for name, before, now in (
                ("model", row.model, parsed.model),
                ("tools", row.tools_id, incoming.tools_id),
                ("instructions", row.instructions_id, incoming.instructions_id),
            )
            if before != now
        )
        served = _cost(parsed, cut, _positions(ordinals, session.left_out)) // CHARS_PER_TOKEN
        limit = self._policy_for(incoming).limit_tokens
        least = _cost(parsed, cut, _expendable(cut)) // CHARS_PER_TOKEN if 0 < limit < served else 0
        failure = self._archive.writer.failure
        return Facts(
            held_out=row.arm == "held out",
            passing_through=row.state_reason if row.state == "pass-through" else None,
            open_calls=bool(cut.open_calls),
            retry=found.outcome == "retry",
            at_user_request=cut.is_boundary,
            mid_turn=turn_start > 0 and cut.blocks[turn_start - 1].kind == "tools",
            history_blocks=turn_start,
            history_tokens=sum(costs[:turn_start]) // CHARS_PER_TOKEN,
            served_tokens=served,
            least_tokens=least,
            unrelieved=session.unrelieved is not None and least + session.unrelieved > limit,
            first_seen=found.outcome == "new",
            in_flight=session.in_flight > 0,
            idle_s=None if found.outcome == "new" else max(0.0, incoming.at - row.last_active_at),
            client_compacted=found.outcome == "client compaction",
            changed=changed,
            archive_trouble=str(failure) if failure is not None else None,
        )

    def _count_turn(self, found: Identified, facts: Facts, parsed: ParsedRequest) -> None:
        session = found.session
        idle = is_idle(facts, self._policy)
        if found.outcome == "retry":
            return
        if found.outcome == "new":
            session.row, session.step = replace(session.row, turns=max(1, user_runs(parsed.messages))), 0
        elif facts.at_user_request and (idle or not facts.mid_turn):
            session.row, session.step = replace(session.row, turns=session.row.turns + 1), 0
        else:
            session.step += 1

    def _evidence(self, draft: Draft) -> tuple[Rule, ContextGraph, dict[int, Mark]]:
        """The rule that counts, what past observations say, and what a person said of single blocks; nothing unreadable
        is a reason to fail a request.

        A branch that is not stored yet starts with what its parent knows of the blocks that both share, and a block
        that a compaction moved with the mark that it had.
        """
        assert draft.found is not None
        found = draft.found
        session, shared = found.parent or found.session, found.shared_ordinals
        try:
            rule, graph = load_evidence(self._archive.reader, session.row.id, self._rule, self._parameters)
            marks = self._archive.reader.marks(session.row.id)
        except Exception:
            log.exception("graph.unreadable session=%s; selecting without it", session.row.name)
            return self._rule or default_rule(None), ContextGraph(), {}
        if found.parent is None:
            moved = found.resent_blocks(draft.cut, draft.ordinals)
            return rule, graph, {o: marks[former] for o, former in moved.items() if former in marks} | marks
        return rule, restricted(graph, shared), {o: mark for o, mark in marks.items() if o in shared}

    def _rewritten(
        self, session: Session, parsed: ParsedRequest, cut: Cut, ordinals: list[int]
    ) -> tuple[bytes | None, frozenset[int]]:
        """The checked body under the session's present selection, and the message indexes that it leaves out.

        None when nothing is left out. Raises `GuardFailure`.
        """
        if self._policy.mode == "off" or session.row.state == "pass-through" or not session.left_out:
            return None, frozenset()
        gone = session.left_out
        left_out = frozenset(i for o, b in zip(ordinals, cut.blocks, strict=True) if o in gone for i in b.messages)
        if not left_out:
            return None, frozenset()
        notice = self._dialects[parsed.dialect].render_notice(parsed.notice_role) if self._notice else None
        body = render_rewritten(parsed, left_out, notice)
        check_rewritten(parsed, body, left_out, notice, session.reaches_into_turn(cut, ordinals))
        return body, left_out

    def _keep_original(self, draft: Draft, session: Session, why: str) -> None:
        session.drop_selection()
        draft.decision = replace(draft.decision, select=False, reason=f"{draft.decision.reason}; original sent: {why}")

    def _settle(self) -> None:
        """Let the archive catch up before it is read; when it is late or fails, it is read as it is."""
        try:
            self._recorder.settled().result(SETTLE_DEADLINE_S)
        except FutureTimeout:
            log.warning("archive.behind after_s=%s", SETTLE_DEADLINE_S)
        except ArchiveUnavailable as error:
            log.warning("archive.behind why=%s", error)


def _show_turn(session: Session, cut: Cut, ordinals: list[int]) -> None:
    """What belongs to the current turn is sent, and stays: the client went back to it, or a late result reached it.

    Of a turn that was itself selected from, under pressure, these are the newest steps.
    """
    if session.left_out:
        end = cut.steps_start if session.reaches_into_turn(cut, ordinals) else cut.turn_start
        session.left_out = session.left_out.difference(ordinals[end:])


def _expendable(cut: Cut) -> frozenset[int]:
    """Positions of all blocks that may be left out under pressure."""
    return frozenset(i for i, block in enumerate(cut.blocks[: cut.steps_start]) if block.kind not in OWED)


def _positions(ordinals: Sequence[int], left_out: Collection[int]) -> frozenset[int]:
    return frozenset(i for i, ordinal in enumerate(ordinals) if ordinal in left_out) if left_out else frozenset()


def _cost(parsed: ParsedRequest, cut: Cut, left_out: Collection[int]) -> int:
    """Characters of a request without the blocks at these positions."""
    costs = (block.cost for i, block in enumerate(cut.blocks) if i not in left_out)
    return sum(costs) + len(parsed.instructions) + len(parsed.tools)


def _leaves_new(found: Identified, cut: Cut, ordinals: list[int]) -> bool:
    """A block may be left out in a version that the archive lacks: pruned, amended, edited at its end."""
    gone = found.session.left_out
    return bool(gone) and any(
        o in gone and block.messages[-1] >= found.known for o, block in zip(ordinals, cut.blocks, strict=True)
    )


def _row(draft: Draft) -> ExchangeRow:
    """The exchange as it stands; the prefix that it shares with the one before is not known yet."""
    arrival, incoming, found = draft.arrival, draft.incoming, draft.found
    parsed = incoming.parsed if incoming is not None else None
    session = found.session if found is not None else None
    messages = parsed.messages if parsed is not None else ()
    chars = sum([message.cost for message in messages])
    opaque = found is None or found.outcome == "opaque"
    return ExchangeRow(
        id=draft.id,
        session_id=session.row.id if session is not None else None,
        turn=session.row.turns if session is not None else 0,
        step=session.step if session is not None and not opaque else 0,
        started_at=draft.at,
        path=arrival.path,
        dialect=arrival.dialect,
        model=parsed.model if parsed is not None else "",
        stream=parsed.stream if parsed is not None else False,
        outcome=found.outcome if found is not None else "opaque",
        boundary=draft.decision.boundary,
        reason=draft.problem or draft.decision.reason,
        idle_s=draft.facts.idle_s,
        selection_id=session.row.selection_id if session is not None and draft.left_out else None,
        head_node_id=row_id(incoming.chain[-1]) if incoming is not None and incoming.chain and not opaque else None,
        instructions_id=incoming.instructions_id if incoming is not None and not opaque else None,
        tools_id=incoming.tools_id if incoming is not None and not opaque else None,
        blocks_total=len(draft.cut.blocks),
        blocks_left_out=sum(1 for block in draft.cut.blocks if block.messages[0] in draft.left_out),
        messages_total=len(messages),
        messages_sent=len(messages) - len(draft.left_out),
        chars_total=chars,
        chars_sent=chars - sum([messages[i].cost for i in draft.left_out]),
        bytes_total=len(arrival.body),
        bytes_sent=len(draft.body if draft.body is not None else arrival.body),
    )


def _sent(session: Session, parsed: ParsedRequest, left_out: frozenset[int], *, notice: bool, is_broken: bool) -> Sent:
    """What stands in the message array as sent, and how much of it the previous request began with.

    `is_broken`: what stands before the array changed, so no prefix is common.
    """
    mark = (NOTICE_MARK,) if left_out and notice else ()
    now = mark + tuple(d for i, d in enumerate(parsed.digests) if i not in left_out) if left_out else parsed.digests
    before = () if is_broken or session.sent is None else session.sent
    if now[: len(before)] == before:  # the common case, compared in one step
        shared = len(before)
    else:
        shared = next(
            (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now))
        )
    session.sent = now
    messages = max(0, shared - len(mark))
    spans = parsed.spans[parsed.leading :]
    if left_out:
        kept = (span for i, span in enumerate(spans) if i not in left_out)
        size = sum(end - start for (start, end), _ in zip(kept, range(messages), strict=False))
    else:  # with the separators between them, which are the client's own
        size = spans[messages - 1][1] - spans[0][0] if messages else 0
    return Sent(messages, size)
