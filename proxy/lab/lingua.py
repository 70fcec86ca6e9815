"""LLMLingua-2 and LongLLMLingua as rows of Lost in Conversation (paper §5.1): a small model drops words of the history.

Needs the extra `lingua`, and weights. The library decides what goes; how the history is laid out for it is ours, for
the paper does not say: a text a message, and what is left as one message of the user's.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from proxy.lab.compactors import Compacted, Message
from proxy.lab.errors import LabError

INSTALL = "pip install 'recap-proxy[lingua]'"
WEIGHTS = {  # the paper's (Appendix C)
    "llmlingua-2": "microsoft/llmlingua-2-xlm-roberta-large-meetingbank",
    "longllmlingua": "microsoft/phi-2",
}
RATES = {"llmlingua-2": 0.2, "longllmlingua": 0.1}  # of the tokens that may stay (paper §5.1, for LiC)
OPTIONS: dict[str, dict[str, Any]] = {  # as their authors use them
    "llmlingua-2": {"force_tokens": ["\n"]},
    "longllmlingua": {
        "rank_method": "longllmlingua",
        "condition_in_question": "after_condition",
        "condition_compare": True,
        "dynamic_context_compression_ratio": 0.3,
        "reorder_context": "original",
        "concate_question": False,
    },
}
EARLIER = "The conversation so far, with words left out:"

Squeeze = Callable[[list[str], str], str]  # texts of the history, the request -> what is left of the texts


def load_lingua(name: str, weights: str | None) -> Squeeze:
    """Takes seconds, on the CPU. Raises `LabError`: no library, no weights, weights that it cannot use."""
    try:
        from llmlingua import PromptCompressor
    except ImportError as error:
        raise LabError(f"{name} needs the library llmlingua ({error}): {INSTALL}") from error
    model = weights or WEIGHTS[name]
    try:
        compressor = PromptCompressor(
            model,
            device_map="cpu",
            use_llmlingua2=name == "llmlingua-2",
            model_config={"trust_remote_code": False},
        )
    except Exception as error:
        raise LabError(
            f"{name} cannot load {model!r} ({type(error).__name__}: {error}); it fetches weights and a table of "
            "tokens at its first use; or name a folder that holds the weights with --lingua-model"
        ) from error
    lock = threading.Lock()

    def squeeze(texts: list[str], request: str) -> str:
        with lock:
            try:
                made = compressor.compress_prompt(texts, question=request, rate=RATES[name], **OPTIONS[name])
            except Exception as error:
                raise LabError(f"{name} with {model!r} failed: {type(error).__name__}: {error}") from error
        return str(made["compressed_prompt"])

    return squeeze


class Squeezer:
    """What a compressor leaves of the whole history, users' words too."""

    def __init__(self, squeeze: Squeeze) -> None:
        self._squeeze = squeeze

    async def compact(self, history: Sequence[Message], request: str) -> Compacted:
        began = time.perf_counter()
        texts = [f"{message['role']}: {message['content']}" for message in history[1:]]
        left = await asyncio.to_thread(self._squeeze, texts, request)
        earlier = {"role": "user", "content": f"{EARLIER}\n{left}"}
        return Compacted((history[0], earlier), True, seconds=time.perf_counter() - began)
