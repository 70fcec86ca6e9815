"""How an arriving history relates to one that we know: the outcomes of identification.

Pure comparison of message digests, plus one look at the messages that changed in place. It knows nothing of clients or
storage; what only a client can tell (a compaction, a side request) is decided by the caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rapidfuzz import fuzz

from graphstore.blocks import Message

Relation = Literal["retry", "extension", "undo", "diverged"]

# A message changed in place still reads like itself: a reminder was added to or removed from it, a date line moved on.
# Below this the client wrote something else there. partial_ratio looks for the shorter text inside the longer one.
SAME_TEXT_SCORE = 80.0
COMPARED_CHARS = 20_000  # rapidfuzz is quadratic in the worst case; the head of a message is enough to recognise it


@dataclass(frozen=True, slots=True)
class Version:
    """One message of a history: its digest, its facts, and its text when somebody asks for it."""

    digest: bytes
    message: Message
    text: Callable[[], str]


def common_prefix(known: Sequence[bytes], arriving: Sequence[bytes]) -> int:
    """Number of leading elements that are equal. Works on chain digests (binary search) as both are prefix-closed."""
    low, high = 0, min(len(known), len(arriving))
    while low < high:
        middle = (low + high + 1) // 2
        if known[middle - 1] == arriving[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def relate(known: Sequence[bytes], arriving: Sequence[bytes]) -> tuple[Relation, int]:
    """Relation of two chains and the length of their common prefix."""
    shared = common_prefix(known, arriving)
    if shared == len(known):
        return ("retry" if shared == len(arriving) else "extension"), shared
    return ("undo" if shared == len(arriving) else "diverged"), shared


def changed_in_place(known: Sequence[Version], arriving: Sequence[Version]) -> Literal["pruning", "amendment"] | None:
    """Name what a client did that changed old messages without moving any, or None if it did something else.

    `known` and `arriving` start at the first difference. Every known message must have its successor at the same
    position: equal, or with the same role and calls and a text that is recognisably the same (amendment), or a tool
    result of the same call with other content (pruning). The arriving history must go on after them; a changed last
    message is an edit by the user, which starts a branch.
    """
    if len(arriving) <= len(known):
        return None
    pruned = amended = False
    for old, new in zip(known, arriving, strict=False):
        if old.digest == new.digest:
            continue
        same_place = (old.message.role, old.message.calls, old.message.answers) == (
            new.message.role,
            new.message.calls,
            new.message.answers,
        )
        if not same_place:
            return None
        if old.message.role == "output":
            pruned = True
        elif _reads_the_same(old.text(), new.text()):
            amended = True
        else:
            return None
    return "pruning" if pruned and not amended else "amendment"


def _reads_the_same(old: str, new: str) -> bool:
    return fuzz.partial_ratio(old[:COMPARED_CHARS], new[:COMPARED_CHARS]) >= SAME_TEXT_SCORE
