"""I(text): the identifiers by which texts point at each other, and an index of them.

Knows nothing of languages or messages. An identifier is a word or a dotted name of at least four characters; a dotted
name also yields its parts, so that `store.writer` is found by `writer`. Case is kept.
"""

import re
from collections.abc import Iterable, Sequence
from sys import intern

LENGTH_MIN = 4
STOP_WORDS = frozenset(
    """this that these those with from have will what when where which there their then than them they your into just
    like make need want should would could also some each only more been were about after before does done here very
    please sure okay using used None True False null true false self return import const else elif while async await
    pass break continue lambda yield raise except finally function class""".split()
)

_TOKENS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")


def identifiers(text: str) -> frozenset[str]:
    """All identifiers of `text` (paper §4.3; the stop list and the splitting of dotted names are ours)."""
    return _kept(set(_TOKENS.findall(text)))


def leading_identifiers(text: str, *, chars: int = 4_000, matches: int = 400) -> frozenset[str]:
    """Identifiers of the first `matches` matches in the first `chars` characters: what the stale rule compares."""
    return _kept(set(_TOKENS.findall(text[:chars])[:matches]))


def _kept(tokens: Iterable[str]) -> frozenset[str]:
    found = {token for token in tokens if len(token) >= LENGTH_MIN}
    for token in [token for token in found if "." in token]:
        found.update(part for part in token.split(".") if len(part) >= LENGTH_MIN and not part[0].isdigit())
    return frozenset(map(intern, found - STOP_WORDS))


class IdentifierIndex:
    """Which blocks of a history name an identifier: I(v) turned around, so that a cue meets only blocks that share one.

    Blocks count from 0 in the order in which they were added. Most identifiers stand in one block, whose number is then
    kept without a list.
    """

    __slots__ = ("_blocks", "_size")

    def __init__(self, texts: Iterable[frozenset[str]] = ()) -> None:
        self._blocks: dict[str, int | list[int]] = {}
        self._size = 0
        self.extend(texts)

    def __len__(self) -> int:
        return self._size

    def extend(self, texts: Iterable[frozenset[str]]) -> None:
        """Add the identifiers of the blocks that follow."""
        blocks = self._blocks
        for block, words in enumerate(texts, self._size):
            for word in words:
                known = blocks.setdefault(word, block)
                if isinstance(known, list):
                    known.append(block)
                elif known != block:
                    blocks[word] = [known, block]
            self._size = block + 1

    def naming(self, word: str) -> Sequence[int]:
        """The blocks whose texts have this identifier, in order."""
        known = self._blocks.get(word, ())
        return (known,) if isinstance(known, int) else known
