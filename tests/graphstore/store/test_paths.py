"""Many histories from few walks: each one is what a walk of its own would have found."""

import pytest
from sqlalchemy import event, select

from graphstore.identity import chain_digests, row_id
from graphstore.store.archive import Archive
from graphstore.store.paths import LOOKUP_MAX, Path, load_paths
from graphstore.store.schema import nodes
from tests.graphstore.store.history import SCOPE, History, message

DEADLINE_S = 30
UNKNOWN = 4711  # no node has this id


def ids(*texts: str) -> list[int]:
    """The nodes of a history of these messages, recomputed from their hashes."""
    return [row_id(link) for link in chain_digests(SCOPE, [message(text).digest for text in texts])]


def store(archive: Archive, *texts: str, session_id: int = 1) -> list[int]:
    archive.writer.submit(History(session_id).grow(*texts, exchange=False)).result(DEADLINE_S)
    return ids(*texts)


def paths(archive: Archive, *heads: int) -> dict[int, Path]:
    with archive.reader.snapshot() as db:
        return load_paths(db, heads)


def test_a_line_is_walked_once_and_every_head_on_it_sees_its_own_beginning(archive: Archive) -> None:
    a, b, c = store(archive, "one", "two words", "and three words")
    found = paths(archive, a, c, b)
    assert {head: (path.nodes, path.tokens) for head, path in found.items()} == {
        a: ([a], 1),
        b: ([a, b], 3),
        c: ([a, b, c], 6),
    }
    assert found[a].walk is found[b].walk is found[c].walk


def test_branches_share_their_beginning_and_nothing_else(archive: Archive) -> None:
    left = store(archive, "one", "two words", "left it goes on")
    right = store(archive, "one", "two words", "right", "and on", session_id=2)
    assert left[:2] == right[:2]
    found = paths(archive, left[-1], right[-1], left[1])
    assert (found[left[-1]].nodes, found[left[-1]].tokens) == (left, 7)
    assert (found[right[-1]].nodes, found[right[-1]].tokens) == (right, 6)
    assert (found[left[1]].nodes, found[left[1]].tokens) == (left[:2], 3)


def test_after_an_undo_the_head_stands_before_what_was_taken_back(archive: Archive) -> None:
    """The deeper history is still there, and must not lengthen the shorter one or its sums."""
    undone = store(archive, "one", "two words", "taken back again")
    history = store(archive, "one", "said instead")
    found = paths(archive, undone[-1], history[-1], history[0])
    assert found[history[0]].nodes == [undone[0]]
    assert (found[history[-1]].nodes, found[history[-1]].tokens) == (history, 3)
    assert found[history[0]].tokens_of(undone) == 1, "of these nodes only the first stands in the history"
    assert found[history[-1]].tokens_of(undone) == 1
    assert found[undone[-1]].tokens_of(undone[1:]) == 5


def test_an_unknown_head_has_no_history_and_disturbs_none(archive: Archive) -> None:
    a, b = store(archive, "one", "two words")
    assert {head: path.nodes for head, path in paths(archive, UNKNOWN, b).items()} == {b: [a, b]}
    assert paths(archive, UNKNOWN) == paths(archive) == {}
    assert paths(archive, b)[b].tokens_of([UNKNOWN]) == 0


@pytest.fixture
def tree(archive: Archive) -> Archive:
    """A trunk with branches at every second message, some of which branch again."""
    trunk = [f"trunk {'word ' * i}{i}" for i in range(12)]
    store(archive, *trunk)
    for i in range(1, 12, 2):
        branch = [*trunk[:i], f"branch {i}", f"{i} goes on"]
        store(archive, *branch, session_id=i + 1)
        store(archive, *branch[:-1], f"{i} goes elsewhere", session_id=i + 100)
    return archive


def test_every_head_of_a_tree_has_the_history_that_the_reader_finds(tree: Archive) -> None:
    with tree.reader.snapshot() as db:
        heads = list(db.scalars(select(nodes.c.id)))
    assert len(heads) == 12 + 6 * 3
    found = paths(tree, *heads)
    for head in heads:
        expected = [node for node, _, _, _ in tree.reader.load_path(head)]
        texts = tree.reader.path_contents(head)
        assert found[head].nodes == expected
        assert found[head].tokens == sum(len(text.decode().split()) for text in texts)
        assert found[head].tokens_of(expected[1:]) == found[head].tokens - len(texts[0].decode().split())


def test_more_heads_than_one_query_takes_are_asked_for_in_pieces_and_walked_once(archive: Archive) -> None:
    line = store(archive, *(f"message {i}" for i in range(LOOKUP_MAX + 2)))
    statements: list[str] = []
    with archive.reader.snapshot() as db:
        event.listen(db.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        found = load_paths(db, line)
    assert [found[head].tokens for head in line] == [2 * i for i in range(1, len(line) + 1)]
    assert sum("RECURSIVE" in statement for statement in statements) == 1
