"""Ways to choose which blocks of a history to send: ReCAP's, and those that it is compared with.

A selector is a value: in which order blocks are packed, which may be packed at all, and whether the latest edits are
protected. What is owed (users, pinned blocks, what a person pinned) is sent by every one of them, because a session
would break without. Selectors that change text or call a model are no business of the proxy (`proxy/lab`).

| name                  | packs                                            | source              |
|-----------------------|--------------------------------------------------|---------------------|
| `recap`               | by score, then what those depend on              | paper §4.3          |
| `recap-without-graph` | by the words of the request                      | paper §5.4, Table 2 |
| `recency`             | the newest                                       | paper §5.1          |
| `random`              | by a seeded draw                                 | paper §5.1          |
| `user-messages`       | nothing: what is owed                            | ours                |
| `clear-tool-results`  | everything but old tool calls with their results | observation masking |
| `full`                | everything                                       | paper §5.1          |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from graphstore.blocks import BlockKind

SelectorName = Literal[
    "recap", "recap-without-graph", "recency", "random", "user-messages", "clear-tool-results", "full"
]
TOOL_BLOCKS_KEPT = 3  # of the newest, by `clear-tool-results`: what providers' own clearing keeps by default


def _everything(kinds: Sequence[BlockKind]) -> set[int]:
    return set(range(len(kinds)))


def _old_tools(kinds: Sequence[BlockKind]) -> set[int]:
    return set([position for position, kind in enumerate(kinds) if kind == "tools"][:-TOOL_BLOCKS_KEPT])


@dataclass(frozen=True, slots=True)
class Selector:
    """`bars` says which positions of a history, by the kinds of its blocks, are not packed; None: each may be."""

    name: SelectorName
    order: Literal["score", "newest", "draw"] = "score"
    bars: Callable[[Sequence[BlockKind]], set[int]] | None = None
    uses_graph: bool = False  # importance, stale marks, expansion
    protects_edits: bool = False
    is_bounded: bool = True  # by the budget


RECAP = Selector("recap", uses_graph=True, protects_edits=True)
SELECTORS: dict[SelectorName, Selector] = {
    selector.name: selector
    for selector in (
        RECAP,
        Selector("recap-without-graph", protects_edits=True),
        Selector("recency", "newest"),
        Selector("random", "draw"),
        Selector("user-messages", "newest", bars=_everything),
        Selector("clear-tool-results", "newest", bars=_old_tools, is_bounded=False),
        Selector("full", "newest", is_bounded=False),
    )
}
