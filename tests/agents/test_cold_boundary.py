"""A session of each real agent, through a real proxy, across two cold boundaries.

Two turns read six files. The clock passes the idle time, and turn 3 asks about two of the files by names that only they
hold: the upstream must see a compacted, valid history that then only grows. After another pause turn 4 names things
from a file that was left out: it must be back.
"""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from proxy.conversations import open_conversations
from proxy.dialects.chat import ChatDialect
from proxy.dialects.responses import ResponsesDialect
from proxy.settings import Settings
from tests.agents.drivers import COMMAND_AGENTS, Driver, Workspace
from tests.agents.test_direct import SDK_AGENTS
from tests.fakes.model_script import text_of
from tests.fakes.provider_rules import CACHE_STEP_TOKENS
from tests.fakes.scripted_upstream import Fault, Received, ScriptedUpstream
from tests.support import running_proxy

IDLE_AFTER_S = 600.0
PAUSE_S = 7200.0  # behind which every profile takes the cache for gone
PROVIDER = {"name": "provider", "hosts": ["127.0.0.1"], "warm_s": 300, "cold_s": 3600, "read": 0.1}
HISTORY_TOKENS = 6_000  # three files are less, six more
BETA = 0.4  # room for two of the six files

# Per file: words that occur nowhere else. Turn 3 asks about the last two, turn 4 about the second.
WORDS = (
    ("aardvark_burrow", "aardvark_claws"),
    ("bandicoot_ledger", "bandicoot_whiskers"),
    ("capybara_lagoon", "capybara_chorus"),
    ("dormouse_teapot", "dormouse_slumber"),
    ("echidna_spines", "echidna_puggle"),
    ("flamingo_filter", "flamingo_parade"),
)
FORGOTTEN = 1


@dataclass(slots=True)
class VirtualClock:
    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Stage:
    """A proxy in front of a scripted upstream, both on one clock."""

    upstream: ScriptedUpstream
    base_url: str
    clock: VirtualClock

    def pass_idle_time(self) -> None:
        self.clock.now += PAUSE_S

    def steps(self, turn: int) -> list[Received]:
        """The agent's own requests of a turn: not titles, not side requests with other tools."""
        ours = next(received for received in self.upstream.conversations if received.has_tools)
        return [
            received
            for received in self.upstream.conversations
            if received.json.get("tools") == ours.json.get("tools") and f"Turn {turn}:" in user_texts(received)[-1]
        ]


@asynccontextmanager
async def stage(folder: Path, mode: Literal["idle", "auto"]) -> AsyncIterator[Stage]:
    clock = VirtualClock()
    async with ScriptedUpstream(clock=clock, cache_ttl_seconds=IDLE_AFTER_S) as upstream:
        settings = Settings(
            upstream=upstream.base_url,
            db=str(folder / "archive" / "recap.db"),
            mode=mode,
            idle_after=IDLE_AFTER_S,
            min_history_tokens=HISTORY_TOKENS,
            beta=BETA,
            profiles=(PROVIDER,),
        )
        async with running_proxy(settings, open_conversations(settings, clock)) as proxy:
            yield Stage(upstream, f"{proxy.url}/v1", clock)


def write_files(project: Path) -> list[Path]:
    """Six files of about 5 kB, each with words and a sentinel of its own."""
    paths = []
    for number, (first, second) in enumerate(WORDS):
        path = project / f"part{number}.txt"
        lines = [f"{first} {n:02d} is kept beside {second} on shelf {number}" for n in range(90)]
        path.write_text("\n".join([sentinel(number), *lines, ""]))
        paths.append(path)
    return paths


def sentinel(number: int) -> str:
    """Stands in the file and never in a prompt, so that it tells whether the file's content was sent."""
    return f"sentinel-of-file-{number}"


def files_sent(received: Received) -> set[int]:
    return {number for number in range(len(WORDS)) if sentinel(number).encode() in received.body}


def user_texts(received: Received) -> list[str]:
    return [text_of(message["content"]) for message in received.messages if message.get("role") == "user"]


def raw_messages(received: Received) -> list[bytes]:
    """The elements of the message array as bytes, for comparisons that JSON equality would blur."""
    fields = msgspec.json.decode(received.body, type=dict[str, msgspec.Raw])
    history = fields["messages" if received.dialect == "chat" else "input"]
    return [bytes(element) for element in msgspec.json.decode(history, type=list[msgspec.Raw])]


def notices(received: Received) -> list[bytes]:
    dialect = ChatDialect(part_chars=0) if received.dialect == "chat" else ResponsesDialect(part_chars=0)
    known = {dialect.render_notice(role) for role in ("system", "developer", "user")}
    return [raw for raw in raw_messages(received) if raw in known]


def is_prefix(shorter: list[bytes], longer: list[bytes]) -> bool:
    return longer[: len(shorter)] == shorter


def is_subsequence(some: list[bytes], whole: list[bytes]) -> bool:
    rest = iter(whole)
    return all(element in rest for element in some)


async def play(agent: Driver, on: Stage, files: list[Path]) -> None:
    """Four turns with tool calls; the clock passes the idle time before the third and the fourth."""

    def reading(*numbers: int) -> str:
        return " ".join(f"[[{agent.read(files[number])}]]" for number in numbers)

    extras = [file.with_name(f"extra{n}.txt") for n, file in enumerate(files[:2])]
    for extra in extras:
        extra.write_text("a short note\n")
    both = " || ".join(agent.read(extra) for extra in extras)
    recent = " ".join(word for words in WORDS[-2:] for word in words)
    forgotten = " ".join(WORDS[FORGOTTEN])

    assert "first done" in await agent.turn(f"Turn 1: {reading(0, 1, 2)} [[= first done]]")
    assert "second done" in await agent.turn(f"Turn 2: {reading(3, 4, 5)} [[= second done]]")
    on.pass_idle_time()
    asking = f"Turn 3: how do {recent} fit together? [[{agent.read(extras[0])}]] [[{both}]] [[= third done]]"
    assert "third done" in await agent.turn(asking)
    on.pass_idle_time()
    assert "fourth done" in await agent.turn(f"Turn 4: and {forgotten}? [[{agent.read(extras[1])}]] [[= fourth done]]")


@pytest.mark.agent
@pytest.mark.parametrize("mode", ["idle", "auto"])
@pytest.mark.parametrize("name", [*COMMAND_AGENTS, *SDK_AGENTS])
async def test_a_session_is_compacted_at_cold_boundaries_and_never_breaks(
    name: str,
    mode: Literal["idle", "auto"],
    tmp_path: Path,
    workspace: Workspace,
    start_agent: Callable[[str, str], Driver],
) -> None:
    async with stage(tmp_path, mode) as on:
        await play(start_agent(name, on.base_url), on, write_files(workspace.project))

        assert {(received.status, received.rejected) for received in on.upstream.conversations} == {(200, None)}
        first, second, third, fourth = (on.steps(turn) for turn in (1, 2, 3, 4))
        assert [len(steps) for steps in (first, second, third, fourth)] == [4, 4, 3, 2]

        warm = [*first, *second]
        assert files_sent(second[-1]) == {0, 1, 2, 3, 4, 5} and not any(notices(step) for step in warm)

        whole = raw_messages(second[-1])
        compacted = third[0]
        assert len(compacted.messages) < len(whole)
        assert files_sent(compacted) == {4, 5}, "what the request names is kept, the rest is left out"
        assert all(len(notices(step)) == 1 for step in [*third, *fourth])
        kept = [raw for raw in raw_messages(compacted) if raw not in notices(compacted)]
        old = list(itertools.takewhile(lambda raw: raw in whole, kept))
        assert is_subsequence(old, whole), "kept messages are verbatim and in order"
        assert len(kept) - len(old) <= 3, "new are only the last answer, with its reasoning, and the user's request"
        assert user_texts(compacted)[:-1] == user_texts(second[-1]), "every user message is there"

        assert FORGOTTEN in files_sent(fourth[0]), "what the newest request names is back"
        assert user_texts(fourth[0])[:-1] == user_texts(third[-1])

        for steps in (warm, third, fourth):
            for before, after in zip(steps, steps[1:], strict=False):
                assert is_prefix(raw_messages(before), raw_messages(after))
                assert after.cached_tokens > before.input_tokens - 2 * CACHE_STEP_TOKENS, "the cache stayed warm"


async def test_a_refused_rewrite_goes_out_as_it_came_and_the_session_goes_on(
    tmp_path: Path, workspace: Workspace, start_agent: Callable[[str, str], Driver]
) -> None:
    async with stage(tmp_path, "idle") as on:
        on.upstream.inject(Fault(status=400), when=lambda received: bool(notices(received)))
        await play(start_agent("sdk-chat-stream", on.base_url), on, write_files(workspace.project))
        refused, again, *later = on.steps(3)
        assert (refused.status, again.status) == (400, 200)
        assert files_sent(again) == {0, 1, 2, 3, 4, 5}
        assert not any(notices(step) for step in [again, *later, *on.steps(4)]), (
            "the session is left alone from then on"
        )
