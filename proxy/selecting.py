"""From a parsed request to a selection: the bridge between wire messages and the pure algorithm.

Reads the graph that it is given and the text of the messages; sends nothing and stores nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphstore.blocks import Block, Cut
from graphstore.graph import ContextGraph
from graphstore.identifiers import identifiers
from graphstore.parameters import Parameters
from graphstore.selection import HistoryBlock, Selection, select
from proxy.dialects.base import Dialect, ParsedRequest

IDENTIFIERS_KEPT = 20_000  # messages whose identifiers stay in memory, about 1 kB each at most in practice


class IdentifierCache:
    """Identifiers of message texts by message digest: the history is the same at every boundary."""

    def __init__(self, size: int = IDENTIFIERS_KEPT) -> None:
        self._size = size
        self._known: OrderedDict[bytes, frozenset[str]] = OrderedDict()

    def of_messages(self, dialect: Dialect, request: ParsedRequest, indexes: Iterable[int]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for index in indexes:
            digest = request.digests[index]
            known = self._known.get(digest)
            if known is None:
                known = self._known[digest] = identifiers(dialect.message_text(request.raw(index)))
                if len(self._known) > self._size:
                    self._known.popitem(last=False)
            found = found | known if found else known
        return found


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection over the history, with what it leaves out."""

    selection: Selection
    left_out: frozenset[int]  # ordinals


def history_of(cut: Cut, ordinals: Sequence[int]) -> list[tuple[int, Block]]:
    """The selectable part: every block before the current turn, with its ordinal."""
    return list(zip(ordinals, cut.blocks[: cut.turn_start], strict=False))


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
    query: str | None = None,
) -> Choice:
    """Select for the current turn's user text, or for `query` when a person asks what would be kept."""
    history = [
        HistoryBlock(ordinal, block.kind, block.cost, block.edits) for ordinal, block in history_of(cut, ordinals)
    ]
    texts = [cache.of_messages(dialect, request, block.messages) for _, block in history_of(cut, ordinals)]
    if query is None:
        asked = [i for b in cut.blocks[cut.turn_start :] if b.kind == "user" for i in b.messages]
        cue = cache.of_messages(dialect, request, asked)
    else:
        cue = identifiers(query)
    rest = sum(block.cost for block in cut.blocks[cut.turn_start :]) + len(request.instructions) + len(request.tools)
    selection = select(history, texts, cue, graph, parameters, session=session, turn=turn, rest_chars=rest)
    kept = frozenset(selection.chosen)
    return Choice(selection, frozenset(block.ordinal for block in history if block.ordinal not in kept))
