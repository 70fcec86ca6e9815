"""Chat completions requests: facts, pairing, cost, text; and that nothing a client sends makes us raise."""

import json
from pathlib import Path
from typing import Any

import pytest

from graphstore.blocks import Message, cut_blocks
from proxy.dialects.base import ParsedRequest, UnreadableRequest
from proxy.dialects.chat import ChatDialect
from proxy.dialects.content import CALLS_CHARS

CHAT = ChatDialect()
WIRE = Path(__file__).parents[2] / "wire"


def facts(message: dict[str, Any]) -> Message:
    return CHAT.parse_message(json.dumps(message).encode())


def parse(*messages: dict[str, Any], **fields: Any) -> ParsedRequest:
    return CHAT.parse_request(json.dumps({"messages": messages, **fields}).encode())


def call(call_id: Any = "c", name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*entries: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(entries), **fields}


def result(call_id: str = "c") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "r"}


def kinds(*messages: dict[str, Any]) -> list[str]:
    return [block.kind for block in cut_blocks(parse(*messages).messages).blocks]


ASKED = {"role": "user", "content": "u"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "system", "content": "abc"}, Message("instruction", cost=3)),
        ({"role": "developer", "content": [{"type": "text", "text": "abc"}]}, Message("instruction", cost=3)),
        ({"role": "user", "content": "é😀"}, Message("user", cost=2)),
        ({"role": "user"}, Message("user")),
        ({"role": "assistant", "content": "abc", "tool_calls": []}, Message("assistant", cost=3)),
        ({"role": "assistant", "content": None, "refusal": "no"}, Message("assistant", cost=2)),
        ({"role": "assistant", "content": "a", "tool_calls": None}, Message("assistant", cost=1)),
        ({"role": "tool", "tool_call_id": "c", "content": "abc"}, Message("output", answers=("c",), cost=3)),
        ({"role": "tool", "content": "abc"}, Message("output", cost=3)),
        ({"role": "function", "name": "f", "content": "abc"}, Message("output", answers=("function:f",), cost=3)),
        ({"role": "narrator", "content": "abc"}, Message("other", cost=3)),
        ({"role": ["user"], "content": "abc"}, Message("other", cost=3)),
        ({"role": "assistant", "tool_calls": {"id": "c"}}, Message("other", cost=10)),
        (calls(call("c"), call(7)), Message("other", calls=("c",), cost=139)),
        ({}, Message("other")),
    ],
)
def test_facts_of_a_message(message: dict[str, Any], expected: Message) -> None:
    assert facts(message) == expected


def test_calls_cost_their_compact_json_however_the_client_spells_it() -> None:
    entry = call(name="bash", arguments='{"command": "ls é"}')
    cost = len(json.dumps([entry], separators=(",", ":"), ensure_ascii=False))
    message = calls(entry, content="ab")
    for text in (json.dumps(message), json.dumps(message, ensure_ascii=False, indent=2)):
        assert CHAT.parse_message(text.encode()).cost == cost + 2


def test_reasoning_is_neither_text_nor_cost() -> None:
    message = {"role": "assistant", "content": "ab", "reasoning_content": "long thoughts", "thinking_blocks": [{}]}
    assert facts(message) == Message("assistant", cost=2)
    assert CHAT.message_text(json.dumps(message).encode()) == "ab"


def test_an_image_has_a_fixed_size_and_no_text() -> None:
    """Images vanished from tool results, and base64 was taken for text."""
    for role in ("user", "tool"):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 50_000}}
        message = {"role": role, "tool_call_id": "c", "content": [{"type": "text", "text": "see"}, image]}
        raw = json.dumps(message).encode()
        assert CHAT.parse_message(raw).cost == 4_003
        assert ChatDialect(part_chars=10).parse_message(raw).cost == 13
        assert CHAT.message_text(raw) == "see"


def test_a_call_names_the_files_that_it_edits() -> None:
    message = calls(call("1", "Edit", '{"file_path": "a.py"}'), call("2", "read", '{"path": "b.py"}'))
    assert facts(message).edits == ("a.py",)
    patch = "*** Begin Patch\n*** Update File: c.py\n*** End Patch"
    custom = {"id": "3", "type": "custom", "custom": {"name": "apply_patch", "input": patch}}
    assert facts(calls(custom)).edits == ("c.py",)
    assert CHAT.call_text(json.dumps(calls(custom)).encode()) == f"apply_patch {patch}"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_parallel_calls_and_their_results_are_one_block(count: int) -> None:
    """A batch of parallel calls was split by trimming; results may come out of order and with a user in between."""
    ids = [f"call_{number}" for number in range(count)]
    results = [result(call_id) for call_id in reversed(ids)]
    history = [ASKED, calls(*map(call, ids)), results[0], ASKED, *results[1:], ASKED]
    cut = cut_blocks(parse(*history).messages)
    assert [block.kind for block in cut.blocks] == ["user", "tools", "user", "user"]
    assert len(cut.blocks[1].messages) == count + 1
    assert not cut.open_calls


def test_call_ids_need_not_be_unique() -> None:
    turn = [ASKED, calls(call("call_0")), result("call_0")]
    cut = cut_blocks(parse(*turn, *turn).messages)
    assert [block.messages for block in cut.blocks] == [(0,), (1, 2), (3,), (4, 5)]


def test_a_legacy_function_call_and_its_answer_are_one_block() -> None:
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    answer = {"role": "function", "name": "f", "content": "r"}
    assert facts(legacy).calls == ("function:f",)
    assert kinds(ASKED, legacy, answer, ASKED) == ["user", "tools", "user"]
    assert parse(ASKED, functions=[{"name": "f"}]).tools == b'[{"name": "f"}]'


def test_what_is_not_understood_is_pinned() -> None:
    """For a third message shape nothing was pruned although the display said so."""
    history = [ASKED, {"role": "narrator"}, calls(call(None)), result("lost"), ASKED]
    assert kinds(*history) == ["user", "pinned", "pinned", "pinned", "user"]


def test_the_request_around_the_messages() -> None:
    system = {"role": "system", "content": "s"}
    request = parse(system, {"role": "developer", "content": "d"}, ASKED, model="m", stream=True, prompt_cache_key="k")
    assert (request.model, request.stream, request.cache_key, request.leading) == ("m", True, "k", 2)
    assert request.notice_role == "developer"
    assert request.instructions == b'{"role": "system", "content": "s"}\n{"role": "developer", "content": "d"}'
    assert request.messages == (Message("user", cost=1),)
    assert json.loads(request.raw(0)) == ASKED
    assert (request.opaque, request.background, request.dialect) == (None, False, "chat")


def test_only_real_values_count() -> None:
    request = parse(ASKED, model=7, stream=1, prompt_cache_key=["k"], tools=[], background="yes")
    assert (request.model, request.stream, request.cache_key, request.tools) == ("", False, None, b"")
    assert (request.notice_role, request.instructions, request.background) == ("system", b"", False)
    assert parse(ASKED, tools=None).tools == b""
    assert CHAT.parse_request(b'{"messages":[{}],"tools":[ \n]}').tools == b""
    assert CHAT.parse_request(b'{"messages":[{}],"tools":[ 1]}').tools == b"[ 1]"


def test_equal_bytes_have_equal_digests_wherever_they_stand() -> None:
    first, second = parse(ASKED, {"role": "assistant", "content": "a"}), parse({"role": "system"}, ASKED)
    assert first.digests[0] == second.digests[0]
    assert first.digests[0] != first.digests[1]


@pytest.mark.parametrize(
    ("message", "label"),
    [
        ({"role": "user", "content": "  two\n words "}, "two words"),
        ({"role": "user", "content": "x" * 200}, "x" * 79 + "…"),
        (calls(call(name="read", arguments='{"limit": 3, "filePath": "src/a.py"}')), "read src/a.py"),
        (calls(call(name="bash", arguments='{"description": "d", "command": "ls -l"}'), call()), "bash ls -l, f"),
        (
            calls(call(name="read", arguments='{"path": "a"}'), call(name="read", arguments='{"path": "b"}')),
            "read a, read b",
        ),
        (calls(call(name="grep", arguments='{"path": "src", "pattern": "def  f"}')), "grep def f src"),
        (calls(call(name="grep", arguments='{"pattern": "x", "output_mode": "content"}')), "grep x"),
        (calls(call(name="bash", arguments='{"command": ["git", "log"]}')), "bash git log"),
        (calls(call(name="bash", arguments="{broken")), "bash {broken"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "(user)"),
        ({"role": {}}, "(unreadable)"),
    ],
)
def test_a_label_is_one_line_for_people(message: dict[str, Any], label: str) -> None:
    assert CHAT.label(json.dumps(message).encode()) == label


def test_the_notice_is_constant_and_asks_for_nothing() -> None:
    notice = CHAT.render_notice("system")
    assert notice == CHAT.render_notice("system")
    assert notice.startswith(b'{"role":"system","content":"Earlier messages')
    assert facts(json.loads(notice)).role == "instruction"


def test_real_clients_are_cut_as_they_speak() -> None:
    request = CHAT.parse_request((WIRE / "qwen-code-0.15.10.turn2-step2.chat.json").read_bytes())
    cut = cut_blocks(request.messages)
    assert [b.kind for b in cut.blocks] == ["user", "assistant", "user", "tools", "tools", "assistant", "user", "tools"]
    assert not cut.is_boundary and not cut.open_calls
    title = CHAT.parse_request((WIRE / "opencode-1.18.33.chat.title.chat.json").read_bytes())
    assert title.tools == b"" and cut_blocks(title.messages).is_boundary


UNREADABLE = {
    b"": "not a JSON object",
    b"[]": "not a JSON object",
    b"null": "not a JSON object",
    b'{"messages":[{}]': "not a JSON object",
    b'{"messages":[{}]} x': "trailing",
    b'{"messages":[{},]}': "trailing comma",
    b"{}": "`messages` is missing",
    b'{"messages":null}': "not an array",
    b'{"messages":{"0":{}}}': "not an array",
    b'{"messages":[]}': "empty",
    b'{"messages":[{},"x"]}': r"`messages\[1\]` is not an object",
    b'{"messages":[{}],"messages":[{}]}': "repeated",
    b'{"messages":[{"a":1}],"messages":[{}]}': "repeated",
    b'{"messages":[{}],"m\\u0065ssages":[{"a":1}]}': "repeated",
    b'{"messages":[{}],"a":1,"a":12}': "repeated",
    b'{"messages":[{"content":"\xff"}]}': "not UTF-8",
    b'{"messages":[{"content":"\xed\xa0\x80"}]}': "not UTF-8",
    b'{"messages":[{}],"x":"\xff"}': "not UTF-8",
    b'{"x":"\xff","messages":[{}]}': "not UTF-8",
    b'\xef\xbb\xbf{"messages":[{}]}': "not a JSON object",
    '{"messages":[{}]}'.encode("utf-16"): "not a JSON object",
    b'{"messages":[{"content":"\\q"}]}': "not a JSON object",
    b'{"messages":[{"content":NaN}]}': "not a JSON object",
    b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested too deeply",
    b'{"messages":[{}],"a":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}": "nested too deeply",
    bytes([40, 181, 47, 253, 4, 88]): "not a JSON object",  # zstd that nobody decoded
}


@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: body[:40].decode(errors="replace"))
def test_an_unreadable_body_says_why(body: bytes) -> None:
    with pytest.raises(UnreadableRequest, match=UNREADABLE[body]):
        CHAT.parse_request(body)


def test_invalid_utf8_is_noticed_although_the_other_messages_are_known() -> None:
    good = b'{"messages":[{"role":"user","content":"known"},{"role":"user","content":"?"}]}'
    CHAT.parse_request(good)
    with pytest.raises(UnreadableRequest, match="not UTF-8"):
        CHAT.parse_request(good.replace(b"?", b"\xc3"))


DEEP = b"[" * 900 + b"]" * 900
HOSTILE = [
    rb'{"role":"user","content":"half \ud83d of \uDE00 a \ud83d\ude00 pair \\ud83d"}',
    b'{"role":"user","content":"a","n":' + b"9" * 400 + b"}",
    b'{"role":"user","content":"a","n":' + b"9" * 20_000 + b"}",
    b'{"role":"user","content":"a","n":1e999}',
    b'{"role":"user","content":' + DEEP + b"}",
    b'{"role":' + DEEP + b"}",
    b'{"role":"assistant","tool_calls":[{"id":"c","function":{"name":[[]],"arguments":'
    + b"[" * 900
    + b"]" * 900
    + b"}}]}",
    b'{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"edit","arguments":"' + b"[" * 9000 + b'"}}]}',
    b'{"role":"assistant","tool_calls":[{"id":"\\ud800","function":{"name":"edit","arguments":"{\\"path\\":7}"}}]}',
    b'{"role":"assistant","tool_calls":[null,7,"x",[],{}]}',
    b'{"role":"assistant","tool_calls":[{"id":"c","custom":7}],"function_call":"f"}',
    b'{"role":"user","role":"tool","content":"a"}',
    b'{"role":"user","content":{"text":7}}',
    b'{"role":"user","content":[null,7,"x",[],{},{"text":null},{"text":"t"}]}',
    b'{"role":"user","content":"' + b"x" * 10_000_000 + b'"}',
    b"{}",
    b"[]",
    b'"text"',
    b"",
    b"\xff",
    b'{"role":',
]


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: raw[:40].decode(errors="replace"))
def test_a_hostile_message_is_read_without_raising(raw: bytes) -> None:
    message = CHAT.parse_message(raw)
    assert message.cost >= 0
    assert "\n" not in CHAT.label(raw) and len(CHAT.label(raw)) <= CALLS_CHARS
    for text in (CHAT.message_text(raw), CHAT.call_text(raw), CHAT.label(raw), *message.calls):
        text.encode()
    if raw.startswith(b"{") and raw.endswith(b"}"):
        request = CHAT.parse_request(b'{"messages":[ ' + raw + b' ,{"role":"user"}]}')
        assert request.raw(0) == raw


def test_half_a_surrogate_pair_reads_as_a_replacement_character() -> None:
    raw = rb'{"role":"user","content":"half \ud83d of \uDE00 a \ud83d\ude00 pair \\ud83d"}'
    assert CHAT.message_text(raw) == "half \ufffd of \ufffd a 😀 pair \\ud83d"
    assert CHAT.parse_message(raw).role == "user"


def test_a_repeated_key_in_a_message_makes_it_pinned() -> None:
    assert CHAT.parse_message(b'{"role":"user","role":"tool"}') == Message("other")
