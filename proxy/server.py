"""The HTTP server around the application: one configuration of uvicorn, for the command and for the tests.

Refuses to know settings beyond the socket it is given. It changes nothing in what passes (no Server, Date or Forwarded
headers), offers no websocket, and ends in order: no new connections, streams run out, then the caller closes the rest.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from proxy.errors import StartError

BACKLOG = 2048  # connections that wait to be accepted: a burst of sub-agents
KEEP_ALIVE_S = 75  # longer than client pools keep a connection: we are never the one to close it under a request
GRACE_S = 0.5  # for answers to people, who look again, when agents' answers alone are worth waiting for
# How we mean to answer: a broken upstream breaks the client's connection, an upgrade gets 426.
_EXPECTED = (
    "ASGI callable returned without completing response.",
    "Unsupported upgrade request.",
    "No supported WebSocket library",
)

log = logging.getLogger("recap")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError with the remedy.

    It says that it speaks TCP, which `socket.create_server` leaves out: asyncio switches Nagle's algorithm off only for
    sockets that do, and with it every answer in two pieces waits 40 ms for the client's acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would let a second proxy take the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
        return listener
    except OSError as exc:
        listener.close()
        raise StartError(f"Cannot listen on {host} port {port}: {_words(exc)}. {_remedy(exc, port)}") from exc


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _remedy(error: OSError, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"Is another recap running? Choose another port: --port {port + 1 if port < 65535 else 8787}."
        case errno.EACCES:
            return "Ports below 1024 are for administrators: choose another, such as --port 8787."
        case _:
            return "Choose an address of this machine, such as --host 127.0.0.1."


def run(main: Coroutine[object, object, None]) -> None:
    """Run to the end."""
    asyncio.run(main)


async def serve(server: "Server", listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM and until the last stream has ended; a second Ctrl-C cuts those off."""
    try:
        await server.serve(sockets=[listener])
    finally:
        await _cancel(server.server_state.tasks)


class Server(uvicorn.Server):
    def __init__(self, app: ASGIApp, *, on_stop: Callable[[], None] = lambda: None, cut_off: str | None = None) -> None:
        """`on_stop` runs when the server is asked to stop. Requests below the path `cut_off` are waited for no longer
        than `GRACE_S`: then their connections end, whatever they wait for."""
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
        self._on_stop = on_stop
        self._cut_off = cut_off
        logging.getLogger("uvicorn.error").addFilter(_is_unexpected)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._on_stop()
        if self._cut_off is not None:
            asyncio.get_running_loop().call_later(GRACE_S, self._cut, self._cut_off)
        log.info("serve.stopping open_requests=%d", len(self.server_state.tasks))

    def _cut(self, path: str) -> None:
        for connection in list(self.server_state.connections):
            if _is_below(path, connection):
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own way raises the signal again at the end, in the middle of our closing."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def _is_below(path: str, connection: object) -> bool:
    """Whether the latest request on this connection, if any, is for something below `path`. Its answer may be complete
    and still wait in the transport for a reader."""
    cycle = getattr(connection, "cycle", None)
    return cycle is not None and cycle.scope["path"].startswith(path)


def _is_unexpected(record: logging.LogRecord) -> bool:
    is_cut_off = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not is_cut_off and not str(record.msg).startswith(_EXPECTED)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Requests that a second Ctrl-C left behind: each finishes its record before the archive closes."""
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
