"""A session as rows of blocks: what stood in each turn, what attention it got, what was sent."""

from dataclasses import replace

from graphstore.identity import row_id
from graphstore.records import Batch, BlockRow
from graphstore.store.archive import Archive
from graphstore.store.marks import set_mark
from graphstore.store.session_map import session_map
from tests.graphstore.store.history import START, History, exchange_row, selection_row, session_row
from tests.observed import observe, replay_of

DEADLINE_S = 30


def two_turns(archive: Archive) -> None:
    """The second turn begins at a cold boundary, at which block 1 is left out."""
    history = History()
    archive.writer.submit(history.grow("one", "two", exchange=False)).result(DEADLINE_S)
    first = exchange_row(1, head_node_id=history.head)
    archive.writer.submit(Batch(exchanges=(first,))).result(DEADLINE_S)
    archive.writer.submit(history.grow("three", exchange=False)).result(DEADLINE_S)
    made = selection_row(1, exchange_id=2, left_out=(1,))
    second = exchange_row(
        2, head_node_id=history.head, boundary="cold", reason="idle for 9 s", selection_id=1, blocks_left_out=1
    )
    side = exchange_row(3, turn=2, step=1, outcome="side", head_node_id=None)
    archive.writer.submit(Batch(exchanges=(second, side), selections=(made,))).result(DEADLINE_S)


def test_each_turn_shows_what_stood_in_it_and_what_became_of_it(archive: Archive) -> None:
    two_turns(archive)
    observe(archive.path, 1, replay_of({0: 0.5, 2: 0.25}), turn=2, exchange_id=2)
    set_mark(archive.path, 1, 1, "pin", clock=lambda: START)
    shown = session_map(archive.reader, 1)
    first, second = shown.rows
    assert (first.turn, first.reason, second.turn, second.reason) == (1, None, 2, "idle for 9 s")
    assert [(s.block.ordinal, s.density, s.is_sent) for s in shown.segments(first)] == [
        (0, None, True),
        (1, None, True),
    ]
    assert [(s.block.ordinal, s.density, s.is_sent) for s in shown.segments(second)] == [
        (0, 0.5, True), (1, None, False), (2, 0.25, True),
    ]  # fmt: skip
    assert shown.blocks[1].outline == "pin" and shown.blocks[1].mark == "pin"
    assert all(block.tokens > 0 for block in shown.blocks.values())


def test_a_turn_has_the_sizes_of_its_own_history(archive: Archive) -> None:
    """A call whose result had not come; the same with its result; and after the client pruned that."""
    whole, pruned = History(), History()
    call = BlockRow(1, 1, "tools", 0, ())
    for history, texts, id in (
        (whole, ("ask", "a call"), 1),
        (whole, ("its long long result", "said"), 2),
        (pruned, ("ask", "a call", "[gone]", "said", "again"), 3),
    ):
        batch = history.grow(*texts, exchange=False)
        nodes = tuple(map(row_id, history.chain))
        blocks = [BlockRow(1, 0, "user", 0, nodes[:1]), replace(call, node_ids=nodes[1:3])]
        blocks += [BlockRow(1, ordinal, "user", 0, (node,)) for ordinal, node in enumerate(nodes[3:], 2)]
        row = exchange_row(id, head_node_id=history.head)
        archive.writer.submit(replace(batch, blocks=tuple(blocks), exchanges=(row,))).result(DEADLINE_S)
    shown = session_map(archive.reader, 1)
    assert [[segment.tokens for segment in shown.segments(row)] for row in shown.rows] == [
        [1, 2], [1, 6, 1], [1, 3, 1, 1],
    ]  # fmt: skip
    assert shown.blocks[1].tokens == 3 and [dict(row.sizes) for row in shown.rows] == [{1: 2}, {1: 6}, {}]


def test_a_session_without_history_has_no_rows(archive: Archive) -> None:
    archive.writer.submit(Batch(sessions=(session_row(),))).result(DEADLINE_S)
    assert session_map(archive.reader, 1).rows == ()
