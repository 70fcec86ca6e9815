"""The splice and its guard: the client's bytes stay, whole blocks go, and nothing that lies gets past the guard."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.blocks import cut_blocks
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName, ParsedRequest
from proxy.rewrite import GuardFailure, check_rewritten, render_rewritten
from tests.proxy.dialects.histories import ARRAY_NAMES, bodies

WIRE = sorted((Path(__file__).parents[1] / "wire").glob("*.json"))
NAMES = st.sampled_from(sorted(DIALECTS))


def parse(body: bytes, dialect: DialectName = "chat") -> ParsedRequest:
    return DIALECTS[dialect].parse_request(body)


def chat(*messages: Mapping[str, object]) -> ParsedRequest:
    return parse(json.dumps({"model": "m", "messages": messages}).encode())


def expendable(request: ParsedRequest) -> list[tuple[int, ...]]:
    cut = cut_blocks(request.messages)
    return [block.messages for block in cut.blocks[: cut.turn_start] if block.kind in ("tools", "assistant")]


def elements(request: ParsedRequest) -> list[bytes]:
    return [request.body[start:end] for start, end in request.spans]


@pytest.mark.parametrize("path", WIRE, ids=lambda path: path.stem)
def test_recorded_bodies_of_real_clients_survive_when_nothing_is_left_out(path: Path) -> None:
    body = path.read_bytes()
    request = parse(body, "chat" if ".chat" in path.suffixes else "responses")
    assert render_rewritten(request, [], None) == body
    array = json.loads(body)[ARRAY_NAMES[request.dialect]]
    assert [json.loads(raw) for raw in elements(request)] == array


@given(st.data(), NAMES)
def test_parse_then_render_is_identity(data: st.DataObject, dialect: DialectName) -> None:
    body = data.draw(bodies(dialect))
    request = parse(body, dialect)
    assert render_rewritten(request, set(), None) == body
    assert [json.loads(raw) for raw in elements(request)] == json.loads(body)[ARRAY_NAMES[dialect]]


@given(st.data(), NAMES, st.booleans())
def test_any_choice_of_whole_blocks_gives_a_valid_body(
    data: st.DataObject, dialect: DialectName, with_notice: bool
) -> None:
    """Orphaned results, split parallel calls and dangling reasoning were the commonest way to lose a session."""
    request = parse(data.draw(bodies(dialect)), dialect)
    blocks = expendable(request)
    chosen = data.draw(st.sets(st.sampled_from(blocks))) if blocks else set()
    left_out = {index for block in chosen for index in block}
    notice = DIALECTS[dialect].render_notice(request.notice_role) if with_notice else None
    body = render_rewritten(request, left_out, notice)
    check_rewritten(request, body, left_out, notice)
    sent = parse(body, dialect)
    kept = [raw for index, raw in enumerate(elements(request)) if index - request.leading not in left_out]
    assert elements(sent) == kept[: request.leading] + ([notice] if notice else []) + kept[request.leading :]
    before, after = json.loads(request.body), json.loads(body)
    array = ARRAY_NAMES[dialect]
    assert list(before) == list(after)
    assert {**before, array: None} == {**after, array: None}


@given(st.data(), NAMES)
def test_a_split_block_never_passes_the_guard(data: st.DataObject, dialect: DialectName) -> None:
    request = parse(data.draw(bodies(dialect)), dialect)
    wholes = [block for block in expendable(request) if len(block) > 1]
    if wholes:
        block = data.draw(st.sampled_from(wholes))
        part = data.draw(st.sets(st.sampled_from(block), min_size=1, max_size=len(block) - 1))
        with pytest.raises(GuardFailure, match="split"):
            check_rewritten(request, render_rewritten(request, part, None), part, None)


@given(st.data(), NAMES, st.booleans())
def test_a_longer_request_extends_the_bytes_that_were_sent(
    data: st.DataObject, dialect: DialectName, with_notice: bool
) -> None:
    """A warm prefix must not break when the client appends its next step."""
    request = parse(data.draw(bodies(dialect)), dialect)
    blocks = expendable(request)
    left_out = {index for block in blocks[::2] for index in block}
    notice = DIALECTS[dialect].render_notice(request.notice_role) if with_notice else None
    end = request.spans[-1][1]
    appended = data.draw(st.sampled_from([b',{"role":"user"}', b' ,\n {"role":"user"} , {"role":"assistant"}']))
    longer = parse(request.body[:end] + appended + request.body[end:], dialect)
    tail = len(request.body) - end
    sent = render_rewritten(request, left_out, notice)
    assert render_rewritten(longer, left_out, notice).startswith(sent[: len(sent) - tail])


def test_separators_and_spelling_of_kept_messages_stay() -> None:
    """Re-made bytes broke the provider's cache on nearly every request."""
    body = (
        b'{ "messages" : [ {"role":"system","content":"s"} ,\n  {"role":"user","content":"\\u00e9\\/"},'
        b'\t{"role":"assistant","content":"a"} , {"content":"b","role":"user","n":1e2,"n2":[ ]}\n], "model":"m" }'
    )
    request = parse(body)
    assert render_rewritten(request, {1}, b'{"role":"system","content":"!"}') == (
        b'{ "messages" : [ {"role":"system","content":"s"},{"role":"system","content":"!"} ,\n  '
        b'{"role":"user","content":"\\u00e9\\/"} , {"content":"b","role":"user","n":1e2,"n2":[ ]}\n], "model":"m" }'
    )


def test_a_notice_comes_first_where_there_are_no_instructions() -> None:
    request = parse(b'{"messages":[ {"role":"assistant","content":"a"}, {"role":"user","content":"b"} ]}')
    notice = b'{"role":"system","content":"!"}'
    assert render_rewritten(request, [], notice) == (
        b'{"messages":[ {"role":"system","content":"!"},{"role":"assistant","content":"a"}, '
        b'{"role":"user","content":"b"} ]}'
    )
    assert json.loads(render_rewritten(request, {0, 1}, None)) == {"messages": []}


def test_invented_fields_and_the_absence_of_tools_survive() -> None:
    """Gateways dropped fields that they did not know, and added an empty `tools`; strict servers answer 400 to that."""
    body = json.dumps(
        {
            "vendor": {"deep": [None, {"a": []}]},
            "prompt_cache_key": "k",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": "b", "reasoning_details": [{"data": "x"}], "refusal": None},
                {"role": "user", "content": "c"},
            ],
            "store": False,
        }
    ).encode()
    sent = json.loads(render_rewritten(parse(body), {1}, None))
    original = json.loads(body)
    assert list(sent) == list(original)
    assert sent == {**original, "messages": [original["messages"][0], original["messages"][2]]}


CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
ASKED, SAID = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
SESSION = chat({"role": "system", "content": "s"}, ASKED, CALL, RESULT, SAID, {"role": "narrator"}, ASKED, CALL, RESULT)


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        ({0}, "user"),
        ({1}, "split"),
        ({2}, "split"),
        ({4}, "pinned"),
        ({5}, "user"),
        ({6, 7}, "current turn"),
        ({99}, "does not exist"),
    ],
)
def test_the_guard_refuses_what_must_stay(left_out: set[int], reason: str) -> None:
    with pytest.raises(GuardFailure, match=reason):
        check_rewritten(SESSION, render_rewritten(SESSION, left_out, None), left_out, None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body.replace(b'"u"', b'"v"', 1),
        lambda body: body.replace(b'"model": "m"', b'"model": "n"'),
        lambda body: body + b" ",
        lambda body: body[:-1],
        lambda body: body.replace(b'"role": "user"', b'"role": "user", "role": "user"', 1),
        lambda body: b'{"messages":[]}',
        lambda body: SESSION.body,
    ],
)
def test_the_guard_refuses_a_body_that_is_not_what_it_should_be(damage: Callable[[bytes], bytes]) -> None:
    body = render_rewritten(SESSION, {1, 2, 3}, None)
    check_rewritten(SESSION, body, {1, 2, 3}, None)
    with pytest.raises(GuardFailure):
        check_rewritten(SESSION, damage(body), {1, 2, 3}, None)


def test_the_guard_refuses_two_notices_and_a_notice_elsewhere() -> None:
    notice = b'{"role":"system","content":"!"}'
    body = render_rewritten(SESSION, {3}, notice)
    check_rewritten(SESSION, body, {3}, notice)
    with pytest.raises(GuardFailure, match="not the client's"):
        check_rewritten(SESSION, body.replace(notice, notice + b"," + notice), {3}, notice)
    with pytest.raises(GuardFailure, match="not the client's"):
        check_rewritten(SESSION, body.replace(b"," + notice, b"").replace(b", {", b"," + notice + b", {", 1), {3}, None)


def test_a_request_with_an_open_call_is_never_rewritten() -> None:
    """Compaction deleted calls in flight; the results then had nothing to answer."""
    request = chat(ASKED, SAID, ASKED, CALL)
    with pytest.raises(GuardFailure, match="no result yet"):
        check_rewritten(request, render_rewritten(request, {1}, None), {1}, None)


def test_an_opaque_request_is_never_rewritten() -> None:
    request = parse(b'{"input":[{"role":"user"},{"role":"assistant"},{"role":"user"}],"conversation":"c"}', "responses")
    with pytest.raises(GuardFailure, match="conversation"):
        check_rewritten(request, render_rewritten(request, {1}, None), {1}, None)


def test_nothing_left_out_means_the_very_bytes() -> None:
    check_rewritten(SESSION, SESSION.body, [], None)
    with pytest.raises(GuardFailure, match="nothing is left out"):
        check_rewritten(SESSION, SESSION.body + b" ", [], None)


def test_call_ids_that_every_turn_reuses_pair_within_their_turn() -> None:
    left_out = {1, 2}
    body = render_rewritten(SESSION, left_out, None)
    check_rewritten(SESSION, body, left_out, None)
    assert [m["role"] for m in json.loads(body)["messages"]][1:4] == ["user", "assistant", "narrator"]


def test_a_result_whose_own_call_is_unreadable_is_not_lost_with_an_older_call_of_that_id() -> None:
    unreadable = {"role": "assistant", "tool_calls": [{"id": "c", "function": "?"}, "?"]}
    request = chat(ASKED, CALL, RESULT, ASKED, unreadable, RESULT, ASKED)
    body = render_rewritten(request, {1, 2}, None)
    check_rewritten(request, body, {1, 2}, None)
    assert len(json.loads(body)["messages"]) == 5


@given(st.data(), NAMES)
def test_only_under_pressure_and_only_before_the_newest_steps_may_the_current_turn_lose_blocks(
    data: st.DataObject, dialect: DialectName
) -> None:
    request = parse(data.draw(bodies(dialect)), dialect)
    cut = cut_blocks(request.messages)
    for place, block in enumerate(cut.blocks):
        if block.kind in ("tools", "assistant") and not cut.open_calls:
            body = render_rewritten(request, block.messages, None)
            for into_turn, end in ((False, cut.turn_start), (True, cut.steps_start)):
                if place < end:
                    check_rewritten(request, body, block.messages, None, into_turn)
                else:
                    with pytest.raises(GuardFailure, match="current turn"):
                        check_rewritten(request, body, block.messages, None, into_turn)


def test_users_pinned_blocks_and_halves_stay_under_pressure_as_well() -> None:
    steps = [
        message
        for n in range(5)
        for message in (
            {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{n}", "function": {"name": "a"}}]},
            {"role": "tool", "tool_call_id": f"c{n}", "content": "r"},
        )
    ]
    request = chat({"role": "user", "content": "u"}, *steps[:2], {"role": "system", "content": "note"}, *steps[2:])
    for left_out, why in (((0,), "user"), ((3,), "pinned"), ((1,), "split"), ((6, 7), "current turn")):
        with pytest.raises(GuardFailure, match=why):
            check_rewritten(request, render_rewritten(request, left_out, None), left_out, None, True)
    check_rewritten(request, render_rewritten(request, (1, 2, 4, 5), None), (1, 2, 4, 5), None, True)
