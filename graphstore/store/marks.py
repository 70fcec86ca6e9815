"""Marks in the archive: a person's word on single blocks, obeyed at the next cold boundary.

Whoever marks is another process than the proxy, or another thread of it: SQLite makes one transaction wait for the
other.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.dialects.sqlite import insert as upsert

from graphstore.records import Fork, Mark, Resent
from graphstore.store.engine import explained, writer_engine
from graphstore.store.schema import marks


def load_marks(db: Connection, session_id: int) -> dict[int, Mark]:
    """Ordinal -> mark."""
    query = select(marks.c.ordinal, marks.c.mark).where(marks.c.session_id == session_id)
    return {row.ordinal: row.mark for row in db.execute(query)}


def set_mark(path: Path | str, session_id: int, ordinal: int, mark: Mark | None, *, clock: Callable[[], float]) -> None:
    """Pin or mute a block, or take its mark away. The archive must be there (`archive.open_reader` sees to it).

    Raises `ArchiveUnavailable`.
    """
    engine = writer_engine(Path(path))
    try:
        with explained(), engine.begin() as db:
            if mark is None:
                db.execute(delete(marks).where(marks.c.session_id == session_id, marks.c.ordinal == ordinal))
            else:
                row = {"session_id": session_id, "ordinal": ordinal, "mark": mark, "made_at": clock()}
                db.execute(
                    upsert(marks)
                    .values(row)
                    .on_conflict_do_update(index_elements=["session_id", "ordinal"], set_={"mark": mark})
                )
    finally:
        engine.dispose()


def inherit_marks(db: Connection, fork: Fork) -> None:
    """Give a new session the marks of its parent on the blocks that both share. For its first transaction."""
    query = select(marks).where(marks.c.session_id == fork.parent_id)
    shared = [dict(row) for row in db.execute(query).mappings() if row["ordinal"] in fork.ordinals]
    if shared:
        db.execute(insert(marks), [row | {"session_id": fork.session_id} for row in shared])


def carry_marks(db: Connection, blocks: Iterable[Resent]) -> None:
    """Give blocks the marks of those whose messages they hold; one that has a mark keeps it."""
    for block in blocks:
        place = (marks.c.session_id == block.session_id, marks.c.ordinal == block.former)
        former = db.execute(select(marks).where(*place)).mappings().first()
        if former is not None:
            db.execute(upsert(marks).values(dict(former) | {"ordinal": block.ordinal}).on_conflict_do_nothing())
