"""An archive of recorded sessions, as a proxy left it: turns, lunches, usage by a provider with a cache, replays.

The replays are made up (a real model is tested elsewhere); everything else is what the product itself recorded.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphstore.identity import message_digest
from graphstore.store.archive import open_reader
from tests.clock import VirtualClock
from tests.observed import observe, replay_of
from tests.proxy.dialogue import LUNCH_S, SYSTEM, Dialogue, said, user
from tests.recorded import RecordedSession, load_sessions, steps

STEP_S = 5.0
MODEL = "gpt-test"
HEADERS = {"user-agent": "opencode/1.18.33 ai-sdk"}
HOSTILE = "<img src=x onerror=alert(1)><script>alert('xss')</script>&lt;b&gt;\"'`${1}</textarea>"


@dataclass
class ProviderCache:
    """What a provider would report: the beginning that it has seen, in steps of 128 tokens of four bytes."""

    seen: dict[str, list[bytes]] = field(default_factory=dict)

    def usage(self, session: str, sent: list[dict[str, Any]], *, warm: bool) -> dict[str, int]:
        raw = [json.dumps(message).encode() for message in sent]
        same = 0
        for before, now in zip(self.seen.get(session, []) if warm else [], raw, strict=False):
            if before != now:
                break
            same += len(now)
        self.seen[session] = raw
        return {"prompt_tokens": sum(map(len, raw)) // 4, "cached": same // 4 // 128 * 128}


Observer = Callable[[Dialogue, str, int], Awaitable[None]]  # what is to be done with a turn of a client that ended


async def play(dialogue: Dialogue, session: RecordedSession, cache: ProviderCache, observer: Observer) -> None:
    """Every request of a recorded session; every second turn begins after lunch."""
    headers = HEADERS | {"x-session-affinity": session.id}
    for step in steps(session, "chat"):
        if step.at_user_request and step.turn > 1:
            await observer(dialogue, session.id, step.turn - 1)
        lunch = step.at_user_request and step.turn % 2 == 0
        history = [message for message in step.history if message["role"] != "system"]
        reply = await dialogue.send(
            history, headers=headers, after_s=LUNCH_S if lunch else STEP_S, finish=False, model=MODEL
        )
        usage = cache.usage(session.id, reply.messages, warm=not lunch)
        dialogue.finish(reply.plan, step.answer, tokens=usage)


def density(ordinal: int, turn: int) -> float:
    """A made-up attention: always the same for a block in a turn, a few blocks with much of it."""
    mixed = int.from_bytes(message_digest(f"{ordinal} {turn // 3}".encode())[:2], "big") / 65536
    return float(mixed**6) / 10 + 1e-6


async def observe_turn(dialogue: Dialogue, client_id: str, turn: int) -> None:
    """A replay of the turn that just ended, but for the newest tenth of the blocks."""
    await dialogue.conversations.flush()
    with open_reader(dialogue.settings.db) as reader:
        session = next(row for row in reader.list_sessions() if row.client_id == client_id)
        last = reader.last_exchange(session.id)
    assert last is not None
    seen = {v: density(v, turn) for v in range(last.blocks_total - max(1, last.blocks_total // 10))}
    if seen:
        edges = [(v // 2, v, density(v, turn + 1)) for v in range(2, len(seen), 3)]
        observe(dialogue.settings.db, session.id, replay_of(seen, edges), turn=turn, at=dialogue.clock())


async def build(
    folder: Path,
    *,
    clock: VirtualClock,
    changes: Mapping[str, Any] | None = None,
    observer: Observer = observe_turn,
    with_hostile: bool = True,
) -> Dialogue:
    """Three recorded sessions, a hostile one and a side request. The dialogue stays open."""
    dialogue = Dialogue(folder, clock=clock, changes=dict(changes or {}))
    cache = ProviderCache()
    wanted = ("entire-3fb30de16616", "swetogether-gemini-voyager-task-aa88f5", "tau-airline-33")
    for session in load_sessions():
        if session.id in wanted:
            await play(dialogue, session, cache, observer)
    if with_hostile:
        await hostile(dialogue)
    await dialogue.conversations.flush()
    return dialogue


async def hostile(dialogue: Dialogue) -> None:
    """Markup wherever a client can put text."""
    call = {"id": "c1", "type": "function", "function": {"name": HOSTILE, "arguments": json.dumps({"path": HOSTILE})}}
    history = [
        user(HOSTILE),
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": HOSTILE * 200},
        said(HOSTILE),
    ]
    headers = HEADERS | {"x-session-affinity": HOSTILE}
    await dialogue.send(history[:1], headers=headers, model=HOSTILE, answer=history[1])
    await dialogue.send(history[:3], headers=headers, model=HOSTILE, answer=history[3])
    again = [*history, user(HOSTILE + " again")]
    await dialogue.send(again, headers=headers, model=HOSTILE, after_s=LUNCH_S, reject=400)
    await dialogue.send(
        [user("A title?")], headers=HEADERS, tools=None, system=SYSTEM | {"content": "You make titles."}
    )
