"""Rows of the archive as values: what the proxy hands to the store's writer and gets back from its reader.

Integer ids are given by the caller (one process owns the archive), so that the request path never waits for a commit.
All times are seconds since the epoch, UTC, as float. Digests are 16 bytes (`identity`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Outcome = Literal[
    "new", "extension", "retry", "undo", "amendment", "fork", "client compaction", "client pruning", "side", "opaque"
]
BoundaryKind = Literal["cold", "warm", "step", "none"]
Ending = Literal["complete", "client gone", "upstream broken", "failed", "running"]
Arm = Literal["held out", "treated"]  # of the comparison between sessions left untouched and all others
Mark = Literal["pin", "mute"]  # what a person says of a block: send it always, never pack it


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A content-addressed blob: one message, one instruction set or one tools array."""

    id: int
    digest: bytes
    content: bytes  # raw JSON as the client sent it; the writer compresses
    text: str | None  # what tokens are counted over; None: count nothing (the writer stores 0)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One position of a history chain. `depth` counts from 0; `parent_id` is None at depth 0."""

    id: int
    digest: bytes
    parent_id: int | None
    message_id: int
    depth: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    id: int
    name: str  # public id, e.g. "s-7f3k2c"
    scope: bytes
    upstream: str
    dialect: str
    client: str  # "opencode", "codex", "qwen", "openai-sdk", "aider", "other"
    client_id: str | None  # the client's own session id
    kind: Literal["agent", "side"]
    model: str
    instructions_id: int | None  # messages.id of the instruction bytes
    tools_id: int | None
    parent_id: int | None
    fork_depth: int | None  # messages shared with the parent
    head_node_id: int | None
    state: Literal["normal", "pass-through"]
    state_reason: str | None
    turns: int
    selection_id: int | None  # the selection that this session currently sends; None: the full history
    created_at: float
    last_active_at: float
    title: str  # first line of the first user message, at most 80 characters
    arm: Arm | None = None  # drawn when it began; None: nothing was drawn then


@dataclass(frozen=True, slots=True)
class BlockRow:
    session_id: int
    ordinal: int
    kind: str
    cost: int
    node_ids: tuple[int, ...]  # current positions; earlier mappings stay
    edits: tuple[str, ...] = ()
    label: str = ""  # one line for people: tool names and files, or the first words


@dataclass(frozen=True, slots=True)
class NodeState:
    """What the graph knows of a block (inherited by a fork, updated by observations)."""

    ordinal: int
    u: float
    observed: bool
    stale: bool


@dataclass(frozen=True, slots=True)
class EdgeRow:
    support: int
    dependent: int
    weight: float
    position: int  # order in which the edge was first stored


class VerdictRow(NamedTuple):
    """Why one history block was kept or left out. A tuple, because a selection makes one for every block."""

    ordinal: int
    kept: bool
    rule: str  # "protected", "packed", "expanded", "left out"
    detail: str  # e.g. "latest edit of src/a.py", "for 12", "rank 3 of 9, stale"
    score: float | None = None
    z_u: float | None = None
    z_lex: float | None = None
    z_past: float | None = None
    exploration: float | None = None
    rank: int | None = None  # 1 = highest score among the unprotected


@dataclass(frozen=True, slots=True)
class SelectionRow:
    id: int
    session_id: int
    exchange_id: int
    turn: int
    created_at: float
    applied: bool  # False: mode "off" recorded what would have been sent
    reason: str  # why the boundary is cold
    parameters: str  # JSON
    budget: int
    cost: int
    protected_cost: int
    total_cost: int
    notice: bool
    verdicts: tuple[VerdictRow, ...]


@dataclass(frozen=True, slots=True)
class ExchangeRow:
    """One request and its response. Upserted: first at arrival (`ending` = "running"), then when it ended."""

    id: int
    session_id: int | None
    turn: int
    step: int
    started_at: float
    path: str
    dialect: str
    model: str
    stream: bool
    outcome: str
    boundary: str
    reason: str
    idle_s: float | None = None
    selection_id: int | None = None
    head_node_id: int | None = None
    instructions_id: int | None = None
    tools_id: int | None = None
    blocks_total: int = 0
    blocks_left_out: int = 0
    messages_total: int = 0
    messages_sent: int = 0
    chars_total: int = 0
    chars_sent: int = 0
    bytes_total: int = 0  # request body as the client sent it, decoded
    bytes_sent: int = 0
    prefix_messages: int = 0  # longest common prefix with the previous request of this session, as sent
    prefix_bytes: int = 0
    first_byte_at: float | None = None
    ended_at: float | None = None
    status: int | None = None
    ending: str = "running"
    fell_back: bool = False  # the rewritten request was rejected and the original sent
    usage: str | None = None  # the provider's usage object, raw JSON
    input_tokens: int | None = None  # including cached
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    response_id: str | None = None
    transformations: int = 0  # reasoning items that the answer says were removed, those of earlier requests again
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """One message of a response, in order."""

    exchange_id: int
    position: int
    message_id: int


@dataclass(frozen=True, slots=True)
class Fork:
    """A session that begins with what the graph of its parent knows of the blocks that both share."""

    session_id: int
    parent_id: int
    ordinals: frozenset[int]


@dataclass(frozen=True, slots=True)
class Resent:
    """A block with the messages of a former one, which the client sent again at another place: it has its mark."""

    session_id: int
    ordinal: int
    former: int


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A finished turn, to be replayed when a worker finds the time. Its latest exchange says what was served.

    `exchange_id` None: the turn was broken off; whatever was answered last in it, unless it waits already.
    """

    session_id: int
    turn: int
    exchange_id: int | None
    queued_at: float


JobState = Literal["queued", "claimed", "done", "failed", "folded"]


@dataclass(frozen=True, slots=True)
class JobRow:
    """A replay job as people see it. `folded`: a later turn's replay covers this one."""

    id: int
    session_id: int
    turn: int
    exchange_id: int
    state: JobState
    attempts: int
    queued_at: float
    claimed_at: float | None
    ended_at: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """A finished replay as people see it; what it measured of each block is in `evidence.StoredObservation`."""

    turn: int
    since_turn: int
    created_at: float
    model: str
    tokens: int
    tokens_computed: int
    rows: int
    seconds: float
    blocks: int
    edges: int
    unobserved: tuple[int, ...]
    replaced: tuple[int, ...]  # blocks that the stale rule held for


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What the replay worker last said of itself. `problem` is a sentence with a remedy, None when all is well."""

    pid: int
    state: Literal["starting", "loading", "idle", "replaying", "unavailable", "stopped"]
    model: str
    device: str
    problem: str | None
    updated_at: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything one transaction writes. All inserts are idempotent; `session` and `exchange` are upserts."""

    messages: tuple[MessageRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    sessions: tuple[SessionRow, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    forks: tuple[Fork, ...] = ()
    resent: tuple[Resent, ...] = ()
    exchanges: tuple[ExchangeRow, ...] = ()
    answers: tuple[AnswerRow, ...] = ()
    selections: tuple[SelectionRow, ...] = ()
    replays: tuple[ReplayRequest, ...] = ()
