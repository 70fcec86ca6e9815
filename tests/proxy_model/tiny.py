"""Models of a few thousand random weights and a tokenizer of single bytes: the shapes of real ones, and no download."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CONTROL = (
    "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
MARKS = ("<think>", "</think>", "<tool_response>", "</tool_response>")  # added to the vocabulary, but not "special"

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None, reason="torch and transformers are not installed"
)


def byte_tokenizer(template: str | None = None) -> Any:
    """One token a byte, and the control tokens of every family in `templates`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(CONTROL))
    core.add_tokens(list(MARKS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


SIZES = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}


def tiny_config(family: str, layers: int = 6) -> Any:
    """qwen3, llama, gemma3 (every third layer is a full one, the others see 64 tokens), gpt2 (no rotary attention)."""
    from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

    sizes = {**SIZES, "num_hidden_layers": layers}
    if family == "qwen3":
        return Qwen3Config(**sizes, tie_word_embeddings=True)
    if family == "llama":
        return LlamaConfig(**sizes)
    if family == "gemma3":
        kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(layers)]
        return Gemma3TextConfig(**sizes, layer_types=kinds, sliding_window=64, query_pre_attn_scalar=8)
    if family == "gpt2":
        return GPT2Config(vocab_size=288, n_embd=32, n_layer=layers, n_head=4, n_positions=512)
    raise KeyError(family)


def tiny_folder(folder: Path, family: str, *, template: str | None = None, layers: int = 6, seed: int = 0) -> Path:
    """A model as a user would have it on disk: configuration, weights, tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_config(family, layers)).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder
