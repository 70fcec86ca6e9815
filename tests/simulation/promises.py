"""The promises of the design as checks on what clients sent, what the provider got, and what stands on the disk.

Those that bytes alone can tell are in `tests.properties.promises`; here are those of a whole proxy with a file.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphstore.identity import message_digest, row_id
from graphstore.records import ExchangeRow
from proxy.conversations import ADMIT_DEADLINE_S
from proxy.upstream.relay import NOT_ABOUT_THE_BODY
from tests.properties.clients import Client
from tests.properties.promises import Broken, Request, never_mangles, require
from tests.simulation.disk import Disk
from tests.simulation.upstream import Attempt, Behaviour

PLANNED_WITHIN_S = 1.0  # with a disk that works: the threads' turns, and a look at what is still on its way


@dataclass(eq=False, kw_only=True)
class Call(Request):
    """One request of a client, from its first byte to the last one of the answer."""

    number: int
    who: int
    client: Client
    wire: bytes  # as it went out: perhaps compressed
    how: Behaviour
    arrived_at: float
    planned_at: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    status: int | None = None
    received: bytes = b""
    got_end: bool = False
    left: bool = False  # the client went away
    killed: bool = False  # the proxy died under it
    over: bool = False

    @property
    def rejected(self) -> bool:
        return len(self.attempts) > 1

    def unpacked(self, body: bytes) -> bytes:
        return gzip.decompress(body) if body == self.wire and self.wire != self.body else body


# -- 5: never wait for the model ------------------------------------------------------------------------------------


def never_waits(call: Call, disk: Disk) -> None:
    """A plan takes no longer than the disk makes it take, and never longer than its deadline."""
    assert call.planned_at is not None
    took = call.planned_at - call.arrived_at
    require(took <= ADMIT_DEADLINE_S + 0.1, "never wait", f"planned after {took:.1f} s")
    disturbed = disk.fails or disk.troubled_at >= call.arrived_at - ADMIT_DEADLINE_S
    require(disturbed or took <= PLANNED_WITHIN_S, "never wait", f"planned after {took:.1f} s, with a disk that works")


# -- 1: never break a session ---------------------------------------------------------------------------------------


def never_breaks_on_the_way(call: Call) -> None:
    """What the provider gets is the client's own bytes or the same without whole old blocks; twice after a 4xx only."""
    number, body = len(call.attempts), call.attempts[-1].body
    if number == 1:
        expected = call.sent if call.is_rewritten else call.wire
        require(body == expected, "never break", "what was sent is neither the client's bytes nor what was planned")
        if call.is_rewritten:
            never_mangles(call, body)
        return
    status = call.attempts[0].status
    require(number == 2, "never break", f"sent {number} times")
    allowed = status is not None and 400 <= status < 500 and status not in NOT_ABOUT_THE_BODY
    require(call.is_rewritten and allowed, "never break", f"sent again after {status}")
    require(body == call.wire, "never break", "what was sent after the rejection is not the original")


def never_breaks_in_the_end(call: Call) -> None:
    """The client has what the provider gave, to the byte, or an error that says that the provider gave nothing."""
    if call.left or call.killed:
        return
    require(call.attempts, "never break", "the request was never sent")
    last = call.attempts[-1]
    if last.status is None:
        expected = {"unreachable": 502, "stall": 504}[call.how.kind]
        require(call.status == expected, "never break", f"{call.status} for an upstream that is {call.how.kind}")
        return
    require(call.status == last.status, "never break", f"{call.status} instead of the provider's {last.status}")
    require(call.received == last.given, "never break", "the answer's bytes changed")
    require(call.got_end == last.is_complete, "never break", "the answer's end is made up or missing")
    if call.is_rewritten and len(call.attempts) == 1:
        retried = not 400 <= last.status < 500 or last.status in NOT_ABOUT_THE_BODY
        require(retried, "never break", f"a rewritten request got {last.status}, and the original was not sent")


# -- 2: never lose history ------------------------------------------------------------------------------------------


def never_loses(gone: Sequence[bytes], disk: Disk) -> None:
    """What is left out would be there even if the power failed now."""
    messages, _ = disk.durable
    for raw in gone:
        id = row_id(message_digest(raw))
        require(id in messages, "never lose", f"left out before it was durably in the archive: {raw[:100]!r}")


# -- 3: never break a warm cache ------------------------------------------------------------------------------------


def was_cold_between(before: ExchangeRow, now: ExchangeRow, disk: Disk) -> bool:
    """Decided for a request that never left: its client or the proxy went away."""
    return bool(disk.ask(_COLD_BETWEEN, now.session_id, before.id, now.id))


_COLD_BETWEEN = "SELECT 1 FROM exchanges WHERE session_id = ? AND id > ? AND id < ? AND boundary = 'cold'"


# -- 4: always explain ----------------------------------------------------------------------------------------------


def explains_a_plan(call: Call, disk: Disk) -> None:
    """What is sent, what is left out and why: in the row, and on the disk before it happens."""
    row = call.row
    if row is None:
        require(not call.is_rewritten, "explain", "rewritten without a record")
        return
    require(row.reason, "explain", "no reason is given")
    gone = call.gone
    require(row.messages_total == len(call.raws), "explain", f"{row.messages_total} messages, not {len(call.raws)}")
    sent = len(call.raws) - len(gone)
    require(row.messages_sent == sent, "explain", f"{row.messages_sent} messages sent, not {sent}")
    size = len(call.sent)
    require(row.bytes_sent == size, "explain", f"{row.bytes_sent} bytes sent, not {size}")
    if not call.is_rewritten:
        return
    require(row.selection_id in disk.durable[1], "explain", "the selection in force is not durably in the archive")
    for raw in gone:
        why = disk.ask(_WHY, row_id(message_digest(raw)), row.selection_id, row.session_id)
        require(any(rule for (rule,) in why), "explain", f"nothing says why this was left out: {raw[:100]!r}")


# A branch goes by its parent's selection until it has one of its own; both number the blocks that they share alike.
_WHY = """
    SELECT v.rule FROM nodes n
    JOIN selections s ON s.id = ?2
    JOIN block_nodes b ON b.node_id = n.id AND b.session_id IN (s.session_id, ?3)
    JOIN selection_blocks v ON v.selection_id = s.id AND v.ordinal = b.ordinal AND NOT v.kept
    WHERE n.message_id = ?1
"""


def explains_an_exchange(call: Call, stored: ExchangeRow) -> None:
    """Once all is written: how it ended, and the provider's own numbers."""
    row = call.row
    assert row is not None
    same = (stored.outcome, stored.boundary, stored.reason) == (row.outcome, row.boundary, row.reason)
    require(same, "explain", f"{stored.outcome}, {stored.reason} was {row.outcome}, {row.reason}")
    if not call.over or call.killed:
        return
    require(stored.ended_at is not None, "explain", "its end was not recorded")
    require(stored.fell_back == call.rejected, "explain", "that the original went out in the end is not recorded")
    last = call.attempts[-1] if call.attempts else Attempt(b"")
    if call.left:
        return
    require(stored.status == last.status, "explain", f"status {stored.status}, not {last.status}")
    ending = "complete" if last.is_complete else "upstream broken" if last.status is not None else "failed"
    require(stored.ending == ending, "explain", f"ending {stored.ending}, not {ending}")
    if ending == "complete" and last.status == 200 and isinstance(call.how.usage, dict) and call.how.usage:
        told = json.loads(stored.usage or "null")
        require(told == call.how.usage, "explain", f"usage {stored.usage}, not {call.how.usage}")


# -- recap verify ---------------------------------------------------------------------------------------------------


def verifies_at_a_glance(disk: Disk) -> None:
    """What `recap verify` finds by looking at references alone; contents and hashes are checked in the end."""
    for finding in disk.ask("PRAGMA foreign_key_check"):
        raise Broken("verify", f"a reference to nothing: {finding}")
    for problem, query in _GLANCES.items():
        for row in disk.ask(query):
            raise Broken("verify", f"{problem}: {row}")


_GLANCES = {
    "a node at a wrong depth": """
        SELECT n.id FROM nodes n LEFT JOIN nodes p ON p.id = n.parent_id WHERE n.depth <> coalesce(p.depth + 1, 0)
    """,
    "a block without messages": """
        SELECT session_id, ordinal FROM blocks EXCEPT SELECT session_id, ordinal FROM block_nodes
    """,
    "a verdict on a block that is missing": """
        SELECT s.id, v.ordinal FROM selections s JOIN selection_blocks v ON v.selection_id = s.id
        WHERE NOT EXISTS (SELECT 1 FROM blocks b WHERE b.session_id = s.session_id AND b.ordinal = v.ordinal)
    """,
    "a selection that is missing": """
        SELECT id FROM (SELECT selection_id AS id FROM sessions UNION SELECT selection_id FROM exchanges)
        WHERE id IS NOT NULL AND id NOT IN (SELECT id FROM selections)
    """,
    "a message that nothing refers to": """
        SELECT id FROM messages EXCEPT SELECT message_id FROM nodes EXCEPT SELECT message_id FROM answers
        EXCEPT SELECT instructions_id FROM sessions EXCEPT SELECT tools_id FROM sessions
        EXCEPT SELECT instructions_id FROM exchanges EXCEPT SELECT tools_id FROM exchanges
    """,
    "a node that nothing refers to": """
        SELECT id FROM nodes EXCEPT SELECT parent_id FROM nodes EXCEPT SELECT head_node_id FROM sessions
        EXCEPT SELECT head_node_id FROM exchanges EXCEPT SELECT node_id FROM block_nodes
    """,
}
