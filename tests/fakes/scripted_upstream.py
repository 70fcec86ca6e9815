"""A model provider of our own: a strict, scripted HTTP server that speaks both dialects.

It runs on a free port of the loopback, in the caller's event loop (`async with`) or in a thread (`with`). The model
follows the script in the newest user message (`model_script`), histories are validated as OpenAI's API does
(`provider_rules`), usage comes from a simulated prefix cache on the caller's clock, and every request is kept in `log`.
Faults come from the script or from `inject`. Sockets are plain asyncio streams, so that a fault can say exactly which
byte is the last one.
"""

import asyncio
import base64
import gzip
import hashlib
import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlsplit

import brotli  # type: ignore[import-untyped]

from tests.fakes.model_script import DialectName, Step, locate, next_step
from tests.fakes.provider_rules import (
    PrefixCache,
    Units,
    count_tokens,
    error_body,
    prompt_units,
    reject_body,
    reject_chat,
    reject_overflow,
    reject_responses,
)
from tests.fakes.wire_answers import Reply, ToolForm, Written, response_items, write_chat, write_json, write_responses

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Json = dict[str, Any]
HeaderList = list[tuple[str, str]]

DEADLINE_SECONDS = 20.0  # for waiting in a test; generous, because nothing waits this long when it works


@dataclass(frozen=True, slots=True)
class Fault:
    """How one answer goes wrong. Byte counts are of the encoded body.

    `status` and `body`, of `content_type`, replace the answer (a `body` of None with an error status gets OpenAI's
    error shape). `stall` waits for `release` before the status line, `stall_after` after that many body bytes.
    `truncate_after` breaks the connection after that many bytes; `unfinished` ends a stream cleanly without its closing
    events. `split` is the size of each write, `encoding` one of gzip, br, zstd, deflate.
    """

    status: int = 200
    body: bytes | None = None
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    stall: bool = False
    stall_after: int | None = None
    truncate_after: int | None = None
    unfinished: bool = False
    split: int | None = None
    encoding: str | None = None


@dataclass(slots=True)
class Received:
    """One request as it came, and what became of it.

    `messages` are the elements of `messages`/`input` ([] elsewhere). `rejected` is the text of a validation error.
    `disconnected` is set when the client was seen to leave before the answer was complete.
    """

    method: str
    path: str  # with query, as sent
    headers: HeaderList
    body: bytes
    at: float
    json: Any = None
    dialect: DialectName | None = None
    status: int = 0
    rejected: str | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    answered: bool = False
    disconnected: bool = False

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def messages(self) -> list[Json]:
        if self.dialect is None or not isinstance(self.json, dict):
            return []
        history = self.json.get("messages" if self.dialect == "chat" else "input")
        return history if isinstance(history, list) else []

    @property
    def has_tools(self) -> bool:
        return bool(_declared_tools(self.json))


class ScriptedUpstream:
    """The server. `clock` drives the simulated cache; `reasons` makes the model think before each step; a longer prompt
    than `window_tokens` is refused.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        cache_ttl_seconds: float = 300.0,
        reasons: bool = True,
        window_tokens: int | None = None,
    ) -> None:
        self.log: list[Received] = []
        self._clock = clock
        self._reasons = reasons
        self.window_tokens = window_tokens
        self._cache = PrefixCache(clock, cache_ttl_seconds)
        self._led_to: dict[str, str] = {}
        self._faults: list[tuple[Fault, Callable[[Received], bool]]] = []
        self._spent: set[tuple[str, int]] = set()
        self._changed = threading.Condition()
        self._released = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What a client calls OPENAI_BASE_URL."""
        return f"{self.origin}/v1"

    @property
    def conversations(self) -> list[Received]:
        """Requests to a conversation endpoint in order of arrival."""
        return [received for received in self.log if received.dialect is not None]

    def inject(self, *faults: Fault, when: Callable[[Received], bool] = lambda received: True) -> None:
        """Let each fault befall the next request to a conversation endpoint for which `when` holds."""
        self._faults += [(fault, when) for fault in faults]

    def release(self) -> None:
        """Let every stalled answer go on, now and from now on until the next stall."""
        assert self._loop is not None, "not running"
        self._loop.call_soon_threadsafe(self._released.set)

    def wait_for(self, condition: Callable[[list[Received]], bool], seconds: float = DEADLINE_SECONDS) -> None:
        """Block until the log satisfies `condition`. From a coroutine: `await asyncio.to_thread(...)`."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self.log), seconds):
                raise TimeoutError(f"not seen within {seconds:g} s; log holds {len(self.log)} requests")

    # Life cycle

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        started = threading.Event()
        stop: asyncio.Event | None = None

        async def serve() -> None:
            nonlocal stop
            stop = asyncio.Event()
            async with self:
                started.set()
                await stop.wait()

        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), name="scripted-upstream", daemon=True)
        self._thread.start()
        if not started.wait(DEADLINE_SECONDS):
            raise TimeoutError("the scripted upstream did not start")
        assert stop is not None
        self._stop = stop.set
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(DEADLINE_SECONDS)

    # Connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (received := await self._read(reader, writer)) is not None:
                if not await self._handle(received, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, or the test is over; asyncio's server reports either as an unhandled error
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Received | None:
        """Read one request, its body still encoded; None when the client closed between requests."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        request_line, *lines = head[:-4].decode("latin-1").split("\r\n")
        method, path, _ = request_line.split(" ", 2)
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        received = Received(method, path, headers, b"", self._clock())
        if received.header("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if (received.header("transfer-encoding") or "").lower() == "chunked":
            received.body = b"".join([chunk async for chunk in _chunks(reader)])
        else:
            received.body = await reader.readexactly(int(received.header("content-length") or 0))
        return received

    async def _handle(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Returns whether the connection goes on."""
        status, written, fault = self._answer(received)
        received.status = status
        with self._changed:
            self.log.append(received)
            self._changed.notify_all()
        try:
            alive = await self._send(status, written, fault, reader, writer)
        except ConnectionError:
            alive, received.disconnected = False, True
        except _ClientGone:
            alive, received.disconnected = False, True
        with self._changed:
            received.answered = True
            self._changed.notify_all()
        return alive

    async def _send(
        self,
        status: int,
        written: Written,
        fault: Fault,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        if fault.stall:
            await self._stall(reader)
        streamed = written.content_type.startswith("text/event-stream")
        pieces = written.pieces[: -written.closing] if fault.unfinished and written.closing else written.pieces
        pieces = tuple(_encoded(pieces, fault.encoding)) if fault.encoding else pieces
        headers = [("content-type", written.content_type), ("x-request-id", f"req_{len(self.log)}"), *fault.headers]
        if fault.encoding:
            headers.append(("content-encoding", fault.encoding))
        length = sum(map(len, pieces))
        headers.append(("transfer-encoding", "chunked") if streamed else ("content-length", str(length)))
        head = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}", *(f"{name}: {value}" for name, value in headers)]
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1"))

        for piece, reached in _cuts(pieces, fault):
            if piece:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if streamed else piece)
                await writer.drain()
            if reached == fault.stall_after:
                await self._stall(reader)
            if reached == fault.truncate_after:
                writer.transport.abort()
                return False
        if streamed:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _stall(self, reader: asyncio.StreamReader) -> None:
        """Wait for `release`, or notice that the client has left."""
        self._released.clear()
        release = asyncio.ensure_future(self._released.wait())
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({release, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            release.cancel()
            gone.cancel()
            # A read that is still being cancelled keeps the next request of this connection from being read.
            await asyncio.gather(release, gone, return_exceptions=True)
        if gone.done() and not gone.cancelled():
            raise _ClientGone

    # Answers

    def _answer(self, received: Received) -> tuple[int, Written, Fault]:
        path = urlsplit(received.path).path
        if received.method == "GET" and path.endswith("/models"):
            names = [{"id": name, "object": "model", "created": 0, "owned_by": "script"} for name in ("gpt-5.1", "m")]
            return 200, write_json({"object": "list", "data": names}), Fault()
        if received.method == "GET" and (received.header("upgrade") or "").lower() == "websocket":
            return 426, write_json(error_body("This server does not speak websocket here.")), Fault()
        if received.method != "POST" or not path.endswith(("/chat/completions", "/responses")):
            echo = f"{received.method} {received.path}"
            media = received.header("content-type") or "application/octet-stream"
            return 200, Written(media, (received.body,)), Fault(headers=(("x-echo", echo),))
        received.dialect = "chat" if path.endswith("/chat/completions") else "responses"
        return self._converse(received, received.dialect)

    def _converse(self, received: Received, dialect: DialectName) -> tuple[int, Written, Fault]:
        try:
            received.json = json.loads(decode_body(received.body, received.header("content-encoding")))
        except (ValueError, OSError, EOFError, zlib.error, zstd.ZstdError, brotli.error):
            received.json = None
        history_field = "messages" if dialect == "chat" else "input"
        rejection = reject_body(received.json, history_field) or self._reject_history(received, dialect)
        if rejection is None and self.window_tokens is not None:
            rejection = reject_overflow(received.json, history_field, self.window_tokens)
        injected = self._take_fault(received)
        if rejection and (injected is None or injected.status == 200):
            received.rejected = rejection["error"]["message"]
            return 400, write_json(rejection), Fault()

        body = received.json if isinstance(received.json, dict) else {}
        history = _history(body, history_field)
        position = locate(dialect, history)
        tools = _declared_tools(body)
        step = next_step(position, has_tools=bool(tools))
        fault = injected or self._scripted_fault(step, position.user_text, position.steps_done)
        if fault.status != 200 or fault.body is not None:
            return fault.status, _error_or(fault), fault
        units = prompt_units(body, history_field)
        received.input_tokens = count_tokens(units)
        received.cached_tokens = self._cache.serve(
            units, model=body["model"], credential=received.header("authorization") or ""
        )
        reply = self._reply(received, step, tools, units)
        return 200, self._write(reply, body, history, dialect), fault

    def _reject_history(self, received: Received, dialect: DialectName) -> Json | None:
        if dialect == "chat":
            return reject_chat(received.json["messages"]) if isinstance(received.json["messages"], list) else None
        items = received.json["input"]
        if isinstance(items, str):
            return None
        keeps_state = received.json.get("previous_response_id") or received.json.get("conversation")
        references = any(isinstance(item, dict) and item.get("type") == "item_reference" for item in items)
        return reject_responses(items, stateful=bool(keeps_state or references), led_to=self._led_to)

    def _take_fault(self, received: Received) -> Fault | None:
        for index, (fault, when) in enumerate(self._faults):
            if when(received):
                del self._faults[index]
                return fault
        return None

    def _scripted_fault(self, step: Step, user_text: str, steps_done: int) -> Fault:
        """The fault that the script puts before a step befalls it once; a retry of the same step succeeds."""
        key = (user_text, steps_done)
        if step.fault is None or key in self._spent:
            return Fault()
        self._spent.add(key)
        headers = tuple((str(name), str(value)) for name, value in step.fault.get("headers", {}).items())
        body = step.fault.get("body")
        return replace(Fault(**{**step.fault, "headers": headers}), body=body.encode() if body is not None else None)

    def _reply(self, received: Received, step: Step, tools: dict[str, ToolForm], units: Units) -> Reply:
        seed = hashlib.sha256(received.body + len(self.log).to_bytes(4, "big")).hexdigest()[:24]
        dropped = tuple(_unreadable_reasoning(received.messages, received.json))
        return Reply(
            seed=seed,
            model=received.json["model"],
            step=step,
            tools=tools,
            input_tokens=received.input_tokens,
            cached_tokens=received.cached_tokens,
            sealed_reasoning=_seal(units) if self._reasons else None,
            transformations=dropped,
        )

    def _write(self, reply: Reply, body: Json, history: Sequence[Json], dialect: DialectName) -> Written:
        stream = bool(body.get("stream"))
        if dialect == "chat":
            wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return write_chat(reply, stream=stream, include_usage=wants_usage)
        if reply.sealed_reasoning:
            reasoning, *led_to = response_items(reply)
            self._led_to.update((item["id"], reasoning["id"]) for item in led_to)
        compacts = bool(history) and history[-1].get("type") == "compaction_trigger"
        return write_responses(reply, stream=stream, compacts=compacts)


class _ClientGone(Exception):
    pass


_REASONS = {200: "OK", 400: "Bad Request", 426: "Upgrade Required", 429: "Too Many Requests", 500: "Server Error"}
_SEAL = b"sealed over "  # a multiple of three bytes, so that its base64 is a prefix of the whole
_SEAL_PREFIX = base64.b64encode(_SEAL).decode()


def _seal(units: Units) -> str:
    """`encrypted_content` that remembers the prompt under which the model reasoned, about as long as a real one."""
    return base64.b64encode((_SEAL + hashlib.sha256(b"".join(units)).digest()).ljust(300, b".")).decode()


def _unreadable_reasoning(items: Sequence[Json], body: Json) -> Iterator[Json]:
    """Our own reasoning items whose prefix is not the one under which they were made: a provider withholds those."""
    for index, item in enumerate(items):
        if item.get("type") != "reasoning" or not str(item.get("encrypted_content")).startswith(_SEAL_PREFIX):
            continue
        if item["encrypted_content"] != _seal(prompt_units({**body, "input": list(items[:index])}, "input")):
            yield {"type": "reasoning", "id": item.get("id"), "action": "removed", "reason": "prefix_mismatch"}


def _history(body: Json, history_field: str) -> list[Json]:
    history = body.get(history_field)
    if isinstance(history, str):
        return [{"role": "user", "content": history}]
    return [item for item in history or () if isinstance(item, dict)]


def _declared_tools(body: object) -> dict[str, ToolForm]:
    """Tools by name in either dialect's form, those of namespaces and of `additional_tools` items included."""
    if not isinstance(body, dict):
        return {}
    declared = list(body.get("tools") or body.get("functions") or ())
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            declared += item.get("tools") or ()
    return dict(_tool_forms(declared, None))


def _tool_forms(declared: Sequence[Json], namespace: str | None) -> Iterator[tuple[str, ToolForm]]:
    for tool in declared:
        kind = tool.get("type", "function")
        if kind == "namespace":
            yield from _tool_forms(tool.get("tools") or (), tool.get("name"))
            continue
        name = tool.get("name") or (tool.get(kind) or {}).get("name")
        if name and kind in ("function", "custom"):
            yield name, ToolForm(kind, namespace)


def _error_or(fault: Fault) -> Written:
    if fault.body is not None:
        return Written(fault.content_type, (fault.body,))
    return write_json({"error": {"message": f"Injected {fault.status}.", "type": "server_error", "code": None}})


def _cuts(pieces: Sequence[bytes], fault: Fault) -> Iterator[tuple[bytes, int]]:
    """Pieces as they are written, cut where the fault wants to act, each with the bytes sent once it is out."""
    marks = sorted({mark for mark in (fault.stall_after, fault.truncate_after) if mark is not None})
    sent = 0
    if 0 in marks:
        yield b"", 0
    for piece in pieces:
        while piece:
            size = min([len(piece), fault.split or len(piece), *(mark - sent for mark in marks if mark > sent)])
            sent += size
            yield piece[:size], sent
            piece = piece[size:]


async def _chunks(reader: asyncio.StreamReader) -> Any:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    while (await reader.readline()).strip():
        pass  # trailers


def _encoded(pieces: Sequence[bytes], encoding: str) -> Iterator[bytes]:
    """Compress a stream piece by piece, flushed after each, as a streaming server does."""
    if encoding == "br":
        brotli_stream = brotli.Compressor()
        for piece in pieces:
            yield brotli_stream.process(piece) + brotli_stream.flush()
        yield brotli_stream.finish()
    elif encoding == "zstd":
        zstd_stream = zstd.ZstdCompressor()
        for piece in pieces:
            yield zstd_stream.compress(piece, zstd_stream.FLUSH_BLOCK)
        yield zstd_stream.flush()
    else:
        zlib_stream = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
        for piece in pieces:
            yield zlib_stream.compress(piece) + zlib_stream.flush(zlib.Z_SYNC_FLUSH)
        yield zlib_stream.flush()


def decode_body(body: bytes, encoding: str | None) -> bytes:
    """Undo a content encoding; raises what the decompressor raises."""
    match (encoding or "identity").lower():
        case "gzip":
            return gzip.decompress(body)
        case "deflate":
            return zlib.decompress(body)
        case "br":
            return bytes(brotli.decompress(body))
        case "zstd":
            return bytes(zstd.decompress(body))
        case _:
            return body
