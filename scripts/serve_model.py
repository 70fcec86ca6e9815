"""A small local model behind /v1/chat/completions, one answer at a time: for trying the lab without a provider.

It needs the extra `attention`. No streaming, no tools; for anything but a trial use a real server.

    python scripts/serve_model.py .models/SmolLM2-135M-Instruct --port 8090
    python scripts/serve_model.py .models/SmolLM2-135M-Instruct -- make eval-asked     # for as long as that runs
"""

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from proxy.errors import StartError
from proxy.server import bind

MAX_TOKENS = 512  # of an answer whose request gives no limit


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Raises KeyError, TypeError and ValueError for a body that is no request."""
    inputs = tokenizer.apply_chat_template(
        body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    temperature = float(body.get("temperature", 1.0))
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    prompt_tokens, window = inputs["input_ids"].shape[1], getattr(model.config, "max_position_embeddings", None)
    if window is not None and prompt_tokens > window:
        raise ValueError(f"the prompt has {prompt_tokens} tokens, and the maximum context length is {window}")
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=int(body.get("max_tokens") or MAX_TOKENS), **sampling)
    own = tokens[0, prompt_tokens:]
    text = tokenizer.decode(own, skip_special_tokens=True)
    return {
        "id": "local",
        "object": "chat.completion",
        "model": name,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(own),
            "total_tokens": prompt_tokens + len(own),
        },
    }


def application(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Starlette:
    one_at_a_time = asyncio.Lock()

    async def complete(request: Request) -> Response:
        async with one_at_a_time:
            try:
                body = await request.json()
                return JSONResponse(await asyncio.to_thread(answer, model, tokenizer, name, body))
            except (KeyError, TypeError, ValueError) as error:
                return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)

    return Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])


async def serve(server: uvicorn.Server, listener: socket.socket, command: Sequence[str]) -> int:
    """For ever, or for as long as the command runs: its exit status."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    if not command:
        await serving
        return 0
    process = await asyncio.create_subprocess_exec(*command)  # what it asks before we are ready waits at the socket
    try:
        return await process.wait()
    finally:
        server.should_exit = True
        await serving


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a small local model as chat completions, for trials.")
    parser.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.epilog = (
        "After -- may stand a command: the model is served for as long as it runs, and ends with its status."
    )
    given = sys.argv[1:]
    own = given[: given.index("--")] if "--" in given else given
    arguments, command = parser.parse_args(own), given[len(own) + 1 :]
    try:
        listener = bind("127.0.0.1", arguments.port)
    except StartError as error:
        parser.error(str(error))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto" if device == "cuda" else torch.float32)
    model.to(device).eval()
    torch.manual_seed(arguments.seed)
    app = application(model, tokenizer, arguments.model)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    return asyncio.run(serve(server, listener, command))


if __name__ == "__main__":
    sys.exit(main())
