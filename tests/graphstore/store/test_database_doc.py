"""docs/database.md runs: each of its queries gives exactly the output shown below it, on the session built here."""

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from graphstore.records import Batch, BlockRow, SelectionRow, VerdictRow
from graphstore.store import schema
from tests.graphstore.store.conftest import open_archive
from tests.graphstore.store.history import START, History, exchange_row, session_row

DOC = (Path(__file__).parents[3] / "docs" / "database.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```sql\n(.*?)```\n\n```\n(.*?)```", DOC, flags=re.S)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three turns; before the third the user was away for 86 minutes."""
    path = tmp_path_factory.mktemp("doc") / "recap.db"
    words = (12, 1300, 600, 120, 9)
    labels = ("Fix the parser for dates", "read src/dates.py", "edit src/dates.py", "The parser takes ISO dates", "Now")
    kinds = ("user", "tools", "tools", "assistant", "user")
    history = History()
    batch = history.grow(*(f"{i} " * count for i, count in enumerate(words)), exchange=False)
    blocks = tuple(
        replace(block, kind=kind, label=label, cost=count * 4)
        for block, kind, label, count in zip(batch.blocks, kinds, labels, words, strict=True)
    )
    session = session_row(
        head_node_id=history.head, turns=3, selection_id=1, last_active_at=START + 5225, title=labels[0]
    )
    common = {"status": 200, "ending": "complete", "head_node_id": history.head, "chars_total": 8164}
    exchanges = (
        exchange_row(1, started_at=START + 1, turn=1, outcome="new", boundary="none", reason="no history yet",
                     blocks_total=1, chars_sent=8164, input_tokens=2500, cached_tokens=0, **common),
        exchange_row(2, started_at=START + 61, turn=2, reason="idle for 60 s, cold after 3600 s", blocks_total=3,
                     chars_sent=8164, input_tokens=4000, cached_tokens=3900, **common),
        exchange_row(3, started_at=START + 5221, turn=3, boundary="cold", reason="idle for 5160 s", blocks_total=5,
                     blocks_left_out=2, chars_sent=2484, selection_id=1, input_tokens=900, cached_tokens=0, **common),
    )  # fmt: skip
    selection = SelectionRow(
        id=1, session_id=1, exchange_id=3, turn=3, created_at=START + 5221, applied=True, reason="idle for 5160 s",
        parameters="{}", budget=812, cost=2448, protected_cost=2448, total_cost=8128, notice=True,
        verdicts=(
            VerdictRow(0, True, "protected", "user"),
            VerdictRow(1, False, "left out", "did not fit", score=0.31, rank=1),
            VerdictRow(2, True, "protected", "latest edit of src/dates.py"),
            VerdictRow(3, False, "left out", "did not fit", score=-0.62, rank=2),
        ),
    )  # fmt: skip
    whole: Batch = replace(
        batch, sessions=(session,), blocks=tuple(map(_as_block, blocks)), exchanges=exchanges, selections=(selection,)
    )
    with open_archive(path) as archive:
        archive.writer.submit(whole, durable=True).result(30)
    return path


def _as_block(block: BlockRow) -> BlockRow:
    return replace(block, edits=("src/dates.py",) if block.label.startswith("edit") else ())


def render(path: Path, query: str) -> str:
    """As `sqlite3 -header -column` prints."""
    with closing(sqlite3.connect(path)) as db:
        cursor = db.execute(query)
        names = [column[0] for column in cursor.description]
        rows = [["" if value is None else str(value) for value in row] for row in cursor]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = [names, ["-" * width for width in widths], *rows]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def test_there_are_five_questions() -> None:
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize(("query", "output"), EXAMPLES)
def test_a_query_of_the_document_gives_the_output_shown(example: Path, query: str, output: str) -> None:
    assert render(example, query) == output


def test_every_table_and_view_is_described(example: Path) -> None:
    with closing(sqlite3.connect(example)) as db:
        views = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'view'")}
    assert views == set(re.findall(r"^\| `(v_\w+)`", DOC, flags=re.M))
    for table in schema.metadata.tables:
        assert f"**{table}**" in DOC
