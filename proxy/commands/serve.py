"""recap serve: run the proxy until Ctrl-C, which lets open streams end first. All output is the log on stderr."""

import argparse
import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from proxy import memory
from proxy.attention import why_none
from proxy.settings import CONFIG_ENV, ENV_PREFIX, HINTS, Settings, environ_of
from proxy.supervisor import Supervisor, worker_command
from proxy.telemetry import Telemetry, open_telemetry

log = logging.getLogger("recap")

WORKER_SETTINGS = ("db", "attention", "evidence", "log_level")  # beginnings of the names of what the worker must share


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    return subparsers.add_parser("serve", help="run the proxy until Ctrl-C")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from proxy import server

    memory.reuse_pages()
    configure_logging(settings.log_level)
    # The socket comes first: a second proxy on the same port must not touch the first one's archive.
    with server.bind(settings.host, settings.port) as listener:
        server.run(_serve(settings, listener))
    return 0


async def _serve(settings: Settings, listener: socket.socket) -> None:
    from proxy.metrics import Meters
    from proxy.server import Server, serve
    from proxy.wiring import open_app, open_conversations

    meters = Meters()
    telemetry = open_telemetry(os.environ)
    conversations = await open_conversations(settings, (meters, telemetry) if telemetry is not None else (meters,))
    memory.settle()
    supervisor = _supervisor(settings)
    async with _closed_last(telemetry), open_app(settings, conversations, meters=meters) as app:
        _announce(settings, listener)
        trimming = asyncio.create_task(memory.return_pages())
        if supervisor is not None:
            supervisor.start(conversations.ready())  # an archive in use has a worker
        try:
            await serve(Server(app, on_stop=app.state.inspector.stop, cut_off="/recap/"), listener)
        finally:
            trimming.cancel()
            if supervisor is not None:
                await supervisor.stop()
    log.info("serve.stopped")


@asynccontextmanager
async def _closed_last(telemetry: Telemetry | None) -> AsyncIterator[None]:
    """It hears of the last exchanges while the archive closes."""
    try:
        yield
    finally:
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)


def _supervisor(settings: Settings) -> Supervisor | None:
    """The worker's keeper, where the worker can run at all."""
    if absent := why_none(settings):
        if settings.attention != "off":
            log.info("attention.none %s (%s)", *absent)
        return None
    return Supervisor(worker_command(), worker_environ(settings, os.environ), clock=time.monotonic)


def worker_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Our environment with the worker's settings as we have them, wherever from, and none of the others: neither a
    settings file that we do not read nor half of ours must keep the worker from starting."""
    foreign = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    shared = environ_of(settings, [name for name in HINTS if name.startswith(WORKER_SETTINGS)])
    return foreign | shared | {CONFIG_ENV: os.devnull}


def _announce(settings: Settings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    log.info("serve.started upstream=%s mode=%s db=%s", settings.upstream, settings.mode, settings.db)
    log.info("Look at http://%s/recap/ to see what is sent and why", authority)
    log.info("Point your agent at OPENAI_BASE_URL=http://%s/v1  (Ctrl-C lets streams end, twice cuts them)", authority)


def configure_logging(level: str) -> None:
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Libraries may write headers at their debug level, and headers hold keys; Alembic reports its own setting up.
    wire = ("aiohttp", "httpx", "httpcore", "urllib3", "uvicorn", "asyncio")
    for name in (*wire, "alembic", "torch", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
