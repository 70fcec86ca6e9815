"""The commands `serve` and `config` as a user runs them: a process of its own, its output and its exit code."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from graphstore.store.archive import open_reader
from proxy.attention import missing_libraries
from proxy.errors import StartError
from proxy.server import bind
from tests.archives import lay_out_archive
from tests.fakes.raw_client import exchange, raw_client, request
from tests.fakes.raw_upstream import Call, answering, raw_upstream, response
from tests.fakes.scripted_upstream import ScriptedUpstream

DEADLINE_S = 30.0


def environment(home: Path, **more: str) -> dict[str, str]:
    own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_DATA_HOME": str(home), "RECAP_ATTENTION": "off"}
    return {**os.environ, **own, **more}


def recap(home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proxy", *arguments]
    return subprocess.run(command, env=environment(home, **env), capture_output=True, text=True, timeout=DEADLINE_S)


@asynccontextmanager
async def serving(home: Path, upstream: str, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, str]]:
    """A running `recap serve`: the process, its port, and what it has said so far."""
    command: Sequence[str] = (sys.executable, "-m", "proxy", "serve", "--port", "0", "--upstream", upstream, *flags)
    process = await asyncio.create_subprocess_exec(*command, env=environment(home), stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    said = ""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while "OPENAI_BASE_URL=http://127.0.0.1:" not in said:
                line = (await process.stderr.readline()).decode()
                assert line, said
                said += line
        yield process, int(said.partition("OPENAI_BASE_URL=http://127.0.0.1:")[2].partition("/v1")[0]), said
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def test_config_prints_value_and_source(tmp_path: Path) -> None:
    shown = recap(tmp_path, "config", "--port", "1", "--proxy-key", "canary", RECAP_SEED="7")
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()}
    assert shown.returncode == 0
    assert rows["port"] == ["1", "flag", "--port"]
    assert rows["seed"] == ["7", "env", "RECAP_SEED"]
    assert rows["mode"] == ["auto", "default"]
    assert "canary" not in shown.stdout


def test_config_as_json(tmp_path: Path) -> None:
    (tmp_path / "recap").mkdir()
    (tmp_path / "recap" / "config.toml").write_text("beta = 0.25")
    rows = json.loads(recap(tmp_path, "config", "--json").stdout)
    assert rows["beta"] == {"value": 0.25, "source": f"file {tmp_path / 'recap' / 'config.toml'}"}
    assert rows["db"]["value"] == str(tmp_path / "recap" / "recap.db")


@pytest.mark.parametrize("arguments", [["config", "--port", "x"], ["serve", "--upstream", "nowhere"]])
def test_wrong_setting_is_exit_2_and_one_line(arguments: list[str], tmp_path: Path) -> None:
    done = recap(tmp_path, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"recap: The setting {arguments[1][2:]} is wrong")


def test_port_in_use_is_exit_1_and_names_the_remedy(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = recap(tmp_path, "serve", "--port", str(port))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert str(port) in done.stderr and "--port" in done.stderr
    assert not (tmp_path / "recap").exists()  # the archive of the other one is not even looked at


async def test_serve_announces_itself_and_passes_requests_on(tmp_path: Path) -> None:
    async with (
        raw_upstream(answering(response(b'{"ok":1}'))) as upstream,
        serving(tmp_path, upstream.url, "--mode", "off") as (process, port, said),
    ):
        assert upstream.url in said and "mode=off" in said and str(tmp_path / "recap" / "recap.db") in said
        reply = await exchange(port, request("/v1/chat/completions", b'{"model":"m","messages":[]}'))
        assert (reply.status, reply.body) == (200, b'{"ok":1}')
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()
        assert process.returncode == 0


@pytest.mark.parametrize("cut", [False, True])
async def test_ctrl_c_lets_a_stream_end_and_a_second_one_cuts_it(cut: bool, tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await go_on.wait()
        await call.send(b"1\r\nb\r\n0\r\n\r\n")

    async with (
        raw_upstream(script) as upstream,
        serving(tmp_path, upstream.url) as (process, port, _),
        raw_client(port) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        assert process.stderr is not None
        await client.send(request("/v1/x", method="GET"))
        await client.until(b"1\r\na\r\n")
        process.send_signal(signal.SIGINT)
        await process.stderr.readuntil(b"serve.stopping open_requests=1\n")
        if cut:
            process.send_signal(signal.SIGINT)
        else:
            go_on.set()
        assert await client.rest() == (b"" if cut else b"1\r\nb\r\n0\r\n\r\n")
        _, said = await process.communicate()
        assert process.returncode == 0
        assert b"serve.stopped" in said and b"Traceback" not in said
        go_on.set()


def test_an_address_that_is_not_ours_is_not_called_a_second_recap() -> None:
    with pytest.raises(StartError) as failed:
        bind("192.0.2.1", 0)  # set aside for documentation: no machine has it
    assert "--host 127.0.0.1" in str(failed.value) and "another recap" not in str(failed.value)
    assert "while attempting" not in str(failed.value)


async def test_the_log_of_a_first_start_is_about_the_proxy(tmp_path: Path) -> None:
    """The archive is made by Alembic, which would report its own plugins in eight lines."""
    async with serving(tmp_path, "http://127.0.0.1:9/v1") as (_, _, said):
        assert "alembic" not in said and said.count("\n") == 3


def asked(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/recap/health", timeout=DEADLINE_S) as response:
        state: dict[str, Any] = json.loads(response.read())["archive"]["attention"]
        return state


@pytest.mark.skipif(bool(missing_libraries()), reason="torch and transformers are not installed")
def test_a_worker_does_not_run_where_attention_is_off(tmp_path: Path) -> None:
    lay_out_archive(tmp_path / "recap.db")
    done = recap(tmp_path, "worker", "--db", str(tmp_path / "recap.db"), "--attention", "off")
    assert done.returncode == 1 and "the setting attention is off" in done.stderr


async def test_serve_keeps_a_worker_that_says_what_it_lacks(tmp_path: Path) -> None:
    """No weights: the session goes on, health names the remedy, and the worker ends with the proxy."""
    flags = ("--attention", "auto", "--attention-model", str(tmp_path / "nothing"))
    async with (
        ScriptedUpstream() as upstream,
        serving(tmp_path, upstream.base_url, *flags) as (process, port, _),
        asyncio.timeout(DEADLINE_S),
    ):
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sk-test")
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "[[= done]]"}])
        await client.close()
        while (state := await asyncio.to_thread(asked, port))["state"] != "unavailable":  # noqa: ASYNC110  # a process
            await asyncio.sleep(0.1)
        assert (state["queued"], state["failed"]) == (1, 0)
        assert str(tmp_path / "nothing") in state["problem"] and state["remedy"]
        process.send_signal(signal.SIGINT)
        _, said = await process.communicate()  # the worker writes to the same pipe: it has ended too
    assert process.returncode == 0
    assert b"worker.started" in said or b"replay.no_model" in said
    with open_reader(tmp_path / "recap" / "recap.db") as reader:
        status = reader.worker_status()
        assert status is not None and status.state == "stopped"
