"""Whatever the budget and whatever the history, in either dialect: what is selected can be sent."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from graphstore.blocks import cut_blocks
from graphstore.graph import ContextGraph
from graphstore.parameters import Parameters
from proxy.dialects import DIALECTS
from proxy.dialects.base import DialectName, ParsedRequest
from proxy.rewrite import check_rewritten, render_rewritten
from proxy.selecting import IdentifierCache, choose
from tests.proxy.dialects.histories import ARRAY_NAMES, bodies

parameters = st.builds(
    Parameters,
    beta=st.floats(0, 1),
    delta=st.floats(0, 2),
    request_cap_chars=st.one_of(st.just(360_000), st.integers(0, 400)),
)


def left_out_of(request: ParsedRequest, given_parameters: Parameters) -> frozenset[int]:
    """The indexes of the messages that a selection under these parameters leaves out."""
    cut = cut_blocks(request.messages)
    ordinals = list(range(len(cut.blocks)))
    choice = choose(
        DIALECTS[request.dialect],
        request,
        cut,
        ordinals,
        ContextGraph(),
        given_parameters,
        IdentifierCache(),
        session="s",
        turn=1,
        rule="past-use",
    )
    return frozenset(i for o in choice.left_out for i in cut.blocks[o].messages)


def called_and_answered(messages: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Ids of calls and of results in order, read as a provider reads them and not as we do."""
    called, answered = [], []
    for message in messages:
        called += [call["id"] for call in message.get("tool_calls", ())]
        kind = message.get("type", "")
        if message.get("role") == "tool":
            answered.append(message["tool_call_id"])
        elif kind.endswith("_output"):
            answered.append(message["call_id"])
        elif kind.endswith("_call"):
            called.append(message["call_id"])
    return called, answered


@given(st.data(), st.sampled_from(sorted(DIALECTS)), parameters)
def test_no_budget_splits_a_pair_or_loses_a_user(
    data: st.DataObject, dialect: DialectName, given_parameters: Parameters
) -> None:
    """Front truncation cut between a call and its result; every request from then on got 400."""
    request = DIALECTS[dialect].parse_request(data.draw(bodies(dialect)))
    left_out = left_out_of(request, given_parameters)
    body = render_rewritten(request, left_out, None)
    check_rewritten(request, body, left_out, None)

    array = ARRAY_NAMES[dialect]
    before, after = json.loads(request.body)[array], json.loads(body)[array]
    waiting: list[str] = []
    for message in after:
        called, answered = called_and_answered([message])
        waiting += called
        for one in answered:
            waiting.remove(one)  # raises for a result without a call before it
    assert waiting == [], "a call lost its result"
    assert after[-1] == before[-1]
    assert [m for m in after if m.get("role") == "user"] == [m for m in before if m.get("role") == "user"]
    reasoning = [i for i, m in enumerate(after) if m.get("type") == "reasoning"]
    assert all(after[i + 1].get("type") in ("message", "function_call", "custom_tool_call") for i in reasoning)


@given(st.data(), st.sampled_from(sorted(DIALECTS)), st.floats(0, 1), st.floats(0, 2))
def test_what_is_sent_keeps_the_bound(data: st.DataObject, dialect: DialectName, beta: float, delta: float) -> None:
    """Eq. 6 in characters of messages: what is sent of the history is the protected part or within the budget."""
    request = DIALECTS[dialect].parse_request(data.draw(bodies(dialect)))
    left_out = left_out_of(request, Parameters(beta=beta, delta=delta))
    cut = cut_blocks(request.messages)
    history = cut.blocks[: cut.turn_start]
    latest = {path: o for o, block in enumerate(history) for path in block.edits}
    protected = {o for o, block in enumerate(history) if block.kind in ("user", "pinned")} | set(latest.values())
    total = sum(block.cost for block in history)
    kept = sum(block.cost for block in history if left_out.isdisjoint(block.messages))
    assert kept <= max(sum(history[o].cost for o in protected), (1 + delta) * beta * total + 1e-6)
    assert all(left_out.isdisjoint(history[o].messages) for o in protected)
