"""What a dialect remembers of a message, so that a resent history is not read again.

Facts depend on a message's bytes alone. The memory is bounded and knows no wire format.
"""

from collections.abc import Callable
from dataclasses import dataclass

from graphstore.blocks import Message

GENERATION_COUNT = 16_384  # about 165 sessions of 100 messages; some 5 MB for both generations


@dataclass(frozen=True, slots=True)
class Facts:
    """`message` is what everybody may know; the rest is for the dialect's own reading of the request around it."""

    message: Message
    wire_role: str = ""
    opaque: str | None = None  # this message alone makes the request unfit for a rewrite, for this reason
    brings_tools: bool = False  # tools that stand in the history instead of in `tools`
    alias: tuple[str, str] | None = None  # (other id, call id) of a call that may be answered under either


class FactsMemory:
    """Digest to facts, least recently used ones forgotten.

    Two generations instead of a linked list: a hit in the old one moves to the young one, a full young one becomes the
    old one. Every step is one dictionary operation, so threads may share it; a race costs one more reading.
    """

    def __init__(self, read: Callable[[bytes], Facts], *, generation_count: int = GENERATION_COUNT) -> None:
        self._read = read
        self._limit = generation_count
        self._young: dict[bytes, Facts] = {}
        self._old: dict[bytes, Facts] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, digest: bytes) -> Facts | None:
        facts = self._young.get(digest)
        if facts is None and (facts := self._old.get(digest)) is not None:
            self._keep(digest, facts)
        return facts

    def put(self, digest: bytes, raw: bytes) -> Facts:
        """Read the message `raw` and remember its facts under its digest."""
        facts = self._read(raw)
        self._keep(digest, facts)
        return facts

    def _keep(self, digest: bytes, facts: Facts) -> None:
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        self._young[digest] = facts
