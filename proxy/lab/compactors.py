"""Ways to shorten a conversation that change its text: for comparison, in the lab alone (paper §5.1, Tables 1 and 2).

A compactor gets the history before the current request, as it was said, and gives what is sent in its place. It serves
one conversation. The proxy has none of them: it sends whole messages, verbatim.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from graphstore.evidence import past_use
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex, identifiers
from graphstore.parameters import Parameters
from graphstore.selection import HistoryBlock, select
from proxy.lab.chat_model import ChatModel
from proxy.lab.recordings import CHAT
from proxy.lab.units import Granularity, units_of

Message = dict[str, str]

SUMMARY_PROMPT = """Stop working on the task for a moment. Another programmer takes over from here, and sees nothing of
this conversation but the user's own messages and what you write now. Write the handover:
- what has been done so far, and the latest state of the code, verbatim where it matters;
- decisions that were taken and why, and what was tried and did not work;
- what is still open, and the next step.
Be brief and exact. Write the handover and nothing else."""
HANDOVER = "Handover from the programmer who worked on this before you:"


@dataclass(frozen=True, slots=True)
class Compacted:
    """What is sent in place of the history, and what it took. Tokens are the provider's; None: it reported none."""

    messages: tuple[Message, ...]
    shortened: bool
    calls: int = 0
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    seconds: float = 0.0


class Compactor(Protocol):
    async def compact(self, history: Sequence[Message], request: str) -> Compacted:
        """`history` begins with the instructions. It is not changed. Raises `LabError`."""


Compactors = Callable[[ChatModel, str], Compactor]  # the model, the conversation's name


class UnitSelector:
    """ReCAP without observed attention over paragraphs or lines of answers instead of whole ones (Table 2)."""

    def __init__(self, granularity: Granularity, parameters: Parameters, session: str, *, notice: bool) -> None:
        self._granularity = granularity
        self._parameters = parameters
        self._session = session
        self._notice = notice

    async def compact(self, history: Sequence[Message], request: str) -> Compacted:
        began = time.perf_counter()
        instructions, said = list(history[:1]), history[1:]
        units = [
            (place, unit)
            for place, message in enumerate(said)
            for unit in ([message["content"]] if message["role"] == "user" else self._cut(message["content"]))
        ]
        kept = self._choose(said, units, request, len(instructions[0]["content"]))
        texts: dict[int, str] = {}
        for number, (place, unit) in enumerate(units):
            if number in kept:
                texts[place] = texts.get(place, "") + unit
        messages = [{"role": said[place]["role"], "content": text} for place, text in texts.items()]
        shortened = len(kept) < len(units)
        if shortened and self._notice:
            instructions.append(json.loads(CHAT.render_notice("system")))
        return Compacted((*instructions, *messages), shortened, seconds=time.perf_counter() - began)

    def _cut(self, text: str) -> list[str]:
        return units_of(text, self._granularity)

    def _choose(
        self, said: Sequence[Message], units: Sequence[tuple[int, str]], request: str, instructions: int
    ) -> set[int]:
        words = IdentifierIndex(identifiers(unit) for _, unit in units)
        costs = [len(unit) for _, unit in units]
        last = next((m["content"] for m in reversed(said) if m["role"] == "assistant"), "")
        selection = select(
            [
                HistoryBlock(i, "user" if said[place]["role"] == "user" else "assistant", costs[i])
                for i, (place, _) in enumerate(units)
            ],
            words,
            identifiers(request),
            ContextGraph(),
            self._parameters,
            session=self._session,
            turn=1 + sum(message["role"] == "user" for message in said),
            rest_chars=instructions + len(request),
            rule="past-use",
            past=past_use(words, identifiers(last), costs),
        )
        return set(selection.chosen)


class Summariser:
    """Users' messages, and a handover that the model itself writes of all that it had before (Codex's compaction).

    The next handover is written from the last one and what came since. Where the model writes none, it is shown what it
    was shown, and what came since.
    """

    def __init__(self, model: ChatModel, session: str) -> None:
        self._model = model
        self._session = f"{session}-summary"
        self._handover: str | None = None
        self._covered = 1  # messages of the history that the handover tells of, instructions included

    async def compact(self, history: Sequence[Message], request: str) -> Compacted:
        before = self._context(history)
        if all(message["role"] != "assistant" for message in history[self._covered :]):
            return Compacted(tuple(before), self._handover is not None)
        began = time.perf_counter()
        answer = await self._model.ask([*before, {"role": "user", "content": SUMMARY_PROMPT}], self._session)
        written = answer.text.strip()
        if written:
            self._handover, self._covered = written, len(history)
        return Compacted(
            tuple(self._context(history)),
            self._handover is not None,
            calls=1,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            seconds=time.perf_counter() - began,
        )

    def _context(self, history: Sequence[Message]) -> list[Message]:
        """What the model is shown in place of the history."""
        if self._handover is None:
            return list(history)
        owed = [message for message in history[: self._covered] if message["role"] != "assistant"]
        return [*owed, {"role": "user", "content": f"{HANDOVER}\n{self._handover}"}, *history[self._covered :]]
