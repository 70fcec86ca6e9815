"""recap health: is it well? For people, and for healthchecks of containers: the exit code says it in one number."""

import argparse
import json
import urllib.error
import urllib.request

from graphstore.store.archive import open_reader
from proxy.attention import attention_health
from proxy.settings import Settings

TIMEOUT_S = 4.0
WELL = frozenset({"starting", "loading", "idle", "replaying"})


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("health", help="ask the running proxy, or its archive, how it is")
    parser.add_argument("--worker", action="store_true", help="ask the archive for the replay worker instead")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return _worker(settings) if arguments.worker else _proxy(settings)


def _worker(settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        found = attention_health(reader, settings)
    print(json.dumps(found, indent=2))
    return 0 if found["state"] in WELL else 1


def _proxy(settings: Settings) -> int:
    """Asks on the loopback, also when the proxy listens everywhere."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    authority = f"[{host}]:{settings.port}" if ":" in host else f"{host}:{settings.port}"
    request = urllib.request.Request("http://" + authority + "/recap/health")
    if settings.proxy_key:
        request.add_header("x-recap-key", settings.proxy_key)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # a URL of our own settings
            found = json.load(response)
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"no answer from {request.full_url}: {error}; start it with `recap serve`")
        return 1
    print(json.dumps(found, indent=2))
    return 0 if found.get("status") == "ok" else 1
