"""An upstream that answers every conversation request with the next answer it was given, and keeps what it received."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from proxy.server import bind


class RecordingUpstream:
    """Answers in chat or responses form, as a stream when asked. `bodies` are the raw requests in order."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answers: deque[dict[str, Any]] = deque()
        self.rejections: deque[int] = deque()  # statuses to answer with before anything else
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def handle(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(body)
        if self.rejections:
            error = {"error": {"message": "rejected by the test", "type": "invalid_request_error"}}
            return Response(msgspec.json.encode(error), self.rejections.popleft(), media_type="application/json")
        message = self.answers.popleft() if self.answers else {"role": "assistant", "content": "done"}
        answer = chat_events(message) if request.url.path.endswith("completions") else responses_events(message)
        return StreamingResponse(answer, media_type="text/event-stream")

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RecordingUpstream"]:
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        app = Starlette(routes=[Route("/{path:path}", self.handle, methods=["POST"])])
        server = _Server(uvicorn.Config(app, lifespan="off", log_level="warning", log_config=None))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True
            server.stopped.set()
            await task


class _Server(uvicorn.Server):
    """Stops at once: uvicorn's own loop looks ten times a second whether it should."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopped = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopped.wait()


async def chat_events(message: dict[str, Any]) -> AsyncIterator[bytes]:
    delta = {k: v for k, v in message.items() if v is not None}
    calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls") or ())]
    if calls:
        delta["tool_calls"] = calls
    reason = "tool_calls" if calls else "stop"
    usage = {"prompt_tokens": 1000, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 128}}
    for chunk in (
        {"id": "c", "choices": [{"index": 0, "delta": delta}]},
        {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"id": "c", "choices": [], "usage": usage},
    ):
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


async def responses_events(message: dict[str, Any]) -> AsyncIterator[bytes]:
    from tests.recorded import response_items

    items = response_items(message)
    usage: dict[str, Any] = {"input_tokens": 1000, "output_tokens": 10, "input_tokens_details": {"cached_tokens": 128}}
    response: dict[str, Any] = {"id": "r", "status": "completed", "output": items, "usage": usage}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress", "output": []}}
    ]
    events += [{"type": "response.output_item.done", "output_index": i, "item": item} for i, item in enumerate(items)]
    events += [{"type": "response.completed", "response": response}]
    for event in events:
        yield f"event: {event['type']}\n".encode() + b"data: " + json.dumps(event).encode() + b"\n\n"
