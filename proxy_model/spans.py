"""The served context as token ids, and where each block's text lies in them.

Every text is encoded alone and joined with the template's marks, so spans are exact by construction: no search in a
rendered text, no offsets. A text never becomes one of the template's control tokens, whatever it spells.

A context that is too long loses, in this order and never silently (`Encoded.unobserved`):
1. the end of the instructions, as far as they take more than half of the room;
2. whole blocks, the oldest first, those of the finished turn last; somewhat more than must go, so that the next turns
   begin with the same tokens and their replay continues this one;
3. the beginning of the last block, when that one does not fit by itself.
"""

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from proxy_model.context import ContextBlock, Role
from proxy_model.glue import Glue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # token positions, end excluded; start == end for an empty text
Ids = Sequence[int]

INSTRUCTIONS_SHARE = 2  # half of the room: the rest is what a replay is for
DROP_STEP_SHARE = 8  # an eighth of the room: lost at most, for about as many tokens without a cold replay
CACHE_TOKENS_MAX = 4_000_000  # 16 MB; some hundred contexts


@dataclass(frozen=True, slots=True)
class Encoded:
    """`ids` is what the network reads; what lies in no span is the template's.

    `spans[i]` has one range for each part of block i, in order. A block that did not fit has none.
    `unobserved`: indexes of the blocks that did not fit, or only in part. No reading and no edge is taken for them; the
    spans of a block that fits in part cover what is left of it, so rows can be sampled there.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    unobserved: tuple[int, ...]


class TokenCache:
    """Ids of texts by their hash: a history is encoded once, though it comes again with every turn."""

    def __init__(self, tokens_max: int = CACHE_TOKENS_MAX) -> None:
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self._tokens_max = tokens_max
        self._tokens = 0

    def get(self, key: bytes) -> Ids | None:
        found = self._ids.get(key)
        if found is not None:
            self._ids.move_to_end(key)
        return found

    def put(self, key: bytes, ids: Ids) -> None:
        self._tokens += len(ids) - len(self._ids.pop(key, ()))
        self._ids[key] = array("i", ids)
        while self._tokens > self._tokens_max:
            self._tokens -= len(self._ids.popitem(last=False)[1])


def encode(
    blocks: Sequence[ContextBlock],
    tokenizer: "PreTrainedTokenizerBase",
    glue: Glue,
    max_tokens: int,
    cache: TokenCache | None = None,
) -> Encoded:
    """At most `max_tokens` ids. Work is linear in the text that `cache` does not know."""
    control = _control_tokens(tokenizer, glue)
    texts = [[_text_ids(part.text, tokenizer, control, cache) for part in block.parts] for block in blocks]
    return _fit(_Context(blocks, texts, glue), max_tokens)


@dataclass(slots=True)
class _Context:
    """Blocks with the ids of their texts, which may be shortened here."""

    blocks: Sequence[ContextBlock]
    texts: list[list[Ids]]
    glue: Glue

    def lay_out(self, kept: Sequence[int]) -> tuple[list[int], dict[int, tuple[Span, ...]]]:
        """Ids of the kept blocks in order, and the spans of each."""
        ids: list[int] = []
        spans: dict[int, tuple[Span, ...]] = {}
        previous: Role | None = None
        for index in kept:
            ranges = []
            for part, text in zip(self.blocks[index].parts, self.texts[index], strict=True):
                ids += self.glue.before[previous, part.role]
                ranges.append((len(ids), len(ids) + len(text)))
                ids += text
                previous = part.role
            spans[index] = tuple(ranges)
        ids += self.glue.after[previous] if previous is not None else ()
        return ids, spans

    def length(self, kept: Sequence[int]) -> int:
        return len(self.lay_out(kept)[0])


def _fit(context: _Context, room: int) -> Encoded:
    count = len(context.blocks)
    kept, whole = list(range(count)), set(range(count))
    ids, spans = context.lay_out(kept)
    if len(ids) > room:
        head = _instructions(context.blocks)
        whole -= _shorten(context, range(head), context.length(range(head)) - room // INSTRUCTIONS_SHARE, from_end=True)
        kept = [*range(head), *range(_first_kept(context, head, room), count)]
        whole &= set(kept)
        excess = context.length(kept) - room
        whole -= _shorten(context, kept[-1:], excess, from_end=False)
        ids, spans = context.lay_out(kept)
    if len(ids) > room:
        whole -= {i for i, ranges in spans.items() if ranges and ranges[0][0] < len(ids) - room}
        ids, spans = _clip(ids, spans, room)
    return Encoded(
        tuple(ids), tuple(spans.get(i, ()) for i in range(count)), tuple(i for i in range(count) if i not in whole)
    )


def _instructions(blocks: Sequence[ContextBlock]) -> int:
    """How many blocks at the beginning are the instructions and the notice: those that the graph does not know.

    The last block is never one of them: something must be left to read.
    """
    known = (i for i, block in enumerate(blocks) if block.ordinal is not None or block.in_turn)
    return min(next(known, len(blocks)), len(blocks) - 1)


def _first_kept(context: _Context, head: int, room: int) -> int:
    """Index of the first block after the instructions that stays. The last one always does."""
    last = len(context.blocks) - 1
    sizes = [_size(context, i) for i in range(head, last + 1)]
    excess = context.length(range(last + 1)) - room
    if excess <= 0:
        return head
    step = max(1, room // DROP_STEP_SHARE)
    generous = -(-excess // step) * step
    turn = next((i for i in range(head, last) if context.blocks[i].in_turn), last)
    first = _dropping(sizes, generous, head, limit=turn)
    while first < last and context.length([*range(head), *range(first, last + 1)]) > room:
        missing = context.length([*range(head), *range(first, last + 1)]) - room
        first = min(last, max(first + 1, _dropping(sizes[first - head :], missing, first, limit=last)))
    return first


def _dropping(sizes: Sequence[int], tokens: int, first: int, limit: int) -> int:
    """Index behind the oldest blocks that hold `tokens` together, at most `limit`."""
    for size in sizes:
        if tokens <= 0 or first >= limit:
            break
        tokens -= size
        first += 1
    return first


def _size(context: _Context, index: int) -> int:
    """Tokens of a block with the glue inside and before it, by its own roles alone."""
    roles = [part.role for part in context.blocks[index].parts]
    before = (len(context.glue.before[a, b]) for a, b in zip(chain(roles[:1], roles), roles, strict=False))
    return sum(before) + sum(len(text) for text in context.texts[index])


def _shorten(context: _Context, indexes: Sequence[int], excess: int, *, from_end: bool) -> set[int]:
    """Takes `excess` tokens off the texts of these blocks, from one end on. Returns the blocks that lost some."""
    parts = [(i, j) for i in indexes for j in range(len(context.texts[i]))]
    cut = set()
    for i, j in reversed(parts) if from_end else parts:
        text = context.texts[i][j]
        loss = min(excess, len(text))
        if loss <= 0:
            continue
        context.texts[i][j] = text[: len(text) - loss] if from_end else text[loss:]
        excess -= loss
        cut.add(i)
    return cut


def _clip(
    ids: list[int], spans: dict[int, tuple[Span, ...]], room: int
) -> tuple[list[int], dict[int, tuple[Span, ...]]]:
    """When the glue alone does not fit: the end of it. Nothing to do in any context of use."""
    gone = len(ids) - room
    moved = {i: tuple((max(0, a - gone), max(0, b - gone)) for a, b in ranges) for i, ranges in spans.items()}
    return ids[gone:], moved


def _text_ids(
    text: str, tokenizer: "PreTrainedTokenizerBase", control: dict[int, str], cache: TokenCache | None
) -> Ids:
    raw = text.encode("utf-8", "surrogatepass")
    key = hashlib.blake2b(raw, digest_size=16).digest()
    known = cache.get(key) if cache is not None else None
    if known is not None:
        return known
    ids = _plain(_sound(text), tokenizer, control)
    if cache is not None:
        cache.put(key, ids)
    return ids


def _plain(text: str, tokenizer: "PreTrainedTokenizerBase", control: dict[int, str]) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if control.keys().isdisjoint(ids):
        return ids
    # Marks that the vocabulary does not call special (`</tool_response>`): cut behind their first character.
    marks = re.compile("|".join(re.escape(mark) for mark in sorted(control.values(), key=len, reverse=True)))
    cuts = [0, *(found.start() + 1 for found in marks.finditer(text)), len(text)]
    pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    parts = (tokenizer(p, add_special_tokens=False, split_special_tokens=True)["input_ids"] for p in pieces if p)
    return list(chain.from_iterable(parts))


def _control_tokens(tokenizer: "PreTrainedTokenizerBase", glue: Glue) -> dict[int, str]:
    """The glue's tokens that are more than their letters: id and text."""
    used = set(chain.from_iterable([*glue.before.values(), *glue.after.values()]))
    return {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if id in used and token.content}


def _sound(text: str) -> str:
    """Half of a surrogate pair is no character and no tokenizer takes it: U+FFFD stands for it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
