"""Turns what happened into archive batches, in a thread of its own, in the order in which it happened.

It knows what the archive wants to keep of a request and of an answer; it decides nothing. A failing archive is the
writer's business: nothing here ever reaches a client.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from graphstore.blocks import Cut
from graphstore.identity import message_digest, row_id
from graphstore.records import (
    AnswerRow,
    Batch,
    BlockRow,
    ExchangeRow,
    Fork,
    MessageRow,
    NodeRow,
    ReplayRequest,
    Resent,
    SelectionRow,
    SessionRow,
)
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.forget import Forget, Forgotten
from graphstore.store.reader import Reader
from graphstore.store.writer import Writer
from proxy.cache_watch import CacheFall
from proxy.dialects.base import Answer, Dialect
from proxy.dialects.content import calls_line
from proxy.economics.warmth import WarmthBook
from proxy.ports import Observer
from proxy.sessions import Identified, Incoming, Session

log = logging.getLogger(__name__)

COLLECT_S = 0.02  # how long recording may lag behind, unless somebody waits for it


@dataclass(frozen=True, slots=True)
class Sent:
    """How much of the message array as sent continues the previous request: whole messages, and their bytes."""

    prefix_messages: int
    prefix_bytes: int


class Recorder:
    """One thread that works through jobs in order. It collects for a moment before it starts, so that a request is
    not slowed down by the recording of the one before it. No job waits for the disk: jobs hold whole requests.
    """

    def __init__(self, writer: Writer, reader: Reader, book: WarmthBook, observer: Observer | None = None) -> None:
        self._writer = writer
        self._book = book
        self._observer = observer
        self._reader = reader
        self._jobs: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._work = threading.Event()
        self._falls: dict[str, CacheFall] = {}  # by session name
        self._hurry = threading.Event()  # somebody waits for a job, or for the end
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="recap-recorder", daemon=True)
        self._thread.start()

    def arrived(
        self, row: ExchangeRow, found: Identified, incoming: Incoming, cut: Cut, ordinals: Sequence[int]
    ) -> "Future[object]":
        """Archive what is new in a request, with its exchange. The future is for `ended`: it fails when refused."""
        session, snapshot = found.session, found.session.row  # the planner goes on while this is written

        def submit() -> None:
            try:
                batch = self._batch(row, found, self._known(found, cut), snapshot, incoming, cut, ordinals)
                self._writer.submit(batch).add_done_callback(lambda done: _note_loss(session, done))
            except Exception:
                session.has_gap = True
                raise

        return self._add(submit)

    def decided(
        self,
        row: ExchangeRow,
        found: Identified,
        incoming: Incoming,
        cut: Cut,
        ordinals: Sequence[int],
        selection: SelectionRow | None,
    ) -> "Future[object]":
        """Commit a decision durably, together with the whole history that it selects from; None: the history alone.

        The future resolves when all of it is on disk; it raises what kept it from getting there.
        """
        # The planner goes on while this is written. The blocks are those of this history, so its end goes with them.
        head = row_id(incoming.chain[-1]) if incoming.chain else None
        snapshot = replace(found.session.row, head_node_id=head)

        def commit() -> "Future[None]":
            self._is_beside_gap(found)
            batch = self._batch(row, found, 0, snapshot, incoming, cut, ordinals)
            decisions = (selection,) if selection is not None else ()
            return self._writer.submit(replace(batch, selections=decisions), durable=True)

        return _committed(self._add(commit, hurry=True))

    def noted(self, row: ExchangeRow, session: Session | None) -> "Future[object]":
        """Record a request that moves no session. The future is as that of `arrived`."""

        def submit() -> None:
            if session is not None and session.has_gap and self._reader.load_session(session.row.id) is None:
                raise ArchiveUnavailable("busy", "its session could not be recorded yet", "nothing needs to be done")
            self._writer.submit(Batch(exchanges=(row,)))

        return self._add(submit)

    def ended(
        self,
        row: ExchangeRow,
        session: Session | None,
        dialect: Dialect,
        read: Callable[[], Answer | None],
        *,
        upstream: str,
        recorded: "Future[object]",
    ) -> None:
        """Archive the outcome of an exchange with `upstream`, and the answer that `read` finds in it.

        `recorded` is what `arrived` or `noted` returned for it: the archive lacks what a refused exchange refers to.
        """
        snapshot = session.row if session is not None else None

        def submit() -> None:
            known = _without_lost_parent(session, snapshot) if session is not None and snapshot is not None else None
            answer = read()
            ended = _answered(row, answer)
            _log(ended, known)
            if self._observer is not None:
                self._observer.ended(ended, upstream)
            if session is not None and row.outcome != "side":
                self._watch(session, ended)
            if recorded.exception() is not None:  # it is done: jobs are worked through in order
                return
            # With a gap, the session must not move on to messages that the archive may have from another one alone.
            moves = session is not None and not session.has_gap
            self._writer.submit(_end(ended, known, dialect, answer, moves=moves))
            if session is not None and row.outcome != "side" and _ends_turn(answer):
                session.queued_turn = max(session.queued_turn, row.turn)

        self._add(submit)

    def forget(self, what: Forget, names: Collection[str]) -> "Future[Future[Forgotten]]":
        """Remove sessions from the archive, after all that was recorded of them before."""

        def submit() -> "Future[Forgotten]":
            for name in names:
                self._falls.pop(name, None)
            return self._writer.forget(what)

        return self._add(submit, hurry=what.thorough)  # type: ignore[return-value]  # of whatever the job returns

    def cache_falls(self) -> dict[str, str]:
        """Sessions that the provider's cache serves worse than it used to, with what is known."""
        return {name: str(fall) for name, fall in list(self._falls.items())}

    def settled(self) -> "Future[object]":
        """Resolves when all that was recorded before is committed: durably, as the writer hurries only for that."""
        return _committed(self._add(lambda: self._writer.submit(Batch(), durable=True), hurry=True))

    def close(self) -> None:
        """Work through what is left, then stop."""
        self._closing = True
        self._hurry.set()
        self._work.set()
        self._thread.join()

    def _add(self, job: Callable[[], object], *, hurry: bool = False) -> "Future[object]":
        done = _uncancellable()
        self._jobs.append((job, done))
        if hurry:
            self._hurry.set()
        self._work.set()
        return done

    def _run(self) -> None:
        while not self._closing or self._jobs:
            self._work.wait()
            self._hurry.wait(COLLECT_S)
            self._work.clear()
            self._hurry.clear()
            while self._jobs:
                self._do(*self._jobs.popleft())
            if self._closing:
                self._work.set()

    def _do(self, job: Callable[[], object], done: "Future[object]") -> None:
        try:
            done.set_result(job())
        except Exception as error:
            log.warning("record.failed error=%r; the exchange went through", error)
            done.set_exception(error.with_traceback(None))  # the frames would hold the request

    def _known(self, found: Identified, cut: Cut) -> int:
        """From which message on a request is archived: from the first one if earlier rows were lost."""
        if not self._is_beside_gap(found):
            return found.known
        session = found.session
        session.has_gap = session.has_gap and not cut.blocks  # a side request brings the messages, and not the blocks
        return 0

    def _is_beside_gap(self, found: Identified) -> bool:
        """Whether the archive may lack some of what this session builds on; notes whether it lacks the parent."""
        session, above = found.session, found.parent or found.origin
        if not session.has_gap and (above is None or not above.has_gap):
            return False
        parent_id = session.row.parent_id
        session.is_orphan = parent_id is not None and self._reader.load_session(parent_id) is None
        return True

    def _session_rows(self, found: Identified, snapshot: SessionRow) -> tuple[SessionRow, ...]:
        """A side request does not bring what the row of a session with a gap refers to."""
        row = _without_lost_parent(found.session, snapshot)
        if not found.session.has_gap or found.outcome != "side" or row.kind == "side":
            return (row,)
        if self._reader.load_session(row.id) is not None:
            return ()
        return (replace(row, head_node_id=None, instructions_id=None, tools_id=None),)

    def _batch(
        self,
        row: ExchangeRow,
        found: Identified,
        known: int,
        snapshot: SessionRow,
        incoming: Incoming,
        cut: Cut,
        ordinals: Sequence[int],
    ) -> Batch:
        """Everything of this request from message `known` on."""
        parsed, dialect, chain = incoming.parsed, incoming.dialect, incoming.chain
        new = range(known, len(chain))
        # A branch has blocks of its own from the start, and an undo may have cut one of those that we have.
        first = 0 if found.parent is not None or found.outcome == "undo" else known
        blobs = [blob for blob in (parsed.instructions, parsed.tools) if blob]
        parent, orphan = found.parent, found.session.is_orphan
        blocks = (
            BlockRow(
                session_id=snapshot.id,
                ordinal=ordinal,
                kind=block.kind,
                cost=block.cost,
                node_ids=tuple(row_id(chain[i]) for i in block.messages),
                edits=block.edits,
                label=block_label(dialect, [parsed.raw(i) for i in block.messages]),
            )
            for block, ordinal in zip(cut.blocks, ordinals, strict=True)
            if block.messages[-1] >= first
        )
        return Batch(
            messages=(
                *(_message(blob, blob.decode("utf-8", "replace")) for blob in blobs),
                *(
                    _message(raw, f"{dialect.message_text(raw)}\n{dialect.call_text(raw)}".strip())
                    for raw in (parsed.raw(i) for i in new)
                ),
            ),
            nodes=tuple(
                NodeRow(row_id(chain[i]), chain[i], row_id(chain[i - 1]) if i else None, row_id(parsed.digests[i]), i)
                for i in new
            ),
            sessions=self._session_rows(found, snapshot),
            blocks=tuple(blocks),
            replays=self._broken_off(row, found),
            forks=(Fork(snapshot.id, parent.row.id, found.shared_ordinals),) if parent and not orphan else (),
            resent=tuple(Resent(snapshot.id, *pair) for pair in found.resent_blocks(cut, ordinals).items()),
            exchanges=(row,),
        )

    @staticmethod
    def _broken_off(row: ExchangeRow, found: Identified) -> tuple[ReplayRequest, ...]:
        """A new turn shows that the one before it has ended, however it did."""
        known = found.session.queued_turn >= row.turn - 1
        if known or row.session_id is None or row.step or row.turn < 2 or found.outcome in ("side", "retry"):
            return ()
        return (ReplayRequest(row.session_id, row.turn - 1, None, row.started_at),)

    def _watch(self, session: Session, row: ExchangeRow) -> None:
        if session.ended is not None:
            self._book.note(session.row.upstream, session.ended, row)
        session.ended = row
        fall = session.watch.note(row).fall
        if fall is None:
            self._falls.pop(session.row.name, None)
        elif session.row.name not in self._falls:
            log.warning("cache.fell session=%s %s", session.row.name, fall)
            self._falls[session.row.name] = fall


def _uncancellable() -> "Future[object]":
    """Whoever stops waiting for it does not keep it from being resolved."""
    future: Future[object] = Future()
    future.set_running_or_notify_cancel()
    return future


def _committed(queued: "Future[object]") -> "Future[object]":
    """Resolves as the future does that `queued` resolves to."""
    found = _uncancellable()

    def tell(done: "Future[object]") -> None:
        if (error := done.exception()) is not None:
            found.set_exception(error)
        else:
            found.set_result(done.result())

    def follow(queued: "Future[Any]") -> None:
        if queued.exception() is not None:
            tell(queued)
        else:
            queued.result().add_done_callback(tell)

    queued.add_done_callback(follow)
    return found


def _note_loss(session: Session, done: "Future[None]") -> None:
    """Later rows refer to earlier ones. A batch that is only late is told like one that is lost: no harm in twice."""
    if done.exception() is not None:
        session.has_gap = True


def _answered(row: ExchangeRow, answer: Answer | None) -> ExchangeRow:
    if answer is None:
        return row
    usage = answer.usage
    return replace(
        row,
        usage=answer.usage_raw,
        input_tokens=usage.input,
        cached_tokens=usage.cached,
        cache_write_tokens=usage.cache_write,
        output_tokens=usage.output,
        reasoning_tokens=usage.reasoning,
        response_id=answer.response_id,
        transformations=answer.transformations,
        error=row.error or answer.error,
    )


def _end(
    row: ExchangeRow, session: SessionRow | None, dialect: Dialect, answer: Answer | None, *, moves: bool
) -> Batch:
    """What there is to archive of the end of an exchange; `moves`: its session has moved with it."""
    messages = tuple(
        _message(raw, f"{dialect.message_text(raw)}\n{dialect.call_text(raw)}".strip())
        for raw in (answer.messages if answer is not None and row.session_id is not None else ())
    )
    replays: tuple[ReplayRequest, ...] = ()
    has_blocks = row.head_node_id is not None  # a history of nothing has none
    if _ends_turn(answer) and row.session_id is not None and has_blocks and _is_of_agent(row, session):
        replays = (ReplayRequest(row.session_id, row.turn, row.id, row.ended_at or row.started_at),)
    return Batch(
        messages=messages,
        sessions=(session,) if session is not None and moves else (),
        exchanges=(row,),
        answers=tuple(AnswerRow(row.id, position, message.id) for position, message in enumerate(messages)),
        replays=replays,
    )


def _ends_turn(answer: Answer | None) -> bool:
    return answer is not None and answer.complete and answer.ends_turn


def _is_of_agent(row: ExchangeRow, session: SessionRow | None) -> bool:
    return session is not None and session.kind == "agent" and row.outcome not in ("side", "opaque")


def _without_lost_parent(session: Session, row: SessionRow) -> SessionRow:
    return replace(row, parent_id=None, fork_depth=None) if session.is_orphan else row


def _message(raw: bytes, text: str) -> MessageRow:
    digest = message_digest(raw)
    return MessageRow(row_id(digest), digest, raw, text)


def block_label(dialect: Dialect, raws: Sequence[bytes]) -> str:
    """What a block calls names it, all of it; otherwise its first message with words does."""
    calling = [dialect.label(raw) for raw in raws if dialect.call_text(raw)]
    return calls_line(calling) or dialect.label(next((raw for raw in raws if dialect.message_text(raw)), raws[0]))


def _log(row: ExchangeRow, session: SessionRow | None) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    took = f"{1000 * (row.ended_at - row.started_at):.0f}" if row.ended_at is not None else "-"
    first = f"{1000 * (row.first_byte_at - row.started_at):.0f}" if row.first_byte_at is not None else "-"
    log.info(
        "exchange session=%s known_by=%s turn=%s.%s outcome=%s boundary=%s reason=%r messages=%s/%s chars=%s/%s "
        "status=%s ending=%s input=%s cached=%s output=%s first_byte_ms=%s total_ms=%s%s",
        session.name if session else "-",
        "-" if session is None else "history" if session.client_id is None else "id",
        row.turn,
        row.step,
        row.outcome,
        row.boundary,
        row.reason,
        row.messages_sent,
        row.messages_total,
        row.chars_sent,
        row.chars_total,
        row.status,
        row.ending,
        row.input_tokens,
        row.cached_tokens,
        row.output_tokens,
        first,
        took,
        " fell_back=yes" if row.fell_back else "",
    )
