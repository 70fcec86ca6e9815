"""The ways from a client to its model that are measured side by side: direct, through us, through others.

Each of the others is installed from PyPI into a virtual environment of its own, with the command that its documentation
gives, and started with its documented defaults but for what `about` says. Nothing may leave the machine: whatever
reports home or looks for downloads is off. What cannot be installed or started is not measured, and says why.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL_S = 600


class NotMeasured(Exception):
    """Why a way cannot be measured here, in words for the table."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a proxy runs: its port, its upstream's, a folder that goes when it ends, and the clients' key."""

    port: int
    upstream: int
    folder: Path
    key: str


@dataclass(frozen=True, slots=True)
class Way:
    """`package` is what pip is asked for, in the environment `home`; without one it is ourselves, or nothing."""

    name: str
    about: str
    command: Callable[[Place], Sequence[str]] | None
    home: str = ""
    package: str = ""
    environment: Mapping[str, str] | None = None


def _ours(*flags: str) -> Callable[[Place], Sequence[str]]:
    def command(place: Place) -> Sequence[str]:
        serve = (sys.executable, "-m", "proxy", "serve", "--port", str(place.port), "--db", str(place.folder / "a.db"))
        upstream = f"http://127.0.0.1:{place.upstream}/v1"
        return (*serve, "--upstream", upstream, "--attention", "off", "--log-level", "warning", *flags)

    return command


def _headroom(*flags: str) -> Callable[[Place], Sequence[str]]:
    def command(place: Place) -> Sequence[str]:
        proxy = ("headroom", "proxy", "--port", str(place.port), "--no-rate-limit", "--no-subscription-tracking")
        return (*proxy, "--openai-api-url", f"http://127.0.0.1:{place.upstream}", *flags)

    return command


LITELLM_CONFIG = """model_list:
  - model_name: bench
    litellm_params:
      model: openai/bench
      api_base: http://127.0.0.1:{upstream}/v1
      api_key: bench
"""


def _litellm(place: Place) -> Sequence[str]:
    config = place.folder / "config.yaml"
    config.write_text(LITELLM_CONFIG.format(upstream=place.upstream))
    return ("litellm", "--host", "127.0.0.1", "--port", str(place.port), "--config", str(config))


SILENT = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
HEADROOM = {"home": "headroom", "package": "headroom-ai[proxy]", "environment": {**SILENT, "HEADROOM_BEACON": "off"}}

DIRECT = "direct"
WAYS = (
    Way(DIRECT, "no proxy", None),
    Way("ours, off", "recap serve --mode off: every request recorded, sent as it came", _ours("--mode", "off")),
    Way(
        "ours, warm",
        "recap serve --mode idle: a session that goes on, nothing to select, as at an agent's own steps in any mode",
        _ours("--mode", "idle"),
    ),
    Way(
        "ours, weighed",
        "recap serve: every request is a user's, the cache warm; what a rewrite would save is weighed each time",
        _ours(),
    ),
    Way(
        "ours, cold",
        "recap serve --mode always: every request is a cold boundary, selected anew and on disk before it is sent",
        _ours("--mode", "always"),
    ),
    Way(
        "headroom",
        "headroom proxy with --openai-api-url, --no-rate-limit (its 60 requests a minute would end the run), "
        "--no-subscription-tracking; without the model that it would download",
        _headroom(),
        **HEADROOM,  # type: ignore[arg-type]
    ),
    Way(
        "headroom, pass-through",
        "the same with --no-optimize",
        _headroom("--no-optimize"),
        **HEADROOM,  # type: ignore[arg-type]
    ),
    Way(
        "litellm",
        "litellm with --config, one model openai/bench with api_base, and a master key; as many workers as cores, "
        "its default",
        _litellm,
        "litellm",
        "litellm[proxy]",
        SILENT,
    ),
)


def ensure_installed(home: Path, package: str) -> None:
    """An environment with the package. Raises `NotMeasured`; what was begun is tried again the next time."""
    done = home / ".installed"
    if done.exists() and done.read_text() == package:
        return
    print(f"bench-peers: installing {package} into {home.name}", file=sys.stderr, flush=True)
    try:
        venv.create(home, with_pip=True, clear=True)
        pip = (str(home / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.CalledProcessError as error:
        said = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR")]
        raise NotMeasured(f"pip could not install {package}: {said[-1] if said else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(f"{package} could not be installed: {error}") from error
    done.write_text(package)


def version_of(home: Path, package: str) -> str:
    """Name and version. Raises `OSError` or `CalledProcessError`: it is not there."""
    name = package.partition("[")[0]
    code = f"from importlib.metadata import version; print({name!r}, version({name!r}))"
    return subprocess.run(
        (str(home / "bin/python"), "-c", code), check=True, capture_output=True, text=True
    ).stdout.strip()


def command_line(way: Way, place: Place, homes: Path) -> tuple[Sequence[str], dict[str, str]]:
    """Command and environment: of this process's own, nobody sees anything."""
    assert way.command is not None
    command = way.command(place)
    if not way.package:
        return command, {"HOME": str(place.folder), "PATH": os.defpath, "PYTHONPATH": str(ROOT)}
    binaries = homes / way.home / "bin"
    own = {"HOME": str(place.folder), "PATH": f"{binaries}{os.pathsep}{os.defpath}", **(way.environment or {})}
    # litellm starts with no key only when told that this is dangerous; its remedy is to set one: the clients' own.
    return (str(binaries / command[0]), *command[1:]), {**own, "LITELLM_MASTER_KEY": place.key}
