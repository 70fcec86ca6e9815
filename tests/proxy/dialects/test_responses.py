"""Responses requests: all item types, their odd pairing keys, and what makes a request opaque."""

import json
from pathlib import Path
from typing import Any

import pytest

from graphstore.blocks import Message, cut_blocks
from proxy.dialects.base import ParsedRequest, UnreadableRequest
from proxy.dialects.responses import ResponsesDialect

RESPONSES = ResponsesDialect()
WIRE = Path(__file__).parents[2] / "wire"


def facts(item: dict[str, Any]) -> Message:
    return RESPONSES.parse_message(json.dumps(item).encode())


def parse(*items: Any, **fields: Any) -> ParsedRequest:
    return RESPONSES.parse_request(json.dumps({"input": items, **fields}).encode())


def kinds(*items: dict[str, Any]) -> list[str]:
    return [block.kind for block in cut_blocks(parse(*items).messages).blocks]


def wire(name: str) -> ParsedRequest:
    return RESPONSES.parse_request((WIRE / f"{name}.responses.json").read_bytes())


ASKED = {"role": "user", "content": [{"type": "input_text", "text": "u"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]}
OUTPUT = {"output": "abc"}

PAIRS = [
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, "function_call_output", 3),
    ({"type": "custom_tool_call", "call_id": "c", "name": "exec", "input": "ls"}, "custom_tool_call_output", 6),
    ({"type": "local_shell_call", "call_id": "c", "id": "i", "action": {"a": 1}}, "local_shell_call_output", 18),
    ({"type": "shell_call", "call_id": "c", "id": "i", "action": {"a": 1}}, "shell_call_output", 12),
    ({"type": "apply_patch_call", "call_id": "c", "operation": {"path": "a"}}, "apply_patch_call_output", 23),
    ({"type": "computer_call", "call_id": "c", "action": {"a": 1}}, "computer_call_output", 15),
]


@pytest.mark.parametrize(("call", "output", "cost"), PAIRS, ids=lambda value: str(value)[:40])
def test_every_client_executed_call_pairs_with_its_output(call: dict[str, Any], output: str, cost: int) -> None:
    """Calls pair by `call_id`, not by `id`: an output without its call is a 400."""
    answer = {"type": output, "call_id": "c", "id": "another", **OUTPUT}
    assert (facts(call).role, facts(call).calls, facts(call).cost) == ("call", ("c",), cost)
    assert facts(answer) == Message("output", answers=("c",), cost=3)
    assert kinds(ASKED, call, answer, ASKED) == ["user", "tools", "user"]


def test_a_local_shell_output_carries_the_id_of_its_call() -> None:
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "action": {}}
    for answered in ("lsh_1", "call_1"):
        output = {"type": "local_shell_call_output", "id": answered, "output": "r"}
        cut = cut_blocks(parse(ASKED, call, output, ASKED).messages)
        assert [block.kind for block in cut.blocks] == ["user", "tools", "user"]
        assert not cut.open_calls
    assert facts({"type": "local_shell_call", "id": "lsh_1", "action": {}}).calls == ("lsh_1",)


@pytest.mark.parametrize(
    "kind", ["web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"]
)
def test_a_server_executed_call_goes_with_its_reasoning(kind: str) -> None:
    assert facts({"type": kind, "id": "x"}).role == "call"
    assert facts({"type": kind, "id": "x"}).calls == ()
    cut = cut_blocks(parse(ASKED, REASONING, {"type": kind, "id": "x"}, SAID, ASKED).messages)
    assert cut.blocks[1].kind == "tools" and cut.blocks[1].messages[:2] == (1, 2)


def test_an_image_costs_the_same_in_any_place() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 50_000}
    assert facts({"role": "user", "content": [image, {"type": "input_text", "text": "see"}]}).cost == 4_003
    assert facts({"type": "function_call_output", "call_id": "c", "output": [image]}).cost == 4_000
    assert (
        facts({"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}).cost == 4_000
    )
    assert facts({"type": "image_generation_call", "result": "A" * 50_000}).cost == 4_000 + len("image_generation")
    small = ResponsesDialect(part_chars=10)
    assert small.parse_message(json.dumps({"role": "user", "content": [image]}).encode()).cost == 10


@pytest.mark.parametrize(
    "item",
    [
        {"type": "mcp_list_tools", "server_label": "s"},
        {"type": "mcp_approval_request", "id": "m"},
        {"type": "mcp_approval_response", "approval_request_id": "m"},
        {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}"},
        {"type": "tool_search_call", "call_id": "c"},
        {"type": "tool_search_output", "call_id": "c"},
        {"type": "additional_tools", "tools": []},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"type": "program", "call_id": "c"},
        {"type": "program_output", "call_id": "c"},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "agent_message", "role": "user", "content": "a"},
        {"type": "message", "role": "critic", "content": "a"},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": 7, "role": "user"},
        {"type": "invented next year"},
        {},
    ],
    ids=str,
)
def test_stateful_and_unknown_items_are_pinned(item: dict[str, Any]) -> None:
    assert facts(item).role == "other"
    request = parse(ASKED, item, ASKED)
    assert kinds(ASKED, item, ASKED) == ["user", "pinned", "user"]
    assert request.opaque is None


def test_the_calls_of_a_program_stay_with_it() -> None:
    caller = {"type": "program", "caller_id": "p"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": caller}
    output = {"type": "function_call_output", "call_id": "c", "output": "r", "caller": caller}
    cut = cut_blocks(parse(ASKED, {"type": "program", "call_id": "p"}, call, output, ASKED).messages)
    assert [block.kind for block in cut.blocks] == ["user", "pinned", "pinned", "user"]
    assert cut.open_calls == ()
    assert facts({**call, "caller": {"type": "direct"}}).role == "call"


@pytest.mark.parametrize("kind", ["message", "additional_tools", "anything", None])
def test_a_developer_item_in_the_history_is_pinned_and_at_its_head_an_instruction(kind: str | None) -> None:
    item = {"role": "developer", "content": "d"} | ({"type": kind} if kind else {})
    assert facts(item).role == "instruction"
    assert kinds(ASKED, item, ASKED) == ["user", "pinned", "user"]
    assert parse(item, ASKED).leading == 1


def test_reasoning_is_glued_to_what_it_led_to() -> None:
    """A reasoning item without the item that followed it, or the other way round, is a 400."""
    call, output = PAIRS[0][0], {"type": "function_call_output", "call_id": "c", "output": "r"}
    history = [ASKED, REASONING, call, output, REASONING, SAID, ASKED]
    cut = cut_blocks(parse(*history).messages)
    assert [(block.kind, block.messages) for block in cut.blocks] == [
        ("user", (0,)),
        ("tools", (1, 2, 3)),
        ("assistant", (4, 5)),
        ("user", (6,)),
    ]
    assert RESPONSES.message_text(json.dumps(REASONING).encode()) == ""
    assert facts(REASONING) == Message("reasoning")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt template"),
        ({"previous_response_id": None, "conversation": None, "prompt": None}, None),
    ],
)
def test_history_that_we_cannot_see_makes_a_request_opaque(fields: dict[str, Any], reason: str | None) -> None:
    assert parse(ASKED, **fields).opaque == reason


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "item_reference"),
        ({"id": "msg_1"}, "item_reference"),
        ({"type": "compaction_trigger"}, "compaction_trigger"),
    ],
)
def test_items_that_make_a_request_opaque(item: dict[str, Any], reason: str) -> None:
    """A compaction request that was not understood failed with a misleading message."""
    assert parse(ASKED, SAID, item).opaque == reason


def test_a_string_is_one_user_message() -> None:
    request = RESPONSES.parse_request(b'{"model":"m", "input" : "say \\u00e9" ,"instructions":"i"}')
    assert request.opaque == "string input"
    assert request.messages == (Message("user", cost=5),)
    assert request.raw(0) == b'"say \\u00e9"'
    assert request.instructions == b'"i"'
    assert RESPONSES.message_text(request.raw(0)) == RESPONSES.label(request.raw(0)) == "say é"


def test_the_request_around_the_items() -> None:
    developer = {"role": "developer", "content": "d"}
    request = parse(developer, ASKED, instructions="i", background=True, prompt_cache_key="k", tools=[{"type": "x"}])
    assert request.instructions == b'"i"\n{"role": "developer", "content": "d"}'
    assert (request.background, request.cache_key, request.notice_role) == (True, "k", "developer")
    assert request.tools == b'[{"type": "x"}]'
    assert parse({"role": "system", "content": "s"}, ASKED).notice_role == "system"
    assert parse(ASKED, instructions=None).instructions == b""
    assert parse(ASKED).notice_role == "developer"


def test_a_request_whose_tools_stand_in_its_input_does_not_look_like_one_without_tools() -> None:
    request = wire("codex-0.171.0.builtin.turn-lite")
    assert request.tools.startswith(b'{"type":"additional_tools"')
    assert request.tools in request.instructions
    assert (request.leading, request.notice_role) == (5, "developer")
    assert [message.role for message in request.messages] == ["user", "user"]


def test_real_clients_are_cut_as_they_speak() -> None:
    request = wire("codex-0.171.0.provider.turn2-step2")
    cut = cut_blocks(request.messages)
    assert [b.kind for b in cut.blocks] == ["user", "user", "tools", "tools", "assistant", "user", "tools"]
    assert not cut.open_calls and not cut.is_boundary
    assert cut_blocks(wire("opencode-1.18.33.responses.image-and-file").messages).open_calls == ()
    compacting = wire("codex-0.171.0.builtin.compaction-remote")
    assert compacting.opaque == "compaction_trigger"
    compacted = wire("codex-0.171.0.builtin.after-compaction-remote")
    assert compacted.opaque is None
    assert "pinned" in [block.kind for block in cut_blocks(compacted.messages).blocks]


@pytest.mark.parametrize(
    ("item", "text", "call", "label"),
    [
        (SAID, "a", "", "a"),
        (PAIRS[0][0], "", "f {}", "f"),
        (PAIRS[1][0], "", "exec ls", "exec ls"),
        ({"type": "local_shell_call", "action": {"command": ["ls", "-l"]}}, "", None, "local_shell ls -l"),
        ({"type": "function_call_output", "output": [{"type": "input_text", "text": "r"}]}, "r", "", "r"),
        ({"type": "shell_call_output", "output": [{"stdout": "o", "stderr": "e"}]}, "o\ne", "", "o e"),
        ({"type": "apply_patch_call", "operation": {"path": "a.py"}}, "", None, "apply_patch a.py"),
        ({"type": "compaction", "encrypted_content": "gAAA"}, "", "", "(compaction)"),
        (REASONING, "", "", "(reasoning)"),
    ],
    ids=str,
)
def test_what_an_item_says(item: dict[str, Any], text: str, call: str | None, label: str) -> None:
    raw = json.dumps(item).encode()
    assert RESPONSES.message_text(raw) == text
    assert RESPONSES.label(raw) == label
    if call is not None:
        assert RESPONSES.call_text(raw) == call


def test_a_patch_names_the_files_that_it_edits() -> None:
    operation = {"type": "update_file", "path": "a.py", "diff": "@@"}
    assert facts({"type": "apply_patch_call", "call_id": "c", "operation": operation}).edits == ("a.py",)
    patch = "*** Begin Patch\n*** Add File: b.py\n+x\n*** Update File: c.py\n*** End Patch"
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": patch}
    assert facts(custom).edits == ("b.py", "c.py")
    function = {"type": "function_call", "call_id": "c", "name": "edit", "arguments": '{"filePath": "d.py"}'}
    assert facts(function).edits == ("d.py",)


def test_the_notice_is_an_item_in_the_role_of_the_instructions() -> None:
    notice = RESPONSES.render_notice("developer")
    assert notice.startswith(b'{"type":"message","role":"developer","content":[{"type":"input_text","text":"Earlier')
    assert facts(json.loads(notice)).role == "instruction"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"input":null}',
        b'{"input":7}',
        b'{"input":[]}',
        b'{"input":["x"]}',
        b'{"input":"a","input":"a"}',
        b'{"input":"\xff"}',
    ],
    ids=str,
)
def test_an_unreadable_body_says_so(body: bytes) -> None:
    with pytest.raises(UnreadableRequest):
        RESPONSES.parse_request(body)


@pytest.mark.parametrize(
    "raw",
    [
        rb'{"role":"user","content":"\ud83d"}',
        b'{"type":"function_call","call_id":"c","name":["f"],"arguments":{"a":' + b"9" * 400 + b"}}",
        b'{"type":"function_call","call_id":"c","arguments":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"type":"function_call","call_id":"c","call_id":"d"}',
        b'{"type":"shell_call_output","output":[7,{"stdout":7}]}',
        b'{"type":"function_call_output","call_id":["c"],"output":{"a":1}}',
        b'{"type":{},"role":[],"content":{}}',
        b'{"role":"user","content":' + b"9" * 20_000 + b"}",
        b'{"role":"user","content":"' + b"x" * 10_000_000 + b'"}',
        b'"\\ud83d"',
        b"[]",
        b"\xff",
        b"",
    ],
    ids=lambda raw: raw[:40].decode(errors="replace"),
)
def test_a_hostile_item_is_read_without_raising(raw: bytes) -> None:
    message = RESPONSES.parse_message(raw)
    assert message.cost >= 0
    assert "\n" not in RESPONSES.label(raw) and len(RESPONSES.label(raw)) <= 80
    for text in (RESPONSES.message_text(raw), RESPONSES.call_text(raw), RESPONSES.label(raw), *message.calls):
        text.encode()


def test_two_shell_calls_of_one_id_are_answered_each_by_the_next_result() -> None:
    """An alias holds from its call on: a later one must not take earlier results with it."""
    history: list[dict[str, Any]] = []
    for call in ("one", "two"):
        history.append({"type": "local_shell_call", "id": "same", "call_id": call, "action": {}})
        history.append({"type": "local_shell_call_output", "id": "same", "output": "r"})
    raws = [json.dumps(item).encode() for item in history]
    assert [message.answers for message in ResponsesDialect().parse_messages(raws)] == [(), ("one",), (), ("two",)]
