"""Sums over the archive, against the ledger's own over its exchanges."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from graphstore.records import ExchangeRow
from graphstore.store.archive import open_reader
from graphstore.store.forget import Forget
from graphstore.store.reader import Reader
from graphstore.store.report import Tokens, exchange_tokens
from proxy import savings
from proxy.economics.profiles import shipped
from proxy.economics.warmth import prior
from proxy.ledger import Price, Totals, entries, total
from proxy.savings import Savings
from tests.proxy.dialogue import LUNCH_S, Dialogue, said, turn, user

HEADERS = [{"x-session-id": "one"}, {"x-session-id": "two"}]
HISTORY = [m for name in ("alpha", "beta", "gamma", "delta") for m in turn(f"Where is {name}?", name)]
DAY_S = 86_400.0


async def test_the_parts_of_a_session_are_its_days_and_models(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    await dialogue.send(HISTORY[:-1], headers=HEADERS[0])
    await dialogue.send([*HISTORY, user("more")], headers=HEADERS[0], after_s=LUNCH_S)
    await dialogue.send([*HISTORY, user("more"), said("ok"), user("on")], headers=HEADERS[0], after_s=DAY_S, model="b")
    await dialogue.conversations.flush()
    settings = msgspec.structs.replace(dialogue.settings, prices={"*": Price(input=2.0)})
    with open_reader(dialogue.settings.db) as reader:
        (session,) = reader.list_sessions()
        rows = reader.session_exchanges(session.id)
        tokens = exchange_tokens(reader, rows)
        whole = total(rows, entries(rows, tokens, settings.prices, lambda _, pause_s: prior(shipped()[-1], pause_s)))
        parts = Savings(settings).by_session(reader)[session.id]
    assert [share.model for share in sorted(parts)] == ["gpt-test", "b"]
    assert [parts[share].requests for share in sorted(parts)] == [2, 1]
    added = sum(parts.values(), Totals())
    assert replace(added, cost=0, untouched_cost=0) == replace(whole, cost=0, untouched_cost=0)
    assert (added.cost, added.untouched_cost) == pytest.approx((whole.cost, whole.untouched_cost))
    assert added.rewritten and added.untouched_input > added.input and added.cost > 0
    await dialogue.close()


async def test_a_session_is_summed_again_only_when_an_exchange_came_or_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inspector asks every five seconds, and an archive holds tens of thousands of exchanges."""
    summed: list[int] = []

    def counted(reader: Reader, rows: Sequence[ExchangeRow]) -> dict[int, Tokens]:
        summed.extend(row.id for row in rows)
        return exchange_tokens(reader, rows)

    monkeypatch.setattr(savings, "exchange_tokens", counted)
    dialogue = Dialogue(tmp_path)
    known = Savings(dialogue.settings)
    for headers in HEADERS:
        await dialogue.send([user(f"hello {headers}")], headers=headers)
    await dialogue.conversations.flush()
    with open_reader(dialogue.settings.db) as reader:
        first = known.by_session(reader)
        assert known.by_session(reader) == first and len(summed) == 2

        more = [user(f"hello {HEADERS[1]}"), said("ok"), user("more")]
        reply = await dialogue.send(more, headers=HEADERS[1], finish=False)
        await dialogue.conversations.flush()
        assert [p.requests for parts in known.by_session(reader).values() for p in parts.values()] == [1, 2]
        assert [p.with_usage for parts in known.by_session(reader).values() for p in parts.values()] == [1, 1]
        dialogue.finish(reply.plan, said("ok"))
        await dialogue.conversations.flush()
        assert [p.with_usage for parts in known.by_session(reader).values() for p in parts.values()] == [1, 2]
        one, two, three = sorted(set(summed))
        assert summed == [one, two, two, three, two, three]
    await dialogue.close()


async def test_a_branch_is_summed_again_when_its_parents_last_answer_ends(tmp_path: Path) -> None:
    """The branch came while the parent's request still ran: what the cache held is known only afterwards."""
    dialogue = Dialogue(tmp_path)
    known = Savings(dialogue.settings)
    await dialogue.send(HISTORY[:-1], headers=HEADERS[0], usage={"prompt_tokens": 3000, "cached": 0})
    more = [*HISTORY, user("more")]
    late = await dialogue.send(more, headers=HEADERS[0], after_s=LUNCH_S, finish=False)
    branched = await dialogue.send(
        [*more, said("ok"), user("on")], headers=HEADERS[1], usage={"prompt_tokens": 500, "cached": 400}
    )
    assert late.rewritten and branched.rewritten
    await dialogue.conversations.flush()
    with open_reader(dialogue.settings.db) as reader:
        branch = next(row.id for row in reader.list_sessions() if row.client_id == "two")

        def untouched_cached() -> float:
            return sum(known.by_session(reader)[branch].values(), Totals()).untouched_cached

        assert untouched_cached() == 0
        dialogue.finish(late.plan, said("ok"), tokens={"prompt_tokens": 450, "cached": 0})
        await dialogue.conversations.flush()
        assert untouched_cached() > 2000
    await dialogue.close()


async def test_requests_of_no_session_are_counted_too(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, dialect="responses")
    await dialogue.send([user("hello")], more={"previous_response_id": "resp_1"})
    await dialogue.send([user("hello")], headers=HEADERS[0])
    await dialogue.conversations.flush()
    with open_reader(dialogue.settings.db) as reader:
        (session,) = reader.list_sessions()
        parts = Savings(dialogue.settings).by_session(reader)
        assert {id: sum(part.values(), Totals()).requests for id, part in parts.items()} == {None: 1, session.id: 1}
    await dialogue.close()


async def test_what_is_remembered_of_a_branch_is_what_a_restart_would_find(tmp_path: Path) -> None:
    """Its parent is forgotten: what that had sent is no part of the sums any more. Nor is the forgotten one itself."""
    dialogue = Dialogue(tmp_path)
    known = Savings(dialogue.settings)
    whole = {"prompt_tokens": 3000, "cached": 0}
    await dialogue.send(HISTORY[:-1], headers=HEADERS[0], usage=whole)
    more = [*HISTORY, user("more")]
    await dialogue.send(more, headers=HEADERS[0], after_s=LUNCH_S, usage={"prompt_tokens": 450, "cached": 0})
    branch = {"prompt_tokens": 500, "cached": 400}
    await dialogue.send([*more, said("ok"), user("on")], headers=HEADERS[1], usage=branch)
    await dialogue.conversations.flush()
    with open_reader(dialogue.settings.db) as reader:
        before = known.by_session(reader)
        ids = {row.client_id: row.id for row in reader.list_sessions()}
        assert reader.load_session(ids["two"]).fork_depth is not None  # type: ignore[union-attr]
        await dialogue.conversations.forget(Forget(frozenset([ids["one"]])))  # type: ignore[attr-defined]
        after = known.by_session(reader)
        assert after == Savings(dialogue.settings).by_session(reader)
        assert after[ids["two"]] != before[ids["two"]]
        assert set(known._known) == {ids["two"]}
    await dialogue.close()
