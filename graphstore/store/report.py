"""Questions that people ask of the archive: figures over many rows, for the commands and the inspector.

Read-only, on top of a `Reader`. Everything is a sum over stored rows; nothing is estimated here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select

from graphstore.records import ExchangeRow, SelectionRow, SessionRow
from graphstore.store.paths import among, load_paths
from graphstore.store.reader import Reader
from graphstore.store.schema import (
    block_nodes,
    exchanges,
    messages,
    observation_blocks,
    observations,
    selection_blocks,
    selections,
    sessions,
)

BESIDE = ("side", "opaque")  # outcomes of requests that move no session


class UnknownSession(LookupError):
    """No session has this name."""


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One session with sums over its exchanges; token figures are the provider's.

    `latest`: the newest that moved the session, of any where none did. `running_since`: when the newest began that has
    not ended, as far as the archive knows. `answered`: some request of it was.
    """

    session: SessionRow
    exchanges: int
    input_tokens: int | None
    cached_tokens: int | None
    latest: ExchangeRow | None
    running_since: float | None
    answered: bool

    @property
    def blocks_left_out(self) -> int:
        return self.latest.blocks_left_out if self.latest is not None else 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a request by our own tokenizer: instructions, tools and messages; as it came and as it was sent."""

    full: int
    sent: int


class ExchangesStamp(NamedTuple):
    """Changes with every exchange that begins or ends: of a session, and of a branch's parent before it branched."""

    exchanges: int
    latest: int
    ended: float  # sum of the times at which they ended
    led: float  # the same sum over the parent's


def exchanges_stamps(reader: Reader) -> dict[int | None, ExchangesStamp]:
    """Session id -> stamp. None: of the exchanges that belong to no session."""
    e, s = exchanges.c, sessions.c
    query = select(e.session_id, func.count(), func.max(e.id), func.total(e.ended_at)).group_by(e.session_id)
    first = select(e.session_id, func.min(e.id).label("id")).group_by(e.session_id).subquery().c
    of_parent = and_(e.session_id == s.parent_id, e.id < first.id)
    leads = select(s.id, func.total(e.ended_at)).join(first.session_id.table, first.session_id == s.id)
    leads = leads.join(exchanges, of_parent).where(s.fork_depth.is_not(None)).group_by(s.id)
    with reader.snapshot() as db:
        led = dict(tuple(row) for row in db.execute(leads))
        rows = db.execute(query).all()
    return {session: ExchangesStamp(n, latest, ended, led.get(session, 0.0)) for session, n, latest, ended in rows}


def lead_of(reader: Reader, session: SessionRow, exchanges: Sequence[ExchangeRow]) -> list[ExchangeRow]:
    """What the parent of a branch had sent before these, which are the branch's own; nothing of any other session."""
    if session.parent_id is None or session.fork_depth is None or not exchanges:
        return []
    return [row for row in reader.session_exchanges(session.parent_id) if row.id < exchanges[0].id]


def recent_exchanges(reader: Reader, limit: int) -> list[tuple[SessionRow, list[ExchangeRow]]]:
    """The latest exchanges by session, each session's in order."""
    e = exchanges.c
    query = select(exchanges).where(e.session_id.is_not(None)).order_by(e.id.desc()).limit(limit)
    found: dict[int, list[ExchangeRow]] = {}
    with reader.snapshot() as db:
        for row in db.execute(query):
            found.setdefault(row.session_id, []).append(ExchangeRow(**row._mapping))
    known = {session.id: session for session in reader.list_sessions()}
    return [(known[id], rows[::-1]) for id, rows in found.items() if id in known]


class TurnOpening(NamedTuple):
    """A turn as its requests tell of it. `pause_s`: before the first one, None: nothing was sent before it."""

    requests: int
    pause_s: float | None


def turn_openings(reader: Reader, session_id: int, limit: int) -> list[TurnOpening]:
    """Of the latest turns, in order."""
    e = exchanges.c
    first = func.max(case((e.step == 0, e.idle_s), else_=None))
    own = and_(e.session_id == session_id, e.outcome.not_in(("side", "opaque", "retry")))
    query = select(func.count(), first).where(own).group_by(e.turn).order_by(e.turn.desc()).limit(limit)
    with reader.snapshot() as db:
        return [TurnOpening(*row) for row in db.execute(query)][::-1]


def find_session(reader: Reader, reference: str) -> SessionRow:
    """By name or the beginning of one. Raises `UnknownSession` or `AmbiguousSession`."""
    session = reader.load_session(reference)
    if session is None:
        raise UnknownSession(f"no session is called {reference!r}; `recap sessions` lists them")
    return session


def latest_answer(reader: Reader, session: SessionRow) -> list[bytes]:
    """What the model said last and no history holds yet: clients send it along with the next request."""
    last = [row for row in reader.session_exchanges(session.id) if row.head_node_id == session.head_node_id][-1:]
    ids = [i for members in reader.answers_of([row.id for row in last]).values() for i in members]
    contents = reader.message_contents(ids)
    return [contents[i] for i in ids]


def cached_of(row: ExchangeRow) -> int | None:
    """Input tokens from the cache: no more than there were, whatever the provider says."""
    if row.cached_tokens is None or row.input_tokens is None:
        return None
    return min(row.cached_tokens, row.input_tokens)


def summaries(reader: Reader) -> list[SessionSummary]:
    """All sessions, the most recently active first."""
    e = exchanges.c
    latest = func.coalesce(func.max(case((e.outcome.not_in(BESIDE), e.id))), func.max(e.id)).label("latest")
    running = func.max(case((e.ending == "running", e.started_at)))
    answered = func.max(case((e.status < 400, 1), else_=0))
    from_cache = func.sum(func.min(e.cached_tokens, e.input_tokens))  # see `cached_of`
    query = select(e.session_id, func.count(), func.sum(e.input_tokens), from_cache, latest, running, answered)
    with reader.snapshot() as db:
        sums = {row[0]: row for row in db.execute(query.group_by(e.session_id))}
        rows = among(db, select(exchanges), e.id, (row.latest for row in sums.values()))
        last = {row.id: ExchangeRow(**row._mapping) for row in rows}
    found = []
    for session in reader.list_sessions():
        none = (session.id, 0, None, None, None, None, 0)
        _, count, given, cached, newest, since, served = sums.get(session.id, none)
        found.append(SessionSummary(session, count, given, cached, last.get(newest), since, bool(served)))
    return found


def selection_of(reader: Reader, exchange_id: int) -> SelectionRow | None:
    """The selection that was made at this exchange, if any."""
    return _selection(reader, selections.c.exchange_id == exchange_id)


def latest_selection(reader: Reader, session_id: int) -> SelectionRow | None:
    return _selection(reader, selections.c.session_id == session_id)


def selection_before(reader: Reader, selection: SelectionRow) -> SelectionRow | None:
    """What was in force when this one was made: of the request before it, which a branch may have from its parent.

    None: that request was sent in full.
    """
    c = exchanges.c
    own = and_(c.id < selection.exchange_id, c.outcome.not_in(BESIDE))
    session = reader.load_session(selection.session_id)
    while session is not None:
        query = select(c.selection_id, c.fell_back).where(own, c.session_id == session.id).order_by(c.id.desc())
        with reader.snapshot() as db:
            last = db.execute(query.limit(1)).first()
        if last is not None:
            return reader.load_selection(last.selection_id) if last.selection_id and not last.fell_back else None
        session = reader.load_session(session.parent_id) if session.parent_id is not None else None
    return None


def _selection(reader: Reader, condition: ColumnElement[bool]) -> SelectionRow | None:
    query = select(selections.c.id).where(condition).order_by(selections.c.id.desc()).limit(1)
    with reader.snapshot() as db:
        found = db.scalar(query)
    return reader.load_selection(found) if found is not None else None


def left_out_of(reader: Reader, exchange: ExchangeRow) -> frozenset[int]:
    """Blocks that were left out of a request as it was sent."""
    if not exchange.blocks_left_out or exchange.selection_id is None:
        return frozenset()
    selection = reader.load_selection(exchange.selection_id)
    return frozenset(v.ordinal for v in selection.verdicts if not v.kept) if selection is not None else frozenset()


class BlockVersion(NamedTuple):
    """What a block said, message by message, and the turns of the requests in which it said so."""

    messages: tuple[int, ...]
    turns: tuple[int, ...]


def block_versions(reader: Reader, session_id: int, ordinal: int) -> list[BlockVersion]:
    """The latest first. One that was only the beginning of another is none of its own."""
    places = reader.block_messages(session_id).get(ordinal, {})
    rows = [row for row in reader.session_exchanges(session_id) if row.outcome not in BESIDE]
    with reader.snapshot() as db:
        paths = load_paths(db, (row.head_node_id for row in rows if row.head_node_id is not None))
    found: dict[tuple[int, ...], set[int]] = {}
    for row in reversed(rows):
        if (path := paths.get(row.head_node_id or 0)) is None:
            continue
        messages = tuple(message for node, message in places.items() if node in path)
        whole = next((known for known in found if known[: len(messages)] == messages), messages)
        if messages:
            found.setdefault(whole, set()).add(row.turn)
    return [BlockVersion(messages, tuple(sorted(turns))) for messages, turns in found.items()]


class Reading(NamedTuple):
    """What the replay of one turn measured of a block."""

    turn: int
    density: float
    mass: float


def block_readings(reader: Reader, session_id: int, ordinal: int) -> list[Reading]:
    """In order of turns."""
    query = (
        select(observations.c.turn, observation_blocks.c.density, observation_blocks.c.mass)
        .join(observation_blocks, observation_blocks.c.observation_id == observations.c.id)
        .where(observations.c.session_id == session_id, observation_blocks.c.ordinal == ordinal)
        .order_by(observations.c.turn)
    )
    with reader.snapshot() as db:
        return [Reading(*row) for row in db.execute(query)]


def failed_exchanges(reader: Reader, limit: int, *, running_since: float) -> list[ExchangeRow]:
    """The newest exchanges that went wrong, the newest first. A client that left has not.

    What still runs and began before `running_since` (a Unix time) belonged to a proxy that was killed.
    """
    c = exchanges.c
    interrupted = and_(c.ending == "running", c.started_at < running_since)
    wrong = or_(c.error.is_not(None), c.status >= 400, c.ending.in_(("upstream broken", "failed")), interrupted)
    query = select(exchanges).where(wrong, c.ending != "client gone").order_by(c.id.desc()).limit(limit)
    with reader.snapshot() as db:
        return [ExchangeRow(**row._mapping) for row in db.execute(query)]


def last_answered(reader: Reader) -> ExchangeRow | None:
    """The newest exchange of all that ended by the upstream's doing: it does not run, and no client left."""
    c = exchanges.c
    query = select(exchanges).where(c.ending.not_in(("running", "client gone"))).order_by(c.id.desc()).limit(1)
    with reader.snapshot() as db:
        row = db.execute(query).first()
        return ExchangeRow(**row._mapping) if row is not None else None


def exchange_tokens(reader: Reader, rows: Sequence[ExchangeRow]) -> dict[int, Tokens]:
    """Exchange id -> tokens. One walk for all histories that go on from one another."""
    with reader.snapshot() as db:
        blobs = {row.instructions_id for row in rows} | {row.tools_id for row in rows} - {None}
        fixed = dict(
            tuple(row) for row in db.execute(select(messages.c.id, messages.c.tokens).where(messages.c.id.in_(blobs)))
        )
        paths = load_paths(db, (row.head_node_id for row in rows if row.head_node_id is not None))
        gone: dict[tuple[int | None, int | None], frozenset[int]] = {}  # a selection holds for many exchanges
        result = {}
        for row in rows:
            full = sum(fixed.get(blob, 0) for blob in (row.instructions_id, row.tools_id) if blob is not None)
            path = paths.get(row.head_node_id or 0)
            if path is None:
                result[row.id] = Tokens(full, full)
                continue
            less = 0
            if row.blocks_left_out:
                key = (row.session_id, row.selection_id)
                if key not in gone:
                    gone[key] = _left_out(db, row)
                less = path.tokens_of(gone[key])
            result[row.id] = Tokens(full + path.tokens, full + path.tokens - less)
        return result


def _left_out(db: Connection, row: ExchangeRow) -> frozenset[int]:
    """Nodes of the blocks that the exchange's selection left out."""
    verdict = selection_blocks.c
    query = (
        select(block_nodes.c.node_id)
        .join(selection_blocks, verdict.ordinal == block_nodes.c.ordinal)
        .where(block_nodes.c.session_id == row.session_id, verdict.selection_id == row.selection_id)
        .where(case((verdict.kept, 0), else_=1) == 1)
    )
    return frozenset(db.scalars(query))
