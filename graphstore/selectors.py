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

`oracle` ranks by what will be named. It is no setting: only who has the whole session knows that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graphstore.blocks import BlockKind

SelectorName = Literal[
    "recap", "recap-without-graph", "recency", "random", "user-messages", "clear-tool-results", "full"
]
TOOL_RESULTS_KEPT = 3  # of the newest, by `clear-tool-results`: what providers' own clearing keeps by default


def _everything(kinds: Sequence[BlockKind]) -> set[int]:
    return set(range(len(kinds)))


def _tools_before(kept: int) -> Callable[[Sequence[BlockKind]], set[int]]:
    """Bars all tool blocks but the newest `kept`."""

    def bars(kinds: Sequence[BlockKind]) -> set[int]:
        tools = [position for position, kind in enumerate(kinds) if kind == "tools"]
        return set(tools[: max(0, len(tools) - kept)])

    return bars


@dataclass(frozen=True, slots=True)
class Selector:
    """`bars` says which positions of a history, by the kinds of its blocks, are not packed; None: each may be.

    `cue` gives the identifiers that stand in for the request's at the moment of a selection; None: the request's own.
    """

    name: SelectorName
    order: Literal["score", "newest", "draw"] = "score"
    bars: Callable[[Sequence[BlockKind]], set[int]] | None = None
    uses_graph: bool = False  # importance, stale marks, expansion
    protects_edits: bool = False
    is_bounded: bool = True  # by the budget
    cue: Callable[[], frozenset[str]] | None = None


RECAP = Selector("recap", uses_graph=True, protects_edits=True)
SELECTORS: dict[SelectorName, Selector] = {
    selector.name: selector
    for selector in (
        RECAP,
        Selector("recap-without-graph", protects_edits=True),
        Selector("recency", "newest"),
        Selector("random", "draw"),
        Selector("user-messages", "newest", bars=_everything),
        Selector("clear-tool-results", "newest", bars=_tools_before(TOOL_RESULTS_KEPT), is_bounded=False),
        Selector("full", "newest", is_bounded=False),
    )
}


def selector_named(name: SelectorName, *, tool_results_kept: int = TOOL_RESULTS_KEPT) -> Selector:
    """`tool_results_kept`: blocks of calls with their results that `clear-tool-results` leaves."""
    selector = SELECTORS[name]
    return replace(selector, bars=_tools_before(tool_results_kept)) if name == "clear-tool-results" else selector


def oracle(future: Callable[[], frozenset[str]]) -> Selector:
    """`recap-without-graph` that knows what will be named, in place of what the request names (paper B.1)."""
    return replace(SELECTORS["recap-without-graph"], cue=future)
