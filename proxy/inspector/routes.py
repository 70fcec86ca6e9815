"""The inspector over HTTP: a page, its files, and JSON routes (docs/api.md). A thin shell around the views.

Views read the archive in threads of their own, so that a long look takes none from the requests that are proxied.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec
from sqlalchemy.exc import DBAPIError
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route, request_response
from starlette.staticfiles import StaticFiles

from graphstore.errors import GraphIntegrityError
from graphstore.records import Mark, SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.changes import Changes
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.reader import AmbiguousSession, Reader
from graphstore.store.report import Tokens, UnknownSession, find_session
from proxy.errors import render_error
from proxy.inspector.blocks import show_block
from proxy.inspector.feed import Feed
from proxy.inspector.guard import TOKEN, Guard
from proxy.inspector.health import health_without_archive, show_health
from proxy.inspector.maps import show_graph, show_map
from proxy.inspector.search import search_text
from proxy.inspector.sessions import SESSIONS_MAX, Value, View, list_sessions, show_session
from proxy.inspector.turns import UnknownTurn, show_turn, show_what_if
from proxy.marking import ProtectedBlock, UnknownBlock, mark_block, unheeded
from proxy.metrics import MEDIA_TYPE, Meters, of_archive, without_archive
from proxy.savings import Savings, as_json, sum_up
from proxy.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

UNKNOWN = (UnknownSession, AmbiguousSession, UnknownTurn, UnknownBlock)

STATIC = Path(__file__).parent / "static"
THREADS = 2
QUERY_CHARS_MAX = 200_000  # of a request that somebody tries
BODY_BYTES_MAX = 4 * QUERY_CHARS_MAX + 1024
BODY_S = 30  # for it to arrive
NUMBER_DIGITS = 9  # of a turn, a block or a limit


class BadRequest(ValueError):
    """The text says what is wrong with the caller's request."""


REFUSALS = (*UNKNOWN, BadRequest, ProtectedBlock, ArchiveUnavailable, DBAPIError)


class MarkRequest(msgspec.Struct, forbid_unknown_fields=True):
    mark: Mark | None


class WhatIfRequest(msgspec.Struct, forbid_unknown_fields=True):
    query: str


class Inspector:
    """The page of one proxy, and its metrics. `health` says what /recap/health says."""

    def __init__(
        self, settings: Settings, health: Callable[[], Value], clock: Callable[[], float], meters: Meters
    ) -> None:
        self._settings = settings
        self._meters = meters
        self._health = health
        self._clock = clock
        self._started_at = clock()
        self._sums = Savings(settings)
        self._sizes: dict[tuple[int, int], Tokens] = {}
        self._token = secrets.token_urlsafe(24)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="inspector")
        self._reader: Reader | None = None
        self._opening = threading.Lock()
        self._stopped = False
        self.nowhere = Guard(request_response(self._unknown), token=self._token)  # answers what `routes` do not take
        self.feed = Feed(lambda: Changes(settings.db), self._threads)

    def stop(self) -> None:
        """Begin to close: streams end, and views that have not begun never will."""
        self._stopped = True
        self.feed.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self.stop()
        self._threads.shutdown(wait=True)
        if self._reader is not None:
            self._reader.close()

    def routes(self) -> list[BaseRoute]:
        session = "/api/sessions/{session}"
        block = session + "/blocks/{block}"
        inner: list[BaseRoute] = [
            Route("/", self._page),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/metrics", self._metrics),
            Route("/api/self", self._self),
            Route("/api/events", self._events),
            Route("/api/sessions", self._sessions),
            Route("/api/search", self._search),
            Route("/api/savings", self._savings),
            Route("/api/health", self._show_health),
            Route(session, self._session),
            Route(session + "/map", self._map),
            Route(session + "/graph", self._graph),
            Route(session + "/turns/{turn}", self._turn),
            Route(session + "/what-if", self._what_if, methods=["POST"]),
            Route(block, self._block),
            Route(block + "/mark", self._mark, methods=["POST"]),
            Route("/{rest:path}", self._unknown),
        ]
        guard = Middleware(Guard, token=self._token)
        return [Route("/recap", self._to_page, middleware=[guard]), Mount("/recap", routes=inner, middleware=[guard])]

    # -- routes -------------------------------------------------------------------------------------------------------

    async def _to_page(self, request: Request) -> Response:
        return RedirectResponse("/recap/")

    async def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _unknown(self, request: Request) -> Response:
        return _error(404, "not_found", f"ReCAP proxy has no page {request.url.path!r}.")

    async def _self(self, request: Request) -> Response:
        """What the page must know before all else, the token for changes among it."""
        return _json(
            {
                "token": self._token,
                "token_header": TOKEN,
                "problem": self._health()["problem"],
                "version": version("recap-proxy"),
                "now": self._clock(),
                "mode": self._settings.mode,
                "idle_after_s": self._settings.idle_after,
                "upstream": self._settings.upstream,
                "priced": bool(self._settings.prices),
            }
        )

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":  # nothing would ever end it
            return Response(media_type="text/event-stream", headers={"cache-control": "no-store"})
        return StreamingResponse(
            self.feed.listen(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _sessions(self, request: Request) -> Response:
        side = request.query_params.get("side", "0") not in ("", "0")
        return await self._answer(
            request, lambda view: list_sessions(view, side=side, limit=_number(request, "limit", SESSIONS_MAX))
        )

    async def _search(self, request: Request) -> Response:
        wanted = request.query_params.get("q", "").strip()
        return await self._answer(request, lambda view: search_text(view.reader, wanted, monotonic=time.monotonic))

    async def _savings(self, request: Request) -> Response:
        return await self._answer(request, lambda view: as_json(sum_up(view.savings, view.reader), view.settings))

    async def _show_health(self, request: Request) -> Response:
        return await self._answer(
            request,
            lambda view: show_health(view, self._health()),
            without_archive=lambda error: health_without_archive(
                self._settings, self._started_at, self._health(), error
            ),
        )

    async def _metrics(self, request: Request) -> Response:
        said = self._health()
        return await self._answer(
            request,
            lambda view: of_archive(view.savings, view.reader, said),
            without_archive=lambda error: without_archive(said),
            encode=self._meters.render,
            media_type=MEDIA_TYPE,
        )

    async def _session(self, request: Request) -> Response:
        return await self._answer(request, lambda view: show_session(view, _session(view, request)))

    async def _map(self, request: Request) -> Response:
        return await self._answer(request, lambda view: show_map(view, _session(view, request)))

    async def _graph(self, request: Request) -> Response:
        return await self._answer(request, lambda view: show_graph(view, _session(view, request)))

    async def _turn(self, request: Request) -> Response:
        return await self._answer(
            request, lambda view: show_turn(view, _session(view, request), _part(request, "turn"))
        )

    async def _block(self, request: Request) -> Response:
        return await self._answer(
            request, lambda view: show_block(view, _session(view, request), _part(request, "block"))
        )

    async def _what_if(self, request: Request) -> Response:
        return await self._answer_to(
            request, WhatIfRequest, lambda view, given: show_what_if(view, _session(view, request), _whole(given.query))
        )

    async def _mark(self, request: Request) -> Response:
        def mark(view: View, given: MarkRequest) -> Value:
            session, block = _session(view, request), _part(request, "block")
            mark_block(view.reader, self._settings, session, block, given.mark, clock=self._clock)
            return {"ordinal": block, "mark": given.mark, "unheeded": unheeded(self._settings, session)}

        return await self._answer_to(request, MarkRequest, mark)

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _answer_to(self, request: Request, wanted: type[T], look: Callable[[View, T], Value]) -> Response:
        """The answer to what a body asks for."""
        try:
            given = await _body(request, wanted)
        except BadRequest as error:
            return _error(400, "bad_request", str(error))
        return await self._answer(request, lambda view: look(view, given))

    async def _answer(
        self,
        request: Request,
        look: Callable[[View], T],
        *,
        without_archive: Callable[[ArchiveUnavailable], T] | None = None,
        encode: Callable[[T], bytes] = msgspec.json.encode,
        media_type: str = "application/json",
    ) -> Response:
        """Run a view in a thread. Whatever fails becomes an answer that says what and what to do."""
        if self._stopped:
            return _error(503, "stopping", "The proxy is stopping. Load the page again when it runs.")
        looking = partial(self._look, look, without_archive, encode)
        try:
            body = await asyncio.get_running_loop().run_in_executor(self._threads, looking)
        except UNKNOWN as error:
            return _error(404, "not_found", str(error))
        except BadRequest as error:
            return _error(400, "bad_request", str(error))
        except ProtectedBlock as error:
            return _error(409, "protected", str(error))
        except ArchiveUnavailable as error:
            return _error(503, "archive_unavailable", str(error))
        except GraphIntegrityError as error:
            return _error(503, "archive_damaged", f"{error}; `recap verify` says more, `recap rebuild` mends the graph")
        except DBAPIError as error:  # tables of another revision, swapped under a proxy that runs
            problem = f"the archive is not as this version knows it ({error.orig}); restart the proxy"
            return _error(503, "archive_unavailable", problem)
        except Exception:
            log.exception("inspector.failed path=%s", request.url.path)
            return _error(500, "inspector_failed", "This view failed; the proxy's log says why. Requests are unharmed.")
        etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"etag": etag})
        return Response(body, media_type=media_type, headers={"etag": etag, "cache-control": "no-cache"})

    def _look(
        self,
        look: Callable[[View], T],
        without_archive: Callable[[ArchiveUnavailable], T] | None,
        encode: Callable[[T], bytes],
    ) -> bytes:
        try:
            with self._opening:
                if self._reader is None:
                    self._reader = open_reader(self._settings.db)
            view = View(self._reader, self._settings, self._clock(), self._started_at, self._sums, self._sizes)
            try:
                value = look(view)
            except REFUSALS:
                raise
            except Exception:  # it reads in several steps, and a session may be removed between two of them
                value = look(view)
        except ArchiveUnavailable as error:
            if without_archive is None:
                raise
            value = without_archive(error)
        return encode(value)


def _session(view: View, request: Request) -> SessionRow:
    return find_session(view.reader, request.path_params["session"])


def _part(request: Request, name: str) -> int:
    return _as_number(name, request.path_params[name])


def _number(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name)
    return default if given is None else _as_number(name, given)


def _as_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS):
        raise BadRequest(f"{name} {text[:40]!r} is no number")
    return int(text)


async def _body(request: Request, wanted: type[T]) -> T:
    """Raises `BadRequest`."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("The body must be application/json.")
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > BODY_BYTES_MAX:
                    raise BadRequest(f"The body has more than {BODY_BYTES_MAX} bytes.")
    except ClientDisconnect as error:
        raise BadRequest("The body did not arrive whole.") from error
    except TimeoutError as error:
        raise BadRequest(f"The body did not arrive within {BODY_S} seconds.") from error
    try:
        return msgspec.convert(json.loads(raw), type=wanted)  # unlike msgspec it reads half a surrogate pair
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not understood: {error}.") from error


def _whole(text: str) -> str:
    """A browser's text may hold half a surrogate pair, which no answer can: U+FFFD in its place."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json(value: Value) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})


def _error(status: int, code: str, message: str) -> Response:
    return Response(render_error(message, code=code), status_code=status, media_type="application/json")
