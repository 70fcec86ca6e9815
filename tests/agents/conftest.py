"""Which real agents this machine has. `TEST_AGENTS_REQUIRED=1` turns a missing one into a failure."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents.drivers import COMMAND_AGENTS, Driver, SdkChat, SdkResponses, Workspace, missing

StartAgent = Callable[[str, str], Driver]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.create(tmp_path)


@pytest.fixture
def start_agent(workspace: Workspace) -> StartAgent:
    """A driver by name and base URL; skips, or fails where agents are required, when it is not installed."""

    def start(name: str, base_url: str) -> Driver:
        if name in COMMAND_AGENTS:
            if absence := missing(name):
                if os.environ.get("TEST_AGENTS_REQUIRED"):
                    pytest.fail(f"{name} is required here, but {absence}")
                pytest.skip(f"{name}: {absence}")
            return COMMAND_AGENTS[name](workspace, base_url)
        kind, transport = name.removeprefix("sdk-").split("-")
        sdk = SdkChat if kind == "chat" else SdkResponses
        return sdk(workspace, base_url, stream=transport == "stream")

    return start
