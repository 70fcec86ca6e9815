"""Search in what was said: whoever looks for a word finds the block, or reads that the search has given up."""

from pathlib import Path

import pytest

from graphstore.store.reader import Reader
from proxy.inspector import search
from proxy.inspector.search import AROUND_CHARS, FOUND_MAX, SECONDS_MAX, search_text
from tests.inspector.conftest import Recorded
from tests.inspector.looking import looking, looking_after
from tests.inspector.world import HOSTILE
from tests.proxy.dialogue import Dialogue, Message, read, said, user

CODING, AIRLINE = "entire-3fb30de16616", "tau-airline-33"
SHARP = "Straße " * 200  # folds to more characters than it has
ONE, OTHER = {"x-session-id": "one"}, {"x-session-id": "other"}


async def spoken(folder: Path, *histories: list[Message]) -> Dialogue:
    """A session for each history, whose last message is its newest request."""
    dialogue = Dialogue(folder)
    for number, history in enumerate(histories):
        await dialogue.send(history, headers={"x-session-id": f"session {number}"})
    return dialogue


async def test_text_is_found_where_it_stands_whatever_its_case(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        upper = await look.get("search", q="  OPENREPOSITORY ")
        assert upper == await look.get("search", q="openRepository")
        blocks = {f["ordinal"]: f["excerpt"] for f in upper["found"] if f["session"] == look.names[CODING]}
        session = look.session(CODING)
        stored = {b.ordinal: b.node_ids for b, _ in look.reader.load_blocks(session.id)}
        expected = {
            ordinal
            for ordinal, nodes in stored.items()
            if b"openrepository" in b"".join(look.reader.node_contents(nodes)).lower()
        }
        assert blocks.keys() == expected and len(expected) > 1
        assert all("openrepository" in excerpt.lower() for excerpt in blocks.values())
        assert all(len(excerpt) <= 2 * AROUND_CHARS + len("openRepository") for excerpt in blocks.values())
        assert {f["title"] for f in upper["found"] if f["session"] == session.name} == {session.title}


async def test_what_json_escapes_is_found_as_it_reads(recorded: Recorded, tmp_path: Path) -> None:
    """In the archive a quote is \\" and a letter may be \\u5bfc: a search of the raw bytes would miss both."""
    async with looking(recorded, tmp_path) as look:
        markup = await look.get("search", q=HOSTILE)
        assert {f["session"] for f in markup["found"]} == {look.names[HOSTILE]}
        assert {f["ordinal"] for f in markup["found"]} == {0, 1, 2, 3}
        chinese = await look.get("search", q="导入策略")
        assert chinese["found"] and all("导入策略" in f["excerpt"] for f in chinese["found"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\ttab, a \"quote\" and a \\ backslash", '"quote" and a \\'),
        ("first line\nsecond line", "line\nsecond"),
        ("Ünïcödé", "üNÏCÖDÉ"),
        ("emoji 🦀 crab", "🦀"),
        ("die Straße", "STRASSE"),
        (SHARP + "needle" + SHARP, "Needle"),
        ("half a pair \ud83d here", "here"),
        ("50% of it_all", "% OF IT_"),
    ],
)  # fmt: skip
async def test_the_excerpt_shows_what_was_found(text: str, wanted: str, tmp_path: Path) -> None:
    """Folding makes ß two letters: places in the folded text are not places in the text."""
    async with looking_after(await spoken(tmp_path, [user(text)])) as look:
        (found,) = (await look.get("search", q=wanted))["found"]
    assert wanted.casefold() in found["excerpt"].casefold()
    assert len(found["excerpt"]) <= 2 * AROUND_CHARS + len(wanted)


def test_a_needle_is_found_across_the_pieces_of_a_long_text() -> None:
    """A text is read in pieces; one long letter in it must not cost a number for each of its characters."""
    needle = "needle"
    for at in (*range(search.PIECE_CHARS - 8, search.PIECE_CHARS + 3), 3 * search.PIECE_CHARS):
        for filler in ("a", "ß"):
            text = filler * at + "NEEDLE" + filler * 10
            place = search._find(text, needle)
            assert place is not None and text[place] == "NEEDLE"
    assert search._find("ß" * search.PIECE_CHARS * 2, needle) is None


async def test_calls_are_found_by_name_and_argument(tmp_path: Path) -> None:
    history = [user("look"), *read("src/strange_name.py", "nothing"), user("next")]
    async with looking_after(await spoken(tmp_path, history)) as look:
        (found,) = (await look.get("search", q="STRANGE_NAME"))["found"]
        assert (found["ordinal"], found["kind"]) == (1, "tools") and "src/strange_name.py" in found["excerpt"]
        assert (await look.get("search", q="tool_call_id"))["found"] == [], "what only the wire says is no text"


async def test_the_newest_session_comes_first_and_a_shared_beginning_once(tmp_path: Path) -> None:
    """A branch holds its parent's messages too: one place for each would drown the others."""
    dialogue = Dialogue(tmp_path)
    start = [user("where is xylophone?"), said("here")]
    await dialogue.send([*start, user("older")], headers=ONE)
    await dialogue.send([user("another xylophone")], headers=OTHER)
    await dialogue.send([*start, user("newer xylophone")], headers=ONE, after_s=60)
    async with looking_after(dialogue) as look:
        names = [row.name for row in look.reader.list_sessions()]
        found = (await look.get("search", q="xylophone"))["found"]
    assert len(names) == 3 and names[0] != names[2]
    assert [(f["session"], f["excerpt"]) for f in found] == [
        (names[0], "newer xylophone"),
        (names[0], "where is xylophone?"),
        (names[1], "another xylophone"),
    ]


async def test_nothing_is_found_for_nothing(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        for q in ({}, {"q": ""}, {"q": "   "}):
            assert await look.get("search", **q) == {
                "found": [], "complete": True, "sessions_read": 0, "sessions": 0,
            }  # fmt: skip
        absent = await look.get("search", q="no such words anywhere")
        sessions = len(look.reader.list_sessions())
        assert absent == {"found": [], "complete": True, "sessions_read": sessions, "sessions": sessions}


async def test_it_gives_up_at_its_deadline_and_says_so(recorded: Recorded, tmp_path: Path) -> None:
    async with looking(recorded, tmp_path) as look:
        whole = search_text(look.reader, "the", monotonic=lambda: 0.0)
        newest = look.reader.list_sessions()[0]
        blocks = len(look.reader.load_blocks(newest.id))
        times = [0.0] + [SECONDS_MAX] * blocks + [SECONDS_MAX + 0.001]  # over when the second session begins
        cut = search_text(look.reader, "the", monotonic=iter(times).__next__)
        none = search_text(look.reader, "the", monotonic=iter([0.0, SECONDS_MAX + 0.001]).__next__)
    sessions = len(recorded.names) + 1  # the side request has no id
    assert whole["sessions"] == cut["sessions"] == none["sessions"] == sessions
    assert (cut["complete"], cut["sessions_read"]) == (False, 1)
    assert (none["complete"], none["sessions_read"], none["found"]) == (False, 0, [])
    assert {f["session"] for f in cut["found"]} <= {newest.name}  # type: ignore[attr-defined]


async def test_it_stops_when_there_is_enough_and_says_so(tmp_path: Path) -> None:
    history = [m for i in range(FOUND_MAX + 1) for m in (user(f"word {i}"), said("ok"))]
    async with looking_after(await spoken(tmp_path, [user("word, first")], history[:-1])) as look:
        found = await look.get("search", q="word")
    assert (len(found["found"]), found["complete"], found["sessions_read"]) == (FOUND_MAX, False, 0)
    assert "word 50" in found["found"][0]["excerpt"], "the newest first"


async def test_a_session_that_is_removed_in_between_is_passed_over(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with looking(recorded, tmp_path) as look:
        monkeypatch.setattr(Reader, "message_contents", lambda reader, ids: {})
        answer = await look.get("search", q="openRepository")
    assert answer["complete"] and answer["found"] == []
