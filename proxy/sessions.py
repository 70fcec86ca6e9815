"""Sessions in memory: which conversation an arriving history belongs to.

The registry keeps the recently active sessions and loads others from the archive when a history or a client id asks for
them. It identifies (DESIGN words: extension, retry, undo, amendment, fork, client compaction, client pruning, new,
side); it decides nothing and sends nothing.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal, Protocol

from graphstore.blocks import Cut, Message, cut_blocks, extend_cut
from graphstore.identity import chain_digests, message_digest, row_id
from graphstore.records import Arm, ExchangeRow, Outcome, SelectionRow, SessionRow
from graphstore.selection import turn_reached_into
from proxy.cache_watch import CacheWatch
from proxy.clients import Caller
from proxy.dialects.base import Dialect, ParsedRequest
from proxy.lineage import Relation, Version, changed_in_place, relate

SESSIONS_IN_MEMORY = 256  # about 100 kB each for a history of 500 messages
SUMMARIES_KEPT = 32  # answers to summary requests, by which a compacted history is recognised
SUMMARY_CHARS_MIN = 12  # shorter answers occur in other texts by chance
SUMMARY_SEARCHED_MESSAGES = 8  # a summary stands at the head of a compacted history, after the client's own context
RECENT_SESSIONS_COMPARED = 8
SHARED_MIN = 4  # messages after which an equal history is the same conversation even under changed instructions
AGENT_ROLES = frozenset({"assistant", "call", "output", "reasoning"})


class NeedsDisk(Exception):
    """The archive must be read, which the caller has not allowed here: try again in a thread."""


class SessionSource(Protocol):
    """What the registry asks of the archive."""

    def sessions_by_client_id(self, scope: bytes, client_id: str) -> list[SessionRow]: ...
    def sessions_by_heads(self, node_ids: Sequence[int]) -> list[SessionRow]: ...
    def sessions_through(self, node_ids: Sequence[int]) -> list[SessionRow]: ...
    def recent_sessions(self, scope: bytes, limit: int) -> list[SessionRow]: ...
    def load_path(self, head_node_id: int) -> list[tuple[int, bytes, int, bytes]]: ...
    def block_ordinals(self, session_id: int) -> dict[int, int]: ...
    def load_selection(self, selection_id: int) -> SelectionRow | None: ...
    def message_contents(self, ids: Sequence[int]) -> dict[int, bytes]: ...


@dataclass(slots=True)
class Session:
    """One conversation as it stands: its row, its present history as chain and message digests, and what it sends."""

    row: SessionRow
    chain: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    ordinals: dict[int, int] = field(default_factory=dict)  # chain node id -> block ordinal
    next_ordinal: int = 0
    left_out: frozenset[int] = frozenset()  # ordinals that the present selection leaves out
    stored: frozenset[int] = frozenset()  # ... and that its row in the archive says are left out: never fewer
    sent: tuple[bytes, ...] | None = None  # digests of the message array as last sent, None: not known
    window: str | None = None
    step: int = 0
    in_flight: int = 0
    has_gap: bool = False  # the archive lost some of this history: it gets all of it with the next request
    into_turn: int | None = None  # ordinal of the request whose own older steps the present selection leaves out too
    unrelieved: int | None = None  # tokens that it had to leave in although the window is too small; None: it is not
    queued_turn: int = 0  # the last turn whose end was seen, and which therefore waits for its replay already
    watch: CacheWatch = field(default_factory=CacheWatch)
    ended: ExchangeRow | None = None  # the exchange that ended last, as far as it was seen to end
    forgotten: bool = False  # a person or the retention removed it: nothing of it is recorded any more
    is_orphan: bool = False  # the archive lost the session that it branched from
    cut: Cut = Cut((), ())
    cut_length: int = 0  # messages that `cut` covers
    block_ordinals: list[int] = field(default_factory=list)  # aligned with the blocks of `cut`

    def follow(self, chain: list[bytes], digests: list[bytes]) -> None:
        self.chain, self.digests = chain, digests

    def drop_selection(self) -> None:
        """Send everything from now on."""
        self.left_out, self.into_turn, self.unrelieved = frozenset(), None, None
        self.row = replace(self.row, selection_id=None)

    def reaches_into_turn(self, cut: Cut, ordinals: Sequence[int]) -> bool:
        """Whether the turn that is under way is the one whose older steps the present selection may leave out."""
        request = cut.request if self.into_turn is not None else None
        return request is not None and ordinals[request] == self.into_turn

    def standing(self) -> frozenset[int]:
        """Ordinals of the blocks in the present history, as far as they are numbered."""
        nodes = map(row_id, self.chain)
        return frozenset(self.ordinals[node] for node in nodes if node in self.ordinals)

    def cut_history(self, messages: Sequence[Message], known: int) -> tuple[Cut, list[int]]:
        """Blocks of the present history and the ordinal of each; blocks seen for the first time get the next numbers.

        The first `known` messages are those of the cut before.
        """
        before, cut = self.cut, extend_cut(self.cut, messages) if known == self.cut_length else cut_blocks(messages)
        stable = 0
        for old, new in zip(before.blocks, cut.blocks, strict=False):
            if old is not new:
                break
            stable += 1
        ordinals = self.block_ordinals[:stable]
        for block in cut.blocks[stable:]:
            ids = [row_id(self.chain[i]) for i in block.messages]
            number = next((self.ordinals[node] for node in ids if node in self.ordinals), None)
            if number is None:
                number, self.next_ordinal = self.next_ordinal, self.next_ordinal + 1
            for node in ids:
                self.ordinals.setdefault(node, number)
            ordinals.append(number)
        self.cut, self.cut_length, self.block_ordinals = cut, len(messages), ordinals
        return cut, ordinals


@dataclass(frozen=True, slots=True)
class Incoming:
    """A parsed request with everything that identifies it."""

    parsed: ParsedRequest
    caller: Caller
    dialect: Dialect
    scope: bytes
    upstream: str
    chain: list[bytes]
    instructions_id: int | None
    tools_id: int | None
    at: float

    @classmethod
    def of(
        cls, parsed: ParsedRequest, caller: Caller, dialect: Dialect, *, scope: bytes, upstream: str, at: float
    ) -> "Incoming":
        return cls(
            parsed=parsed,
            caller=caller,
            dialect=dialect,
            scope=scope,
            upstream=upstream,
            chain=chain_digests(scope, parsed.digests),
            instructions_id=row_id(message_digest(parsed.instructions)) if parsed.instructions else None,
            tools_id=row_id(message_digest(parsed.tools)) if parsed.tools else None,
            at=at,
        )

    def text(self, index: int) -> str:
        return self.dialect.message_text(self.parsed.raw(index))

    def versions(self, start: int) -> list[Version]:
        return [
            Version(digest, message, lambda i=i: self.text(i))  # type: ignore[misc]  # i is bound, not passed
            for i, (digest, message) in enumerate(zip(self.parsed.digests, self.parsed.messages, strict=True))
            if i >= start
        ]


@dataclass(frozen=True, slots=True)
class Identified:
    session: Session
    outcome: Outcome
    known: int  # leading messages that the archive already has at this position
    parent: Session | None = None  # a fork inherits what the graph knows of the shared part
    shared_ordinals: frozenset[int] = frozenset()  # ... which are these blocks
    resent: Mapping[int, int] = field(default_factory=dict)  # node id -> ordinal that its message had elsewhere before
    origin: Session | None = None  # the one that a new session names as its parent, or that it is a side session of

    def resent_blocks(self, cut: Cut, ordinals: Sequence[int]) -> dict[int, int]:
        """Ordinal -> that of the former block with the same messages, of blocks that a compaction moved."""
        found = {}
        for block, ordinal in zip(cut.blocks, ordinals, strict=False) if self.resent else ():
            former = {self.resent.get(row_id(self.session.chain[i])) for i in block.messages}
            if len(former) == 1 and (number := former.pop()) is not None:
                found[ordinal] = number
        return found


@dataclass(frozen=True, slots=True)
class _Match:
    session: Session
    relation: Relation
    shared: int


class Registry:
    """Not thread-safe: requests are planned one after the other."""

    def __init__(
        self,
        source: SessionSource,
        *,
        settle: Callable[[], None],
        next_session_id: int,
        draw: Callable[[str], Arm | None] = lambda name: None,
    ) -> None:
        """`settle` waits, within limits, until what was recorded so far can be read from `source`; `draw` gives the arm
        of a session of this name that begins."""
        self._source = source
        self._draw = draw
        self._settle = settle
        self._disk = True
        self._ids = count(next_session_id)
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._by_head: dict[bytes, int] = {}
        self.matches_by_history = 0  # requests that found their session without an id of the client's
        self._summaries: deque[tuple[bytes, str, int]] = deque(maxlen=SUMMARIES_KEPT)
        self._forgotten: set[int] = set()  # until the archive has removed them, and after: ids are not used twice

    def named(self, incoming: Incoming, *, disk: bool) -> Session | None:
        """The latest session with the client's own id, if any: where an opaque request is noted."""
        if incoming.caller.client_id is None:
            return None
        self._disk = disk
        found = [s for s in self._candidates(incoming) if s.row.client_id == incoming.caller.client_id]
        return max(found, key=lambda s: s.row.last_active_at, default=None)

    def remember_summary(self, session: Session, text: str) -> None:
        """Keep the answer to a summary request: the client's next history may begin with it."""
        of = session.row.parent_id if session.row.kind == "side" else session.row.id
        if of is not None and len(text.strip()) >= SUMMARY_CHARS_MIN:
            self._summaries.append((session.row.scope, text.strip(), of))

    def forget(self, ids: Collection[int]) -> None:
        """Know these sessions no more, nor what was asked beside them; their branches stand alone.

        A request that is still running for one of them is not recorded.
        """
        gone = set(ids)
        rows = [s.row for s in self._sessions.values()]
        named = {(row.scope, row.client_id) for row in rows if row.id in gone and row.client_id is not None}
        while more := {row.id for row in rows if _is_beside(row, gone, named)} - gone:
            gone |= more
        self._forgotten |= gone
        for id in gone & self._sessions.keys():
            self._sessions.pop(id).forgotten = True
        self._by_head = {link: id for link, id in self._by_head.items() if id not in gone}
        self._summaries = deque((s for s in self._summaries if s[2] not in gone), maxlen=SUMMARIES_KEPT)
        for session in self._sessions.values():
            if session.row.parent_id in gone:
                session.row = replace(session.row, parent_id=None, fork_depth=None)

    def last_active(self) -> dict[int, float]:
        """Session id -> when it was active last, of those in memory; for ever in the future while a request runs."""
        return {s.row.id: math.inf if s.in_flight else s.row.last_active_at for s in self._sessions.values()}

    def identify(self, incoming: Incoming, *, disk: bool) -> Identified:
        """Find or start the session of a request and move its history there.

        Reads the archive at most a few times, for what is not in memory; without `disk` it raises `NeedsDisk` instead,
        with nothing changed.
        """
        found = self._identify(incoming, disk=disk)
        if incoming.caller.client_id is None and found.outcome not in ("new", "side"):
            self.matches_by_history += 1
        return found

    def _identify(self, incoming: Incoming, *, disk: bool) -> Identified:
        self._disk = disk
        own = self._candidates(incoming)
        best = self._best(own, incoming)
        side = self._side(incoming, best, own)
        if side is not None:
            return side
        if best is None or best.relation == "diverged":
            compacted = self._compacted(incoming, best, own)
            if compacted is not None:
                return self._moved(compacted, incoming, "client compaction", known=0)
        if best is None:
            return self._changed_elsewhere(incoming) or self._start(incoming)
        if best.relation == "diverged":
            return self._diverged(incoming, best)
        if best.session.row.kind == "side":
            best.session.row = replace(best.session.row, kind="agent")
        if self._is_foreign(best.session, incoming):
            return self._fork(incoming, best)
        return self._moved(best.session, incoming, best.relation, known=best.shared)

    @staticmethod
    def _is_foreign(session: Session, incoming: Incoming) -> bool:
        """Clients of different ids, or with and without one, may share a history; none moves another's session."""
        return session.row.client_id != incoming.caller.client_id

    # -- candidates ---------------------------------------------------------------------------------------------

    def _candidates(self, incoming: Incoming) -> list[Session]:
        """Sessions with the client's own id; without one, those whose history this may be."""
        caller = incoming.caller
        if caller.client_id is not None:
            named = [
                s
                for s in self._sessions.values()
                if (s.row.scope, s.row.client_id) == (incoming.scope, caller.client_id)
            ]
            if not named:
                named = self._load(lambda source: source.sessions_by_client_id(incoming.scope, caller.client_id or ""))
            if any(s.row.kind == "agent" for s in named):
                return [s for s in named if s.row.kind == "agent"]
            return self._by_history(incoming)
        return self._by_history(incoming)

    def _by_history(self, incoming: Incoming) -> list[Session]:
        for link in reversed(incoming.chain):
            session = self._sessions.get(self._by_head.get(link, -1))
            if session is not None and self._may_be(session, incoming):
                return [session]
        ids = [row_id(link) for link in incoming.chain]
        found = self._load(lambda source: source.sessions_by_heads(ids))
        if not found:
            found = self._load(lambda source: source.sessions_through(ids))
        found += [s for s in self._sessions.values() if s not in found and s.chain[:1] == incoming.chain[:1]]
        return [s for s in found if self._may_be(s, incoming)]

    @staticmethod
    def _may_be(session: Session, incoming: Incoming) -> bool:
        """Equal beginnings are not yet one conversation: two chats may share a greeting under other instructions."""
        if session.row.scope != incoming.scope:
            return False
        relation, shared = relate(session.chain, incoming.chain)
        spoken = any(m.role in AGENT_ROLES for m in incoming.parsed.messages[:shared])
        if relation in ("undo", "diverged") and not spoken:
            return False
        return session.row.instructions_id == incoming.instructions_id or shared >= SHARED_MIN

    def _best(self, candidates: list[Session], incoming: Incoming) -> _Match | None:
        order = {"extension": 3, "retry": 3, "undo": 2, "diverged": 1}
        matches = [_Match(s, *relate(s.chain, incoming.chain)) for s in candidates]
        return max(matches, key=lambda m: (order[m.relation], m.shared, m.session.row.last_active_at), default=None)

    def _load(self, query: Callable[[SessionSource], list[SessionRow]]) -> list[Session]:
        self._need_disk()
        found = [row for row in query(self._source) if row.id not in self._forgotten]
        return [self._sessions.get(row.id) or self._restore(row) for row in found]

    def _need_disk(self) -> None:
        if not self._disk:
            raise NeedsDisk

    def _restore(self, row: SessionRow) -> Session:
        """Bring a session back from the archive, with the selection that it was sending."""
        session = Session(row)
        if row.head_node_id is not None:
            path = self._source.load_path(row.head_node_id)
            session.follow([digest for _, digest, _, _ in path], [digest for _, _, _, digest in path])
        session.ordinals = self._source.block_ordinals(row.id)
        session.next_ordinal = max(session.ordinals.values(), default=-1) + 1
        if row.selection_id is not None and (selection := self._source.load_selection(row.selection_id)):
            session.left_out = session.stored = frozenset(v.ordinal for v in selection.verdicts if not v.kept)
            session.into_turn = turn_reached_into(selection)
            named = max((v.ordinal for v in selection.verdicts), default=-1)
            session.next_ordinal = max(session.next_ordinal, named + 1)
        self._keep(session)
        return session

    def _keep(self, session: Session) -> None:
        self._sessions[session.row.id] = session
        self._sessions.move_to_end(session.row.id)
        if session.chain:
            self._by_head[session.chain[-1]] = session.row.id
        while len(self._sessions) > SESSIONS_IN_MEMORY:
            idle = next((s for s in self._sessions.values() if s.in_flight == 0), None)
            if idle is None:
                break
            del self._sessions[idle.row.id]
            if idle.chain and self._by_head.get(idle.chain[-1]) == idle.row.id:
                del self._by_head[idle.chain[-1]]

    # -- outcomes -----------------------------------------------------------------------------------------------

    def _side(self, incoming: Incoming, best: _Match | None, own: list[Session]) -> Identified | None:
        """Titles, summaries and the like: recorded beside the session, never moving or rewriting it."""
        parsed, caller = incoming.parsed, incoming.caller
        continues = best is not None and best.relation in ("extension", "retry")
        if caller.compacting and best is not None:
            return Identified(best.session, "side", best.shared)
        if best is not None and _is_another_agent(incoming, best.session.row):
            return self._begin(incoming, "side", best.session)
        if parsed.tools or parsed.opaque:
            return None
        if continues and best is not None and best.session.row.tools_id is not None:
            return Identified(best.session, "side", best.shared)
        spoken = any(message.role in AGENT_ROLES for message in parsed.messages)
        other = bool(own) and all(s.row.instructions_id != incoming.instructions_id for s in own)
        if spoken or not (caller.always_sends_tools or other):
            return None
        return self._begin(incoming, "side", best.session if best else (own[-1] if own else None))

    def _compacted(self, incoming: Incoming, best: _Match | None, own: list[Session]) -> Session | None:
        """The session whose history this client replaced by a summary, if there is evidence that it did."""
        named = [s for s in own if s.row.client_id == incoming.caller.client_id] if incoming.caller.client_id else []
        newest = max(named, key=lambda s: s.row.last_active_at, default=None)
        if newest is not None:
            window = incoming.caller.window
            if window and newest.window and window != newest.window:
                return newest
            if any(b'"compaction"' in incoming.parsed.raw(i)[:200] for i in range(self._head_size(incoming))):
                return newest
        texts = [incoming.text(i) for i in range(self._head_size(incoming))]
        for scope, summary, session_id in reversed(tuple(self._summaries)):
            session = self._sessions.get(session_id)
            if session is None or scope != incoming.scope or self._is_foreign(session, incoming):
                continue
            if incoming.caller.client == session.row.client and any(summary in text for text in texts):
                return session
        return None

    @staticmethod
    def _head_size(incoming: Incoming) -> int:
        return min(len(incoming.parsed.messages), max(SUMMARY_SEARCHED_MESSAGES, len(incoming.parsed.messages) // 2))

    def _diverged(self, incoming: Incoming, best: _Match) -> Identified:
        change = None if self._is_foreign(best.session, incoming) else self._change(incoming, best)
        if change is not None:
            outcome: Outcome = "client pruning" if change == "pruning" else "amendment"
            return self._moved(best.session, incoming, outcome, known=best.shared)
        return self._fork(incoming, best) if best.shared else self._start(incoming)

    def _change(self, incoming: Incoming, match: _Match) -> str | None:
        if len(incoming.chain) <= len(match.session.chain):
            return None
        self._need_disk()
        known = match.session.digests[match.shared :]
        contents = self._contents(known)
        if contents is None:  # the last of them may still be on their way; nobody waits unless they are
            self._settle()
            contents = self._contents(known)
        if contents is None:
            return None
        dialect, same = incoming.dialect, [incoming.parsed.raw(i) for i in range(match.shared)]
        raws = [contents[row_id(digest)] for digest in known]
        messages = dialect.parse_messages([*same, *raws])[match.shared :]
        old = [
            Version(digest, message, lambda raw=raw: dialect.message_text(raw))  # type: ignore[misc]
            for digest, message, raw in zip(known, messages, raws, strict=True)
        ]
        return changed_in_place(old, incoming.versions(match.shared))

    def _contents(self, digests: Sequence[bytes]) -> dict[int, bytes] | None:
        """Raw bytes of all these messages by id; None unless the archive has every one."""
        contents = self._source.message_contents([row_id(digest) for digest in digests])
        return contents if all(row_id(digest) in contents for digest in digests) else None

    def _changed_elsewhere(self, incoming: Incoming) -> Identified | None:
        """A client without ids whose first messages changed (a date, a folder listing): look at its recent sessions."""
        if incoming.caller.client_id is not None or len(incoming.chain) < 3:
            return None
        self._load(lambda source: source.recent_sessions(incoming.scope, RECENT_SESSIONS_COMPARED))
        for session in list(reversed(self._sessions.values()))[:RECENT_SESSIONS_COMPARED]:
            row = session.row
            if (row.scope, row.client, row.kind) != (incoming.scope, incoming.caller.client, "agent"):
                continue
            if row.client_id is not None or not set(session.digests) & set(incoming.parsed.digests):
                continue
            match = _Match(session, "diverged", 0)
            if self._change(incoming, match) is not None:
                return self._moved(session, incoming, "amendment", known=0)
        return None

    def _moved(self, session: Session, incoming: Incoming, outcome: Outcome, *, known: int) -> Identified:
        former, spoken = session.chain, session.digests
        if session.chain and self._by_head.get(session.chain[-1]) == session.row.id:
            del self._by_head[session.chain[-1]]
        session.follow(incoming.chain, list(incoming.parsed.digests))
        if outcome not in ("extension", "retry"):
            session.cut_length = -1
        if outcome in ("client pruning", "amendment"):  # the messages stand where they stood
            for old, new in zip(former, session.chain, strict=False):
                if (ordinal := session.ordinals.get(row_id(old))) is not None:
                    session.ordinals.setdefault(row_id(new), ordinal)
        if outcome == "undo" and session.left_out:  # what the client took back is new if it ever comes again
            session.left_out = session.left_out.intersection(session.standing())
        resent: dict[int, int] = {}
        if outcome == "client compaction":
            resent = _resent(session, former, spoken)
            session.drop_selection()
        session.window = incoming.caller.window
        self._keep(session)
        return Identified(session, outcome, known, resent=resent)

    def _fork(self, incoming: Incoming, match: _Match) -> Identified:
        """A branch: it shares the parent's beginning, and with it the provider's cache of what was sent for it."""
        parent = match.session
        opening = not any(message.role in AGENT_ROLES for message in incoming.parsed.messages[: match.shared])
        session = self._new(incoming, kind="agent", parent=parent, fork_depth=match.shared, is_drawn=opening)
        shared = [row_id(link) for link in incoming.chain[: match.shared]]
        session.ordinals = {node: parent.ordinals[node] for node in shared if node in parent.ordinals}
        session.next_ordinal = parent.next_ordinal  # until it has its own selection: that may name any block of it
        session.left_out, session.stored = parent.left_out & session.standing(), parent.stored
        session.into_turn = parent.into_turn
        session.row = replace(
            session.row,
            last_active_at=parent.row.last_active_at,
            selection_id=parent.row.selection_id if session.left_out else None,
            state=parent.row.state,
            state_reason=parent.row.state_reason,
            model=parent.row.model,
            instructions_id=parent.row.instructions_id,
            tools_id=parent.row.tools_id,
            turns=user_runs(incoming.parsed.messages[: match.shared]),
        )
        session.sent = parent.sent
        return Identified(session, "fork", match.shared, parent, frozenset(session.ordinals.values()))

    def _start(self, incoming: Incoming) -> Identified:
        parent_id = incoming.caller.parent_id
        parent = next((s for s in self._sessions.values() if parent_id and s.row.client_id == parent_id), None)
        return self._begin(incoming, "new", parent)

    def _begin(self, incoming: Incoming, outcome: Literal["new", "side"], origin: Session | None) -> Identified:
        session = self._new(incoming, kind="agent" if outcome == "new" else "side", parent=origin)
        return Identified(session, outcome, 0, origin=origin)

    def _new(
        self,
        incoming: Incoming,
        *,
        kind: Literal["agent", "side"],
        parent: Session | None = None,
        fork_depth: int | None = None,
        is_drawn: bool = False,
    ) -> Session:
        """`is_drawn`: its arm is its own, whatever its parent's; two tasks may begin with the same words."""
        session_id = next(self._ids)
        name = session_name(session_id, incoming.scope)
        session = Session(
            SessionRow(
                id=session_id,
                name=name,
                scope=incoming.scope,
                upstream=incoming.upstream,
                dialect=incoming.parsed.dialect,
                client=incoming.caller.client,
                client_id=incoming.caller.client_id,
                kind=kind,
                model=incoming.parsed.model,
                instructions_id=incoming.instructions_id,
                tools_id=incoming.tools_id,
                parent_id=parent.row.id if parent else None,
                fork_depth=fork_depth,
                head_node_id=None,
                state="normal",
                state_reason=None,
                turns=0,
                selection_id=None,
                created_at=incoming.at,
                last_active_at=incoming.at,
                title=_title(incoming),
                arm=self._draw(name) if parent is None or is_drawn else parent.row.arm,
            ),
            window=incoming.caller.window,
        )
        session.follow(incoming.chain, list(incoming.parsed.digests))
        self._keep(session)
        return session


def _is_beside(row: SessionRow, ids: Collection[int], named: Collection[tuple[bytes, str | None]]) -> bool:
    is_named = row.parent_id is None and (row.scope, row.client_id) in named
    return row.kind == "side" and (row.parent_id in ids or is_named)


def _is_another_agent(incoming: Incoming, row: SessionRow) -> bool:
    """A client without ids that goes over a session's history under other instructions and with other tools.

    Qwen Code does so after a turn to extract memories: that agent must read everything, and the session itself goes on
    without it. One of the two alone is a new day or a switched mode.
    """
    return (
        incoming.caller.client_id is None
        and row.kind == "agent"
        and None not in (row.tools_id, incoming.tools_id)
        and row.tools_id != incoming.tools_id
        and row.instructions_id != incoming.instructions_id
    )


def _resent(session: Session, chain: Sequence[bytes], digests: Sequence[bytes]) -> dict[int, int]:
    """New node id -> former ordinal of the same message; of equal ones the latest first, for those are what is kept.

    `chain` and `digests` are the history before.
    """
    places: dict[bytes, list[int]] = {}
    for link, digest in zip(chain, digests, strict=True):
        if (ordinal := session.ordinals.get(row_id(link))) is not None:
            places.setdefault(digest, []).append(ordinal)
    known = zip(reversed(session.chain), reversed(session.digests), strict=True)
    found = {row_id(link): places[digest].pop() for link, digest in known if places.get(digest)}
    return {node: ordinal for node, ordinal in found.items() if node not in session.ordinals}


def user_runs(messages: Sequence[Message]) -> int:
    """Number of user requests in a history: runs of consecutive user messages count once."""
    roles = [message.role for message in messages]
    return sum(1 for i, role in enumerate(roles) if role == "user" and (i == 0 or roles[i - 1] != "user"))


def session_name(session_id: int, scope: bytes) -> str:
    """A short public name: stable, easy to type, unique by the number at its end."""
    letters = "abcdefghjkmnpqrstvwxyz23456789"
    mixed = int.from_bytes(message_digest(scope + session_id.to_bytes(8, "big"))[:4], "big")
    word = "".join(letters[(mixed // len(letters) ** i) % len(letters)] for i in range(4))
    return f"{word}{session_id}"


def _title(incoming: Incoming) -> str:
    """The first line that the user wrote: the last user message of a first request, past the client's own context."""
    users = [i for i, message in enumerate(incoming.parsed.messages) if message.role == "user"]
    text = incoming.text(users[-1] if users else 0) if incoming.parsed.messages else ""
    return next((line.strip()[:80] for line in text.splitlines() if line.strip()), "")
