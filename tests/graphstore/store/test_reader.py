"""What was written comes back as the same values, by every way that the proxy and the commands ask."""

import threading
from dataclasses import replace

import pytest

from graphstore.identity import message_digest, row_id
from graphstore.records import Batch, BlockRow, EdgeRow, NodeState
from graphstore.store.archive import Archive, open_reader
from graphstore.store.reader import AmbiguousSession
from tests.graphstore.store.history import SCOPE, START, History, exchange_row, message, selection_row, session_row
from tests.observed import plant

DEADLINE_S = 30


def write(archive: Archive, *batches: Batch) -> None:
    for batch in batches:
        archive.writer.submit(batch, durable=True).result(DEADLINE_S)


def test_a_history_comes_back_byte_for_byte_and_in_order(archive: Archive) -> None:
    history = History()
    texts = ["first", "é and \x00", "x" * 5000, "", "汉字 " * 400]
    write(archive, history.grow(*texts))
    assert archive.reader.path_contents(history.head) == [text.encode() for text in texts]
    path = archive.reader.load_path(history.head)
    assert [digest for _, digest, _, _ in path] == history.chain
    assert [digest for *_, digest in path] == [message(text).digest for text in texts]


def test_digests_find_what_is_stored_and_nothing_else(archive: Archive) -> None:
    history = History()
    write(archive, history.grow(*(f"message {i}" for i in range(1200))))  # more than one IN list
    found = archive.reader.find_nodes([*history.chain, b"?" * 16])
    assert [found[link][:2] for link in history.chain] == [(row_id(link), i) for i, link in enumerate(history.chain)]
    assert len(found) == 1200
    stored = message("message 3")
    assert archive.reader.find_messages([stored.digest, message_digest(b"never")]) == {stored.digest: stored.id}
    assert archive.reader.message_contents([stored.id, 5]) == {stored.id: b"message 3"}


def test_sessions_are_found_by_every_key(archive: Archive) -> None:
    one, two = History(1), History(2)
    write(archive, one.grow("a", "b", exchange=False), two.grow("a", "c", "d", exchange=False))
    write(archive, Batch(sessions=(session_row(3, scope=b"another scope...", last_active_at=START + 99),)))
    reader = archive.reader
    names = lambda rows: [row.id for row in rows]  # noqa: E731
    assert reader.load_session(1) == session_row(1, head_node_id=one.head, turns=1, last_active_at=START + 1)
    assert names(reader.list_sessions()) == [3, 2, 1]
    assert names(reader.recent_sessions(SCOPE, 1)) == [2]
    assert names(reader.sessions_by_client_id(SCOPE, "ses_1")) == [1]
    assert names(reader.sessions_by_client_id(b"another scope...", "ses_1")) == []
    assert names(reader.sessions_by_heads([one.head, 17])) == [1]
    assert names(reader.sessions_through([row_id(one.chain[0])])) == [2, 1]
    assert names(reader.sessions_through([row_id(two.chain[1])])) == [2]


def test_a_session_is_loaded_by_an_unambiguous_beginning_of_its_name(archive: Archive) -> None:
    rows = (session_row(1, name="s-abc"), session_row(2, name="s-abcd"), session_row(3, name="s-x_z"))
    write(archive, Batch(sessions=rows))
    reader = archive.reader
    assert reader.load_session("s-abc") == rows[0]
    assert reader.load_session("s-x") == rows[2]
    assert reader.load_session("s-x_") == rows[2]
    assert reader.load_session("s-_") is None  # a blank of LIKE is a letter here
    assert reader.load_session(9) is None
    with pytest.raises(AmbiguousSession, match="s-abc.*type more") as raised:
        reader.load_session("s-a")
    assert set(raised.value.names) == {"s-abc", "s-abcd"}


def test_numbers_go_on_where_the_last_run_stopped(archive: Archive) -> None:
    assert archive.reader.next_ids().exchanges == 1
    write(archive, History(7).grow("a"), Batch(selections=(selection_row(5, 7),)))
    ids = archive.reader.next_ids()
    assert (ids.sessions, ids.exchanges, ids.selections) == (8, 2, 6)


def test_blocks_stand_on_the_present_path_and_keep_their_earlier_versions(archive: Archive) -> None:
    """A client that prunes an old result changes every later position of the chain; the blocks are the same."""
    before = History()
    write(archive, before.grow("question", "long result here", "answer", exchange=False))
    after = History()
    write(archive, after.grow("question", "[gone]", "answer", exchange=False))
    loaded = [block for block, _ in archive.reader.load_blocks(1)]
    assert [block.node_ids for block in loaded] == [(row_id(link),) for link in after.chain]
    assert archive.reader.block_tokens(1) == {0: 1, 1: 1, 2: 1}
    assert [row.id for row in archive.reader.sessions_through([before.head])] == [1]


def test_blocks_of_an_earlier_request_are_those_of_its_own_path(archive: Archive) -> None:
    before, after = History(), History()
    write(archive, before.grow("question", "long result here", "answer"))
    write(archive, after.grow("question", "[gone]", "answer", exchange=False))
    then = [block.node_ids for block, _ in archive.reader.load_blocks(1, before.head)]
    assert then == [(row_id(link),) for link in before.chain]
    assert archive.reader.block_tokens(1, before.head)[1] == 3
    assert len(archive.reader.block_messages(1)[1]) == 2


def test_a_block_that_stands_no_longer_is_that_of_the_last_request_that_it_stood_in(archive: Archive) -> None:
    """Not all of its versions at once: its size is that of one."""
    long, short, back = History(), History(), History()
    write(archive, long.grow("question", "long result here", "answer"))
    short.exchanges = long.exchanges
    write(archive, short.grow("question", "[gone]", "answer"))
    write(archive, back.grow("question", exchange=False))
    assert archive.reader.load_blocks(1)[1][0].node_ids == (row_id(short.chain[1]),)
    assert archive.reader.block_tokens(1)[1] == 1


def test_a_block_that_the_client_went_back_before_keeps_its_messages(archive: Archive) -> None:
    history = History()
    write(archive, history.grow("one", "two"))
    write(archive, Batch(sessions=(session_row(head_node_id=row_id(history.chain[0])),)))
    assert [block.node_ids for block, _ in archive.reader.load_blocks(1)] == [
        (row_id(history.chain[0]),),
        (row_id(history.chain[1]),),
    ]


def test_blocks_come_with_edits_labels_and_state(archive: Archive) -> None:
    history = History()
    write(archive, history.grow("one"))
    block = BlockRow(1, 0, "tools", 12, (history.head,), ("src/a.py", "ü.md"), "edit src/a.py")
    write(archive, Batch(blocks=(block,)))
    assert archive.reader.load_blocks(1) == [(block, NodeState(0, 0.0, False, False))]


def test_edges_come_in_the_order_of_their_first_sight(archive: Archive) -> None:
    write(archive, History().grow("a", "b", "c"))
    edges = [EdgeRow(1, 2, 0.5, 0), EdgeRow(0, 2, 0.25, 1), EdgeRow(0, 1, 0.125, 2)]
    plant(archive.path, 1, [], edges[::-1])
    assert archive.reader.load_edges(1) == edges


def test_exchanges_and_their_answers(archive: Archive) -> None:
    history = History()
    rows = [exchange_row(1, cached_tokens=5, usage='{"a": 1}'), exchange_row(2, ending="complete", status=200)]
    write(archive, history.grow("a", exchange=False), Batch(exchanges=tuple(rows)))
    history.exchanges = 1
    write(archive, history.answer("first answer"))
    history.exchanges = 2
    write(archive, history.answer("second answer"), Batch(exchanges=(exchange_row(3, session_id=None),)))
    reader = archive.reader
    assert reader.session_exchanges(1) == rows
    assert reader.last_exchange(1) == rows[1]
    assert reader.last_exchange(2) is None
    assert reader.answers_of([1, 2, 3]) == {1: (message("first answer").id,), 2: (message("second answer").id,)}
    newest = [(1, b"second answer"), (1, b"first answer")]
    assert reader.recent_answer_contents(5, session_ids=[1]) == newest
    assert reader.recent_answer_contents(1, scope=SCOPE) == newest[:1]
    assert reader.recent_answer_contents(5, scope=b"another scope...") == []


def test_a_selection_comes_back_with_every_verdict(archive: Archive) -> None:
    row = selection_row(left_out=[1, 2])
    write(archive, replace(History().grow("a", "b", "c"), selections=(row,)))
    assert archive.reader.load_selection(1) == row
    assert archive.reader.load_selection(2) is None


def test_many_threads_and_another_reader_read_while_batches_are_written(archive: Archive) -> None:
    """Other proxies report `database is locked` as soon as a second session reads while one writes."""
    history = History()
    write(archive, history.grow("start"))
    errors: list[BaseException] = []
    lengths: list[int] = []

    def look() -> None:
        try:
            with open_reader(archive.path) as outside:
                for reader in (archive.reader, outside) * 3:
                    row = reader.load_session(1)
                    assert row is not None and row.head_node_id is not None
                    lengths.append(len(reader.path_contents(row.head_node_id)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(32)]
    for thread in threads:
        thread.start()
    written = [archive.writer.submit(history.grow(f"message {i}"), durable=i % 10 == 0) for i in range(200)]
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [future.result(DEADLINE_S) for future in written] == [None] * 200
    assert errors == []
    assert archive.writer.failure is None
    assert len(lengths) == 32 * 6
    assert len(archive.reader.path_contents(history.head)) == 201
