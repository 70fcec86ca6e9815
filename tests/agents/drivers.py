"""Real coding agents, driven turn by turn from a test, each against any base URL.

A driver owns a fresh home and work folder and knows how its agent is configured, how a turn is started and continued,
and which tool reads a file there. It knows nothing of the proxy. `make test` puts the pinned binaries into `.agents`;
`TEST_AGENTS_DIR` names another folder that holds a `node_modules`.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import openai

ROOT = Path(__file__).resolve().parents[2]
AGENTS = Path(os.environ.get("TEST_AGENTS_DIR", ROOT / ".agents")) / "node_modules"
KEY = "sk-test-agent-key"
TURN_DEADLINE_SECONDS = 120.0  # a turn takes six; a first start on a busy machine several times that
EXIT_DEADLINE_SECONDS = 10.0


class Driver(Protocol):
    """One conversation with one agent."""

    async def turn(self, prompt: str) -> str:
        """Let the agent work on a prompt until it is done; returns what it printed. Raises AgentFailed."""

    def read(self, path: Path) -> str:
        """The call that reads a file, in the form of the upstream's script: `tool {json}`."""


class AgentFailed(Exception):
    """The agent ended with an error or not in time; the text holds its output."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A home and a project folder of one agent, fresh for each test."""

    home: Path
    project: Path

    @classmethod
    def create(cls, folder: Path) -> "Workspace":
        workspace = cls(folder / "home", folder / "project")
        workspace.home.mkdir()
        workspace.project.mkdir()
        return workspace

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Nothing of the caller's settings reaches the agent, and nothing but the loopback is reachable by proxy."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "PWD": str(self.project),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
            **extra,
        }


@dataclass(slots=True)
class CommandAgent:
    """An agent that runs one process per turn. Subclasses say which."""

    workspace: Workspace
    base_url: str
    turns: int = field(default=0, init=False)

    def environment(self) -> dict[str, str]:
        raise NotImplementedError

    def command(self, prompt: str, *, first: bool) -> list[str]:
        raise NotImplementedError

    async def turn(self, prompt: str) -> str:
        first, self.turns = self.turns == 0, self.turns + 1
        return await run_process(
            self.command(prompt, first=first),
            folder=self.workspace.project,
            environment=self.workspace.environment(self.environment()),
        )


async def run_process(command: list[str], *, folder: Path, environment: Mapping[str, str]) -> str:
    """Run to the end, in a process group of its own that does not outlive the deadline."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    reading = asyncio.ensure_future(process.communicate())
    try:
        done, _ = await asyncio.wait({reading}, timeout=TURN_DEADLINE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group: agents leave helpers behind
        output = (await asyncio.wait_for(reading, EXIT_DEADLINE_SECONDS))[0].decode(errors="replace")
    if not done or process.returncode != 0:
        state = f"exit code {process.returncode}" if done else f"no end within {TURN_DEADLINE_SECONDS:g} s"
        raise AgentFailed(f"{command[0]}: {state}\n{output}")
    return output


class OpenCodeBuiltin(CommandAgent):
    """OpenCode with its own `openai` provider: two environment variables, responses."""

    model = "openai/gpt-5.1"

    @staticmethod
    def binary() -> Path:
        return next(AGENTS.glob("opencode-*/bin/opencode"), AGENTS / "opencode")

    def environment(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": KEY,
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }

    def command(self, prompt: str, *, first: bool) -> list[str]:
        return [str(self.binary()), "run", *([] if first else ["-c"]), "-m", self.model, prompt]

    def read(self, path: Path) -> str:
        return f"read {json.dumps({'filePath': str(path)})}"


class OpenCodeCompatible(OpenCodeBuiltin):
    """OpenCode with a declared OpenAI-compatible provider: chat completions."""

    model = "proxy/my-model"

    def environment(self) -> dict[str, str]:
        options = {"baseURL": self.base_url, "apiKey": KEY, "setCacheKey": True}
        models = {"my-model": {"name": "x", "limit": {"context": 128000, "output": 8192}}}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "Proxy", "options": options, "models": models}
        config = {"$schema": "https://opencode.ai/config.json", "provider": {"proxy": provider}}
        own = {"OPENAI_BASE_URL", "OPENAI_API_KEY"}
        inherited = {name: value for name, value in super().environment().items() if name not in own}
        return {**inherited, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}


class CodexBuiltin(CommandAgent):
    """Codex with its own provider: it tries a websocket first and takes 426 for an answer."""

    config = 'openai_base_url = "{base_url}"\n'
    key_variable = "CODEX_API_KEY"

    @staticmethod
    def binary() -> Path:
        return AGENTS / ".bin" / "codex"

    def environment(self) -> dict[str, str]:
        folder = self.workspace.home / ".codex"
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(self.config.format(base_url=self.base_url))
        return {"CODEX_HOME": str(folder), self.key_variable: KEY}

    def command(self, prompt: str, *, first: bool) -> list[str]:
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "gpt-5.4"]
        resume = [] if first else ["resume", "--last"]
        return [str(self.binary()), "exec", *resume, *flags, prompt]

    def read(self, path: Path) -> str:
        return f"exec_command {json.dumps({'cmd': f'cat {path}'})}"


class CodexProvider(CodexBuiltin):
    """Codex with a declared provider."""

    config = (
        'model_provider = "proxy"\n[model_providers.proxy]\nname = "proxy"\nbase_url = "{base_url}"\n'
        'env_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    )
    key_variable = "OPENAI_API_KEY"


class QwenCode(CommandAgent):
    """Qwen Code: three environment variables, chat completions, no session id on the wire."""

    @staticmethod
    def binary() -> Path:
        return AGENTS / ".bin" / "qwen"

    def environment(self) -> dict[str, str]:
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": KEY, "OPENAI_MODEL": "my-model"}

    def command(self, prompt: str, *, first: bool) -> list[str]:
        flags = ["--auth-type", "openai", "--yolo"]
        return [str(self.binary()), *flags, *([] if first else ["-c"]), "-p", prompt]

    def read(self, path: Path) -> str:
        return f"read_file {json.dumps({'file_path': str(path)})}"


@dataclass(slots=True)
class SdkAgent:
    """A loop around the OpenAI SDK, as small agents are written: one tool, the whole history with every request."""

    workspace: Workspace
    base_url: str
    stream: bool
    history: list[Any] = field(default_factory=list, init=False)

    def read(self, path: Path) -> str:
        return f"read {json.dumps({'path': str(path)})}"

    async def turn(self, prompt: str) -> str:
        self.history.append({"role": "user", "content": prompt})
        async with openai.AsyncOpenAI(base_url=self.base_url, api_key=KEY) as client:
            while True:
                calls, text = await self.step(client)
                if not calls:
                    return text

    async def step(self, client: openai.AsyncOpenAI) -> tuple[int, str]:
        """One request: extend the history with the answer and the results of its calls; number of calls and text."""
        raise NotImplementedError


class SdkChat(SdkAgent):
    async def step(self, client: openai.AsyncOpenAI) -> tuple[int, str]:
        request: dict[str, Any] = {
            "model": "my-model",
            "messages": [{"role": "system", "content": "You read files."}, *self.history],
            "tools": [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}],
        }
        if self.stream:
            async with client.chat.completions.stream(**request) as events:
                completion: Any = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(**request)
        message = completion.choices[0].message
        calls = message.tool_calls or []
        self.history.append(message.model_dump(exclude_none=True))
        for call in calls:
            text = _read_argument(call.function.arguments)
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return len(calls), message.content or ""


class SdkResponses(SdkAgent):
    async def step(self, client: openai.AsyncOpenAI) -> tuple[int, str]:
        request: dict[str, Any] = {
            "model": "my-model",
            "instructions": "You read files.",
            "input": self.history,
            "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}],
            "store": False,
        }
        if self.stream:
            async with client.responses.stream(**request) as events:
                response: Any = await events.get_final_response()
        else:
            response = await client.responses.create(**request)
        calls = [item for item in response.output if item.type == "function_call"]
        self.history += [item.model_dump(exclude_none=True) for item in response.output]
        for call in calls:
            text = _read_argument(call.arguments)
            self.history.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
        return len(calls), response.output_text


def _read_argument(arguments: str) -> str:
    return Path(json.loads(arguments)["path"]).read_text()


COMMAND_AGENTS: dict[str, type[OpenCodeBuiltin] | type[CodexBuiltin] | type[QwenCode]] = {
    "opencode-builtin": OpenCodeBuiltin,
    "opencode-compatible": OpenCodeCompatible,
    "codex-builtin": CodexBuiltin,
    "codex-provider": CodexProvider,
    "qwen-code": QwenCode,
}


def missing(name: str) -> str | None:
    """Why this agent cannot run here, or None."""
    binary = COMMAND_AGENTS[name].binary()
    if not binary.exists():
        return f"{binary} is not there; `make agents` fetches it"
    if name != "opencode-builtin" and name != "opencode-compatible" and shutil.which("node") is None:
        return "node is not installed"
    return None
