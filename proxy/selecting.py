"""From a parsed request to a selection: the bridge between wire messages and the pure algorithm.

Reads the graph that it is given and the text of the messages; sends nothing and stores nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from graphstore.blocks import Block, Cut
from graphstore.evidence import OF_PAST_USE, Rule, past_use
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex, identifiers
from graphstore.parameters import Parameters
from graphstore.records import Mark
from graphstore.selection import HistoryBlock, Selection, select
from graphstore.selectors import RECAP, Selector
from proxy.dialects.base import Dialect, ParsedRequest

IDENTIFIERS_KEPT = 100_000  # of messages, in memory: about 80 bytes each, counted once for each message that has it
AGENT_KINDS = frozenset({"tools", "assistant"})
INDEXED_BLOCKS = 5_000  # blocks of all indexes in memory, 1 to 2 kB each; the newest index stays, however large


class IdentifierCache:
    """What is known of message texts by digest: the history is the same at every boundary, but for what came since.

    Kept are by session an index of the history that was last selected from, and by message the identifiers of those
    that were read last, both within bounds: what is gone is read again. Those of calls are not kept: only the finished
    turn is asked for them.
    """

    def __init__(self, size: int = IDENTIFIERS_KEPT, blocks: int = INDEXED_BLOCKS) -> None:
        self._size = size
        self._blocks = blocks
        self._known: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._held = 0  # identifiers in `_known`
        self._indexes: OrderedDict[str, tuple[bytes, IdentifierIndex]] = OrderedDict()  # with what was indexed

    def of_messages(self, dialect: Dialect, request: ParsedRequest, indexes: Iterable[int]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for index in indexes:
            digest = request.digests[index]
            known = self._known.get(digest)
            if known is None:
                known = self._known[digest] = identifiers(dialect.message_text(request.raw(index)))
                self._held += len(known)
                while self._held > self._size:
                    self._held -= len(self._known.popitem(last=False)[1])
            found = found | known if found else known
        return found

    @staticmethod
    def of_calls(dialect: Dialect, request: ParsedRequest, indexes: Iterable[int]) -> frozenset[str]:
        """Identifiers of the names and arguments of the calls in these messages."""
        return identifiers("\n".join(dialect.call_text(request.raw(index)) for index in indexes))

    def index(
        self, dialect: Dialect, request: ParsedRequest, blocks: Sequence[Block], *, session: str
    ) -> IdentifierIndex:
        """The index of these blocks: the session's own, extended, when they go on from what it holds."""
        indexed, index = self._indexes.pop(session, (b"", IdentifierIndex()))
        if len(index) > len(blocks) or _digest(request, blocks[: len(index)]) != indexed:
            index = IdentifierIndex()
        index.extend(self.of_messages(dialect, request, block.messages) for block in blocks[len(index) :])
        self._indexes[session] = (_digest(request, blocks), index)
        while len(self._indexes) > 1 and sum(len(index) for _, index in self._indexes.values()) > self._blocks:
            self._indexes.popitem(last=False)
        return index


def _digest(request: ParsedRequest, blocks: Sequence[Block]) -> bytes:
    """Names these blocks by the messages of each."""
    return sha256(b"|".join([b"".join([request.digests[i] for i in block.messages]) for block in blocks])).digest()


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection over the history, with what it leaves out."""

    selection: Selection
    left_out: frozenset[int]  # ordinals


def finished_turn(cut: Cut) -> list[Block]:
    """What the agent did in the last turn before the current one: its words and its calls with their results.

    A request that no agent ever answered is no turn.
    """
    done: list[Block] = []
    for block in reversed(cut.blocks[: cut.turn_start]):
        if block.kind == "user" and done:
            break
        if block.kind in AGENT_KINDS:
            done.append(block)
    return done


def history_of(cut: Cut, ordinals: Sequence[int], end: int) -> list[tuple[int, Block]]:
    """The selectable part: every block before block `end`, with its ordinal."""
    return list(zip(ordinals, cut.blocks[:end], strict=False))


def choose(
    dialect: Dialect,
    request: ParsedRequest,
    cut: Cut,
    ordinals: Sequence[int],
    graph: ContextGraph,
    parameters: Parameters,
    cache: IdentifierCache,
    *,
    session: str,
    turn: int,
    rule: Rule,
    marks: Mapping[int, Mark] | None = None,
    query: str | None = None,
    selector: Selector = RECAP,
    into_turn: bool = False,
) -> Choice:
    """Select for the current turn's user text, or for `query` when a person asks what would be kept.

    `into_turn`: the older steps of the current turn can be chosen from as well, and its newest ones are what has been
    done last.
    """
    end = cut.steps_start if into_turn else cut.turn_start
    blocks = history_of(cut, ordinals, end)
    marks = marks or {}
    since = {path for block in cut.blocks[end:] for path in block.edits} if into_turn else set()  # edited once more
    history = [
        HistoryBlock(o, block.kind, block.cost, tuple(p for p in block.edits if p not in since), marks.get(o))
        for o, block in blocks
    ]
    words = cache.index(dialect, request, [block for _, block in blocks], session=session)
    if selector.cue is not None:
        cue = selector.cue()
    elif query is None:
        asked = [i for b in cut.blocks[cut.turn_start :] if b.kind == "user" for i in b.messages]
        cue = cache.of_messages(dialect, request, asked)
    else:
        cue = identifiers(query)
    past: list[float] = []
    if rule in OF_PAST_USE:
        steps = [block for block in cut.blocks[end:] if block.kind in AGENT_KINDS]
        used = [i for block in (steps if into_turn and steps else finished_turn(cut)) for i in block.messages]
        named = cache.of_messages(dialect, request, used) | cache.of_calls(dialect, request, used)
        past = past_use(words, named, [block.cost for block in history])
    rest = sum(block.cost for block in cut.blocks[end:]) + len(request.instructions) + len(request.tools)
    selection = select(
        history,
        words,
        cue,
        graph,
        parameters,
        session=session,
        turn=turn,
        rest_chars=rest,
        rule=rule,
        past=past,
        selector=selector,
    )
    kept = frozenset(selection.chosen)
    return Choice(selection, frozenset(block.ordinal for block in history if block.ordinal not in kept))
