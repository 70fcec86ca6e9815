"""Recorded sessions through a local model, turn by turn, as the product's worker does.

A turn is replayed over all that stood in its last request and what came back: nothing is left out, because nothing was
when the session was recorded. A context that is longer than the limit is not replayed rather than cut, so a replay has
seen every block whole. Torch is loaded with the model and not before.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from graphstore.evidence import StoredObservation
from graphstore.identifiers import leading_identifiers
from graphstore.parameters import Parameters
from graphstore.replays import Replay
from graphstore.scoring import replaced
from proxy.contexts import parts_of
from proxy.lab.errors import LabError
from proxy.lab.observed import Observed
from proxy.lab.recordings import CHAT, Recording
from proxy.lab.results import Row
from proxy_model.config import ReplayConfig
from proxy_model.context import ContextBlock, Part
from proxy_model.errors import ModelUnavailable, ReplayError

PARAMETERS = Parameters()  # the stale rule's constants


def history_before(recording: Recording, end: int) -> tuple[ContextBlock, ...]:
    """Instructions, and all blocks that begin before this message."""
    text = "\n\n".join(filter(None, recording.texts[: recording.leading]))
    head = (ContextBlock(None, (Part("system", text),)),) if text else ()
    return head + tuple(
        ContextBlock(place, parts_of(CHAT, [recording.messages[recording.leading + m] for m in block.messages]))
        for place, block in enumerate(recording.blocks)
        if recording.start_of(block) < end
    )


def context_at(recording: Recording, turn: int) -> tuple[ContextBlock, ...]:
    """The context at the end of a turn, counted from 1, as `proxy.contexts` makes it for the worker.

    The answer that ends the turn is no block of the graph yet: no request has brought it back.
    """
    start, end = recording.turns()[turn - 1]
    firsts = [recording.start_of(block) for block in recording.blocks]
    dependent = max((first for first in firsts if first < start), default=start)  # what the agent said last is one

    def marked(block: ContextBlock) -> ContextBlock:
        if block.ordinal is None:
            return block
        first, known = firsts[block.ordinal], recording.blocks[block.ordinal]
        is_answer = known.kind == "assistant" and recording.leading + known.messages[-1] == end - 1
        return replace(
            block,
            ordinal=None if is_answer else block.ordinal,
            in_turn=first >= start,
            is_dependent=first >= dependent and not is_answer,
        )

    return tuple(map(marked, history_before(recording, end)))


class ModelAttention:
    """Replays with one loaded model."""

    def __init__(self, config: ReplayConfig) -> None:
        """Takes seconds. Raises LabError: no torch, no weights, a model that cannot be read."""
        from proxy_model.check import proven
        from proxy_model.loader import load

        try:
            self._model = load(config)
            self._replayer = proven(self._model, config)
        except ModelUnavailable as error:
            raise LabError(str(error)) from error
        self._sessions = 0
        self._too_long = f"longer than {self._model.max_tokens:,} tokens"

    @property
    def about(self) -> Row:
        model, path = self._model, Path(self._model.name)
        return {
            "model": path.name if path.exists() else model.name,
            "parameters": model.parameters,
            "layers": list(model.layers),
            "dtype": model.dtype,
            "device": model.device,
            "tokens_max": model.max_tokens,
        }

    def begin(self) -> None:
        """What follows is another session: nothing that the last one computed is used for it."""
        self._sessions += 1

    def replay(self, context: Sequence[ContextBlock]) -> Replay | str:
        """A context of this session, or why it has no replay. Raises LabError when none can have one."""
        if self._model.encode(context).unobserved:
            return self._too_long
        try:
            return self._replayer.observe(context, self._sessions)
        except ModelUnavailable as error:
            raise LabError(str(error)) from error
        except ReplayError as error:
            return error.problem
        except MemoryError:
            return "no memory for it"

    def observe(self, recording: Recording, turns: int) -> Observed:
        self.begin()
        found, missing = {}, Counter[str]()
        for turn in range(1, turns + 1):
            replay = self.replay(context_at(recording, turn))
            if isinstance(replay, str):
                missing[replay] += 1
            else:
                found[turn] = stored(recording, turn, replay)
        return Observed(found, missing)


def stored(recording: Recording, turn: int, replay: Replay) -> StoredObservation:
    """As the archive would keep it."""
    density = {block.ordinal: block.density for block in replay.blocks}
    words = {v: leading_identifiers(recording.text_of(recording.blocks[v])) for v in density}
    return StoredObservation(turn, turn, turn, 0.0, replay, frozenset(replaced(density, words, PARAMETERS)))
