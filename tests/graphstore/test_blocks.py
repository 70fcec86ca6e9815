"""Blocks of any history: what belongs together stays together, and the current turn is whole."""

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from graphstore.blocks import Cut, Message, cut_blocks, extend_cut

USER = Message("user", cost=3)
REASONING = Message("reasoning")
ANSWER = Message("assistant", cost=5)


def call(*ids: str, edits: tuple[str, ...] = ()) -> Message:
    return Message("call", calls=ids, cost=7, edits=edits)


def output(*ids: str) -> Message:
    return Message("output", answers=ids, cost=11)


call_ids = st.sampled_from(["call_0", "call_1", "call_2", "call_3", "call_4"])


@st.composite
def turns(draw: st.DrawFn) -> list[Message]:
    """One user request and what an agent of either wire format makes of it; ids repeat from step to step."""
    found = [USER] * draw(st.integers(1, 2))
    for _ in range(draw(st.integers(0, 3))):
        ids = draw(st.lists(call_ids, min_size=1, max_size=5, unique=True))
        if draw(st.booleans()):  # chat: parallel calls are one message
            found.append(call(*ids, edits=draw(st.sampled_from([(), ("a.py",), ("a.py", "b.py")]))))
        else:  # responses: one item a call, perhaps with reasoning
            found += [REASONING] * draw(st.integers(0, 2)) + [call(one) for one in ids]
        results = [output(one) for one in draw(st.permutations(ids))]
        if draw(st.booleans()):  # the user speaks while tools run
            results.insert(draw(st.integers(0, len(results))), USER)
        found += results
    return found + draw(
        st.sampled_from([[], [ANSWER], [REASONING, ANSWER], [ANSWER, ANSWER], [Message("instruction")]])
    )


well_formed = st.lists(turns(), max_size=4).map(lambda parts: [message for part in parts for message in part])
anything = st.lists(
    st.one_of(
        st.sampled_from([USER, REASONING, ANSWER, Message("instruction"), Message("other"), Message("call")]),
        st.lists(call_ids, max_size=3).map(lambda ids: call(*ids)),
        call_ids.map(output),
        call_ids.map(lambda one: Message("other", calls=(one,))),
    ),
    max_size=25,
)
histories = well_formed | anything


def block_of(cut: Cut) -> dict[int, int]:
    return {message: i for i, block in enumerate(cut.blocks) for message in block.messages}


def pairs(messages: Sequence[Message]) -> tuple[list[tuple[int, int]], list[tuple[int, str]]]:
    """(call, result) by index, each result with the nearest preceding call of its id; and the calls left open."""
    nearest: dict[str, int] = {}
    found, waiting = [], []
    for i, message in enumerate(messages):
        for one in message.calls:
            nearest[one] = i
            waiting.append((i, one))
        for one in message.answers:
            if one in nearest:
                found.append((nearest[one], i))
                waiting = [entry for entry in waiting if entry != (nearest[one], one)]
    return found, waiting


@given(histories)
def test_every_message_is_in_exactly_one_block_in_order(messages: list[Message]) -> None:
    blocks = cut_blocks(messages).blocks
    assert sorted(i for block in blocks for i in block.messages) == list(range(len(messages)))
    assert all(list(block.messages) == sorted(block.messages) for block in blocks)
    assert [block.messages[0] for block in blocks] == sorted(block.messages[0] for block in blocks)
    assert sum(block.cost for block in blocks) == sum(message.cost for message in messages)
    assert {path for block in blocks for path in block.edits} == {path for m in messages for path in m.edits}


@given(histories)
def test_a_result_is_never_separated_from_its_call(messages: list[Message]) -> None:
    cut = cut_blocks(messages)
    block = block_of(cut)
    found, waiting = pairs(messages)
    assert all(block[caller] == block[result] for caller, result in found)
    assert {one for _, one in waiting} >= set(cut.open_calls)


@given(well_formed)
def test_a_well_formed_history_has_no_open_calls(messages: list[Message]) -> None:
    assert cut_blocks(messages).open_calls == ()
    assert not any(b.kind == "pinned" and messages[b.messages[0]].role == "output" for b in cut_blocks(messages).blocks)


@given(well_formed, call_ids)
def test_a_call_without_a_result_is_reported(messages: list[Message], one: str) -> None:
    assert cut_blocks([*messages, call(one)]).open_calls == (one,)


@given(histories)
@example([Message("call"), REASONING, ANSWER])
@example([call("call_0"), REASONING, REASONING, ANSWER])
def test_reasoning_is_never_separated_from_what_follows_it(messages: list[Message]) -> None:
    """Providers reject a reasoning item without the item it led to, and the other way round."""
    block = block_of(cut_blocks(messages))
    for i, (message, following) in enumerate(zip(messages, messages[1:], strict=False)):
        if message.role == "reasoning" and following.role in ("reasoning", "assistant", "call"):
            assert block[i] == block[i + 1]


@given(histories)
def test_users_stand_alone_and_what_we_do_not_understand_is_pinned(messages: list[Message]) -> None:
    for block in cut_blocks(messages).blocks:
        roles = {messages[i].role for i in block.messages}
        assert (block.kind == "user") == ("user" in roles)
        assert "user" not in roles or len(block.messages) == 1
        if roles & {"instruction", "other"} or roles == {"reasoning"}:
            assert block.kind == "pinned"
        if "call" in roles:
            assert block.kind == "tools"


def request_start(messages: Sequence[Message]) -> int | None:
    """Index of the first message of the last run of user messages."""
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    while len(users) > 1 and users[-2] == users[-1] - 1:
        users.pop()
    return users[-1] if users else None


@given(histories)
@example([call("call_0"), USER, output("call_0")])
@example([call("call_0"), USER, output("call_0"), USER])
def test_the_current_turn_holds_the_last_users_and_everything_after(messages: list[Message]) -> None:
    cut = cut_blocks(messages)
    first = request_start(messages)
    if first is None:
        assert cut.turn_start == 0
        return
    assert all(i < first for block in cut.blocks[: cut.turn_start] for i in block.messages)
    late = any(caller < first < result for caller, result in pairs(messages)[0])
    if not late:
        assert cut.turn_start == block_of(cut)[first]


@given(histories)
@example([USER, Message("other", calls=("call_0",)), output("call_0")])
@example([call("call_0"), USER, output("call_0")])
def test_a_boundary_is_a_request_that_nothing_has_answered(messages: list[Message]) -> None:
    first = request_start(messages)
    after = [message for message in messages[first or 0 :] if message.role != "user"]
    produced = [m for m in after if m.role in ("assistant", "call", "output", "reasoning") or m.calls]
    assert cut_blocks(messages).is_boundary == (first is not None and not produced)


@given(well_formed)
def test_a_new_request_after_a_finished_turn_is_a_boundary(messages: list[Message]) -> None:
    cut = cut_blocks([*messages, ANSWER, USER])
    assert cut.is_boundary
    assert cut.blocks[cut.turn_start].messages == (len(messages) + 1,)
    assert not cut_blocks([*messages, ANSWER]).is_boundary
    assert not cut_blocks([*messages, USER, call("call_9"), output("call_9")]).is_boundary


@given(histories, st.data())
def test_extending_a_cut_equals_cutting_anew(messages: list[Message], data: st.DataObject) -> None:
    known = data.draw(st.integers(0, len(messages)))
    assert extend_cut(cut_blocks(messages[:known]), messages) == cut_blocks(messages)


def test_parallel_calls_and_results_in_any_order_are_one_block() -> None:
    for count in range(1, 6):
        ids = [f"call_{i}" for i in range(count)]
        messages = [USER, call(*ids), *[output(one) for one in reversed(ids)], ANSWER]
        assert [b.kind for b in cut_blocks(messages).blocks] == ["user", "tools", "assistant"]


def test_an_id_that_every_turn_reuses_belongs_to_its_own_turn() -> None:
    step = [USER, call("call_0"), output("call_0"), ANSWER]
    blocks = cut_blocks(step * 3).blocks
    assert [b.messages for b in blocks if b.kind == "tools"] == [(1, 2), (5, 6), (9, 10)]


def test_steps_of_one_turn_are_separate_blocks() -> None:
    chat = [USER, call("a"), output("a"), call("b"), output("b")]
    responses = [USER, REASONING, call("a"), output("a"), REASONING, call("b"), output("b")]
    assert [b.messages for b in cut_blocks(chat).blocks] == [(0,), (1, 2), (3, 4)]
    assert [b.messages for b in cut_blocks(responses).blocks] == [(0,), (1, 2, 3), (4, 5, 6)]


def test_the_newest_steps_of_a_turn_are_its_last_three_tool_blocks() -> None:
    def history(steps: int) -> list[Message]:
        return [
            Message("user"),
            *(m for n in range(steps) for m in (Message("call", (f"{n}",)), Message("output", (), (f"{n}",)))),
        ]

    assert [cut_blocks(history(n)).steps_start for n in range(6)] == [0, 0, 0, 0, 2, 3]
    late = [
        *history(5)[:2],
        Message("instruction"),
        *history(5)[3:],
        Message("output", (), ("0",)),
    ]  # the first comes last
    assert cut_blocks(late).steps_start == 1
    assert cut_blocks(history(5)[1:]).steps_start == 0, "without a request there is no turn"
    assert cut_blocks([*history(5), Message("user")]).steps_start == 6
