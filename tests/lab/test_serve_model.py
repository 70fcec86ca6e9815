"""The small model behind an endpoint, for as long as a command runs: what `make eval` asks."""

import subprocess
import sys
from pathlib import Path

import pytest

from proxy.server import bind

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/serve_model.py"
ASKS = """
import asyncio, sys
import httpx
from proxy.lab.chat_model import ChatModel, Sampling

async def ask(url):
    async with httpx.AsyncClient(timeout=None) as client:
        refused = await client.post(url, json={"messages": "none"})
        assert refused.status_code == 400 and refused.json()["error"]["message"], refused.text
        long = await client.post(url, json={"messages": [{"role": "user", "content": "word " * 9000}]})
        assert long.status_code == 400 and "maximum context length is 8192" in long.text, long.text
        model = ChatModel(client, url, Sampling("small", 0.0, 3))
        given = await model.ask([{"role": "user", "content": "Say yes."}], "a")
        assert given.text and given.prompt_tokens > 3 and 0 < given.completion_tokens <= 3, given
        print(given.text)

asyncio.run(ask(f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions"))
sys.exit(3)
"""


def serving(model: Path, port: int, *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), str(model), "--port", str(port), "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_it_answers_while_the_command_runs_and_ends_with_its_status(smollm2: Path) -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    ended = serving(smollm2, port, sys.executable, "-c", ASKS, str(port))
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.strip()


@pytest.mark.slow
def test_a_port_in_use_is_named_and_the_command_does_not_run(smollm2: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        ended = serving(smollm2, port, sys.executable, "-c", "print('it ran')")
        assert ended.returncode == 2
        assert f"{port}" in ended.stderr and "in use" in ended.stderr and "it ran" not in ended.stdout
