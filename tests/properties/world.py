"""Runs a program of random client behaviour against the session logic, and checks every promise after every request."""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from graphstore.blocks import cut_blocks
from graphstore.identity import message_digest
from graphstore.records import ExchangeRow
from graphstore.store.archive import open_reader
from graphstore.store.blobs import unpack
from graphstore.store.engine import ArchiveUnavailable
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName, ParsedRequest
from proxy.dialects.content import NOTICE
from tests.properties.clients import Client, Message, Step
from tests.proxy.dialogue import LUNCH_S, Dialogue, Reply, said

OVERFLOW = b'{"error":{"message":"Too long.","code":"context_length_exceeded"}}'
SUMMARY = "The summary of everything that happened here so far."


@dataclass
class Sent:
    """What a client last sent, and what became of it."""

    body: bytes
    raws: list[bytes]
    outgoing: list[bytes]
    head: tuple[object, ...]  # what stands before the messages
    row: ExchangeRow
    rejected: bool
    reaches_back: bool  # a late result made an old call part of the current turn, which is sent whole


@dataclass
class World:
    folder: Path
    dialect: DialectName
    mode: str = "idle"
    window: int = 0  # of the model, in tokens by the proxy's count
    clients: list[Client] = field(default_factory=list)
    last: dict[int, Sent] = field(default_factory=dict)  # by client
    sent: dict[int, list[bytes]] = field(default_factory=dict)  # exchange id -> the client's messages
    running: list[tuple[Reply, int]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    rejecting: int = 0
    overflowing: int = 0  # the next request is refused for its length; 2: the shorter one as well
    failing: bool = False
    lossy: bool = False  # the queue overflowed or the program closed while failing
    names: "count[int]" = field(default_factory=count)
    current: int = 0
    settled_after: int = 0  # the last exchange that a failing disk may have cost

    def __post_init__(self) -> None:
        self.dialogue = Dialogue(
            self.folder,
            changes={"mode": self.mode, "beta": 0.3, "idle_after": 3600.0, "context_window_tokens": self.window},
            dialect=self.dialect,
        )
        self._open()
        self.clients.append(Client(self.dialect, "s0", system={"role": "system", "content": "You are an agent."}))

    def _open(self) -> None:
        self.file = sqlite3.connect(f"file:{self.dialogue.settings.db}?mode=ro", uri=True, isolation_level=None)

    @property
    def client(self) -> Client:
        return self.clients[self.current]

    # -- the program --------------------------------------------------------------------------------------------

    async def run(self, program: Sequence[Step]) -> None:
        try:
            for operation, n in program:
                await getattr(self, f"do_{operation}")(n)
            await self._come_to_rest()
        finally:
            self.heal()
            for reply, _ in self.running:
                self.dialogue.finish(reply.plan, said("late"))
            self.file.close()
            await self.dialogue.close()
        await self.check_archive()

    async def _come_to_rest(self) -> None:
        """The disk works again, and everybody says one thing more: the archive has to be whole then."""
        self.heal()
        with suppress(ArchiveUnavailable):
            await self.dialogue.conversations.flush()
        await self.dialogue.conversations.flush()
        for number in range(len(self.clients)):
            self.current = number
            self.client.ask(1)
            await self._send()
        await self.dialogue.conversations.flush()
        self.settled_after = max(self.sent, default=0)  # a branch learns only now that its parent is lost
        for number in range(len(self.clients)):
            self.current = number
            self.client.answer(1)
            self.client.ask(1)
            await self._send()

    async def do_turn(self, n: int) -> None:
        """A whole turn and the next request."""
        if not self.client.history:
            self.client.ask(n)
            await self._send()
        for i in range(1 + n % 3):
            self.client.work(n + i)
            if n % 2:
                await self._send()
        self.client.answer(n)
        self.client.ask(n)
        await self._send()

    async def do_lunch(self, n: int) -> None:
        self.dialogue.clock.advance(LUNCH_S)
        await self.do_turn(n)

    async def do_work(self, n: int) -> None:
        self.client.work(n)
        await self._send()

    async def do_ask(self, n: int) -> None:
        self.client.ask(n)
        await self._send()

    async def do_disturb(self, n: int) -> None:
        self.client.disturb(n)
        if n % 4 == 0:
            self.client.ask(n)
        await self._send()

    async def do_silent(self, n: int) -> None:
        """Something changes that the proxy hears of only with the next request."""
        (self.client.disturb if n % 2 else self.client.work)(n // 2)

    async def do_retry(self, n: int) -> None:
        if self.client.history:
            self.dialogue.clock.advance((0.0, 5.0, 10 * LUNCH_S)[n % 3])
            await self._send()

    async def do_undo(self, n: int) -> None:
        if self.client.history:
            self.client.undo(n)
            await self._send()

    async def do_regenerate(self, n: int) -> None:
        if self.client.history:
            before = list(self.client.history)
            self.client.regenerate(n)
            await self._send()
            if n % 2:
                self.client.history = before
                await self._send()

    async def do_edit(self, n: int) -> None:
        if self.client.history:
            self.client.edit(n)
            await self._send()

    async def do_amend(self, n: int) -> None:
        if self.client.history:
            self.client.amend(n)
            await self._send()

    async def do_prune(self, n: int) -> None:
        if self.client.history:
            self.client.prune(n)
            await self._send()

    async def do_compact(self, n: int) -> None:
        if not self.client.history:
            return
        asked = [*self.client.history, {"role": "user", "content": "Summarise the above."}]
        await self._send(history=asked, tools=0, answer=SUMMARY)
        self.client.compact(SUMMARY)
        await self._send()

    async def do_side(self, n: int) -> None:
        title = {"role": "system", "content": "You write titles."}
        question: Message = {"role": "user", "content": f"A title for {self.client.made}?"}
        await self._send(history=[question], tools=0, system=title, answer="A title")

    async def do_fork(self, n: int) -> None:
        twin = self.client.fork((f"s{next(self.names) + 1}", None, self.client.session_id)[n % 3])
        self.clients.append(twin)
        self.current = len(self.clients) - 1
        if n % 2 and twin.history:
            twin.undo(n // 2)

    async def do_fresh(self, n: int) -> None:
        """Another conversation, with or without an id of its own."""
        identity = f"s{next(self.names) + 1}" if n % 2 else None
        self.clients.append(Client(self.dialect, identity, system=self.clients[0].system))
        self.current = len(self.clients) - 1

    async def do_switch(self, n: int) -> None:
        self.current = n % len(self.clients)

    async def do_change(self, n: int) -> None:
        match n % 3:
            case 0:
                self.client.model = f"model-{n}"
            case 1:
                self.client.tools = 1 + n % 5
            case 2:
                self.client.system = {"role": "system", "content": f"You are agent {n}."} if n % 4 else None

    async def do_reject(self, n: int) -> None:
        self.rejecting = 1 + n % 2

    async def do_overflow(self, n: int) -> None:
        self.overflowing = 1 + n % 2

    async def do_hang(self, n: int) -> None:
        if self.client.history:
            self.client.ask(n)
            await self._send(finish=False)

    async def do_land(self, n: int) -> None:
        if self.running:
            reply, _ = self.running.pop(n % len(self.running))
            self.dialogue.finish(reply.plan, said("late"))

    async def do_twice(self, n: int) -> None:
        """The same request on two connections at the same moment."""
        if self.client.history:
            self.client.ask(n)
            self.dialogue.clock.advance(LUNCH_S * (n % 2))
            await asyncio.gather(self._send(), self._send())

    async def do_volley(self, n: int) -> None:
        """Everybody at once."""
        self.dialogue.clock.advance(LUNCH_S * (n % 2))
        sends = []
        for number, client in enumerate(self.clients):
            self.current = number
            client.answer(n)
            client.ask(n)
            sends.append(asyncio.create_task(self._send()))
            await asyncio.sleep(0)  # it has taken its client's history
        await asyncio.gather(*sends)

    async def do_restart(self, n: int) -> None:
        for reply, _ in self.running:
            self.dialogue.finish(reply.plan, said("late"))
        self.running.clear()
        self.heal()
        self.file.close()
        await self.dialogue.restart()
        self._open()

    async def do_flush(self, n: int) -> None:
        if not self.failing:
            await self.dialogue.conversations.flush()

    async def do_fail(self, n: int) -> None:
        """The disk is full from now on."""
        if self.failing:
            return
        self.failing = True
        writer = self.writer
        self._commit = writer._commit

        def commit(_group: object) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        writer._commit = commit
        if n % 3 == 0:
            writer._queue_max = 1  # ... for so long that the queue overflows
            self.lossy = True

    async def do_heal(self, n: int) -> None:
        self.heal()

    def heal(self) -> None:
        if self.failing:
            self.failing = False
            self.writer._commit = self._commit
            self.writer._queue_max = 2048

    @property
    def writer(self) -> Any:
        return self.dialogue.conversations._archive.writer  # type: ignore[union-attr]

    # -- one request and what must hold of it ---------------------------------------------------------------------

    async def _send(
        self,
        *,
        history: list[Message] | None = None,
        tools: int | None = None,
        system: Message | None = None,
        answer: str = "ok",
        finish: bool = True,
    ) -> None:
        who, client = self.current, self.client
        history = client.history if history is None else history
        version = client.tools if tools is None else tools
        rejection, self.rejecting = self.rejecting, 0
        overflow, self.overflowing = self.overflowing, 0
        reply = await self.dialogue.send(
            history,
            headers=client.headers,
            system=system or client.system,
            tools=[{"type": "function", "function": {"name": "read", "version": version}}] if version else None,
            model=client.model,
            answer=said(answer),
            finish=False,
        )
        exchange = reply.plan.exchange
        assert exchange is not None
        row: ExchangeRow = exchange.row  # type: ignore[attr-defined]
        self.seen.update([row.outcome, row.boundary, "rewritten" if reply.rewritten else "original"])
        own = DIALECTS[self.dialect].parse_request(reply.original)
        raws = [own.raw(i) for i in range(len(own.messages))]
        self.sent[row.id] = raws
        self._check_outgoing(reply, own, row)
        first, failed = reply, False
        if overflow and (shorter := await exchange.shorter(400, [], OVERFLOW)) is not None and shorter.body is not None:
            assert len(shorter.body) < len(reply.sent)
            reply = Reply(replace(reply.plan, body=shorter.body), reply.original)
            row = exchange.shortened.row  # type: ignore[attr-defined]
            self.seen.update(["shortened"])
            self._check_outgoing(reply, own, row)
            if failed := overflow == 2:
                exchange.refused_again("refused with 400")
                reply, row = first, exchange.row  # type: ignore[attr-defined]
        before, rejected = self.last.get(who), bool(rejection) and reply.rewritten
        now = Sent(
            body=reply.original,
            raws=raws,
            outgoing=_messages(reply.sent),
            head=(own.instructions, own.tools, own.model),
            row=row,
            rejected=rejected or failed,
            reaches_back=_reaches_back(own),
        )
        if before is not None and row.outcome != "side":
            self._check_continuity(client, before, now)
        if row.outcome != "side":
            self.last[who] = now
        if finish:
            status = 400 if rejection == 2 else 200
            self.dialogue.finish(reply.plan, said(answer), reject=400 if rejection else None, status=status)
        else:
            self.running.append((reply, who))

    def _check_outgoing(self, reply: Reply, own: ParsedRequest, row: ExchangeRow) -> None:
        if not reply.rewritten:
            assert row.messages_sent == row.messages_total
            return
        assert row.outcome != "side"
        outgoing = _messages(reply.sent)
        original = _messages(reply.original)
        head, notice, tail = outgoing[: own.leading], outgoing[own.leading], outgoing[own.leading + 1 :]
        assert head == original[: own.leading]
        assert NOTICE.encode() in notice
        kept = _places(tail, original[own.leading :])  # order kept, every byte kept
        gone = set(range(len(own.messages))) - set(kept)
        assert gone, "rewritten, with nothing left out"
        cut = cut_blocks(own.messages)
        assert not cut.open_calls
        for block in cut.blocks:
            assert gone.issuperset(block.messages) or gone.isdisjoint(block.messages), "a block is split"
            assert block.kind not in ("user", "pinned") or gone.isdisjoint(block.messages)
        end = _newest_steps(own) if "pressure" in self._reason_of(row) else _turn_start(own)
        assert all(i < end for i in gone), "the current turn lost a message"
        for index in gone:
            raw = own.raw(index)
            stored = self.file.execute(
                "SELECT codec, content FROM messages WHERE digest = ?", (message_digest(raw),)
            ).fetchone()
            assert stored is not None, f"left out, and not in the archive: {raw[:200]!r}"
            assert unpack(*stored) == raw

    def _reason_of(self, row: ExchangeRow) -> str:
        """Of the selection that this request went out with."""
        found = self.file.execute("SELECT reason FROM selections WHERE id = ?", (row.selection_id,)).fetchone()
        return str(found[0]) if found is not None else ""

    def _check_continuity(self, me: Client, before: Sent, now: Sent) -> None:
        """Between two cold boundaries what is sent extends what was sent, as long as the client extends its own."""
        if before.rejected or self._has_other(me):
            return
        if now.body == before.body and not before.rejected:
            if "refused with" in now.row.reason:  # the same was refused now
                return
            assert now.outgoing == before.outgoing, f"a retry became something else: {now.row.reason}"
            return
        if now.raws[: len(before.raws)] != before.raws or now.head != before.head or now.row.boundary == "cold":
            return
        if "a tool call has no result yet" in now.row.reason or now.reaches_back:
            return
        if "pass-through" in now.row.reason and "pass-through" not in before.row.reason:
            return
        if self.failing and "decision not saved" in now.row.reason:
            return
        assert now.outgoing[: len(before.outgoing)] == before.outgoing, (
            f"the warm prefix is broken: {now.row.outcome}, {now.row.reason}, after {before.row.reason}"
        )

    def _has_other(self, me: Client) -> bool:
        """Another client is on the same session as far as the proxy can tell: their requests are one sequence."""
        return any(
            other is not me and (other.session_id == me.session_id or me.session_id is None) for other in self.clients
        )

    # -- at the end ----------------------------------------------------------------------------------------------

    async def check_archive(self) -> None:
        with open_reader(self.dialogue.settings.db) as reader:
            rows = {row.id: row for s in reader.list_sessions() for row in reader.session_exchanges(s.id)}
            for number, raws in self.sent.items():
                if number not in rows:
                    assert self.lossy and number <= self.settled_after, f"exchange {number} was not recorded"
                    continue
                head = rows[number].head_node_id
                assert rows[number].messages_total == len(raws)
                stored = reader.path_contents(head) if head is not None else []
                assert stored == raws, f"exchange {number}"
        findings = [str(finding) for finding in await self.dialogue.findings()]
        assert not findings, findings


def _messages(body: bytes) -> list[bytes]:
    dialect = "responses" if "input" in json.loads(body) else "chat"
    parsed = DIALECTS[dialect].parse_request(body)  # type: ignore[index]
    return [body[start:end] for start, end in parsed.spans]


def _places(kept: list[bytes], among: list[bytes]) -> list[int]:
    """Where `kept` stands among `among`, in order; from the end, where equal messages are the newest ones."""
    places: list[int] = []
    end = len(among)
    for raw in reversed(kept):
        end = next((i for i in range(end - 1, -1, -1) if among[i] == raw), -1)
        assert end >= 0, f"not the client's, or out of order: {raw[:200]!r}"
        places.append(end)
    return places[::-1]


def _turn_start(own: ParsedRequest) -> int:
    """Index of the first message of the current turn: the newest run of user messages."""
    users = [i for i, message in enumerate(own.messages) if message.role == "user"]
    start = users[-1] if users else 0
    while start - 1 in users:
        start -= 1
    return start


def _newest_steps(own: ParsedRequest) -> int:
    """Index of the first message of the current turn's newest three tool blocks, or of the turn."""
    start = _turn_start(own)
    steps = [b for b in cut_blocks(own.messages).blocks if b.kind == "tools" and b.messages[-1] > start]
    return steps[-3].messages[0] if len(steps) > 3 else start


def _reaches_back(own: ParsedRequest) -> bool:
    start = _turn_start(own)
    return any(block.messages[0] < start <= block.messages[-1] for block in cut_blocks(own.messages).blocks)
