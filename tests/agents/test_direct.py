"""Each agent works against the scripted upstream without a proxy between: what fails here is not the proxy's doing."""

from collections.abc import Callable

import pytest

from tests.agents.drivers import COMMAND_AGENTS, KEY, Driver, Workspace
from tests.fakes.scripted_upstream import ScriptedUpstream

SDK_AGENTS = ("sdk-chat-plain", "sdk-chat-stream", "sdk-responses-plain", "sdk-responses-stream")


@pytest.mark.agent
@pytest.mark.parametrize("name", [*COMMAND_AGENTS, *SDK_AGENTS])
async def test_two_turns_with_tool_calls(
    name: str, workspace: Workspace, start_agent: Callable[[str, str], Driver]
) -> None:
    files = [workspace.project / "one.txt", workspace.project / "two.txt"]
    for path in files:
        path.write_text(f"content of {path.stem}\n")
    async with ScriptedUpstream() as upstream:
        agent = start_agent(name, upstream.base_url)
        one, two = (agent.read(path) for path in files)
        first = f"Read [[{one}]] and [[{one} || {two}]] [[= both read]]"
        assert "both read" in await agent.turn(first)
        steps = [received for received in upstream.conversations if received.has_tools]
        assert "again done" in await agent.turn(f"Again [[{two}]] [[= again done]]")

        assert len(steps) == 3, "one request per step"
        for received in upstream.conversations:
            assert (received.status, received.rejected) == (200, None)
            assert received.header("authorization") == f"Bearer {KEY}"
        assert b"content of one" in steps[1].body and b"content of two" in steps[2].body
        last = [received for received in upstream.conversations if received.has_tools][-1]
        assert last.messages[: len(steps[-1].messages)] == steps[-1].messages, "the agent keeps its history"
        refused = [received.path for received in upstream.log if received.status == 426]
        assert bool(refused) == (name == "codex-builtin"), "only codex's own provider tries a websocket"
