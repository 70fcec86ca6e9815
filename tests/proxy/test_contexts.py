"""The served context that the worker replays is what stood in the request, block by block, and what came back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphstore.replays import ReplayJob
from graphstore.store.archive import open_reader
from proxy.contexts import Context, context_of
from proxy.dialects.base import DialectName
from proxy.dialects.content import NOTICE
from proxy.ports import Arrival
from proxy_model.context import ContextBlock
from proxy_model.errors import ReplayError
from tests.proxy.dialects.histories import ARRAY_NAMES, bodies
from tests.proxy.dialogue import LUNCH_S, PATHS, SYSTEM, Dialogue, Message, read, said, turn, user

ID = {"x-session-id": "one"}


@pytest.fixture
def dialogue(tmp_path: Path) -> Dialogue:
    return Dialogue(tmp_path)


async def context(dialogue: Dialogue, since_turn: int = 1) -> Context:
    """The context of the latest job of the first session. Closes the session logic: ask last."""
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        job = reader.load_jobs(1)[-1]
        return context_of(reader, ReplayJob(job.id, 1, job.turn, job.exchange_id, since_turn, 1))


def shape(blocks: tuple[ContextBlock, ...]) -> list[tuple[int | None, str, bool, bool]]:
    return [(b.ordinal, "+".join(p.role for p in b.parts), b.in_turn, b.is_dependent) for b in blocks]


async def worked(dialogue: Dialogue) -> list[Message]:
    """Two turns, step by step as a client sends them."""
    history: list[Message] = []
    for name in ("alpha", "beta"):
        steps = turn(f"look at {name}", name)
        await dialogue.send([*history, *steps[:1]], headers=ID, answer=steps[1])
        await dialogue.send([*history, *steps[:3]], headers=ID, answer=steps[3])
        history += steps
    return history


async def test_blocks_stand_as_they_were_sent_and_the_answer_comes_last(dialogue: Dialogue) -> None:
    await worked(dialogue)
    found = await context(dialogue)
    assert shape(found.blocks) == [
        (None, "system", False, False),
        (0, "user", True, True),
        (1, "assistant+tool", True, True),
        (2, "assistant", True, True),
        (3, "user", True, True),
        (4, "assistant+tool", True, True),
        (None, "assistant", True, False),
    ]
    texts = [[part.text for part in block.parts] for block in found.blocks]
    assert texts[0] == ["You are a coding agent."]
    assert texts[1] == ["look at alpha"]
    assert texts[2][0] == 'read {"filePath": "alpha.py"}' and texts[2][1].startswith("def unique_alpha")
    assert texts[-1] == ["ok"]
    assert "unique_alpha" in found.identifiers[1] and set(found.identifiers) == {0, 1, 2, 3, 4}


async def test_only_what_no_replay_has_covered_belongs_to_the_turn(dialogue: Dialogue) -> None:
    """The answer of the turn before was no block yet when that turn was replayed: its rows are read for edges now."""
    await worked(dialogue)
    assert shape((await context(dialogue, since_turn=2)).blocks)[1:] == [
        (0, "user", False, False),
        (1, "assistant+tool", False, False),
        (2, "assistant", False, True),
        (3, "user", True, True),
        (4, "assistant+tool", True, True),
        (None, "assistant", True, False),
    ]


async def test_after_an_undo_everything_that_was_said_anew_belongs_to_the_turn(dialogue: Dialogue) -> None:
    """The turn that was taken back opened at a later place than the one that stands there now."""
    first, second, third, last = (turn(f"look at {name}", name) for name in ("alpha", "beta", "gamma", "last"))
    taken_back = [*first, *second, *third[:1]]
    anew = [*first, *second[:1]]  # the second request again, answered anew
    going_on = [*anew, said("done"), *last]
    for history in (first[:1], taken_back, anew, going_on[:-3], [*going_on, user("more")]):
        await dialogue.send(history, headers=ID)
    blocks = (await context(dialogue, since_turn=2)).blocks
    requests = [b.parts[0].text for b in blocks if b.in_turn and b.parts[0].role == "user"]
    assert requests == ["look at beta", "look at last", "more"]


async def test_a_request_that_moves_no_session_opens_no_turn(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, dialect="responses")
    one, two = ({"type": "message", "role": "user", "content": text} for text in ("one", "two"))
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
    await dialogue.send([one], headers=ID)
    await dialogue.send([one, answer, two], headers=ID)
    await dialogue.send([one], headers=ID, more={"previous_response_id": "resp_1"})  # not understood: passes through
    await dialogue.send([one, answer, two], headers=ID)
    found = await context(dialogue, since_turn=2)
    assert [block.parts[0].text for block in found.blocks if block.in_turn] == ["two", "ok"]


async def test_what_the_selection_left_out_is_not_there(dialogue: Dialogue) -> None:
    history = [*await worked(dialogue), user("and beta again")]
    reply = await dialogue.send(history, headers=ID, after_s=LUNCH_S)
    assert reply.rewritten
    found = await context(dialogue, since_turn=3)
    assert found.blocks[0].parts[0].text == f"You are a coding agent.\n\n{NOTICE}"
    sent = [m["content"] for m in reply.messages if m["role"] == "user"]
    texts = [part.text for block in found.blocks for part in block.parts]
    assert [text for text in texts if text in sent] == sent
    assert len(found.blocks) < len(reply.messages) + 2
    gone = {"def unique_alpha", "def unique_beta"} - {t[:15] for t in texts} - {t[:16] for t in texts}
    assert gone and not any(name in reply.text for name in gone)


async def test_a_turn_that_was_broken_off_is_queued_when_the_next_one_begins(dialogue: Dialogue) -> None:
    steps = turn("look at alpha", "alpha")
    await dialogue.send(steps[:1], headers=ID, answer=steps[1])  # a call: the turn goes on, but never did
    await dialogue.send([*steps[:3], user("forget it")], headers=ID, after_s=LUNCH_S, finish=False)
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        assert [(job.turn, job.exchange_id, job.state) for job in reader.load_jobs(1)] == [
            (1, reader.session_exchanges(1)[0].id, "queued")
        ]


async def test_side_requests_errors_and_calls_end_no_turn(dialogue: Dialogue) -> None:
    await dialogue.send([user("one")], headers=ID, status=500)
    await dialogue.send([user("one")], headers=ID, answer=read("a.py", "x")[0])
    titles = {"role": "system", "content": "Titles."}
    await dialogue.send([user("make a title")], headers=ID, system=titles, tools=None)
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        kinds = {row.id: row.kind for row in reader.list_sessions()}
        assert [(kinds[s], job) for s in kinds for job in reader.load_jobs(s)] == []


async def test_a_history_of_nothing_ends_no_turn(tmp_path: Path) -> None:
    """Its turn had been answered before, and that answer can be replayed."""
    dialogue = Dialogue(tmp_path)
    await dialogue.send([SYSTEM, user("one")], headers=ID)
    await dialogue.send([SYSTEM, user("one"), said("ok"), user("two")], headers=ID)
    await dialogue.send([SYSTEM], headers=ID)
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        exchanges = {row.id: row for row in reader.session_exchanges(1)}
        jobs = reader.load_jobs(1)
        assert jobs and all(exchanges[job.exchange_id].head_node_id is not None for job in jobs)


async def test_images_and_empty_results_take_their_place(dialogue: Dialogue) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "what is this"}, image]},
        *read("a.png", ""),
        user("and now"),
    ]
    await dialogue.send(history, headers=ID)
    blocks = (await context(dialogue)).blocks
    assert blocks[1].parts[0].text == "what is this\n[image_url]"
    assert [part.text for part in blocks[2].parts] == ['read {"filePath": "a.png"}', ""]


async def test_responses_items_have_their_authors(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, dialect="responses")
    history: list[Message] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I look"}]},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"cmd":"ls"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
    ]
    await dialogue.send(history, headers=ID, system=None, more={"instructions": "Be brief."})
    found = await context(dialogue)
    assert [[part.role for part in block.parts] for block in found.blocks] == [
        ["system"], ["user"], ["assistant", "assistant", "tool"], ["assistant"],
    ]  # fmt: skip
    assert found.blocks[0].parts[0].text == "Be brief."
    assert [part.text for part in found.blocks[2].parts][1:] == ['shell {"cmd":"ls"}', "a.py"]


async def test_a_turn_that_is_no_longer_archived_is_a_sentence(dialogue: Dialogue) -> None:
    await dialogue.send([user("one")], headers=ID)
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader, pytest.raises(ReplayError, match="exchange 99 is not"):
        context_of(reader, ReplayJob(1, 1, 1, 99, 1, 1))


@pytest.fixture(params=sorted(ARRAY_NAMES))
def dialect(request: pytest.FixtureRequest) -> Iterator[DialectName]:
    yield request.param


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_every_message_of_any_history_stands_in_one_block(
    tmp_path_factory: pytest.TempPathFactory, dialect: DialectName, data: st.DataObject
) -> None:
    body = data.draw(bodies(dialect))
    dialogue = Dialogue(tmp_path_factory.mktemp("any"), dialect=dialect)
    plan = await dialogue.conversations.admit(Arrival(dialect, PATHS[dialect], [], body))
    dialogue.finish(plan, said("ok"))
    await dialogue.close()
    with open_reader(dialogue.settings.db) as reader:
        for session in reader.list_sessions():
            for job in reader.load_jobs(session.id):
                found = context_of(reader, ReplayJob(job.id, session.id, job.turn, job.exchange_id, 1, 1))
                history: list[Any] = json.loads(body)[ARRAY_NAMES[dialect]]
                leading = sum(len(b.parts) for b in found.blocks if b.ordinal is not None)
                assert leading <= len(history)
                ordinals = [b.ordinal for b in found.blocks if b.ordinal is not None]
                assert ordinals == sorted(set(ordinals)) and set(found.identifiers) == set(ordinals)
                assert any(b.in_turn for b in found.blocks)
                exchange = reader.load_exchange(job.exchange_id)
                assert exchange is not None and leading == exchange.messages_total
