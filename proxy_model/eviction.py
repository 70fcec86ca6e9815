"""A local model that answers over a shortened KV cache: what the paper compares with (§5.1, Appendix C "KV eviction").

At each user turn after the first, every entry of the history that the cache still has is scored by the attention of the
new message, head by head, and all but a share of what the history has counted so far are dropped for good. The message
itself stays whole; its last token is computed once more over what is left. Keys keep the positions that they had.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy_model.errors import INSTALL, ModelUnavailable, ReplayError, reason_of
from proxy_model.layers import FULL
from proxy_model.loader import layer_kinds, length_max

ANOTHER = "choose another model"
SHARE = 0.1  # of the history's tokens, a head
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Given:
    """`context`: entries that each head kept, with the new message, in tokens. `evicted`: something was dropped."""

    text: str
    context: int
    made: int  # tokens
    evicted: bool


@dataclass
class Memory:
    """What one conversation has left in the cache."""

    cache: Any
    tokens: int = 0  # that it has seen; the next one's position
    prompt: str = ""  # the last one, as the template renders it
    answer: str = ""


@dataclass
class EvictingModel:
    """`network` with its output head, in eval mode, with eager attention, whose weights can be read."""

    network: Any
    tokenizer: Any
    share: float = SHARE
    temperature: float = 0.0
    tokens_max: int = 512  # of an answer
    seed: int = 0
    _draw: Any = field(init=False)

    def __post_init__(self) -> None:
        import torch

        self._draw = torch.Generator(device=self.network.device).manual_seed(self.seed)

    def begin(self) -> Memory:
        from transformers import DynamicCache

        return Memory(DynamicCache())

    def answer(self, messages: Sequence[Message], memory: Memory) -> Given:
        """To the last message, the user's. Raises ReplayError: a context that is too long, a template that does not go
        on where it ended."""
        import torch

        prompt = self._rendered(messages, answers=True)
        ids = self._ids(self._news(messages, prompt, memory))
        had, seen = memory.cache.get_seq_length(), memory.tokens
        if seen + ids.shape[1] + self.tokens_max > (most := length_max(self.network.config)):
            raise ReplayError(
                f"the conversation needs {seen + ids.shape[1] + self.tokens_max} tokens of {most}", ANOTHER
            )
        places = torch.arange(seen, seen + ids.shape[1], device=ids.device)[None]
        keep = math.ceil(self.share * seen)
        evicts = keep < had
        with torch.inference_mode():
            out = self._run(ids, places, memory, attention=evicts)
            if evicts:
                for layer, weights in zip(memory.cache.layers, out.attentions, strict=True):
                    evict(layer, weights, had, keep)
                    layer.keys, layer.values = layer.keys[..., :-1, :], layer.values[..., :-1, :]
                out = self._run(ids[:, -1:], places[:, -1:], memory)
            memory.tokens = seen + ids.shape[1]
            context = memory.cache.get_seq_length()
            made = self._generate(out.logits[0, -1], memory)
        memory.prompt, memory.answer = prompt, self.tokenizer.decode(made, skip_special_tokens=True)
        return Given(memory.answer, context, len(made), evicts)

    def _generate(self, logits: Any, memory: Memory) -> list[int]:
        """Token by token; the last one is not in the cache yet: what follows it is fed with the next message."""
        import torch

        made: list[int] = []
        while True:
            made.append(self._next(logits))
            if made[-1] in self._ends() or len(made) == self.tokens_max:
                return made
            step = torch.tensor([[made[-1]]], device=self.network.device)
            place = torch.tensor([[memory.tokens]], device=self.network.device)
            logits = self._run(step, place, memory).logits[0, -1]
            memory.tokens += 1

    def _next(self, logits: Any) -> int:
        import torch

        if self.temperature <= 0:
            return int(logits.argmax())
        odds = torch.softmax(logits.float() / self.temperature, dim=-1)
        return int(torch.multinomial(odds, 1, generator=self._draw))

    def _ends(self) -> set[int]:
        named = self.network.generation_config.eos_token_id
        ends = named if isinstance(named, list) else [named]
        return {end for end in (*ends, self.tokenizer.eos_token_id) if end is not None}

    def _run(self, ids: Any, places: Any, memory: Memory, *, attention: bool = False) -> Any:
        return self.network(
            input_ids=ids,
            position_ids=places,
            cache=memory.cache,
            use_cache=True,
            output_attentions=attention,
        )

    def _news(self, messages: Sequence[Message], prompt: str, memory: Memory) -> str:
        """What stands behind the last answer's tokens. The answer is in the cache as it was made, whatever the template
        makes of its blanks; only its last token is not."""
        if not memory.prompt:
            return prompt
        before = self._rendered(messages[:-1], answers=False)
        tail = before[len(memory.prompt) :].lstrip()
        said = memory.answer.strip()
        if not before.startswith(memory.prompt) or not prompt.startswith(before) or not tail.startswith(said):
            raise ReplayError("its template renders earlier messages anew", ANOTHER)
        return tail[len(said) :] + prompt[len(before) :]

    def _rendered(self, messages: Sequence[Message], *, answers: bool) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answers))

    def _ids(self, text: str) -> Any:
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(self.network.device)


def evict(layer: Any, weights: Any, had: int, keep: int) -> None:
    """Keep the `keep` of the first `had` entries that draw most, for each head of keys; all behind them stay.

    `weights` (1, H, M, had + M): attention of the new message. Heads that share keys are added up.
    """
    import torch

    heads, size = layer.keys.shape[1], layer.keys.shape[-1]
    drawn = weights[0, :, :, :had].float().mean(dim=1)  # (H, had)
    drawn = drawn.view(heads, -1, had).sum(dim=1)
    best = drawn.topk(keep, dim=-1).indices.sort(dim=-1).values  # (K, keep)
    chosen = best[None, :, :, None].expand(1, heads, keep, size)
    layer.keys, layer.values = (
        torch.cat([held[..., :had, :].gather(2, chosen), held[..., had:, :]], dim=2)
        for held in (layer.keys, layer.values)
    )


def load_evicting(source: str, *, temperature: float, tokens_max: int, seed: int) -> EvictingModel:
    """Takes seconds. Raises ModelUnavailable: no torch, no weights, attention that is not full."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except (ImportError, OSError) as error:
        raise ModelUnavailable(f"torch and transformers cannot be imported ({reason_of(error)})", INSTALL) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        network = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto" if device == "cuda" else torch.float32, attn_implementation="eager"
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(f"{source!r} cannot be loaded ({reason_of(error)})", ANOTHER) from error
    if tokenizer.chat_template is None:
        raise ModelUnavailable(f"{source!r} has no chat template", ANOTHER)
    if set(layer_kinds(network.config)) != {FULL}:
        raise ModelUnavailable(f"{source!r} has layers that do not see the whole context", ANOTHER)
    network.to(device).eval().requires_grad_(False)
    return EvictingModel(network, tokenizer, temperature=temperature, tokens_max=tokens_max, seed=seed)
