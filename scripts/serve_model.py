"""A small local model behind /v1/chat/completions, one answer at a time: for trying the lab without a provider.

It needs the extra `attention`. No streaming, no tools; for anything but a trial use a real server.

    python scripts/serve_model.py .models/SmolLM2-135M-Instruct --port 8090
"""

import argparse
import asyncio
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

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
    prompt_tokens = inputs["input_ids"].shape[1]
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a small local model as chat completions, for trials.")
    parser.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto" if device == "cuda" else torch.float32)
    model.to(device).eval()
    torch.manual_seed(arguments.seed)
    one_at_a_time = asyncio.Lock()

    async def complete(request: Request) -> Response:
        async with one_at_a_time:
            try:
                body = await request.json()
                return JSONResponse(await asyncio.to_thread(answer, model, tokenizer, arguments.model, body))
            except (KeyError, TypeError, ValueError) as error:
                return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
