"""Full history against compacted history, by a model (10.20.3): the next action, and the use of a fact.

The model is given the transcript as text in one user message, which is the same for both dialects and needs no support
for tools, and says in one line what it would do next. `full` asks it a second time: how far it agrees with itself. The
full history is a baseline and no truth; for facts the right answer is known. `evidence` is the request with the blocks
of its facts alone, the best that a selector could send; `user-messages` is no memory, `recency` a recent window.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from graphstore.selectors import Selector
from graphstore.store.tokens import count_tokens
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName
from proxy.lab.compaction.bench import SYSTEM, Lab
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import History, made
from proxy.lab.compaction.needle import ASKS, NEEDLES, UNANSWERABLE, Needle, asked, plant

FAMILY = "differential"
ACTION = (
    "Above is the transcript of a coding agent at work, maybe with parts left out. What does the agent do next? Answer "
    "with one line and nothing else: `TOOL: MAIN ARGUMENT`, or `answer: WHAT IT SAYS` when it calls no tool."
)
FACT = (
    "Above is the transcript of a coding agent at work, maybe with parts left out. Answer its last request with the "
    "value alone, and with the word unknown when the transcript does not say it."
)
TURNS_ASKED = 3  # of each history, the last
DEPTH = 0.3  # of the history, where the first fact stands
TRIALS = 2
SHOWN = 60  # characters of an answer in a sentence
CUT_SHARE = 0.5  # a server that counts fewer of our tokens has cut the prompt

Said = tuple[str, int | None]  # what the model says, tokens of the prompt by its count
Ask = Callable[[str], Awaitable[Said]]


def cases(seed: int, ask: Ask, histories: Sequence[History], trials: int) -> list[Case]:
    """Facts in a made history; next actions in a made one and in those given."""
    judged = partial(_fact, ask=ask, stack=made(f"facts {seed}"), trials=trials)
    every = (*NEEDLES, UNANSWERABLE)
    facts = [Case(FAMILY, f"fact, {needle.name}", partial(judged, needle=needle)) for needle in every]
    alone = [
        Case(FAMILY, f"fact, {needle.name}, evidence alone", partial(judged, needle=needle, is_alone=True), once=True)
        for needle in NEEDLES
    ]
    actions = [
        Case(FAMILY, f"next action, {history.id}", partial(_actions, Baseline(ask), history=history, trials=trials))
        for history in (made(f"actions {seed}"), *histories)
        if len(history.starts) > 1
    ]
    return [*facts, *alone, *actions]


class Baseline:
    """What the model does next with everything before it: asked once for each trial, for all selectors."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self._known: dict[tuple[int, int], Said] = {}

    async def said(self, prompt: str, turn: int, trial: int, tally: Tally) -> str:
        """Its tokens count for each selector, so that every row has the baseline that it is compared with."""
        if (turn, trial) not in self._known:
            self._known[turn, trial] = await self.ask(prompt)
        return _noted(self._known[turn, trial], prompt, tally, "full")


async def _actions(baseline: Baseline, lab: Lab, selector: Selector, *, history: History, trials: int) -> Tally:
    tally = Tally(values={"same_line": 0})
    for turn in list(range(1, len(history.starts)))[-TURNS_ASKED:]:
        request = history.messages[history.starts[turn] : history.body_of(turn)]
        full, sent = await _prompts(lab, selector, history.upto(turn), request, ACTION, tally)
        for trial in range(trials):
            expected = await baseline.said(full, turn, trial, tally)
            found = _noted(await baseline.ask(sent), sent, tally, "sent")
            why = f"turn {turn + 1}: with everything {line_of(expected)[:SHOWN]!r}, as sent {line_of(found)[:SHOWN]!r}"
            is_said = line_of(expected) != ""  # who says nothing agrees with nobody
            tally.result(is_said and tool_of(found) == tool_of(expected), why)
            tally.values["same_line"] += is_said and line_of(found) == line_of(expected)
    return tally


async def _fact(
    lab: Lab, selector: Selector, *, ask: Ask, stack: History, needle: Needle, trials: int, is_alone: bool = False
) -> Tally:
    tally = Tally()
    planted = plant(stack, needle.facts, DEPTH, seed=lab.seed)
    history, request = asked(planted, needle, ASKS[0])
    if is_alone:
        blocks = [raw for i in needle.wanted for raw in planted.needles[i]]
        prompt = transcript([SYSTEM, *blocks, request], stack.dialect) + FACT
    else:
        _, prompt = await _prompts(lab, selector, history, [request], FACT, tally)
    for _ in range(trials):
        found = _noted(await ask(prompt), prompt, tally, "sent")
        why = f"{needle.answer or 'unknown'!r} is right, it said {line_of(found)[:SHOWN]!r}"
        tally.result(is_right(found, needle.answer), why)
    return tally


async def _prompts(
    lab: Lab, selector: Selector, history: History, request: Sequence[bytes], task: str, tally: Tally
) -> tuple[str, str]:
    """With everything, and as the proxy sends it after a long pause."""
    async with lab.bench(selector.name, history.dialect) as bench:
        served = await bench.come_back(history, *request)
    tally.watch(served)
    full, sent = (transcript(messages, history.dialect) + task for messages in (served.client, served.upstream))
    return full, sent


def _noted(said: Said, prompt: str, tally: Tally, kind: str) -> str:
    """Notes what the provider counted, and whether it counted so little that it must have cut the prompt."""
    text, tokens = said
    if tokens is not None:
        tally.values[f"tokens_{kind}"] = tally.values.get(f"tokens_{kind}", 0) + tokens
        tally.values["cut"] = tally.values.get("cut", 0) + (tokens < CUT_SHARE * count_tokens(prompt))
    return text


def transcript(messages: Sequence[bytes], dialect_name: DialectName) -> str:
    dialect = DIALECTS[dialect_name]
    parts = []
    for raw in messages:
        said = "\n".join(filter(None, (dialect.message_text(raw), dialect.call_text(raw))))
        parts.append(f"[{dialect.parse_message(raw).role}]\n{said}\n\n")
    return "".join(parts) + "---\n"


def line_of(text: str) -> str:
    """The first line that says something, without quotes and the like."""
    lines = (re.sub(r"\s+", " ", line.strip(" `*\"'>-")).lower() for line in text.splitlines())
    return next((line for line in lines if line), "")


def tool_of(text: str) -> str:
    """What stands before the first colon or space: a model may add arguments in any form."""
    return re.split(r"[:(\s]", line_of(text), maxsplit=1)[0]


def is_right(text: str, answer: str | None) -> bool:
    """The value stands in the first line, by itself; with no value, the model says so."""
    return re.search(rf"(?<![\w.]){re.escape(answer or 'unknown')}(?![\w]|\.\d)", line_of(text)) is not None
