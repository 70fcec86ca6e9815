"""A model provider for many at once, in a process of its own: `python -m scripts.load.upstream PORT THINK_S PIECE_S`.

It refuses bodies that hold another session's words or break its API's rules. What it took from the body's last byte to
the answer's first is in the header `x-took-s`; `x-received` and `x-size` are of the body that it received.
"""

import asyncio
import json
import sys
import time

from scripts.load.wire import PATHS, Ask, answer, digest, tags
from tests.fakes.provider_rules import reject_chat, reject_responses


def problem(path: str, body: bytes) -> str | None:
    """What is wrong with a request, None: nothing."""
    found = tags(body)
    if len(found) != 1:
        return f"words of {len(found)} sessions"
    parsed = json.loads(body)
    rejected = (
        reject_chat(parsed["messages"])
        if path == PATHS["chat"]
        else reject_responses(parsed["input"], stateful=False, led_to={})
    )
    return json.dumps(rejected) if rejected else None


async def serve(port: int, think_s: float, piece_s: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
                body = await reader.readexactly(length)
                began = time.monotonic()
                path = head.split(b" ", 2)[1].decode()
                if why := problem(path, body):
                    wrong = json.dumps({"error": {"message": why}}).encode()
                    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(wrong), wrong))
                    continue
                ask, received = Ask.newest(body), digest(body)
                assert ask is not None
                pieces = answer("chat" if path == PATHS["chat"] else "responses", ask, received, len(body))
                await asyncio.sleep(think_s)
                first, *others = (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
                    b"x-received: %b\r\nx-size: %d\r\nx-took-s: %.6f\r\n\r\n%b"
                    % (received.encode(), len(body), time.monotonic() - began, first)
                )
                for piece in others:
                    await asyncio.sleep(piece_s)
                    writer.write(piece)
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, limit=1 << 20, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
