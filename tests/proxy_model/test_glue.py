"""Glue puts together what the template renders, and goes on where the template refuses."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from proxy_model.context import ContextBlock, Part, Role
from proxy_model.glue import ROLES, Glue, glue_of, headings, marks_of
from proxy_model.spans import encode
from tests.proxy_model.templates import FAMILIES, QWEN3
from tests.proxy_model.tiny import byte_tokenizer, needs_torch

pytestmark = needs_torch

CONVERSATIONS: dict[str, tuple[Role, ...]] = {
    "a question": ("user",),
    "instructions and a question": ("system", "user"),
    "two turns": ("system", "user", "assistant", "user"),
    "no instructions": ("user", "assistant", "user", "assistant", "user"),
    "one tool": ("system", "user", "assistant", "tool", "assistant", "user"),
    "three results": ("system", "user", "assistant", "tool", "tool", "tool", "assistant", "user"),
}
GEMMA_NEXT = "<end_of_turn>\n<start_of_turn>user\n1<end_of_turn>\n"
WITHOUT_TOOLS = {"gemma", "gemma-no-system", "brackets"}


def joined(tokenizer: Any, roles: Sequence[Role], texts: Sequence[str], glue: Glue | None = None) -> str:
    blocks = [ContextBlock(i, (Part(r, t),)) for i, (r, t) in enumerate(zip(roles, texts, strict=True))]
    ids = encode(blocks, tokenizer, glue or glue_of(tokenizer), 100_000).ids
    return str(tokenizer.decode(ids))


def rendered(tokenizer: Any, roles: Sequence[Role], texts: Sequence[str]) -> str:
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def texts_for(roles: Sequence[Role]) -> list[str]:
    return [f"the {i}th words, of {role}: naïve “quotes” 日本" if role != "tool" else f"result {i}"
            for i, role in enumerate(roles)]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("roles", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_an_ordinary_conversation_reads_as_the_template_renders_it(family: str, roles: tuple[Role, ...]) -> None:
    refused = ("tool" in roles and family in WITHOUT_TOOLS) or ("system" in roles and family == "gemma-no-system")
    tokenizer = byte_tokenizer(FAMILIES[family])
    texts = texts_for(roles)
    if refused:
        with pytest.raises(Exception, match=r"not supported|must alternate|unknown role"):
            rendered(tokenizer, roles, texts)
        assert all(text in joined(tokenizer, roles, texts) for text in texts)
    else:
        assert joined(tokenizer, roles, texts) == rendered(tokenizer, roles, texts)


@pytest.mark.parametrize("roles", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_smollm2_reads_what_its_template_renders(smollm2_tokenizer: Any, roles: tuple[Role, ...]) -> None:
    """With its default system prompt where the conversation has no instructions."""
    texts = texts_for(roles)
    text = joined(smollm2_tokenizer, roles, texts)
    assert text == rendered(smollm2_tokenizer, roles, texts)
    assert ("named SmolLM" in text) == (roles[0] != "system")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sequence_of_roles_is_defined_and_keeps_every_text(family: str) -> None:
    tokenizer = byte_tokenizer(FAMILIES[family])
    glue = glue_of(tokenizer)
    assert glue.from_template
    for roles in itertools.product(ROLES, repeat=3):
        text = joined(tokenizer, roles, ["first", "second", "third"], glue)
        assert [text.count(word) for word in ("first", "second", "third")] == [1, 1, 1]
        assert text.index("first") < text.index("second") < text.index("third")


@pytest.mark.parametrize(
    ("family", "roles", "text"),
    [
        (
            "gemma",
            ("system", "user", "assistant", "tool", "tool"),
            "<bos><start_of_turn>user\n0\n\n1<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
            "<start_of_turn>user\n3<end_of_turn>\n<start_of_turn>user\n4<end_of_turn>\n",
        ),
        (
            "gemma-no-system",
            ("system", "user", "user"),
            "<bos><start_of_turn>user\n0<end_of_turn>\n<start_of_turn>user\n1<end_of_turn>\n"
            "<start_of_turn>user\n2<end_of_turn>\n",
        ),
        (
            "strict",
            ("system", "system", "assistant"),
            "<|im_start|>system\n0<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",
        ),
        ("brackets", ("user", "assistant", "tool"), "<bos>[INST] 0 [/INST] 1<eos>[INST] 2 [/INST]"),
        ("gemma", ("assistant", "user"), "<bos><start_of_turn>model\n0" + GEMMA_NEXT),
        ("gemma", ("user", "system"), "<bos><start_of_turn>user\n0" + GEMMA_NEXT),
    ],
)  # fmt: skip
def test_a_role_that_the_template_refuses_speaks_as_the_user(family: str, roles: tuple[Role, ...], text: str) -> None:
    assert joined(byte_tokenizer(FAMILIES[family]), roles, [str(i) for i in range(len(roles))]) == text


def test_results_of_tools_share_one_turn_where_the_template_puts_them_there() -> None:
    text = joined(byte_tokenizer(QWEN3), ("user", "assistant", "tool", "tool"), ["0", "1", "2", "3"])
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    )


def test_the_last_answer_has_the_tokens_that_it_will_have_in_the_next_turn() -> None:
    """Qwen3 puts an empty `<think>` before the last answer only. A replay would never continue the one before."""
    tokenizer = byte_tokenizer(QWEN3)
    now = joined(tokenizer, ("user", "assistant"), ["0", "1"])
    later = joined(tokenizer, ("user", "assistant", "user"), ["0", "1", "2"])
    assert "<think>" in rendered(tokenizer, ("user", "assistant"), ["0", "1"])
    assert "<think>" not in now and later.startswith(now)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_longer_history_begins_with_the_shorter_one(family: str) -> None:
    tokenizer = byte_tokenizer(FAMILIES[family])
    roles: tuple[Role, ...] = ("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    whole = joined(tokenizer, roles, list("0123456"))
    for count in range(1, len(roles)):
        shorter = joined(tokenizer, roles[:count], list("0123456")[:count])
        assert whole.startswith(shorter[: shorter.index(str(count - 1)) + 1])


UNUSABLE = {
    "none": None,
    "empty": "",
    "raises": "{{ 1 / 0 }}",
    "drops": "{{ messages[0]['content'] }}",
    "does not parse": "{% for",
    "wants lists": "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
}


@pytest.mark.parametrize("template", UNUSABLE.values(), ids=UNUSABLE)
def test_without_a_template_that_can_be_used_headings_say_who_speaks(template: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    assert not glue_of(tokenizer).from_template
    text = joined(tokenizer, ("system", "user", "assistant", "tool"), list("0123"))
    assert text == "### System\n0\n\n### User\n1\n\n### Assistant\n2\n\n### Tool\n3\n"


def test_headings_begin_as_the_tokenizer_begins_a_text() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    begin = tokenizer.bos_token_id
    core = tokenizer.backend_tokenizer
    core.post_processor = TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", begin)])
    assert glue_of(tokenizer).before[None, "user"][0] == begin
    assert begin not in glue_of(tokenizer).before["user", "user"]


def test_a_template_that_reorders_is_not_trusted() -> None:
    def last_first(messages: Sequence[Any]) -> str:
        return "".join(m["content"] for m in reversed(messages))

    assert marks_of(last_first) is None
    assert set(headings().before) == {(a, b) for a in (None, *ROLES) for b in ROLES}
