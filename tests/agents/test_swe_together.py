"""scripts/swe_together.py: the real OpenCode obeys the variable, and a runner of the benchmark's shape passes it on."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from proxy.settings import Settings
from tests.agents.drivers import Driver, OpenCodeBuiltin, Workspace
from tests.fakes.scripted_upstream import ScriptedUpstream
from tests.support import running_proxy

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "swe_together.py"
NOWHERE = "http://127.0.0.1:9/v1"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("swe_together", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


swe_together = load()


@dataclass(slots=True)
class InTheBenchmark(OpenCodeBuiltin):
    """As the benchmark's runner starts it: a model in the settings' file, no address, and our variable."""

    chosen: str = field(kw_only=True)
    content: str = field(kw_only=True)

    def environment(self) -> dict[str, str]:
        provider, name = self.chosen.split("/", 1)
        folder = self.workspace.home / ".config" / "opencode"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "opencode.json").write_text(json.dumps({"provider": {provider: {"models": {name: {}}}}}))
        own = {"OPENROUTER_API_KEY": "sk-test", "OPENCODE_CONFIG_CONTENT": self.content}
        return {**OpenCodeBuiltin.environment(self), "OPENAI_BASE_URL": NOWHERE, **own}

    def command(self, prompt: str, *, first: bool) -> list[str]:
        return [str(self.binary()), "run", "-m", self.chosen, prompt]


@pytest.mark.agent
@pytest.mark.parametrize(
    ("chosen", "path"),
    [("openai/gpt-5.1", "/v1/responses"), ("openrouter/openai/gpt-5.1", "/v1/chat/completions")],
)
async def test_opencode_calls_the_proxy_with_its_key(
    chosen: str, path: str, workspace: Workspace, start_agent: Callable[[str, str], Driver]
) -> None:
    start_agent("opencode-builtin", NOWHERE)  # skips where there is no OpenCode
    async with ScriptedUpstream() as upstream:
        settings = Settings(upstream=upstream.base_url, proxy_key="secret")
        async with running_proxy(settings) as proxy:
            config = swe_together.config_of(chosen, f"{proxy.url}/v1", "secret")
            agent = InTheBenchmark(workspace, NOWHERE, chosen=chosen, content=json.dumps(config))
            assert "pineapple" in await agent.turn("Say it. [[= pineapple]]")
        assert {request.path for request in upstream.conversations} == {path}


def checkout(folder: Path, seam: str = "_inject_opencode_flags") -> Path:
    """What the script relies on of the benchmark's checkout (commit cae66ac843a9), and no more."""
    agents = folder / "src" / "user_agent" / "agents"
    agents.mkdir(parents=True)
    for package in (agents, agents.parent):
        (package / "__init__.py").write_text("")
    (agents / "user_enabled_opencode.py").write_text(
        "class UserEnabledOpenCode:\n"
        f"    def {seam}(self, commands):\n"
        "        commands[-1].command = 'patched && ' + commands[-1].command\n"
        "        return commands\n"
    )
    (folder / "src" / "run_eval.py").write_text(
        "import json, sys\nfrom types import SimpleNamespace\n"
        "from user_agent.agents.user_enabled_opencode import UserEnabledOpenCode\n"
        "async def main():\n"
        "    made = [SimpleNamespace(command='write settings', env=None),\n"
        "            SimpleNamespace(command='opencode run', env={'OPENAI_API_KEY': 'k'})]\n"
        "    made = UserEnabledOpenCode()._inject_opencode_flags(made)\n"
        "    print(json.dumps([sys.argv[1:], [vars(one) for one in made]]))\n"
    )
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"RECAP_PROXY_KEY": "secret", "PATH": ""}
    command = [sys.executable, str(SCRIPT), "--checkout", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environ)


def test_every_command_of_a_trial_carries_the_settings(tmp_path: Path) -> None:
    done = run(checkout(tmp_path), "--proxy", "http://host:8787/v1", "--", "--model", "openai/m", "--tag", "t")
    words, commands = json.loads(done.stdout)
    assert words == ["--agent-type", "opencode", "--model", "openai/m", "--tag", "t"]
    options = {"baseURL": "http://host:8787/v1", "headers": {"x-recap-key": "secret"}}
    for command in commands:
        content = json.loads(command["env"]["OPENCODE_CONFIG_CONTENT"])
        assert content == {"provider": {"openai": {"options": options}}}
    assert commands[-1]["env"]["OPENAI_API_KEY"] == "k" and commands[-1]["command"] == "patched && opencode run"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--proxy", "host", "--", "--model", "openai/m"], "no base URL"),
        (["--proxy", "http://h/v1", "--", "--model", "anthropic/m"], "'anthropic/m' is none of openai"),
        (["--proxy", "http://h/v1", "--", "--tag", "t"], "name no --model"),
    ],
)
def test_what_cannot_work_is_said(words: list[str], says: str, tmp_path: Path) -> None:
    done = run(checkout(tmp_path), *words)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr


def test_another_benchmark_is_said(tmp_path: Path) -> None:
    words = ["--proxy", "http://h/v1", "--", "--model=openai/m"]
    (tmp_path / "empty").mkdir()
    assert "does not exist: name the checkout" in run(tmp_path / "empty", *words).stderr
    assert "was written for commit" in run(checkout(tmp_path / "new", seam="_other"), *words).stderr
    with pytest.raises(swe_together.Unprepared):
        swe_together.route_through_proxy(SimpleNamespace(), {})
