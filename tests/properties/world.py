"""Runs a program of random client behaviour against the session logic, and checks every promise after every request."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphstore.identity import message_digest
from graphstore.records import ExchangeRow
from graphstore.store.archive import open_reader
from graphstore.store.blobs import unpack
from graphstore.store.engine import ArchiveUnavailable
from tests.properties.clients import LUNCH_S, SYSTEM, Client, Crowd, Message, Step
from tests.properties.promises import Request, never_chills, never_mangles, require
from tests.proxy.dialogue import Dialogue, Reply, said

OVERFLOW = b'{"error":{"message":"Too long.","code":"context_length_exceeded"}}'


@dataclass(eq=False, kw_only=True)
class Sent(Request):
    rejected: bool = False


@dataclass
class World(Crowd):
    folder: Path = Path()
    mode: str = "idle"
    window: int = 0  # of the model, in tokens by the proxy's count
    last: dict[int, Sent] = field(default_factory=dict)  # by client
    sent: dict[int, list[bytes]] = field(default_factory=dict)  # exchange id -> the client's messages
    running: list[Reply] = field(default_factory=list)
    rejecting: int = 0
    overflowing: int = 0  # the next request is refused for its length; 2: the shorter one as well
    failing: bool = False
    lossy: bool = False  # the queue overflowed or the program closed while failing
    rejected: list[Exception] = field(default_factory=list)  # batches that the database refused for their content
    settled_after: int = 0  # the last exchange that a failing disk may have cost

    def __post_init__(self) -> None:
        self.dialogue = Dialogue(
            self.folder,
            changes={"mode": self.mode, "beta": 0.3, "idle_after": 3600.0, "context_window_tokens": self.window},
            dialect=self.dialect,
        )
        self._open()
        self.join(Client(self.dialect, "s0", system=SYSTEM))

    def _open(self) -> None:
        writer = self.writer
        skip = writer._skip

        def rejected(job: object, error: Exception) -> None:
            self.rejected.append(error)
            skip(job, error)

        writer._skip = rejected
        self.file = sqlite3.connect(f"file:{self.dialogue.settings.db}?mode=ro", uri=True, isolation_level=None)

    # -- the program --------------------------------------------------------------------------------------------

    async def run(self, program: Sequence[Step]) -> None:
        try:
            for operation, n in program:
                await getattr(self, f"do_{operation}")(n)
            await self._come_to_rest()
        finally:
            self.heal()
            for reply in self.running:
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

    async def say(self, **given: Any) -> None:
        await self._send(**given)

    async def pause(self, seconds: float) -> None:
        self.dialogue.clock.advance(seconds)

    async def do_silent(self, n: int) -> None:
        """Something changes that the proxy hears of only with the next request."""
        (self.client.disturb if n % 2 else self.client.work)(n // 2)

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
            reply = self.running.pop(n % len(self.running))
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
        for reply in self.running:
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
        now = Sent(dialect=self.dialect, body=reply.original, plan_body=reply.plan.body, row=row)
        self.sent[row.id] = now.raws
        self._check_outgoing(now)
        if overflow and (shorter := await exchange.shorter(400, [], OVERFLOW)) is not None and shorter.body is not None:
            assert len(shorter.body) < len(reply.sent)
            shortened = Sent(
                dialect=self.dialect,
                body=reply.original,
                plan_body=shorter.body,
                row=exchange.shortened.row,  # type: ignore[attr-defined]
            )
            self.seen.update(["shortened"])
            self._check_outgoing(shortened)
            if overflow == 2:
                exchange.refused_again("refused with 400")
                now.row, now.rejected = exchange.row, True  # type: ignore[attr-defined]
            else:
                now = shortened
                reply = Reply(replace(reply.plan, body=shorter.body), reply.original)
        now.rejected = now.rejected or (bool(rejection) and reply.rewritten)
        before = self.last.get(who)
        if now.row is not None and now.row.outcome != "side":
            if before is not None and not before.rejected and not self.has_other(client):
                never_chills(before, now, disk_fails=self.failing)
            self.last[who] = now
        if finish:
            status = 400 if rejection == 2 else 200
            self.dialogue.finish(reply.plan, said(answer), reject=400 if rejection else None, status=status)
        else:
            self.running.append(reply)

    def _check_outgoing(self, sent: Sent) -> None:
        row = sent.row
        assert row is not None
        if sent.plan_body is None:
            assert row.messages_sent == row.messages_total
            return
        assert row.outcome != "side"
        never_mangles(sent, sent.plan_body, under_pressure="pressure" in self._reason_of(row))
        for raw in sent.gone:
            query = "SELECT codec, content FROM messages WHERE digest = ?"
            stored = self.file.execute(query, (message_digest(raw),)).fetchone()
            require(stored is not None, "never lose", f"left out, and not in the archive: {raw[:200]!r}")
            require(unpack(*stored) == raw, "never lose", f"stored otherwise: {raw[:200]!r}")

    def _reason_of(self, row: ExchangeRow) -> str:
        """Of the selection that this request went out with."""
        found = self.file.execute("SELECT reason FROM selections WHERE id = ?", (row.selection_id,)).fetchone()
        return str(found[0]) if found is not None else ""

    # -- at the end ----------------------------------------------------------------------------------------------

    async def check_archive(self) -> None:
        assert not self.rejected, self.rejected[0]
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
