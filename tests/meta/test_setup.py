"""The files that set the project up agree with each other: make, CI, the agents' versions, the container.

Form only: nothing here needs docker or npm, and `docker compose config` runs where it is installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from proxy.settings import HINTS, env_of

ROOT = Path(__file__).resolve().parents[2]
SETTING_VARIABLES = {env_of(name) for name in HINTS}


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_agents_have_exact_versions() -> None:
    manifest = json.loads(read("tests/agents/package.json"))
    versions = {**manifest["dependencies"], **manifest["optionalDependencies"]}
    assert versions and all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values())


def test_ci_is_make_test_with_everything_required() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "export TEST_AGENTS_REQUIRED=1 TEST_MODELS_REQUIRED=1 TEST_BROWSER_REQUIRED=1" in lines
    assert lines[-1] == "exec make test"


def test_a_required_browser_that_is_absent_fails(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "TEST_BROWSER_REQUIRED": "1"}
    environment.pop("TEST_CHROMIUM", None)
    test = "tests/inspector/test_page.py::test_an_archive_without_sessions_says_how_to_begin"
    command = [sys.executable, "-m", "pytest", "-q", test, "-p", "no:cacheprovider"]
    required = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert required.returncode == 1 and "a browser is required here" in required.stdout
    del environment["TEST_BROWSER_REQUIRED"]
    allowed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert allowed.returncode == 0 and "1 skipped" in allowed.stdout and "apt install chromium" in allowed.stdout


def test_a_required_agent_that_is_absent_fails(tmp_path: Path) -> None:
    """CI must not pass because everything was skipped."""
    environment = {**os.environ, "TEST_AGENTS_DIR": str(tmp_path), "TEST_AGENTS_REQUIRED": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/agents/test_direct.py",
        "-k",
        "qwen",
        "-p",
        "no:cacheprovider",
    ]
    required = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert required.returncode == 1 and "qwen-code is required here" in required.stdout
    del environment["TEST_AGENTS_REQUIRED"]
    allowed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert allowed.returncode == 0 and "1 skipped" in allowed.stdout


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))


def test_make_offers_what_the_documents_promise() -> None:
    documents = "".join(read(name) for name in ("README.md", "CONTRIBUTING.md", "docs/testing.md"))
    assert set(re.findall(r"(?:\$ |`)make ([a-z-]+)", documents)) <= make_targets()
    phony = re.search(r"^\.PHONY: (.*)$", read("Makefile").replace("\\\n", ""), re.MULTILINE)
    assert phony is not None and set(phony[1].split()) == make_targets()


def test_the_image_holds_every_package_and_nothing_is_ignored_that_it_copies() -> None:
    copied = {
        name for line in re.findall(r"^COPY (.*) \S+$", read("Dockerfile"), re.MULTILINE) for name in line.split()
    }
    packages = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["packages"]
    assert {package.partition(".")[0] for package in packages} <= copied
    assert all((ROOT / name).exists() for name in copied)
    kept = {line.removeprefix("!") for line in read(".dockerignore").splitlines() if line.startswith("!")}
    assert copied == kept


def test_the_image_runs_as_a_user_of_its_own_with_its_data_in_a_volume() -> None:
    lines = read("Dockerfile").splitlines()
    stages = "\n".join(lines).split("\nFROM ")[1:]
    assert [stage.split()[2] for stage in stages] == ["base", "worker", "proxy"]
    assert 'ENTRYPOINT ["recap"]' in stages[0] and "CMD" not in stages[0]
    for stage in stages[1:]:
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE) == ["recap"]
        assert stage.rindex("USER recap") > stage.rfind("RUN "), "nothing is installed as that user"
        assert len(re.findall(r"^CMD ", stage, re.MULTILINE)) == 1
    assert "VOLUME /data" in lines and "RECAP_DB=/data/recap.db" in read("Dockerfile")


@pytest.mark.parametrize("name", ["Dockerfile", "docker-compose.yml"])
def test_the_container_sets_variables_that_exist(name: str) -> None:
    used = set(re.findall(r"\bRECAP_[A-Z_]+", read(name)))
    assert used and used <= SETTING_VARIABLES


def test_compose_gives_the_worker_a_gpu_the_archive_and_a_healthcheck() -> None:
    text = read("docker-compose.yml")
    proxy, worker = text.split("\n  worker:\n")
    assert "capabilities: [gpu]" in worker and "capabilities" not in proxy
    assert all("- recap:/data" in service and "healthcheck:" in service for service in (proxy, worker))
    assert set(re.findall(r"target: (\w+)", text)) == {"proxy", "worker"}


def test_compose_publishes_on_the_loopback_and_insists_on_a_key() -> None:
    text = read("docker-compose.yml")
    assert "\t" not in text
    published = re.findall(r'^\s+- "(.*:\d+:\d+)"$', text, re.MULTILINE)
    assert published and all(address.startswith("127.0.0.1:") for address in published)
    assert re.search(r"RECAP_PROXY_KEY: \$\{RECAP_PROXY_KEY:\?", text), "no start without a key"


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="docker compose is not installed",
)
def test_compose_accepts_its_file() -> None:
    environment = {**os.environ, "RECAP_PROXY_KEY": "k"}
    command = ["docker", "compose", "--file", "docker-compose.yml", "config", "--quiet"]
    checked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
