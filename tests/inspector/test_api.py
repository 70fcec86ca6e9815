"""What the API says of recorded sessions, against the archive itself: its rows are read and summed here once more."""

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from graphstore.records import ExchangeRow, SelectionRow
from graphstore.store.archive import open_reader
from graphstore.store.changes import Changes
from graphstore.store.marks import set_mark
from graphstore.store.reader import Reader
from graphstore.store.report import Tokens, exchange_tokens
from proxy.cli import main
from proxy.inspector import sessions
from proxy.ledger import Price
from proxy.ports import Plan
from proxy.savings import Savings
from proxy.settings import Settings
from tests.fakes.raw_upstream import answering, raw_upstream, response, stalling
from tests.inspector.conftest import Recorded
from tests.inspector.looking import Json, Look, looking, looking_after, looking_at
from tests.inspector.world import HEADERS, HOSTILE
from tests.proxy.dialogue import LUNCH_S, TOOLS, Dialogue, said, turn, user

CODING, CHINESE, AIRLINE = "entire-3fb30de16616", "swetogether-gemini-voyager-task-aa88f5", "tau-airline-33"
ONE = {"x-session-id": "one"}
FULL = [m for name in ("alpha", "beta", "gamma", "delta") for m in turn(f"Where is {name}?", name)]


def members(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [ordinal for first, last in runs for ordinal in range(first, last + 1)]


def selection_of(reader: Reader, row: ExchangeRow) -> SelectionRow:
    assert row.selection_id is not None
    found = reader.load_selection(row.selection_id)
    assert found is not None
    return found


def tokens_of(reader: Reader, path: str, row: ExchangeRow) -> tuple[int, int]:
    """Of a request as it came and as it was sent: message by message, from the tables."""
    db = sqlite3.connect(path)
    tokens = dict(db.execute("SELECT id, tokens FROM messages"))
    db.close()
    history = [(node, tokens[m]) for node, _, m, _ in reader.load_path(row.head_node_id)] if row.head_node_id else []
    full = sum(tokens[blob] for blob in (row.instructions_id, row.tools_id) if blob) + sum(n for _, n in history)
    if not row.blocks_left_out:
        return full, full
    gone = {v.ordinal for v in selection_of(reader, row).verdicts if not v.kept}
    assert row.session_id is not None
    numbers = reader.block_ordinals(row.session_id)
    return full, full - sum(n for node, n in history if numbers.get(node) in gone)


def size_of(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


# -- sessions ---------------------------------------------------------------------------------------------------------


async def test_the_list_sums_what_is_archived_of_each_session(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        found = await look.get("sessions", side=1)
        rows = look.reader.list_sessions()
        assert found["total"] == len(rows) == 5
        assert [s["name"] for s in found["sessions"]] == [row.name for row in rows]
        for shown, session in zip(found["sessions"], rows, strict=True):
            exchanges = look.reader.session_exchanges(session.id)
            assert shown["requests"] == len(exchanges)
            assert shown["input_tokens"] == sum(row.input_tokens or 0 for row in exchanges)
            assert shown["cached_tokens"] == sum(row.cached_tokens or 0 for row in exchanges)
            assert shown["blocks_left_out"] == exchanges[-1].blocks_left_out
            full, sent = tokens_of(look.reader, look.proxy.settings.db, exchanges[-1])
            assert (shown["tokens_full"], shown["tokens_sent"]) == (full, sent)
            assert (shown["title"], shown["client"], shown["turns"]) == (session.title, "opencode", session.turns)
            assert shown["cold_at"] == session.last_active_at + 3600
        compacted = {s["name"]: s["tokens_sent"] < s["tokens_full"] for s in found["sessions"]}
        assert [compacted[look.names[id]] for id in (CODING, CHINESE, AIRLINE, HOSTILE)] == [True, True, True, False]


async def test_side_requests_are_asked_for_and_a_list_can_be_cut(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        plain = await look.get("sessions")
        assert {s["kind"] for s in plain["sessions"]} == {"agent"} and plain["total"] == 4
        assert await look.get("sessions", side=0) == plain
        sides = [s for s in (await look.get("sessions", side=1))["sessions"] if s["kind"] == "side"]
        assert [s["title"] for s in sides] == ["A title?"]
        two = await look.get("sessions", limit=2)
        assert (two["total"], two["sessions"]) == (4, plain["sessions"][:2])
        assert (await look.get("sessions", limit=0))["sessions"] == []
        assert await look.get("sessions", limit=999999999) == plain


async def test_the_cache_is_warm_until_the_hour_is_over(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path, later_s=3595.0 - 5.0) as look:  # the last request was a side one
        for advance, expected in ((0.0, "warm"), (4.9, "warm"), (0.1, "cold")):
            look.clock.advance(advance)
            newest = (await look.get("sessions"))["sessions"][0]
            assert newest["name"] == look.names[HOSTILE]
            assert (newest["cache"], newest["cache"] == "warm") == (expected, look.clock() < newest["cold_at"])
        assert {s["cache"] for s in (await look.get("sessions"))["sessions"]} == {"cold"}


async def test_a_request_under_way_is_running_and_one_that_an_earlier_proxy_left_is_not(
    recorded: Recorded, tmp_path: Path
) -> None:
    async with raw_upstream(stalling) as upstream, looking(recorded, tmp_path, upstream=upstream.url) as look:
        sent = look.client.build_request(
            "POST",
            "/v1/chat/completions",
            json={"model": "m", "messages": [user("slow")], "tools": TOOLS},
            headers=HEADERS,
        )
        waiting = asyncio.create_task(look.client.send(sent))
        await upstream.call()
        await look.conversations.flush()  # type: ignore[attr-defined]
        shown = (await look.get("sessions"))["sessions"][0]
        assert (shown["title"], shown["cache"]) == ("slow", "running")
        inside = await look.get(f"sessions/{shown['name']}/turns/1")
        assert [r["running"] for r in inside["requests"]] == [True] and inside["requests"][0]["seconds"] is None
        assert [t["running"] for t in (await look.get(f"sessions/{shown['name']}"))["turns"]] == [True]
        waiting.cancel()
    db = sqlite3.connect(tmp_path / "recap.db")
    db.execute("UPDATE exchanges SET ending = 'running'")
    db.commit()
    db.close()
    look.clock.advance(1)
    async with looking_at(tmp_path / "recap.db", look.clock) as later:
        assert {s["cache"] for s in (await later.get("sessions"))["sessions"]} == {"unknown", "cold"}
        assert not any(t["running"] for t in (await later.get(f"sessions/{shown['name']}"))["turns"])


async def test_a_side_request_does_not_hide_the_sessions_own(tmp_path: Path) -> None:
    """Its answer comes while the session's own request still runs, and all of the history was in it."""
    dialogue = await four_turns(tmp_path)
    history = [*FULL, user("now"), said("ok"), user("more")]
    own = await dialogue.send(history, headers=ONE, finish=False)
    await dialogue.send([*history, user("Summarise")], headers=ONE, tools=None)
    assert own.rewritten
    await dialogue.conversations.flush()
    with open_reader(dialogue.settings.db) as reader:
        view = sessions.View(reader, dialogue.settings, dialogue.clock(), 0.0, Savings(dialogue.settings))
        (shown,) = sessions.list_sessions(view, side=False, limit=10)["sessions"]  # type: ignore[misc]
        (session,) = reader.list_sessions()
        one = sessions.show_session(view, session)["session"]
        row = next(row for row in reader.session_exchanges(session.id) if row.ending == "running")
        sent = exchange_tokens(reader, [row])[row.id].sent
    assert shown["cache"] == "running" and shown["blocks_left_out"] == row.blocks_left_out > 0
    assert shown["tokens_sent"] == sent < shown["tokens_full"] and shown.items() <= one.items()  # type: ignore[attr-defined]
    await dialogue.close()


async def test_states_say_who_leaves_a_session_alone(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path, mode="off") as look:
        states = {s["name"]: (s["state"], s["state_reason"]) for s in (await look.get("sessions"))["sessions"]}
        assert states[look.names[CODING]] == ("observe", None)
        state, reason = states[look.names[HOSTILE]]
        assert state == "pass-through" and "rejected the rewritten request with 400" in reason


async def test_a_branch_names_its_parent(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    await dialogue.send([*FULL, user("this way")], headers=ONE)
    await dialogue.send([*FULL, user("no, that way")], headers=ONE)
    async with looking_after(dialogue) as look:
        branch, parent = (await look.get("sessions"))["sessions"]
        assert (branch["parent"], parent["parent"]) == (parent["name"], None)
        assert (await look.get(f"sessions/{branch['name']}"))["session"]["parent"] == parent["name"]


async def test_a_session_has_a_line_for_each_turn(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        for id in (CODING, CHINESE, AIRLINE):
            found = await look.get(f"sessions/{look.names[id]}")
            exchanges = look.exchanges(id)
            assert [t["turn"] for t in found["turns"]] == sorted({row.turn for row in exchanges})
            for shown in found["turns"]:
                rows = [row for row in exchanges if row.turn == shown["turn"]]
                assert shown["requests"] == len(rows)
                for name in ("input_tokens", "cached_tokens", "output_tokens"):
                    assert shown[name] == sum(getattr(row, name) for row in rows)
                full, sent = tokens_of(look.reader, look.proxy.settings.db, rows[-1])
                assert (shown["tokens_full"], shown["tokens_sent"]) == (full, sent)
                assert (shown["blocks"], shown["blocks_left_out"]) == (rows[-1].blocks_total, rows[-1].blocks_left_out)
                assert (shown["boundary"], shown["reason"]) == (rows[0].boundary, rows[0].reason)
                assert shown["selected"] == (rows[0].boundary == "cold" and rows[0].selection_id is not None)
                assert (shown["errors"], shown["running"]) == (0, False)
            assert [t["selected"] for t in found["turns"]].count(True) == len(
                {row.selection_id for row in exchanges if row.selection_id is not None}
            )
            observed = {o.turn for o in look.reader.load_observations(look.session(id).id)}
            assert {t["turn"] for t in found["turns"] if " rows, " in (t["replay"] or "")} == observed != set()
        assert found["session"]["client_id"] == AIRLINE and "test/model" in found["session"]["attention"]
        assert found["session"] | (await look.get("sessions"))["sessions"][1] == found["session"]


async def test_what_failed_is_counted_in_its_turn(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        turns = (await look.get(f"sessions/{look.names[HOSTILE]}"))["turns"]
    assert [t["errors"] for t in turns] == [0, 1]


# -- maps -------------------------------------------------------------------------------------------------------------


async def test_the_map_holds_every_block_of_every_turn(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        session = look.session(CODING)
        shown = await look.get(f"sessions/{session.name}/map")
        blocks = [block for block, _ in look.reader.load_blocks(session.id)]
        tokens = look.reader.block_tokens(session.id)
        assert list(zip(*(shown["blocks"][n] for n in ("ordinal", "kind", "label", "tokens")), strict=True)) == [
            (block.ordinal, block.kind, block.label, tokens[block.ordinal]) for block in blocks
        ]
        expected = [
            "user" if b.kind == "user" else "pin" if b.kind == "pinned" else "edit" if b.edits else None for b in blocks
        ]
        assert shown["blocks"]["outline"] == expected
        numbers = look.reader.block_ordinals(session.id)
        densities = {o.turn: {r.ordinal: r.density for r in o.replay.blocks}
                     for o in look.reader.load_observations(session.id)}  # fmt: skip
        last = {row.turn: row for row in look.exchanges(CODING)}
        assert [row["turn"] for row in shown["rows"]] == sorted(last)
        for row in shown["rows"]:
            exchange = last[row["turn"]]
            assert exchange.head_node_id is not None
            standing = {numbers[node] for node, _, _, _ in look.reader.load_path(exchange.head_node_id)}
            assert members(row["blocks"]) == sorted(standing)
            verdicts = selection_of(look.reader, exchange).verdicts if exchange.blocks_left_out else ()
            assert members(row["left_out"]) == [v.ordinal for v in verdicts if not v.kept]
            observed, values = row["density"]
            shown_density = dict(zip(members(observed), values, strict=True))
            assert shown_density == pytest.approx(densities.get(row["turn"], {}), abs=1e-6)
        assert any(row["left_out"] for row in shown["rows"]) and any(row["density"][0] for row in shown["rows"])
        cold = {row.turn: row.reason for row in look.exchanges(CODING) if row.boundary == "cold"}
        assert {row["turn"]: row["reason"] for row in shown["rows"] if row["reason"]} == cold != {}


def finish_with(plan: Plan, answer: Json) -> None:
    """The upstream's answer, as it came."""
    assert plan.exchange is not None
    plan.exchange.first_byte()
    plan.exchange.finish(
        "complete", status=200, headers=[(b"content-type", b"application/json")], body=json.dumps(answer).encode()
    )


def pruned(history: list[Json]) -> list[Json]:
    """As a client that drops old tool results sends it again."""
    return [m | {"content": "[cleared]"} if m["role"] == "tool" else m for m in history]


async def test_a_past_turn_shows_what_stood_in_it_before_the_client_pruned_it(tmp_path: Path) -> None:
    """Sizes, costs and texts are those of the turn's own history, not of what has become of its blocks."""
    dialogue = Dialogue(tmp_path)
    await dialogue.send(FULL[:-1], headers=ONE)
    await dialogue.conversations.flush()
    set_mark(dialogue.settings.db, 1, 1, "pin", clock=lambda: 0.0)
    assert (await dialogue.send([*FULL, user("five")], headers=ONE, after_s=LUNCH_S)).rewritten
    await dialogue.send([*pruned(FULL), user("five"), said("ok"), user("six")], headers=ONE)
    async with looking_after(dialogue) as look:
        name = look.session("one").name
        chosen = (await look.get(f"sessions/{name}/turns/5"))["selection"]
        assert sum(chosen["spent"].values()) == chosen["cost"] == sum(b["cost"] for b in chosen["blocks"] if b["kept"])
        assert sum(block["cost"] for block in chosen["blocks"]) == chosen["total"]
        turns = {row["turn"]: row for row in (await look.get(f"sessions/{name}"))["turns"]}
        shown = await look.get(f"sessions/{name}/map")
        latest = dict(zip(shown["blocks"]["ordinal"], shown["blocks"]["tokens"], strict=True))
        fixed = {turn["turn"]: turn["tokens_full"] for turn in turns.values()}
        for row in shown["rows"]:
            sizes = latest | dict(zip(members(row["sizes"][0]), row["sizes"][1], strict=True))
            fixed[row["turn"]] -= sum(sizes[ordinal] for ordinal in members(row["blocks"]))
        assert len(set(fixed.values())) == 1, "what remains are the instructions and tools of every turn"
        found = (await look.get("search", q="unique_alpha"))["found"]
        assert [hit["ordinal"] for hit in found] == [1]
        block = await look.get(f"sessions/{name}/blocks/1")
        (before,) = block["earlier"]
        assert "[cleared]" in block["messages"][1]["text"] and "unique_alpha" in before["messages"][1]["text"]
        assert members(before["turns"]) == [4, 5] and block["tokens"] == latest[1]
        assert (await look.get(f"sessions/{name}/blocks/0"))["earlier"] == []


async def test_the_graph_holds_what_is_stored(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        session = look.session(CODING)
        shown = await look.get(f"sessions/{session.name}/graph")
        nodes, edges = look.reader.load_graph(session.id)
        observed = {node.ordinal: node.u for node in nodes if node.observed}
        assert dict(zip(shown["nodes"]["ordinal"], shown["nodes"]["u"], strict=True)) == pytest.approx(
            observed, rel=1e-4
        )
        assert shown["nodes"]["stale"] == [node.ordinal for node in nodes if node.stale]
        assert [tuple(edge) for edge in shown["edges"]] == [
            (edge.support, edge.dependent, pytest.approx(edge.weight, rel=1e-4)) for edge in edges
        ]
        assert observed and edges and shown["rule"] == "paper"


# -- turns ------------------------------------------------------------------------------------------------------------


def check_selection(shown: Json, selection: SelectionRow, former: SelectionRow | None) -> None:
    assert (shown["turn"], shown["budget"], shown["cost"], shown["total"]) == (
        selection.turn, selection.budget, selection.cost, selection.total_cost,
    )  # fmt: skip
    was = {v.ordinal: v.kept for v in former.verdicts} if former else {v.ordinal: True for v in selection.verdicts}
    words = {(True, True): "kept", (True, False): "revived", (True, None): "new",
             (False, True): "dropped", (False, False): "still out", (False, None): "out at once"}  # fmt: skip
    for block, verdict in zip(shown["blocks"], selection.verdicts, strict=True):
        assert (block["ordinal"], block["kept"], block["rule"]) == (verdict.ordinal, verdict.kept, verdict.rule)
        assert (block["score"], block["z_u"], block["z_words"], block["rank"]) == (
            verdict.score, verdict.z_u, verdict.z_lex, verdict.rank,
        )  # fmt: skip
        assert block["change"] == words[verdict.kept, was.get(verdict.ordinal)]
    assert sum(shown["changes"].values()) == len(shown["blocks"])
    for rule, spent in shown["spent"].items():
        assert spent == sum(b["cost"] for b in shown["blocks"] if b["kept"] and b["rule"] == rule)
    assert sum(shown["spent"].values()) == selection.cost


async def test_a_turn_shows_its_requests_as_they_were_stored(recorded: Recorded, tmp_path: Path) -> None:
    same = ("id", "step", "started_at", "outcome", "boundary", "reason", "model", "path", "stream", "usage", "status",
            "ending", "error", "input_tokens", "cached_tokens", "output_tokens", "messages_sent", "bytes_sent",
            "blocks_left_out", "prefix_messages", "prefix_bytes")  # fmt: skip
    async with looking(recorded, tmp_path) as look:
        for number in range(1, 7):
            shown = await look.get(f"sessions/{look.names[CODING]}/turns/{number}")
            rows = [row for row in look.exchanges(CODING) if row.turn == number]
            assert [{n: r[n] for n in same} for r in shown["requests"]] == [
                {n: getattr(row, n) for n in same} for row in rows
            ]
            assert [(r["messages"], r["blocks"], r["bytes"]) for r in shown["requests"]] == [
                (row.messages_total, row.blocks_total, row.bytes_total) for row in rows
            ]
            assert [(r["tokens_full"], r["tokens_sent"]) for r in shown["requests"]] == [
                tokens_of(look.reader, look.proxy.settings.db, row) for row in rows
            ]
            assert shown["facts"]["idle_s"] == rows[0].idle_s
            assert shown["turns"] == [1, 2, 3, 4, 5, 6]


async def test_a_turn_shows_the_selection_in_force_and_whether_it_was_made_there(
    recorded: Recorded, tmp_path: Path
) -> None:
    async with looking(recorded, tmp_path) as look:
        made: dict[int, SelectionRow] = {}
        for row in look.exchanges(AIRLINE):
            if row.selection_id is not None:
                selection = selection_of(look.reader, row)
                made.setdefault(selection.turn, selection)
        assert sorted(made) == [2, 4, 6, 8]
        for number, (turn_of, former_of) in {
            2: (2, None),
            3: (2, None),
            4: (4, 2),
            5: (4, 2),
            6: (6, 4),
            7: (6, 4),
            8: (8, 6),
        }.items():
            shown = await look.get(f"sessions/{look.names[AIRLINE]}/turns/{number}")
            assert (shown["selection"]["former_turn"], shown["selected_here"]) == (former_of, number == turn_of)
            check_selection(shown["selection"], made[turn_of], made[former_of] if former_of else None)
        first = await look.get(f"sessions/{look.names[AIRLINE]}/turns/1")
        assert (first["selection"], first["selected_here"], first["boundary"]) == (None, False, "none")
        kinds = {b["change"] for n in (4, 6, 8) for b in
                 (await look.get(f"sessions/{look.names[AIRLINE]}/turns/{n}"))["selection"]["blocks"]}  # fmt: skip
        assert {"kept", "dropped", "still out"} <= kinds


async def changed_in(look: Look, name: str, number: int) -> tuple[Json, dict[int, str]]:
    """A turn, and what became of each block in its selection."""
    shown = await look.get(f"sessions/{name}/turns/{number}")
    return shown, {block["ordinal"]: block["change"] for block in shown["selection"]["blocks"]}


async def test_a_branchs_first_selection_is_compared_with_its_parents(tmp_path: Path) -> None:
    """What the parent left out was left out of the branch too, until the branch selected for itself."""
    dialogue = Dialogue(tmp_path)
    await dialogue.send([*FULL, user("one")], headers=ONE)
    assert (await dialogue.send([*FULL, user("one"), said("ok"), user("two")], headers=ONE, after_s=LUNCH_S)).rewritten
    other = {"x-session-id": "other"}
    branch = [*FULL, user("one"), said("ok"), user("two, otherwise")]
    assert (await dialogue.send(branch, headers=other)).rewritten, "it goes on with its parent's selection"
    await dialogue.send([*branch, said("ok"), user("Where is beta?")], headers=other, after_s=LUNCH_S)
    async with looking_after(dialogue) as look:
        parent, session = look.session("one"), look.session("other")
        assert session.parent_id == parent.id
        rows = look.exchanges("other")
        inherited, own = (selection_of(look.reader, row) for row in rows)
        assert inherited.session_id == parent.id and own.session_id == session.id
        was = {v.ordinal: v.kept for v in inherited.verdicts}
        assert not all(was.values())
        shown, changes = await changed_in(look, session.name, rows[1].turn)
        assert shown["selection"]["former_turn"] == inherited.turn and shown["selection"]["made_by"] == session.name
        for verdict in own.verdicts:
            words = ("kept", "dropped") if was.get(verdict.ordinal) else ("revived", "still out")
            words = words if verdict.ordinal in was else ("new", "out at once")
            assert changes[verdict.ordinal] == words[not verdict.kept]
        shown, _ = await changed_in(look, session.name, rows[0].turn)
        assert shown["selection"]["made_by"] == parent.name and not shown["selected_here"], "whatever its turn's number"


@pytest.mark.parametrize("back", ["an undo", "a branch"])
async def test_the_figures_of_a_selection_are_those_of_the_blocks_that_still_stand(tmp_path: Path, back: str) -> None:
    dialogue = Dialogue(tmp_path)
    await dialogue.send(FULL[:-1], headers=ONE)
    assert (await dialogue.send([*FULL, user("five")], headers=ONE, after_s=LUNCH_S)).rewritten
    other = {"x-session-id": "other"}
    await dialogue.send(FULL[:7] if back == "an undo" else [*FULL[:12], user("otherwise")], headers=ONE | other)
    async with looking_after(dialogue) as look:
        session = look.session("one" if back == "an undo" else "other")
        chosen = (await look.get(f"sessions/{session.name}/turns/{session.turns}"))["selection"]
        blocks = {block.ordinal: block for block, _ in look.reader.load_blocks(session.id)}
        assert chosen["made_by"] == session.name and {b["ordinal"] for b in chosen["blocks"]} <= blocks.keys()
        assert sum(b["cost"] for b in chosen["blocks"]) == chosen["total"]
        assert sum(b["cost"] for b in chosen["blocks"] if b["kept"]) == chosen["cost"] == sum(chosen["spent"].values())
        assert chosen["budget"] <= chosen["total"] * chosen["weights"]["beta"]
        stored = look.reader.load_selection(session.selection_id or 0)
        assert stored is not None and stored.protected_cost == chosen["spent"]["protected"]


async def test_after_mode_off_everything_had_been_sent(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, changes={"mode": "off"})
    await dialogue.send([*FULL, user("one")], headers=ONE)
    await dialogue.send([*FULL, user("one"), said("ok"), user("two")], headers=ONE, after_s=LUNCH_S)
    del dialogue.changes["mode"]
    await dialogue.restart()
    history = [*FULL, user("one"), said("ok"), user("two"), said("ok"), user("three")]
    assert (await dialogue.send(history, headers=ONE, after_s=LUNCH_S)).rewritten
    async with looking_after(dialogue) as look:
        shown, changes = await changed_in(look, look.session("one").name, look.exchanges("one")[-1].turn)
        assert shown["selection"]["former_turn"] is None and set(changes.values()) == {"kept", "dropped"}


async def test_a_selection_that_its_own_turn_replaced_is_still_shown(tmp_path: Path) -> None:
    """The client went back within the turn: the cold decision was made all the same."""
    dialogue = Dialogue(tmp_path)
    await dialogue.send([*FULL, user("one")], headers=ONE)
    await dialogue.send([*FULL, user("one"), said("ok"), user("two")], headers=ONE, after_s=LUNCH_S)
    cold = (await dialogue.exchanges())[-1]
    await dialogue.send([*FULL[:8], user("two, otherwise")], headers=ONE)
    async with looking_after(dialogue) as look:
        rows = [row for row in look.exchanges("one") if row.turn == cold.turn]
        selections = [selection_of(look.reader, row) for row in rows if row.selection_id is not None]
        shown = await look.get(f"sessions/{look.session('one').name}/turns/{cold.turn}")
        told = [shown["selection"], *shown["earlier"]] if shown["selection"] else shown["earlier"]
        assert sorted(one["reason"] for one in told) == sorted(one.reason for one in selections)
        assert selections[0].exchange_id == cold.id


async def test_what_a_killed_proxy_left_open_is_said_to_be_interrupted(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        row = look.exchanges(AIRLINE)[-1]
        with closing(sqlite3.connect(tmp_path / "recap.db")) as db:
            db.execute(
                "UPDATE exchanges SET ending = 'running', ended_at = NULL, status = NULL WHERE id = ?", (row.id,)
            )
            db.commit()
        name = look.names[AIRLINE]
        shown = (await look.get(f"sessions/{name}/turns/{row.turn}"))["requests"][-1]
        assert (shown["ending"], shown["running"]) == ("interrupted", False)
        assert (await look.get(f"sessions/{name}"))["turns"][-1]["errors"] == 1
        errors = (await look.get("health"))["errors"]
        found = [(e["session"], e["turn"]) for e in errors if "was stopped" in e["problem"]]
        assert found == [(name, row.turn)]


def test_sizes_survive_that_another_view_forgets_them(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads look at once, and each may find that the memory is full."""
    with recorded.opened(AIRLINE) as (reader, session):
        settings = Settings(db=str(recorded.path))
        view = sessions.View(reader, settings, 0.0, 0.0, Savings(settings))
        rows = reader.session_exchanges(session.id)
        wanted = sessions._sizes(view, rows)

        def forgetful(*given: object) -> dict[int, Tokens]:
            view.sizes.clear()
            return exchange_tokens(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(sessions, "exchange_tokens", forgetful)
        assert sessions._sizes(view, rows) == wanted


async def test_mode_off_shows_what_would_have_been_sent(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path, changes={"mode": "off"})
    await dialogue.send([*FULL, user("one")], headers=ONE)
    reply = await dialogue.send([*FULL, user("one"), said("ok"), user("two")], headers=ONE, after_s=LUNCH_S)
    assert not reply.rewritten
    async with looking_after(dialogue) as look:
        name = (await look.get("sessions"))["sessions"][0]["name"]
        shown = await look.get(f"sessions/{name}/turns/6")
        assert shown["selected_here"] and not shown["selection"]["applied"]
        assert not all(b["kept"] for b in shown["selection"]["blocks"])
        assert shown["requests"][0]["tokens_sent"] == shown["requests"][0]["tokens_full"]
        assert not (await look.get(f"sessions/{name}"))["turns"][-1]["selected"], "it was not sent"


async def test_a_rewrite_that_was_refused_is_shown_with_what_was_sent_instead(
    recorded: Recorded, tmp_path: Path
) -> None:
    async with looking(recorded, tmp_path) as look:
        (request,) = (await look.get(f"sessions/{look.names[HOSTILE]}/turns/2"))["requests"]
    assert request["resent"] and "rejected the rewritten request with 400" in request["error"]
    assert request["messages_sent"] == request["messages"] and request["status"] == 200


# -- what if ----------------------------------------------------------------------------------------------------------


async def four_turns(folder: Path) -> Dialogue:
    """Room for hardly more than one of the files that were read."""
    dialogue = Dialogue(folder, changes={"beta": 0.3, "eps": 0.0})
    await dialogue.send([*FULL[:-4], user("Where is delta?")], headers=ONE)
    await dialogue.send([*FULL, user("now")], headers=ONE, after_s=LUNCH_S)
    return dialogue


async def test_what_if_follows_the_words_of_the_query_and_stores_nothing(tmp_path: Path) -> None:
    async with looking_after(await four_turns(tmp_path)) as look:
        name = (await look.get("sessions"))["sessions"][0]["name"]
        changes = Changes(look.proxy.settings.db)
        changes.happened()
        kept: dict[str, set[str]] = {}
        for word in ("alpha", "gamma"):
            shown = await look.post(f"sessions/{name}/what-if", {"query": f"what of unique_{word} then?"})
            assert (shown["session"], shown["query"]) == (name, f"what of unique_{word} then?")
            kept[word] = {b["label"] for b in shown["selection"]["blocks"] if b["kept"] and b["kind"] == "tools"}
            best = max(shown["selection"]["blocks"], key=lambda b: b["z_words"])
            assert best["label"] == f"read {word}.py"
            assert shown["selection"]["turn"] == 6 and not shown["selection"]["applied"]
        assert "read alpha.py" in kept["alpha"] - kept["gamma"] and "read gamma.py" in kept["gamma"] - kept["alpha"]
        assert not changes.happened()
        changes.close()


async def test_what_if_is_compared_with_what_is_sent_now(tmp_path: Path) -> None:
    async with looking_after(await four_turns(tmp_path)) as look:
        name = (await look.get("sessions"))["sessions"][0]["name"]
        shown = await look.post(f"sessions/{name}/what-if", {"query": "unique_alpha"})
        assert shown["compared_with"] == "the selection of turn 5"
        sent = {v.ordinal: v.kept for v in selection_of(look.reader, look.exchanges("one")[-1]).verdicts}
        for block in shown["selection"]["blocks"]:
            before = sent.get(block["ordinal"])
            assert (block["change"] in ("kept", "dropped")) == (before is True)
            assert (block["change"] in ("revived", "still out")) == (before is False)


async def test_what_if_is_compared_with_everything_before_the_first_selection(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    await dialogue.send([*FULL, user("now")], headers=ONE)
    async with looking_after(dialogue) as look:
        name = (await look.get("sessions"))["sessions"][0]["name"]
        shown = await look.post(f"sessions/{name}/what-if", {"query": "x"})
        assert shown["compared_with"] == "the full history"
        assert {b["change"] for b in shown["selection"]["blocks"]} <= {"kept", "dropped"}


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({}, "sent", "idle for 3600 s"),
        ({"min_history_tokens": 8000}, "nothing", "below 8000"),
        ({"mode": "off"}, "recorded", "idle for 3600 s"),
        ({"mode": "auto"}, "weighed", "idle for 1950 s"),
        ({"mode": "auto", "context_window_tokens": 1000}, "sent", "for a window of 1000"),
    ],
)
async def test_what_if_says_what_would_come_of_it(tmp_path: Path, changes: Json, outcome: str, reason: str) -> None:
    dialogue = Dialogue(tmp_path)
    await dialogue.send([*FULL, user("now")], headers=ONE)
    async with looking_after(dialogue, **changes) as look:
        shown = await look.post(f"sessions/{look.session('one').name}/what-if", {"query": "x"})
        assert shown["outcome"] == outcome and reason in shown["reason"]


async def test_what_if_says_that_a_session_is_left_alone(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        shown = await look.post(f"sessions/{look.names[HOSTILE]}/what-if", {"query": "x"})
        assert shown["outcome"] == "nothing" and shown["reason"].startswith("pass-through: ")
        side = next(row for row in look.reader.list_sessions() if row.kind == "side")
        shown = await look.post(f"sessions/{side.name}/what-if", {"query": "x"})
        assert (shown["outcome"], shown["reason"]) == ("nothing", "side request")


async def test_what_if_takes_whatever_a_browser_has_for_text(recorded: Recorded, tmp_path: Path) -> None:
    """Half of a surrogate pair is text to a browser, and to no encoding."""
    async with looking(recorded, tmp_path) as look:
        reply = await look.client.post(
            f"/recap/api/sessions/{look.names[CODING]}/what-if",
            content=b'{"query": "a \\ud800 b"}',
            headers={"content-type": "application/json", "x-recap-token": look.token},
        )
    assert reply.status_code == 200 and reply.json()["query"] == "a \ufffd b"


# -- blocks -----------------------------------------------------------------------------------------------------------


async def test_a_block_says_what_it_says_and_where_it_was_sent(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        session = look.session(CODING)
        nodes, edges = look.reader.load_graph(session.id)
        latest = selection_of(look.reader, look.exchanges(CODING)[-1])
        rows = (await look.get(f"sessions/{session.name}/map"))["rows"]
        for block, _ in look.reader.load_blocks(session.id):
            shown = await look.get(f"sessions/{session.name}/blocks/{block.ordinal}")
            raw = look.reader.node_contents(block.node_ids)
            assert [m["raw"].encode() for m in shown["messages"]] == raw
            assert (shown["kind"], shown["label"], shown["chars"]) == (block.kind, block.label, block.cost)
            verdict = next((v for v in latest.verdicts if v.ordinal == block.ordinal), None)
            expected = verdict and {"kept": verdict.kept, "rule": verdict.rule, "detail": verdict.detail}
            assert shown["verdict"] == expected
            node = next((n for n in nodes if n.ordinal == block.ordinal), None)
            assert shown["u"] == (node.u if node and node.observed else None)
            assert [(e["ordinal"], e["weight"]) for e in shown["supports"]] == [
                (e.support, e.weight) for e in edges if e.dependent == block.ordinal
            ]
            assert [(e["ordinal"], e["weight"]) for e in shown["dependents"]] == [
                (e.dependent, e.weight) for e in edges if e.support == block.ordinal
            ]
            assert members(shown["served"]["sent"]) == [
                r["turn"] for r in rows
                if block.ordinal in members(r["blocks"]) and block.ordinal not in members(r["left_out"])
            ]  # fmt: skip
            assert members(shown["served"]["left_out"]) == [
                r["turn"] for r in rows if block.ordinal in members(r["left_out"])
            ]
            assert [(r["turn"], r["density"]) for r in shown["importance"]] == [
                (o.turn, r.density)
                for o in look.reader.load_observations(session.id)
                for r in o.replay.blocks
                if r.ordinal == block.ordinal
            ]


async def test_markup_comes_as_the_text_that_it_is(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        shown = await look.get(f"sessions/{look.names[HOSTILE]}/blocks/1")
        reply = await look.client.get(f"/recap/api/sessions/{look.names[HOSTILE]}/blocks/1")
    assert [m["role"] for m in shown["messages"]] == ["call", "output"]
    assert HOSTILE in shown["messages"][0]["text"] and shown["messages"][1]["text"] == HOSTILE * 200
    assert reply.headers["content-type"] == "application/json"


async def test_a_mark_is_stored_shown_and_taken_away(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        session = look.session(CODING)
        block = f"sessions/{session.name}/blocks/3"
        for mark in ("pin", "mute", None):
            assert await look.post(f"{block}/mark", {"mark": mark}) == {"ordinal": 3, "mark": mark, "unheeded": None}
            assert look.reader.marks(session.id) == ({3: mark} if mark else {})
            assert (await look.get(block))["mark"] == mark
            shown = (await look.get(f"sessions/{session.name}/map"))["blocks"]
            assert shown["mark"][3] == shown["outline"][3] == mark
            assert {m for i, m in enumerate(shown["mark"]) if i != 3} == {None}
            verdicts = (await look.post(f"sessions/{session.name}/what-if", {"query": "x"}))["selection"]["blocks"]
            detail = next(v["detail"] for v in verdicts if v["ordinal"] == 3)
            assert ("by hand" in detail) == (mark is not None), "what-if obeys it"
        assert (await look.get(block))["protected"] is None, "a person's own word does not forbid to change it"


async def test_a_protected_block_can_be_pinned_and_not_muted(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        block = f"sessions/{look.names[CODING]}/blocks/0"
        assert (await look.get(block))["protected"] == "user message"
        reply = await look.send(f"{block}/mark", {"mark": "mute"})
        assert reply.status_code == 409 and reply.json()["error"]["code"] == "protected"
        assert reply.json()["error"]["message"] == "block 0 cannot be muted: it is protected (user message)"
        assert look.reader.marks(look.session(CODING).id) == {}
        await look.post(f"{block}/mark", {"mark": "pin"})


async def test_a_pin_that_was_obeyed_can_still_become_a_mute(tmp_path: Path) -> None:
    """In the selection that followed it the block is protected, by that pin alone."""
    dialogue = await four_turns(tmp_path)
    await dialogue.conversations.flush()
    set_mark(dialogue.settings.db, 1, 1, "pin", clock=dialogue.clock)
    again = [*FULL, user("now"), said("ok"), user("again")]
    await dialogue.send(again, headers=ONE, after_s=LUNCH_S)
    async with looking_after(dialogue) as look:
        path = f"sessions/{look.session('one').name}/blocks/1"
        shown = await look.get(path)
        assert shown["verdict"] == {"kept": True, "rule": "protected", "detail": "pinned by hand"}
        assert shown["protected"] is None
        assert (await look.post(f"{path}/mark", {"mark": "mute"}))["mark"] == "mute"


def edit(path: str, text: str, call_id: str) -> list[Json]:
    arguments = json.dumps({"filePath": path, "newString": text})
    call = {"id": call_id, "type": "function", "function": {"name": "edit", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "edited"},
    ]


@pytest.mark.parametrize("selected", [True, False])
async def test_an_edit_is_protected_while_no_later_one_replaced_it(tmp_path: Path, selected: bool) -> None:
    """By the history as it stands, whatever the last selection said of it, and before there was any."""
    dialogue = Dialogue(tmp_path)
    history = [*FULL[:-1], *edit("a.py", "x" * 500, "e1"), said("done"), user("five")]
    await dialogue.send(FULL[:1], headers=ONE)
    await dialogue.send(history, headers=ONE, after_s=LUNCH_S if selected else 5.0)

    async def codes(look: Look) -> list[int]:
        session = look.session("one")
        edits = [block.ordinal for block, _ in look.reader.load_blocks(session.id) if block.edits]
        address = f"sessions/{session.name}/blocks"
        shown = [(await look.get(f"{address}/{ordinal}"))["protected"] for ordinal in edits]
        sent = [(await look.send(f"{address}/{ordinal}/mark", {"mark": "mute"})).status_code for ordinal in edits]
        assert [why is not None for why in shown] == [code == 409 for code in sent]
        return sent

    async with looking_after(dialogue) as look:
        assert await codes(look) == [409]
    await dialogue.restart()
    await dialogue.send([*history, *edit("a.py", "y" * 500, "e2"), said("done"), user("six")], headers=ONE)
    async with looking_after(dialogue) as look:
        assert await codes(look) == [200, 409]


async def test_a_mark_on_a_session_that_is_left_alone_promises_nothing(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        block = f"sessions/{look.names[HOSTILE]}/blocks/1"
        why = (await look.post(f"{block}/mark", {"mark": "pin"}))["unheeded"]
        assert "left alone" in why and (await look.get(block))["unheeded"] == why
    async with looking(recorded, tmp_path, mode="off") as look:
        assert "mode is off" in (await look.get(f"sessions/{look.names[CODING]}/blocks/1"))["unheeded"]


# -- savings and health -----------------------------------------------------------------------------------------------


async def test_savings_add_up_over_sessions_days_and_in_all(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        shown = await look.get("savings")
        every = [row for s in look.reader.list_sessions() for row in look.reader.session_exchanges(s.id)]
        total = shown["total"]
        assert total["requests"] == total["with_usage"] == len(every)
        assert total["input_tokens"] == sum(row.input_tokens or 0 for row in every)
        assert total["cached_tokens"] == sum(row.cached_tokens or 0 for row in every)
        assert total["rewritten"] == sum(row.messages_sent < row.messages_total for row in every) > 0
        assert (total["resent"], total["cost"], shown["priced"], total["priced_requests"]) == (1, None, False, 0)
        assert total["saved_tokens"] == total["untouched_input_tokens"] - total["input_tokens"] > 0
        for name in ("requests", "rewritten", "input_tokens", "cached_tokens", "output_tokens", "resent"):
            assert sum(s[name] for s in shown["sessions"]) == sum(d[name] for d in shown["days"]) == total[name]
        days = {time.strftime("%Y-%m-%d", time.localtime(row.started_at)) for row in every}
        assert [d["day"] for d in shown["days"]] == sorted(days, reverse=True)
        whole = [s for s in shown["sessions"] if not s["rewritten"]]
        assert {s["saved_tokens"] for s in whole} == {0} and len(whole) == 2


async def test_a_session_and_its_turns_saved_what_the_commands_say(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with looking(recorded, tmp_path, prices={"*": Price(input=1000.0)}) as look:
        by_name = {line["session"]: line for line in (await look.get("savings"))["sessions"]}
        for id in (CODING, CHINESE, AIRLINE, HOSTILE):
            name = look.names[id]
            found = await look.get(f"sessions/{name}")
            savings = found["session"]["savings"]
            assert savings == {key: by_name[name][key] for key in savings} and savings["cost"] > 0
            turns = [await look.get(f"sessions/{name}/turns/{t['turn']}") for t in found["turns"]]
            assert [t["savings"]["saved_tokens"] for t in turns] == [t["saved_tokens"] for t in found["turns"]]
            assert sum(t["savings"]["rewritten"] for t in turns) == savings["rewritten"]
            assert main(["show", name, "--db", look.proxy.settings.db]) == 0
            saved = (
                f"saved: about {savings['saved_tokens']:,} input tokens in {savings['rewritten']:,} rewritten request"
            )
            assert (saved in capsys.readouterr().out) == (savings["rewritten"] > 0) == (id != HOSTILE)


async def test_savings_count_every_stored_request(tmp_path: Path) -> None:
    """One that refers to state at the provider belongs to no session, and is paid all the same."""
    dialogue = Dialogue(tmp_path, dialect="responses")
    reply = await dialogue.send([user("hello")], more={"previous_response_id": "resp_1"}, finish=False)
    usage = {"input_tokens": 5000, "input_tokens_details": {"cached_tokens": 4000}, "output_tokens": 7}
    answer = {"id": "resp_2", "status": "completed", "output": [], "usage": usage}
    finish_with(reply.plan, answer)
    async with looking_after(dialogue) as look:
        shown = await look.get("savings")
        assert shown["sessions"] == []
        for sums in (shown["total"], *shown["days"]):
            assert (sums["requests"], sums["input_tokens"], sums["cached_tokens"]) == (1, 5000, 4000)
            assert (sums["saved_tokens"], sums["untouched_cached_tokens"]) == (0, 4000)


async def test_money_follows_the_prices_of_the_settings(recorded: Recorded, tmp_path: Path) -> None:
    prices = {"gpt-*": Price(input=3.0, output=15.0, cached=0.3)}
    async with looking(recorded, tmp_path, prices=prices) as look:
        shown = await look.get("savings")
        rows = [row for id in (CODING, CHINESE, AIRLINE) for row in look.exchanges(id)]
        side = next(s for s in look.reader.list_sessions() if s.kind == "side")
        rows += look.reader.session_exchanges(side.id)
        expected = sum(
            ((row.input_tokens or 0) - (row.cached_tokens or 0)) * 3.0
            + (row.cached_tokens or 0) * 0.3
            + (row.output_tokens or 0) * 15.0
            for row in rows
        )
        assert shown["total"]["cost"] == pytest.approx(expected / 1e6)
        assert shown["total"]["priced_requests"] == len(rows)
        assert shown["total"]["saved_cost"] == shown["total"]["untouched_cost"] - shown["total"]["cost"]
        assert shown["models_without_price"] == [HOSTILE] and shown["priced"]
        by_name = {s["session"]: s for s in shown["sessions"]}
        assert by_name[look.names[HOSTILE]]["cost"] is None and by_name[look.names[CODING]]["cost"] > 0


async def test_health_tells_what_went_wrong_and_what_to_do(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    for status in (200, 401, 404, 429, 400, 503, 504):
        await dialogue.send([user(f"asked for {status}")], headers={"x-session-id": str(status)}, status=status)
    async with looking_after(dialogue) as look:
        shown = await look.get("health")
        named = {row.id: row.name for row in look.reader.list_sessions()}
        failed = [r for id in named for r in look.reader.session_exchanges(id) if r.status != 200]
        failed.sort(key=lambda row: -row.id)
        assert [(e["status"], e["session"], e["turn"], e["at"]) for e in shown["errors"]] == [
            (row.status, named[row.session_id or 0], row.turn, row.started_at) for row in failed
        ]
        assert [e["status"] for e in shown["errors"]] == [504, 503, 400, 429, 404, 401]
        remedies = {e["status"]: e["remedy"] for e in shown["errors"]}
        assert "key" in remedies[401] and "upstream" in remedies[404] and "wait" in remedies[429]
        assert "read_timeout" in remedies[504] and len(set(remedies.values())) == 6
        assert shown["database"]["bytes"] == sum(size_of(look.proxy.settings.db + end) for end in ("", "-wal"))
        assert (shown["database"]["path"], shown["database"]["sessions"]) == (look.proxy.settings.db, 7)
        assert shown["started_at"] == look.clock()
        assert shown["health"] == (await look.client.get("/recap/health")).json()


async def test_a_client_that_leaves_says_nothing_of_the_upstream(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    for status in (200, 502):
        await dialogue.send([user("one")], headers=ONE, status=status)
        reply = await dialogue.send([user("one"), said("ok"), user("two")], headers=ONE, finish=False)
        assert reply.plan.exchange is not None
        reply.plan.exchange.finish("client gone", status=None, headers=[], body=None)
        async with looking_after(dialogue) as look:
            problem = (await look.get("health"))["upstream_problem"]
            assert (problem is None) == (status == 200), "what was known before is known still"
        await dialogue.restart()
    await dialogue.close()


async def test_health_names_sessions_that_are_left_alone(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        shown = await look.get("health")
    (alone,) = shown["pass_through"]
    assert alone["session"] == look.names[HOSTILE] and "400" in alone["reason"]
    (error,) = shown["errors"]
    assert error["session"] == look.names[HOSTILE] and "own request was sent instead" in error["remedy"]


async def test_the_page_learns_the_clock_and_the_settings(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path, mode="always", idle_after=7.0, prices={"*": Price(input=1)}) as look:
        shown = await look.get("self")
        assert (shown["now"], shown["mode"], shown["idle_after_s"], shown["priced"]) == (
            look.clock(),
            "always",
            7,
            True,
        )
        assert shown["token"] == look.token


# -- unchanged answers ------------------------------------------------------------------------------------------------


async def test_what_has_not_changed_is_not_sent_again(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        path = f"/recap/api/sessions/{look.names[CODING]}/map"
        first = await look.client.get(path)
        again = await look.client.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert (await look.client.get(path, headers={"if-none-match": '"other"'})).content == first.content
        await look.post(f"sessions/{look.names[CODING]}/blocks/3/mark", {"mark": "pin"})
        changed = await look.client.get(path, headers={"if-none-match": first.headers["etag"]})
        assert changed.status_code == 200 and changed.headers["etag"] != first.headers["etag"]
        assert (await look.client.get("/recap/api/self")).headers["cache-control"] == "no-store"


# -- while the proxy works --------------------------------------------------------------------------------------------


async def test_a_request_that_has_just_been_proxied_is_there(recorded: Recorded, tmp_path: Path) -> None:
    answer = b'{"choices":[{"message":{"role":"assistant","content":"hi"}}],"usage":{"prompt_tokens":42}}'
    json_head = ((b"Content-Type", b"application/json"),)
    async with (
        raw_upstream(answering(response(answer, headers=json_head))) as upstream,
        looking(recorded, tmp_path, upstream=upstream.url) as look,
    ):
        before: Look = look
        assert (await before.get("sessions"))["total"] == 4
        reply = await look.client.post(
            "/v1/chat/completions", json={"model": "m", "messages": [user("new here")], "tools": TOOLS}, headers=HEADERS
        )
        assert reply.content == answer
        await look.conversations.flush()  # type: ignore[attr-defined]
        shown = await look.get("sessions")
        assert shown["total"] == 5
        assert [shown["sessions"][0][n] for n in ("title", "requests", "input_tokens")] == ["new here", 1, 42]


async def test_a_session_that_nobody_answered_is_not_warm_and_says_what_failed(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    for headers, failed in ((ONE, True), ({"x-session-id": "two"}, False)):
        reply = await dialogue.send([user("hi")], headers=headers, finish=False)
        assert reply.plan.exchange is not None
        if failed:
            reply.plan.exchange.finish("failed", status=None, headers=(), body=None, error="no route")
        else:
            dialogue.finish(reply.plan, said("ok"))
    async with looking_after(dialogue) as look:
        shown = (await look.get("sessions"))["sessions"]
        assert [(s["cache"], s["problem"]) for s in shown] == [("warm", None), ("unknown", "no route")]
        for session in shown:
            alone = (await look.get(f"sessions/{session['name']}"))["session"]
            assert alone | session == alone
