"""recap serve: run the proxy until Ctrl-C, which lets open streams end first. All output is the log on stderr."""

import argparse
import asyncio
import logging
import socket
import sys

from proxy import memory
from proxy.settings import Settings

log = logging.getLogger("recap")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    return subparsers.add_parser("serve", help="run the proxy until Ctrl-C")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from proxy import server

    memory.reuse_pages()
    _configure_logging(settings.log_level)
    # The socket comes first: a second proxy on the same port must not touch the first one's archive.
    with server.bind(settings.host, settings.port) as listener:
        server.run(_serve(settings, listener))
    return 0


async def _serve(settings: Settings, listener: socket.socket) -> None:
    from proxy.server import Server, serve
    from proxy.wiring import open_app, open_conversations

    conversations = await open_conversations(settings)
    memory.settle()
    async with open_app(settings, conversations) as app:
        _announce(settings, listener)
        trimming = asyncio.create_task(memory.return_pages())
        try:
            await serve(Server(app), listener)
        finally:
            trimming.cancel()
    log.info("serve.stopped")


def _announce(settings: Settings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    log.info("serve.started upstream=%s mode=%s db=%s", settings.upstream, settings.mode, settings.db)
    log.info("Point your agent at OPENAI_BASE_URL=http://%s/v1  (Ctrl-C lets streams end, twice cuts them)", authority)


def _configure_logging(level: str) -> None:
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Libraries may write headers at their debug level, and headers hold keys; Alembic reports its own setting up.
    for name in ("aiohttp", "alembic", "httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
