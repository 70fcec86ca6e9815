"""Turns what happened into archive batches, in a thread of its own, in the order in which it happened.

It knows what the archive wants to keep of a request and of an answer; it decides nothing. A failing archive is the
writer's business: nothing here ever reaches a client.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from graphstore.blocks import Cut
from graphstore.identity import message_digest, row_id
from graphstore.records import (
    AnswerRow,
    Batch,
    BlockRow,
    EdgeRow,
    ExchangeRow,
    MessageRow,
    NodeRow,
    NodeState,
    SelectionRow,
    SessionRow,
)
from graphstore.store.reader import Reader
from graphstore.store.writer import Writer
from proxy.dialects.base import Answer, Dialect
from proxy.sessions import Identified, Incoming, Session

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sent:
    """How much of the message array as sent continues the previous request: whole messages, and their bytes."""

    prefix_messages: int
    prefix_bytes: int


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The session as it stood when a request was planned: the planner goes on while this is written."""

    row: SessionRow
    parent_id: int | None

    @classmethod
    def of(cls, found: Identified) -> "_Snapshot":
        return cls(found.session.row, found.parent.row.id if found.parent else None)


class Recorder:
    def __init__(self, writer: Writer, reader: Reader) -> None:
        self._writer = writer
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recap-record")

    def arrived(
        self, row: ExchangeRow, found: Identified, incoming: Incoming, cut: Cut | None, ordinals: Sequence[int]
    ) -> None:
        """Archive what is new in a request, with its exchange."""
        self._run(self._arrived, row, found, _Snapshot.of(found), incoming, cut, tuple(ordinals))

    def decided(
        self,
        row: ExchangeRow,
        found: Identified,
        incoming: Incoming,
        cut: Cut,
        ordinals: Sequence[int],
        selection: SelectionRow,
    ) -> "Future[None]":
        """Commit a decision durably, together with the whole history that it selects from.

        The future resolves when all of it is on disk; it raises what kept it from getting there.
        """
        return self._thread.submit(
            self._decided, row, found, _Snapshot.of(found), incoming, cut, tuple(ordinals), selection
        )

    def noted(self, row: ExchangeRow) -> None:
        """Record a request that belongs to no session."""
        self._run(lambda: self._writer.submit(Batch(exchanges=(row,))))

    def ended(self, row: ExchangeRow, session: Session | None, dialect: Dialect, answer: Answer | None) -> None:
        """Archive the answer and the outcome of an exchange."""
        self._run(self._ended, row, session.row if session is not None else None, dialect, answer)

    def mark(self) -> "Future[Future[None]]":
        """Resolves, twice over, when all that was recorded before it is committed."""
        return self._thread.submit(lambda: self._writer.submit(Batch()))

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, job: object, *args: object) -> None:
        self._thread.submit(job, *args).add_done_callback(_report)  # type: ignore[arg-type]

    def _arrived(
        self,
        row: ExchangeRow,
        found: Identified,
        snapshot: _Snapshot,
        incoming: Incoming,
        cut: Cut | None,
        ordinals: tuple[int, ...],
    ) -> None:
        self._writer.submit(self._batch(row, found.known, snapshot, incoming, cut, ordinals))

    def _decided(
        self,
        row: ExchangeRow,
        found: Identified,
        snapshot: _Snapshot,
        incoming: Incoming,
        cut: Cut,
        ordinals: tuple[int, ...],
        selection: SelectionRow,
    ) -> None:
        batch = replace(self._batch(row, 0, snapshot, incoming, cut, ordinals), selections=(selection,))
        self._writer.submit(batch, durable=True).result()

    def _batch(
        self,
        row: ExchangeRow,
        known: int,
        snapshot: _Snapshot,
        incoming: Incoming,
        cut: Cut | None,
        ordinals: tuple[int, ...],
    ) -> Batch:
        """Everything of this request from message `known` on."""
        parsed, dialect, chain = incoming.parsed, incoming.dialect, incoming.chain
        ids = [row_id(link) for link in chain]
        new = range(known, len(chain))
        first = 0 if snapshot.parent_id is not None else known  # a branch has blocks of its own from the start
        blobs = [blob for blob in (parsed.instructions, parsed.tools) if blob]
        blocks = (
            BlockRow(
                session_id=snapshot.row.id,
                ordinal=ordinal,
                kind=block.kind,
                cost=block.cost,
                node_ids=tuple(ids[i] for i in block.messages),
                edits=block.edits,
                label=_label(dialect, [parsed.raw(i) for i in block.messages]),
            )
            for block, ordinal in (zip(cut.blocks, ordinals, strict=True) if cut else ())
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
                NodeRow(ids[i], chain[i], ids[i - 1] if i else None, row_id(parsed.digests[i]), i) for i in new
            ),
            sessions=(snapshot.row,),
            blocks=tuple(blocks),
            inherited=self._inherited(snapshot, ordinals),
            exchanges=(row,),
        )

    def _inherited(
        self, snapshot: _Snapshot, ordinals: tuple[int, ...]
    ) -> tuple[tuple[int, tuple[NodeState, ...], tuple[EdgeRow, ...]], ...]:
        """What the parent's graph knows of the blocks that a fork shares with it."""
        if snapshot.parent_id is None:
            return ()
        mine = set(ordinals)
        states = tuple(
            state
            for block, state in self._reader.load_blocks(snapshot.parent_id)
            if block.ordinal in mine and (state.observed or state.stale or state.u)
        )
        edges = tuple(
            edge
            for edge in self._reader.load_edges(snapshot.parent_id)
            if edge.support in mine and edge.dependent in mine
        )
        return ((snapshot.row.id, states, edges),) if states or edges else ()

    def _ended(self, row: ExchangeRow, session: SessionRow | None, dialect: Dialect, answer: Answer | None) -> None:
        messages: tuple[MessageRow, ...] = ()
        if answer is not None:
            usage = answer.usage
            row = replace(
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
            if row.session_id is not None:
                messages = tuple(
                    _message(raw, f"{dialect.message_text(raw)}\n{dialect.call_text(raw)}".strip())
                    for raw in answer.messages
                )
        answers = tuple(AnswerRow(row.id, position, message.id) for position, message in enumerate(messages))
        _log(row, session)
        self._writer.submit(
            Batch(
                messages=messages,
                sessions=(session,) if session is not None else (),
                exchanges=(row,),
                answers=answers,
            )
        )


def _message(raw: bytes, text: str) -> MessageRow:
    digest = message_digest(raw)
    return MessageRow(row_id(digest), digest, raw, text)


def _label(dialect: Dialect, raws: Sequence[bytes]) -> str:
    """The first message of a block that calls something names it; otherwise its first words."""
    calling = next((raw for raw in raws if dialect.call_text(raw)), raws[0])
    return dialect.label(calling)


def _report(job: "Future[object]") -> None:
    error = job.exception()
    if error is not None:
        log.warning("record.failed error=%r; the exchange went through", error)


def _log(row: ExchangeRow, session: SessionRow | None) -> None:
    took = f"{1000 * (row.ended_at - row.started_at):.0f}" if row.ended_at is not None else "-"
    first = f"{1000 * (row.first_byte_at - row.started_at):.0f}" if row.first_byte_at is not None else "-"
    log.info(
        "exchange session=%s turn=%s.%s outcome=%s boundary=%s reason=%r messages=%s/%s chars=%s/%s "
        "status=%s ending=%s input=%s cached=%s output=%s first_byte_ms=%s total_ms=%s%s",
        session.name if session else "-",
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
