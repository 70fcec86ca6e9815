"""Clients at random: each keeps a history as real agents do, and changes it in every way that agents and people do.

A program is a list of (operation, number) pairs; the number picks variants, so that a failing program can be copied
into a test as it is printed.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from proxy.dialects.base import DialectName

Message = dict[str, Any]
Step = tuple[str, int]

LUNCH_S = 4000.0  # after which no cache is warm
SUMMARY = "The summary of everything that happened here so far."
SYSTEM: Message = {"role": "system", "content": "You are an agent."}
IMAGE = "data:image/png;base64," + "A" * 400


@dataclass
class Client:
    """One conversation from the agent's side."""

    dialect: DialectName
    session_id: str | None
    history: list[Message] = field(default_factory=list)
    system: Message | None = None
    tools: int = 1  # a version; 0 has none
    model: str = "gpt-test"
    made: int = 0  # what this client has made so far: names of files, ids of calls

    def fork(self, session_id: str | None) -> "Client":
        return Client(
            self.dialect, session_id, list(self.history), self.system, self.tools, self.model, self.made + 1000
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"x-session-id": self.session_id} if self.session_id is not None else {}

    # -- what a client adds ---------------------------------------------------------------------------------------

    def ask(self, n: int) -> None:
        text = f"please look at unique_{(self.made * 7 + n) % 13} and go on {self.made}"
        self._add({"role": "user", "content": text if n % 3 else self._parts(text, n)})
        if n % 5 == 4:
            self._add({"role": "user", "content": "and hurry \ud83d\ude00 \u0000"})

    def answer(self, n: int) -> None:
        text = f"done with {self._next()} " + "and so on " * (n % 4)
        if self.dialect == "chat":
            self._add({"role": "assistant", "content": text, **({"reasoning_content": "hm"} if n % 2 else {})})
            return
        if n % 2:
            self._add(self._reasoning())
        self._add({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})

    def work(self, n: int) -> None:
        """One agent step: calls and their results, in one of many orders."""
        kinds = (self._plain, self._parallel, self._shuffled, self._repeated, self._edit, self._seen, self._talked)
        kinds[n % len(kinds)](n // len(kinds))

    def disturb(self, n: int) -> None:
        """What is legal, but not what an agent usually sends."""
        kinds = (self._unknown, self._developer, self._late_result, self._interrupted, self._open, self._orphan)
        kinds[n % len(kinds)](n // len(kinds))

    def undo(self, n: int) -> None:
        keep = len(self.history) - 1 - n % max(1, len(self.history) - 1)
        self.history = self.history[: max(1, keep)]

    def edit(self, n: int) -> None:
        """Write something else at one place, and drop what followed."""
        place = n % len(self.history)
        self.history = [*self.history[:place], self._altered(self.history[place], "EDITED ")]

    def amend(self, n: int) -> None:
        """A reminder is added to an old message, as some clients do, before the next request."""
        place = n % len(self.history)
        self.history[place] = self._altered(self.history[place], "")
        self.ask(1)

    def prune(self, n: int) -> None:
        """Old tool results become placeholders."""
        places = [i for i, m in enumerate(self.history) if _output_field(m) is not None]
        for place in places[: 1 + n % max(1, len(places))]:
            message = self.history[place]
            self.history[place] = message | {_output_field(message) or "": "[Old tool result content cleared]"}
        self.ask(n)

    def regenerate(self, n: int) -> None:
        """Go back to an old request and do the very same first step again."""
        users = [i for i, m in enumerate(self.history) if m.get("role") == "user"]
        if users:
            place = users[n % len(users)]
            self.history = self.history[: place + 1 + n % 3]

    def compact(self, summary: str) -> None:
        self.history = [{"role": "user", "content": f"{summary}\nGo on from there."}]

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _plain(self, n: int) -> None:
        self._calls([self._next_id()], n)

    def _parallel(self, n: int) -> None:
        self._calls([self._next_id() for _ in range(2 + n % 3)], n)

    def _shuffled(self, n: int) -> None:
        ids = [self._next_id() for _ in range(3)]
        self._call(ids, "read", n)
        for call_id in reversed(ids):
            self._result(call_id)

    def _repeated(self, n: int) -> None:
        self._calls(["call_0"], n)

    def _edit(self, n: int) -> None:
        call_id = self._next_id()
        self._call([call_id], "edit", n)
        self._result(call_id)

    def _seen(self, n: int) -> None:
        call_id = self._next_id()
        self._call([call_id], "read", n)
        self._result(call_id, content=self._parts("a picture", 0, output=True))

    def _talked(self, n: int) -> None:
        """Text with the call, reasoning before it."""
        if self.dialect == "responses":
            self._add(self._reasoning())
            self._add({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I read"}]})
        self._calls([self._next_id()], n, text="I read it now")

    def _unknown(self, n: int) -> None:
        if self.dialect == "chat":
            self._add({"role": ("narrator", "function", 7)[n % 3], "content": {"x": [None, 1e300]}, "name": "f"})
        else:
            self._add({"type": ("compaction", "strange_item", "web_search_call")[n % 3], "encrypted_content": "x"})

    def _developer(self, n: int) -> None:
        self._add({"role": ("system", "developer")[n % 2], "content": f"a reminder {self._next()}"})

    def _late_result(self, n: int) -> None:
        """A second result for a call that has one already."""
        ids = [m.get("tool_call_id", m.get("call_id")) for m in self.history if _output_field(m) is not None]
        if ids:
            self._result(str(ids[n % len(ids)]))

    def _interrupted(self, n: int) -> None:
        """The user writes between a call and its result."""
        call_id = self._next_id()
        self._call([call_id], "read", n)
        self.ask(n)
        self._result(call_id)

    def _open(self, n: int) -> None:
        self._call([self._next_id(), self._next_id()], "read", n)
        self.ask(n)

    def _orphan(self, n: int) -> None:
        self._result(f"nobody_{n}")

    # -- parts -----------------------------------------------------------------------------------------------------

    def _add(self, message: Message) -> None:
        self.history.append(message)

    def _next(self) -> int:
        self.made += 1
        return self.made

    def _next_id(self) -> str:
        return f"c{self._next()}"

    def _reasoning(self) -> Message:
        return {"type": "reasoning", "id": f"rs_{self._next()}", "summary": [], "encrypted_content": "gAAA"}

    def _parts(self, text: str, n: int, *, output: bool = False) -> list[Message]:
        if self.dialect == "chat":
            return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": IMAGE}}]
        return [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": IMAGE}]

    def _calls(self, ids: list[str], n: int, *, text: str | None = None) -> None:
        self._call(ids, "read", n, text=text)
        for call_id in ids:
            self._result(call_id)

    def _call(self, ids: list[str], name: str, n: int, *, text: str | None = None) -> None:
        arguments = json.dumps({"filePath": f"file{n % 4}.py", "n": self.made})
        if self.dialect == "chat":
            calls = [{"id": i, "type": "function", "function": {"name": name, "arguments": arguments}} for i in ids]
            self._add({"role": "assistant", "content": text, "tool_calls": calls})
            return
        for call_id in ids:
            self._add({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})

    def _result(self, call_id: str, content: Any = None) -> None:
        number = self._next()
        content = content or f"def unique_{number % 13}(): pass # {number} " + "filler text " * (5 + 40 * (number % 3))
        if self.dialect == "chat":
            self._add({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            self._add({"type": "function_call_output", "call_id": call_id, "output": content})

    def _altered(self, message: Message, before: str) -> Message:
        name = _output_field(message) or ("content" if isinstance(message.get("content"), str) else None)
        mark = f"{before}<reminder {self._next()}>"
        if name is None:
            return message | {"mark": mark}
        value = message[name]
        return message | {name: f"{value} {mark}" if isinstance(value, str) else [*value, {"text": mark}]}


def _output_field(message: Message) -> str | None:
    if message.get("role") == "tool":
        return "content"
    return "output" if message.get("type") == "function_call_output" else None


@dataclass
class Crowd(ABC):
    """Clients, and what they do. One of them is the `current` one."""

    dialect: DialectName
    clients: list[Client] = field(default_factory=list)
    current: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    names: "count[int]" = field(default_factory=lambda: count(1))

    @abstractmethod
    async def say(
        self,
        *,
        history: list[Message] | None = None,
        tools: int | None = None,
        system: Message | None = None,
        answer: str = "ok",
    ) -> None:
        """Send the current client's history, or what is given in place of it."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Time passes, and nobody says anything."""

    @property
    def client(self) -> Client:
        return self.clients[self.current]

    def join(self, client: Client) -> None:
        self.clients.append(client)
        self.current = len(self.clients) - 1

    def has_other(self, me: Client) -> bool:
        """Another client is on the same session as far as the proxy can tell: their requests are one sequence."""
        return any(
            other is not me and (other.session_id == me.session_id or me.session_id is None) for other in self.clients
        )

    async def do_turn(self, n: int) -> None:
        """A whole turn and the next request."""
        if not self.client.history:
            self.client.ask(n)
            await self.say()
        for i in range(1 + n % 3):
            self.client.work(n + i)
            if n % 2:
                await self.say()
        self.client.answer(n)
        self.client.ask(n)
        await self.say()

    async def do_lunch(self, n: int) -> None:
        await self.pause(LUNCH_S)
        await self.do_turn(n)

    async def do_work(self, n: int) -> None:
        self.client.work(n)
        await self.say()

    async def do_ask(self, n: int) -> None:
        self.client.ask(n)
        await self.say()

    async def do_disturb(self, n: int) -> None:
        self.client.disturb(n)
        if n % 4 == 0:
            self.client.ask(n)
        await self.say()

    async def do_retry(self, n: int) -> None:
        await self.pause((0.0, 5.0, 10 * LUNCH_S)[n % 3])
        await self._again()

    async def do_undo(self, n: int) -> None:
        self.client.undo(n)
        await self._again()

    async def do_regenerate(self, n: int) -> None:
        before = list(self.client.history)
        self.client.regenerate(n)
        await self._again()
        if n % 2:
            self.client.history = before
            await self._again()

    async def do_edit(self, n: int) -> None:
        if self.client.history:
            self.client.edit(n)
            await self.say()

    async def do_amend(self, n: int) -> None:
        if self.client.history:
            self.client.amend(n)
            await self.say()

    async def do_prune(self, n: int) -> None:
        if self.client.history:
            self.client.prune(n)
            await self.say()

    async def do_compact(self, n: int) -> None:
        if self.client.history:
            asked = [*self.client.history, {"role": "user", "content": "Summarise the above."}]
            await self.say(history=asked, tools=0, answer=SUMMARY)
            self.client.compact(SUMMARY)
            await self.say()

    async def do_side(self, n: int) -> None:
        title: Message = {"role": "system", "content": "You write titles."}
        question: Message = {"role": "user", "content": f"A title for {self.client.made}?"}
        await self.say(history=[question], tools=0, system=title, answer="A title")

    async def do_fork(self, n: int) -> None:
        twin = self.client.fork((f"s{next(self.names)}", None, self.client.session_id)[n % 3])
        self.join(twin)
        if n % 2 and twin.history:
            twin.undo(n // 2)

    async def do_fresh(self, n: int) -> None:
        """Another conversation, with or without an id of its own."""
        self.join(Client(self.dialect, f"s{next(self.names)}" if n % 2 else None, system=SYSTEM))

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

    async def _again(self) -> None:
        if self.client.history:
            await self.say()
