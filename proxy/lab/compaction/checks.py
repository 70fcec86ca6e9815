"""What the product promises of every request, checked on the bytes. Pure; every function returns sentences, or none.

Written without the product's guard and splicing: messages are cut out and pairs are counted anew.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from graphstore.blocks import Block, Cut, cut_blocks
from graphstore.parameters import Parameters
from graphstore.selectors import Selector
from proxy.dialects import DIALECTS
from proxy.dialects.base import Dialect
from proxy.dialects.content import NOTICE
from proxy.lab.compaction.bench import FIELDS, Served, members_of

SHOWN = 80  # characters of a message in a sentence
MESSAGES_KEPT = 20_000  # read once each: a history is sent many times
STAYING = frozenset({"user", "system", "developer"})  # roles whose messages are never left out
_CALLS, _OUTPUTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")


def faults(served: Served) -> list[str]:
    """Everything that must not be: changed bytes, broken pairs, a missing user message, a cut into the current turn."""
    places, found = places_of(served), []
    if places is None:
        return [not_verbatim(served)]
    found += surroundings(served)
    theirs = pairs(served.client)
    found += [fault for fault in pairs(served.upstream) if fault not in theirs]
    found += [f"a constraint is missing: {shown(raw)}" for raw in missing_constraints(served)]
    gone = left_out(served, places)
    start = turn_start(served.client)
    found += [f"the current turn lost {shown(served.client[i])}" for i in gone if i >= start]
    return found


def without_notice(served: Served) -> list[bytes]:
    """The messages as sent, but for the one that the proxy puts in when it leaves something out."""
    if not served.is_rewritten:
        return served.upstream
    place = next((i for i, raw in enumerate(served.upstream) if NOTICE.encode() in raw), None)
    if place is None or served.upstream[place] in served.client:
        return served.upstream
    return served.upstream[:place] + served.upstream[place + 1 :]


def places_of(served: Served) -> list[int] | None:
    """Where the messages that were sent stand among the client's; None: one is not the client's, or out of order."""
    places: list[int] = []
    end = len(served.client)
    for raw in reversed(without_notice(served)):
        end = next((i for i in range(end - 1, -1, -1) if served.client[i] == raw), -1)
        if end < 0:
            return None
        places.append(end)
    return places[::-1]


def left_out(served: Served, places: Iterable[int] | None = None) -> list[int]:
    """Indexes of the client's messages that were not sent."""
    kept = set(places if places is not None else places_of(served) or ())
    return [index for index in range(len(served.client)) if index not in kept]


def not_verbatim(served: Served) -> str:
    theirs = set(served.client)
    strange = next((raw for raw in without_notice(served) if raw not in theirs), None)
    return f"not the client's bytes: {shown(strange)}" if strange is not None else "the order of messages changed"


def surroundings(served: Served) -> list[str]:
    """What stands beside the messages is the client's own."""
    field = FIELDS[served.dialect]
    mine, theirs = members_of(served.sent), members_of(served.original)
    names = sorted({*mine, *theirs} - {field})
    return [f"{name!r} changed" for name in names if mine.get(name) != theirs.get(name)]


def pairs(messages: Sequence[bytes]) -> list[str]:
    """Every call has its result after it, every result a call before it."""
    open_calls: dict[str, None] = {}
    found = []
    for raw in messages:
        _, opened, answered = _read(raw)
        for call in answered:
            if call not in open_calls:
                found.append(f"the result of {call!r} lost its call")
            open_calls.pop(call, None)
        open_calls |= dict.fromkeys(opened)
    return found + [f"the call {call!r} lost its result" for call in open_calls]


@lru_cache(maxsize=MESSAGES_KEPT)
def _read(raw: bytes) -> tuple[str | None, list[str], list[str]]:
    """Role of a message, the ids of the calls that it opens, and of those that it answers."""
    message: dict[str, Any] = json.loads(raw)
    kind = message.get("type")
    if kind in _CALLS or kind in _OUTPUTS:
        ids = [str(message.get("call_id"))]
        return (None, ids, []) if kind in _CALLS else (None, [], ids)
    opened = [str(call.get("id")) for call in message.get("tool_calls") or ()]
    answered = [str(message["tool_call_id"])] if "tool_call_id" in message else []
    return message.get("role"), opened, answered


def role_of(raw: bytes) -> str | None:
    """As the message itself says; items of the Responses API that nobody says have none."""
    return _read(raw)[0]


def constraints(messages: Sequence[bytes]) -> list[bytes]:
    """What the user wrote, and instructions inside the history."""
    return [raw for raw in messages if role_of(raw) in STAYING]


def missing_constraints(served: Served) -> list[bytes]:
    """Constraints of the client that were not sent, or not in their order."""
    sent = iter(constraints(without_notice(served)))
    missing, waiting = [], next(sent, None)
    for raw in constraints(served.client):
        if raw == waiting:
            waiting = next(sent, None)
        else:
            missing.append(raw)
    return missing


def turn_start(messages: Sequence[bytes]) -> int:
    """Index of the first message of the newest run of user messages."""
    users = {i for i, raw in enumerate(messages) if role_of(raw) == "user"}
    start = max(users, default=0)
    while start - 1 in users:
        start -= 1
    return start


def extends(before: Served, now: Served) -> list[str]:
    """Between two cold boundaries what is sent goes on from what was sent."""
    same = now.upstream[: len(before.upstream)] == before.upstream
    return [] if same else ["the warm prefix was broken"]


# -- budget -----------------------------------------------------------------------------------------------------------


def blocks_of(served: Served, dialect: Dialect | None = None) -> tuple[int, Cut]:
    """Number of leading instructions, and the blocks of what follows."""
    parsed = (dialect or DIALECTS[served.dialect]).parse_request(served.original)
    return parsed.leading, cut_blocks(parsed.messages)


def protected(history: Sequence[Block], selector: Selector) -> set[int]:
    """Positions that a selector must keep: users, pinned blocks, for some the latest edit of each file."""
    latest = {path: place for place, block in enumerate(history) for path in block.edits}
    owed = {place for place, block in enumerate(history) if block.kind in ("user", "pinned")}
    return owed | set(latest.values()) if selector.protects_edits else owed


def over_budget(served: Served, selector: Selector, parameters: Parameters, dialect: Dialect) -> list[str]:
    """c(C) <= max(c(P), (1 + delta) B) at a boundary (paper Eq. 6), for selectors that have a budget."""
    if not selector.is_bounded or not served.is_rewritten:
        return []
    leading, cut = blocks_of(served, dialect)
    history = cut.blocks[: cut.turn_start]
    gone = set(left_out(served))
    kept = [place for place, block in enumerate(history) if leading + block.messages[0] not in gone]
    total, cost = sum(block.cost for block in history), sum(history[place].cost for place in kept)
    owed = sum(history[place].cost for place in protected(history, selector))
    allowance = int((1 + parameters.delta) * int(parameters.beta * total + 1e-9) + 1e-9)
    bound = max(owed, allowance)
    return [f"the history as sent has {cost} characters, more than {bound}"] if cost > bound else []


def shown(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
