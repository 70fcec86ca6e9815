"""One history: clients, a provider, a disk, a proxy and a worker, all moved by one seed, and every promise checked.

The proxy is the production code from the ASGI application down to the file: `Gateway`, the relay, the session logic,
the recorder, the writer, SQLite. What is made up stands at its edges: the HTTP server above, the HTTP client and the
model below, threads and time (`machine`), and what can happen to a disk (`disk`).
"""

import asyncio
import gzip
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from starlette.types import Message as Event

from graphstore.identity import chain_digests, message_digest, row_id
from graphstore.replays import Replay
from graphstore.store import verify as verification
from graphstore.store.archive import open_queue, open_reader
from graphstore.store.engine import BUSY_TIMEOUT_S, ArchiveUnavailable
from graphstore.store.reader import Reader
from graphstore.store.writer import QUEUE_BATCHES_MAX
from proxy.commands.verify import recut
from proxy.commands.worker import ArchivedJobs
from proxy.conversations import open_conversations
from proxy.dialects.base import DialectName
from proxy.endpoints import Gateway
from proxy.ports import Arrival, Plan
from proxy.settings import Settings
from proxy_model.context import ContextBlock
from proxy_model.errors import ModelUnavailable, ReplayError
from proxy_model.worker import Worker
from tests.observed import replay_of
from tests.properties.clients import LUNCH_S, SUMMARY, SYSTEM, Client, Crowd, Message
from tests.properties.promises import Broken, never_chills, never_mangles, require
from tests.proxy.dialogue import FIELDS, PATHS
from tests.simulation import promises
from tests.simulation.damage import DAMAGES, harm, mend, upgrade
from tests.simulation.disk import OTHER, TROUBLES, Disk, over
from tests.simulation.machine import Machine, Process, Thread
from tests.simulation.promises import Call
from tests.simulation.upstream import CALL_HEADER, Attempt, Behaviour, SimulatedUpstream, behaviour

IDLE_AFTER_S = 3600.0
_COUNTS = "SELECT (SELECT count(*) FROM messages), (SELECT count(*) FROM exchanges)"
RARELY = 97.0  # the worker's looks at its queue are alike: it looks less often, and a history costs less
PATIENCE_S = 30.0  # in which a request is answered by a provider that answers

# What happens in a history, and how often.
ACTIONS: dict[str, int] = {
    "turn": 10, "lunch": 14, "work": 4, "ask": 4, "busy": 4, "wait": 4, "retry": 6, "leave": 4,
    "undo": 2, "regenerate": 2, "edit": 2, "amend": 2, "prune": 3, "compact": 2, "disturb": 3, "side": 2,
    "fork": 3, "fresh": 2, "switch": 3, "change": 2, "twice": 2, "volley": 2,
    "trouble": 6, "heal": 4, "kill": 4, "kill_within": 5, "cut_power": 2, "restart": 2,
    "occupy": 3, "look": 3, "damage": 3, "hire": 3, "kill_worker": 2, "flush": 2, "health": 1,
}  # fmt: skip


@dataclass(eq=False)
class Proxy:
    """One process of the proxy while it lives."""

    process: Process
    conversations: Any = None
    gateway: Gateway | None = None


class _Observer:
    """A model whose measurements are drawn; sometimes it cannot be loaded, cannot replay, or takes its time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def observe(self, blocks: Sequence[ContextBlock], session: int) -> Replay:
        random = self._machine.random
        self._machine.sleep(random.choice((0.5, 20.0, 300.0)))
        match random.randrange(12):
            case 0:
                raise ReplayError("the context is too long", "nothing is to be done")
            case 1:
                raise ModelUnavailable("no attention can be read", "choose another model")
            case 2:
                raise RuntimeError("simulated fault of the model")
        known = [block.ordinal for block in blocks if block.ordinal is not None]
        density = {ordinal: random.random() for ordinal in known}
        pairs = [(a, b) for b in sorted(known) for a in sorted(known) if a < b and random.random() < 0.1]
        return replay_of(density, [(a, b, round(random.uniform(0.01, 0.2), 4)) for a, b in pairs])

    def forget(self) -> None:
        pass


@dataclass(kw_only=True)
class World(Crowd):
    """`log` says what happened, for a history that fails."""

    path: Path
    machine: Machine
    steps: int
    log: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    last: dict[int, Call] = field(default_factory=dict)  # by client
    last_in: dict[tuple[int, int | None], Call] = field(default_factory=dict)  # by client and session
    expected: dict[int, Call] = field(default_factory=dict)  # by exchange: what the archive must have in the end
    fell_back_at: dict[int, float] = field(default_factory=dict)  # by client
    left_out: set[bytes] = field(default_factory=set)
    losses_until: int = -1  # calls up to this number may be missing: a queue ran over, or a process died
    proxy: Proxy | None = None
    worker: Process | None = None
    others: list[Process] = field(default_factory=list)  # who reads or locks the file beside them
    is_damaged: bool = False  # the file is, and nobody has repaired it: what stands in it proves nothing
    problem: Exception | None = None
    commits_verified: int = -1

    def __post_init__(self) -> None:
        random = self.random
        self.disk = Disk(self.path, self.machine)
        self.upstream = SimulatedUpstream(self._asked)
        self.is_rough = random.random() < 0.3
        self.queue_max = 3 if random.random() < 0.1 else None
        self.settings = Settings(
            upstream="http://upstream.test/v1",
            db=str(self.path),
            mode=random.choice(
                ("idle", "auto", "always", "off") if random.random() < 0.3 else ("idle", "auto", "always")
            ),
            idle_after=IDLE_AFTER_S,
            min_history_tokens=0,
            context_window_tokens=random.choice((0, 0, 0, 400)),
            beta=0.3,
            attention=random.choice(("auto", "auto", "off")),
        )
        self.join(Client(self.dialect, random.choice(("s0", None)), system=SYSTEM))
        self.was_short = False
        self._gone: dict[int, asyncio.Event] = {}
        self._served: dict[int, asyncio.Task[None]] = {}
        self._own_tasks: set[asyncio.Task[Any]] = set()

    @property
    def random(self) -> Random:
        return self.machine.random

    def note(self, text: str) -> None:
        self.log.append(f"{self.machine.time() - 1_800_000_000:10.3f}  {text}")

    # -- a history ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        self._own_tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        with over(self.disk):
            try:
                await self._own(self._start_proxy())
                await self._begin()
                names, weights = list(ACTIONS), list(ACTIONS.values())
                for _ in range(self.steps):
                    await self._step(self.random.choices(names, weights)[0], self.random.randrange(40))
                await self._come_to_rest()
            finally:
                self.disk.heal()
                await self._stop_worker()
                self._send_away()
                await self._bury(Process("none"))
                self.disk.close()
        if self.problem is not None:
            raise self.problem

    async def _begin(self) -> None:
        """There is something to leave out: some turns that the proxy hears of at once, or one by one."""
        n = self.random.randrange(40)
        for i in range(2 + n % 2):
            self.client.ask(n + i)
            self.client.work(n + i)
            self.client.answer(n + i)
            if n % 8 == 3:
                await self._quick()
        self.client.ask(n)
        await self._quick()
        if n % 3:
            await self._step("lunch", n)

    async def _step(self, action: str, n: int) -> None:
        self.note(f"{action} {n}")
        self.seen[action] += 1
        await getattr(self, f"do_{action}")(n)
        await self._recover()
        self._check()

    def _check(self) -> None:
        """What must hold between any two steps."""
        if self.problem is not None:
            raise self.problem
        if self.is_damaged or self.disk.commits == self.commits_verified:
            return
        self.commits_verified = self.disk.commits
        promises.verifies_at_a_glance(self.disk)

    async def _come_to_rest(self) -> None:
        """The disk works, everybody is answered and says one thing more: then the archive has to be whole."""
        self.note("come to rest")
        self.disk.heal()
        self.disk.spare()
        self._send_away()
        self.was_short, self.queue_max = self.queue_max is not None, None
        if self._archive is not None:
            self._archive.writer._queue_max = QUEUE_BATCHES_MAX
        self.upstream.released.set()
        await self._recover(at_once=True)
        await self._everybody_is_answered()
        for last in (False, True):
            await self._recover(at_once=True)
            if not last and not self._is_lossy() and self.losses_until < 0:
                continue  # nothing is missing that a further request would have to bring again
            await self._all_is_written()
            if last:
                self.losses_until = max(self.losses_until, len(self.calls) - 1 if self._is_lossy() else -1)
            for number in range(len(self.clients)):
                self.current = number
                self.client.answer(1)
                self.client.ask(1)
                await self._send(Behaviour())
            await self._everybody_is_answered()
        await self._all_is_written()
        self._check()
        await self._stop_worker()
        assert self.proxy is not None
        await self._own(self.proxy.conversations.close())
        self._check_archive()

    async def _all_is_written(self) -> None:
        """The disk works: what waited for that is written soon."""
        problem: object = None
        for _ in range(10):
            assert self.proxy is not None
            try:
                await self._own(self.proxy.conversations.flush())
                break
            except ArchiveUnavailable as error:
                problem = error
                await asyncio.sleep(PATIENCE_S)
        else:
            raise Broken("never lose", f"the disk works again, and nothing is written: {problem}")
        if self._archive is not None:  # else it was opened while the disk failed, and is tried again now and then
            writer = self._archive.writer
            refused = f"{writer.lost} batches were refused: {writer.failure}"
            require(self._is_lossy() or not writer.lost, "never lose", refused)

    async def _everybody_is_answered(self) -> None:
        for _ in range(40):
            if all(call.over for call in self.calls):
                return
            await asyncio.sleep(PATIENCE_S)
            await self._recover(at_once=True)
        waiting = [call.number for call in self.calls if not call.over]
        raise Broken("never break", f"requests {waiting} were never answered")

    def _check_archive(self) -> None:
        with Reader(self.disk.open_to_look()) as reader:
            findings = verification.verify(reader, recut)
            require(not findings, "verify", "; ".join(map(str, findings[:5])))
            sessions = {row.id: row for row in reader.list_sessions()}
            rows = {row.id: row for id in sessions for row in reader.session_exchanges(id)}
            for id, call in self.expected.items():
                if id not in rows:
                    may_lack = call.number <= self.losses_until or (
                        call.row is not None and call.row.session_id is None
                    )
                    require(may_lack, "never lose", f"request {call.number}, exchange {id}, was not recorded")
                    continue
                row = rows[id]
                if row.outcome != "opaque":  # the chain and its messages have just been derived from their bytes
                    chain = chain_digests(sessions[row.session_id or 0].scope, call.own.digests)
                    same = row.head_node_id == (row_id(chain[-1]) if chain else None)
                    require(same, "never lose", f"request {call.number}: its history is another one")
                if call.number > self.losses_until:
                    promises.explains_an_exchange(call, row)
        self._check_left_out()

    def _check_left_out(self) -> None:
        """Whatever was ever left out is still there."""
        known = {digest for (digest,) in self.disk.ask("SELECT digest FROM messages")}
        for digest in self.left_out:
            require(digest in known, "never lose", "a message that was left out is gone")

    def _is_lossy(self) -> bool:
        """The queue ran over, perhaps: what it did not take is lost, as it has to be."""
        return self.was_short or self.queue_max is not None

    @property
    def _archive(self) -> Any:
        conversations = self.proxy.conversations if self.proxy is not None else None
        return getattr(getattr(conversations, "_opened", None) or conversations, "_archive", None)

    # -- clients ------------------------------------------------------------------------------------------------

    async def say(self, *, answer: str = "ok", **given: Any) -> None:
        await self._quick(Behaviour(text=answer) if answer == SUMMARY else None, **given)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._recover()

    async def do_busy(self, n: int) -> None:
        """The next request, while the one before it still runs."""
        self.client.ask(n)
        await self._send()
        await asyncio.sleep((0.0, 0.005, 0.3)[n % 3])
        self.client.ask(n + 1)
        await self._send()

    async def do_wait(self, n: int) -> None:
        await asyncio.sleep((0.1, 1.0, 6.0, 60.0, 700.0)[n % 5])

    async def do_leave(self, n: int) -> None:
        """Clients hang up: now, or soon after they asked."""
        if n % 2 and self.client.history:
            self.client.ask(n)
            await self._send()
            await asyncio.sleep((0.0, 0.003, 0.02, 0.6, 3.1)[n % 5])
        for call in self.calls:
            if not call.over:
                call.left = True
                self._gone[call.number].set()

    async def do_fresh(self, n: int) -> None:
        await super().do_fresh(n)
        await self.do_turn(n)

    async def do_twice(self, n: int) -> None:
        """The same request on two connections."""
        self.client.ask(n)
        await self.pause(LUNCH_S * (n % 2))
        await self._send()
        await self._quick()

    async def do_volley(self, n: int) -> None:
        """Everybody at once."""
        await self.pause(LUNCH_S * (n % 2))
        for number in range(len(self.clients)):
            self.current = number
            self.client.answer(n)
            self.client.ask(n)
            await self._send()

    # -- the machine --------------------------------------------------------------------------------------------

    async def do_trouble(self, n: int) -> None:
        trouble = TROUBLES[n % len(TROUBLES)]
        times = self.random.choice((1, 2, 1 << 40))
        stall_s = self.random.choice((0.4, 4.0, 7.0, 30.0))
        after = self.random.choice((0, 0, 1, 2, 5, 12))
        self.note(f"  {trouble} after {after}, {times} times, {stall_s} s")
        self.seen[f"disk {trouble}"] += 1
        self.disk.fail(trouble, after=after, times=times, stall_s=stall_s)

    async def do_heal(self, n: int) -> None:
        self.disk.heal()

    async def do_kill(self, n: int) -> None:
        """At once, or a moment after a request came in."""
        if n % 3 and self.client.history:
            self.client.ask(n)
            await self._send()
            await asyncio.sleep(self.random.choice((0.0, 0.002, 0.02, 0.1, 0.4, 1.0)))
        if self.proxy is not None:
            self.proxy.process.kill()

    async def do_kill_within(self, n: int) -> None:
        """At one of the next statements, or just before or after a commit."""
        if self.proxy is not None:
            self.disk.kill_at(self.proxy.process, self.random.randrange(60))
            await self.do_lunch(n)

    async def do_cut_power(self, n: int) -> None:
        """Everything stops, and what was not durable is gone."""
        if n % 2 and self.client.history:
            self.client.ask(n)
            await self._send()
            await asyncio.sleep(self.random.choice((0.0, 0.02, 0.4, 3.0)))
        await self._stop_worker()
        self._send_away()
        await self._bury(Process("none"))
        self.disk.cut_power()
        self._note_losses()

    async def do_occupy(self, n: int) -> None:
        """Another program writes to the file, for longer than anybody waits, or not so long."""
        other = self._let_in(OTHER)
        seconds = self.random.choice((0.3, 4.0, 12.0, 400.0))
        Thread(target=lambda: self.disk.occupy(other, seconds), process=other).start()
        self.client.ask(n)
        await self._quick()

    async def do_look(self, n: int) -> None:
        """`recap show` or the inspector reads beside us, and takes its time."""
        Thread(
            target=lambda: self._read_beside(self.random.choice((0.0, 0.5, 60.0))), process=self._let_in("look")
        ).start()
        await self.do_turn(n)

    def _read_beside(self, seconds: float) -> None:
        began = self.machine.time()
        try:
            with open_reader(self.path) as reader, reader.snapshot() as db:
                before = db.exec_driver_sql(_COUNTS).one()
                self.machine.sleep(seconds)
                after = db.exec_driver_sql(_COUNTS).one()
                rows = [row for session in reader.list_sessions() for row in reader.session_exchanges(session.id)]
            with self._breaking():
                require(before == after, "explain", "a view of the archive changed under its reader")
                require(all(row.reason for row in rows), "explain", "an exchange is shown without its reason")
        except ArchiveUnavailable as error:
            disturbed = self.is_damaged or self.disk.fails or self.disk.troubled_at >= began - BUSY_TIMEOUT_S
            with self._breaking():
                require(disturbed, "explain", f"the archive cannot be read, with a disk that works: {error}")

    def _let_in(self, name: str) -> Process:
        process = Process(name)
        self.others.append(process)
        return process

    def _send_away(self) -> None:
        for process in self.others:
            process.kill()
            self.disk.bury(process)
        self.others.clear()

    async def do_damage(self, n: int) -> None:
        """All stand still, and the file is not what it was; work goes on with it, until somebody repairs it."""
        damage = DAMAGES[n % len(DAMAGES)]
        self.note(f"  {damage}")
        self.seen[f"damage {damage}"] += 1
        await self._stop_all()
        harm(self.path, damage, self.random)
        self.is_damaged = True
        self._forget_what_was()
        await self._recover(at_once=True)
        await self.do_turn(n)
        await self.do_lunch(n)
        await self._recover(at_once=True)
        assert self.proxy is not None
        health = await self._own(asyncio.to_thread(self.proxy.conversations.health))
        if health is not None:
            told = health["state"] == "ok" or health["problem"]
            require(told, "explain", "the archive fails, and nobody says why")
            named = damage != "newer" or (health["state"] != "ok" and "newer version" in health["problem"])
            require(named, "explain", f"an archive of a newer version, and health says {health['problem']}")
        await self._stop_all()
        said: list[str] = []
        await self._own(asyncio.to_thread(lambda: said.append(mend(self.settings))))
        self.disk.bury(self.machine.process)
        if damage == "newer":
            require(said and "newer version" in said[0], "explain", "repair of a newer archive says something else")
            upgrade(self.path)
        self.disk.replaced()
        self.is_damaged = False
        self.commits_verified = -1
        self._forget_what_was()

    async def _stop_all(self) -> None:
        await self._stop_worker()
        self._send_away()
        self.disk.heal()
        self.disk.spare()
        await self._bury(Process("none"))
        self.machine.process = Process("repair")

    def _forget_what_was(self) -> None:
        """Of what the file had, what it has now is all that can be asked for."""
        self.losses_until = len(self.calls) - 1
        self.expected.clear()
        self.last.clear()
        self.last_in.clear()
        self.left_out.clear()

    async def do_restart(self, n: int) -> None:
        """In order: what is queued gets written."""
        if self.proxy is None or self.proxy.conversations is None:
            return
        proxy = self.proxy
        for call in self.calls:
            if not call.over:
                call.killed = True
                self._served[call.number].cancel()
        await asyncio.sleep(0)
        if self.disk.fails or self.queue_max is not None:
            self.losses_until = len(self.calls) - 1
        await self._own(proxy.conversations.close())
        if proxy is self.proxy and not proxy.process.dead:
            await self._bury(Process("none"))

    async def do_hire(self, n: int) -> None:
        """A worker starts, if there is none."""
        if self.worker is not None and not self.worker.dead:
            return
        await self._stop_worker()
        worker = self.worker = Process("worker")
        Thread(target=self._work, process=worker).start()
        if n % 3 == 0:
            self.disk.kill_at(worker, self.random.randrange(60))

    async def do_kill_worker(self, n: int) -> None:
        await self._stop_worker()

    async def do_flush(self, n: int) -> None:
        if self.proxy is not None and self.proxy.conversations is not None:
            with suppress(ArchiveUnavailable):
                await self._own(self.proxy.conversations.flush())

    async def do_health(self, n: int) -> None:
        if self.proxy is not None and self.proxy.conversations is not None:
            health = await self._own(asyncio.to_thread(self.proxy.conversations.health))
            require(health is None or json.dumps(health), "explain", "health says nothing")

    def _work(self) -> None:
        def load() -> _Observer:
            if self.random.random() < 0.1:
                raise ModelUnavailable("no weights", "fetch them")
            return _Observer(self.machine)

        try:
            queue, reader = open_queue(self.path, clock=self.machine.time), open_reader(self.path)
        except ArchiveUnavailable:
            return  # the supervisor would start another one
        jobs = ArchivedJobs(queue, reader, self.settings)
        Worker(jobs, jobs.context, load, lambda seconds: self.machine.sleep(seconds * RARELY)).run()

    async def _stop_worker(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.disk.bury(self.worker)
            self.worker = None

    # -- the proxy's process ------------------------------------------------------------------------------------

    async def _start_proxy(self) -> None:
        proxy = self.proxy = Proxy(Process("proxy"))
        self.machine.process = proxy.process
        made = await asyncio.to_thread(open_conversations, self.settings, self.machine.time)
        proxy.conversations = made
        if self.queue_max is not None and self._archive is not None:
            self._archive.writer._queue_max = self.queue_max
        proxy.gateway = Gateway(self.settings, self.upstream, _Watched(made, self))  # type: ignore[arg-type]

    async def _recover(self, *, at_once: bool = False) -> None:
        """Start a proxy in place of one that died."""
        while self.proxy is None or self.proxy.process.dead:
            if self.proxy is not None:
                await self._bury(self.proxy.process)
            self._note_losses()
            if not at_once and self.random.random() < 0.3:
                await asyncio.sleep(2.0)
            await self._own(self._start_proxy())
            self.note("started")

    async def _bury(self, process: Process) -> None:
        """End what is left of the proxy's process: its connections break, its memory is gone."""
        proxy, self.proxy = self.proxy, None
        if proxy is None:
            return
        self.seen["died" if process is proxy.process else "ended"] += 1
        proxy.process.kill()
        for call in self.calls:
            if not call.over:
                call.killed = True
        own = {asyncio.current_task(), *self._own_tasks}
        while others := [task for task in asyncio.all_tasks() if task not in own and not task.done()]:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        self.disk.bury(proxy.process)

    def _note_losses(self) -> None:
        """What a process that died had not written is gone; what the archive has by now must stay."""
        self.losses_until = len(self.calls) - 1
        if self.is_damaged:
            return
        rows = {id for (id,) in self.disk.ask("SELECT id FROM exchanges")}
        self.expected = {id: call for id, call in self.expected.items() if id in rows}
        self._check_left_out()

    async def _own(self, work: Any) -> Any:
        """Run work of the proxy's process; None if that dies under it."""
        proxy_task = asyncio.ensure_future(work)
        while not proxy_task.done():
            await asyncio.wait((proxy_task,), timeout=0.25)
            if self.machine.process.dead:
                proxy_task.cancel()
                await asyncio.gather(proxy_task, return_exceptions=True)
                return None
        return proxy_task.result()

    # -- one request --------------------------------------------------------------------------------------------

    async def _quick(self, how: Behaviour | None = None, **given: Any) -> None:
        """Send, and go on when the answer is there or soon after."""
        call = await self._send(how, **given)
        for pause in (0.02, 0.6, 5.0):
            if call is None or call.over:
                return
            await asyncio.sleep(pause)

    async def _send(
        self,
        how: Behaviour | None = None,
        *,
        history: list[Message] | None = None,
        tools: int | None = None,
        system: Message | None = None,
    ) -> Call | None:
        client, random = self.client, self.random
        if self.proxy is None or self.proxy.gateway is None or self.proxy.process.dead:
            return None  # nobody listens
        first = system or client.system
        version = client.tools if tools is None else tools
        messages = [*([first] if first else []), *(client.history if history is None else history)]
        body: dict[str, Any] = {"model": client.model, FIELDS[self.dialect]: messages}
        if version:
            body["tools"] = [{"type": "function", "function": {"name": "read", "version": version}}]
        stream = random.random() < 0.5
        if stream:
            body["stream"] = True
        plain = json.dumps(body).encode()
        wire = gzip.compress(plain, 1, mtime=0) if random.random() < 0.1 else plain
        how = replace(how, stream=stream) if how else behaviour(random, stream=stream, is_rough=self.is_rough)
        call = Call(
            dialect=self.dialect,
            body=plain,
            number=len(self.calls),
            who=self.current,
            client=client,
            wire=wire,
            how=how,
            arrived_at=self.machine.time(),
        )
        self.calls.append(call)
        self._gone[call.number] = asyncio.Event()
        self.note(f"  request {call.number} of {client.session_id}: {len(messages)} messages, {how.kind} {how.status}")
        self._served[call.number] = asyncio.create_task(self._serve(call, self.proxy.gateway))
        await asyncio.sleep(0)
        return call

    async def _serve(self, call: Call, gateway: Gateway) -> None:
        """What an HTTP server does for one request."""
        pieces = [call.wire[:1000], call.wire[1000:]] if len(call.wire) > 1000 else [call.wire]
        gone = self._gone[call.number]

        async def receive() -> Event:
            if pieces:
                return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(event: Event) -> None:
            if call.left:
                return
            if event["type"] == "http.response.start":
                call.status = event["status"]
                return
            call.received += event.get("body", b"")
            call.got_end = not event.get("more_body", False)

        headers = [(b"authorization", b"Bearer canary"), (CALL_HEADER, b"%d" % call.number)]
        headers += [(name.encode(), value.encode()) for name, value in call.client.headers.items()]
        headers += [(b"content-encoding", b"gzip")] if call.wire != call.body else []
        headers.append((b"content-length", b"%d" % len(call.wire)))
        path = PATHS[self.dialect]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        try:
            await gateway({**scope, "headers": headers}, receive, send)
        except asyncio.CancelledError:
            call.killed = True
        except Exception as error:
            self._break(Broken("never break", f"the application raised {error!r}"))
        finally:
            call.over = True
            if call.rejected:
                self.fell_back_at[call.who] = self.machine.time()
        with self._breaking():
            promises.never_breaks_in_the_end(call)

    def planned(self, call: Call, plan: Plan) -> None:
        """The session logic has said what to send; nothing has been sent yet."""
        call.planned_at = self.machine.time()
        call.plan_body = plan.body
        call.row = getattr(plan.exchange, "row", None)
        self.note(
            f"  planned {call.number}: {call.row.id if call.row else '-'} {call.row.outcome if call.row else '-'}, "
            f"{call.row.reason if call.row else '-'}, left out {len(call.gone)}"
        )
        if self.machine.process.dead:
            return
        with self._breaking():
            self._count(call)
            promises.never_waits(call, self.disk)
            if call.plan_body is not None:
                never_mangles(call, call.plan_body)
            if self.is_damaged:
                return
            gone = call.gone
            promises.never_loses(gone, self.disk)
            self.left_out.update(message_digest(raw) for raw in gone)
            promises.explains_a_plan(call, self.disk)
            if call.row is None:
                self.last.pop(call.who, None)
                self.last_in = {key: last for key, last in self.last_in.items() if key[0] != call.who}
                return
            self.expected[call.row.id] = call
            if call.row.outcome == "side":
                return
            before = self.last_in.get((call.who, call.row.session_id)) or self.last.get(call.who)
            if before is not None and before.row is not None and not self.has_other(call.client):
                fell_back = self.fell_back_at.get(call.who, float("-inf")) >= (before.planned_at or 0.0)
                if not fell_back and not promises.was_cold_between(before.row, call.row, self.disk):
                    never_chills(before, call, lost=self.expected.get(before.row.id) is not before)
            self.last[call.who] = self.last_in[call.who, call.row.session_id] = call

    def _count(self, call: Call) -> None:
        if call.row is not None:
            self.seen.update([call.row.outcome, call.row.boundary, "rewritten" if call.is_rewritten else "original"])
            self.seen.update(["not saved"] if "decision not saved" in call.row.reason else [])
            self.seen.update(["pass-through"] if "pass-through" in call.row.reason else [])
        else:
            self.seen["unrecorded"] += 1

    def _asked(self, number: int, body: bytes) -> tuple[Behaviour, Attempt, bool, DialectName]:
        call = self.calls[number]
        attempt = Attempt(body)
        call.attempts.append(attempt)
        with self._breaking():
            promises.never_breaks_on_the_way(call)
        if call.rejected:
            self.seen["fell back"] += 1
            self.fell_back_at[call.who] = self.machine.time()
        return call.how, attempt, not call.is_rewritten or call.rejected, self.dialect

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Keep a broken promise for the next step: the code under test would take the exception for one of its own."""
        try:
            yield
        except Exception as problem:
            self._break(problem)

    def _break(self, problem: Exception) -> None:
        self.note(f"BROKEN {problem!r}")
        self.problem = self.problem or problem


class _Watched:
    """`Conversations` with a look at every plan."""

    def __init__(self, conversations: Any, world: World) -> None:
        self._conversations = conversations
        self._world = world

    async def admit(self, arrival: Arrival) -> Plan:
        plan: Plan = await self._conversations.admit(arrival)
        number = next(int(value) for name, value in arrival.headers if name == CALL_HEADER)
        self._world.planned(self._world.calls[number], plan)
        return plan


def lay_out(archive: bytes, path: Path) -> None:
    """An empty archive whose secret is always the same: sessions' names, and what is drawn by them, follow from it."""
    path.write_bytes(archive)
    database = sqlite3.connect(path)
    with database:
        database.execute("UPDATE meta SET value = ? WHERE key = 'secret'", (b"s" * 32,))
    database.close()
