"""An evicted cache: nothing changes while nothing is dropped, and what is dropped is what draws least."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.proxy_model.tiny import byte_tokenizer, needs_torch, tiny_config

pytestmark = needs_torch

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = {"role": "system", "content": "You help."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(**options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from proxy_model.eviction import EvictingModel

    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="eager").eval()
    return EvictingModel(network, byte_tokenizer(CHATML), tokens_max=12, **options)


def talk(evicting: Any, *texts: str) -> tuple[list[Any], Any, list[dict[str, str]]]:
    memory, messages, given = evicting.begin(), [SYSTEM], []
    for text in texts:
        messages.append(user(text))
        given.append(evicting.answer(messages, memory))
        messages.append({"role": "assistant", "content": given[-1].text})
    return given, memory, messages


def test_with_room_for_all_it_answers_as_without_a_cache() -> None:
    import torch

    evicting = model(share=1.0)
    memory, messages = evicting.begin(), [SYSTEM]
    ids: list[int] = []
    for text in ("first", "second", "third"):
        messages.append(user(text))
        prompt = evicting._rendered(messages, answers=True)
        ids += evicting._ids(evicting._news(messages, prompt, memory))[0].tolist()
        given = evicting.answer(messages, memory)
        assert not given.evicted and given.context == len(ids)
        own: list[int] = []
        while len(own) < given.made:
            with torch.inference_mode():
                own.append(int(evicting.network(torch.tensor([ids + own])).logits[0, -1].argmax()))
        assert evicting.tokenizer.decode(own, skip_special_tokens=True) == given.text
        ids += own[:-1]
        messages.append({"role": "assistant", "content": given.text})


def test_each_head_keeps_a_tenth_of_what_the_history_counted_and_the_new_message() -> None:
    evicting = model()
    given, memory, messages = talk(evicting, "a" * 200, "b" * 30)
    seen = memory.tokens
    messages.append(user("c" * 10))
    news = evicting._ids(evicting._news(messages, evicting._rendered(messages, answers=True), memory)).shape[1]
    third = evicting.answer(messages, memory)
    assert not given[0].evicted and given[1].evicted and third.evicted
    assert third.context == -(-seen // 10) + news
    assert memory.tokens == seen + news + third.made - 1, "positions go on as if nothing had been dropped"


def test_it_keeps_what_draws_most_head_by_head_in_order() -> None:
    import torch

    from proxy_model.eviction import evict

    keys = torch.arange(2 * 6, dtype=torch.float32).view(1, 2, 6, 1)  # 2 heads of keys: 4 entries, 2 of the message
    layer = SimpleNamespace(keys=keys, values=keys + 100)
    weights = torch.zeros(1, 4, 2, 6)
    weights[0, 0, :, 3], weights[0, 1, 0, 1] = 0.5, 0.9  # the first two heads share the first keys
    weights[0, 2, :, 0], weights[0, 3, :, 2] = 0.2, 0.3
    evict(layer, weights, had=4, keep=2)
    assert layer.keys[0, :, :, 0].tolist() == [[1, 3, 4, 5], [6, 8, 10, 11]]
    assert torch.equal(layer.values, layer.keys + 100)


def test_a_template_that_changes_what_was_said_is_refused() -> None:
    from proxy_model.errors import ReplayError

    evicting = model()
    _, memory, messages = talk(evicting, "one")
    messages[1] = user("another")
    with pytest.raises(ReplayError, match="renders earlier messages anew"):
        evicting.answer([*messages, user("two")], memory)


def test_models_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from proxy_model.errors import ModelUnavailable
    from proxy_model.eviction import load_evicting

    def load(folder: Path) -> Any:
        return load_evicting(str(folder), temperature=0, tokens_max=4, seed=0)

    with pytest.raises(ModelUnavailable, match="cannot be loaded"):
        load(tmp_path / "none")
    for family, template, why in (("llama", None, "no chat template"), ("gemma3", CHATML, "whole context")):
        folder = tmp_path / family
        AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(folder)
        byte_tokenizer(template).save_pretrained(folder)
        with pytest.raises(ModelUnavailable, match=why):
            load(folder)


def test_a_real_model_remembers_what_the_new_message_asks_for(smollm2: Path) -> None:
    from proxy_model.eviction import load_evicting

    evicting = load_evicting(str(smollm2), temperature=0, tokens_max=16, seed=0)
    given, memory, messages = talk(evicting, "My dog is called Biscuit. " * 3 + "Say hello.")
    messages.append(user("What is my dog called?"))
    second = evicting.answer(messages, memory)
    assert not given[0].evicted and second.evicted and second.context < memory.tokens / 2
    assert second.text.strip()
