"""Runs SWE-Together's own runner with OpenCode behind the proxy: docs/swe-together.md.

Works in the benchmark's checkout and its virtual environment, and imports nothing of ours. The benchmark is left as it
is: each `opencode` command gets one more variable, OPENCODE_CONFIG_CONTENT, which OpenCode merges over the settings
that the runner writes, so that the model's provider is called at the proxy's address.

    .venv/bin/python PATH/swe_together.py --proxy 'http://<address>:8787/v1' -- --model openai/NAME --tag recap
"""

import argparse
import asyncio
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

VARIABLE = "OPENCODE_CONFIG_CONTENT"
KEY_VARIABLE = "RECAP_PROXY_KEY"
KEY_HEADER = "x-recap-key"
PROVIDERS = ("openai", "openrouter", "deepseek", "groq", "mistral", "xai")  # of the runner's, those with OpenAI's API
WRAPPER = "user_agent.agents.user_enabled_opencode"
SEAM = "_inject_opencode_flags"  # makes the commands of a trial; the later ones take over the last one's environment


class Unprepared(Exception):
    """What is missing, as a sentence with its remedy."""


def config_of(model: str, proxy: str, key: str) -> dict[str, Any]:
    """OpenCode's settings: this model's provider is called at the proxy's address."""
    provider = model.partition("/")[0]
    if "/" not in model or provider not in PROVIDERS:
        raise Unprepared(f"the model {model!r} is none of {', '.join(PROVIDERS)}: the proxy speaks OpenAI's API alone")
    parts = urlsplit(proxy)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unprepared(f"{proxy!r} is no base URL: give what a container can reach: http, an address, :8787/v1")
    options: dict[str, Any] = {"baseURL": proxy}
    if key:
        options["headers"] = {KEY_HEADER: key}
    return {"provider": {provider: {"options": options}}}


def model_of(arguments: Sequence[str]) -> str:
    for index, word in enumerate(arguments):
        if word.startswith("--model="):
            return word.removeprefix("--model=")
        if word == "--model" and index + 1 < len(arguments):
            return arguments[index + 1]
    raise Unprepared("the runner's arguments name no --model; put them after --")


def route_through_proxy(wrapper: Any, config: dict[str, Any]) -> None:
    """Every command of a trial from here on carries the settings. Raises `Unprepared` when the runner has changed."""
    agent = getattr(wrapper, "UserEnabledOpenCode", None)
    original = getattr(agent, SEAM, None)
    if agent is None or original is None:
        raise Unprepared(f"{WRAPPER} has no UserEnabledOpenCode.{SEAM}: this was written for commit cae66ac843a9")
    text = json.dumps(config)

    def commands_with_settings(self: Any, commands: Any) -> Any:
        made = original(self, commands)
        for command in made:
            command.env = {**(command.env or {}), VARIABLE: text}
        return made

    setattr(agent, SEAM, commands_with_settings)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Run SWE-Together with OpenCode behind the proxy.")
    parser.add_argument("--proxy", required=True, metavar="URL", help="base URL of the proxy as a container reaches it")
    parser.add_argument(
        "--checkout", type=Path, default=Path.cwd(), metavar="DIR", help="of the benchmark (default: .)"
    )
    parser.add_argument("runner", nargs="+", metavar="ARGUMENT", help="of the benchmark's src/run_eval.py, after --")
    given = parser.parse_args(words)
    source = given.checkout / "src"
    try:
        config = config_of(model_of(given.runner), given.proxy, os.environ.get(KEY_VARIABLE, ""))
        if not (source / "run_eval.py").is_file():
            raise Unprepared(f"{str(source / 'run_eval.py')!r} does not exist: name the checkout with --checkout")
        sys.path[:0] = [str(source), str(given.checkout / "external" / "harbor" / "src")]
        try:
            runner, wrapper = importlib.import_module("run_eval"), importlib.import_module(WRAPPER)
        except ImportError as error:
            raise Unprepared(f"{error}: use the benchmark's own environment, .venv/bin/python (uv sync)") from error
        route_through_proxy(wrapper, config)
    except Unprepared as error:
        print(f"swe_together: {error}", file=sys.stderr)
        return 1
    sys.argv = ["run_eval.py", "--agent-type", "opencode", *given.runner]
    asyncio.run(runner.main())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
