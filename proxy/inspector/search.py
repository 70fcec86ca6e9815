"""Where in the archived sessions a text stands, or stood before the client pruned or amended it.

Reads every message, the newest session first, for so long.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate

from graphstore.store.reader import Reader
from proxy.dialects import stored_dialect
from proxy.inspector.blocks import readable
from proxy.inspector.sessions import Value

FOUND_MAX = 50
AROUND_CHARS = 60  # of the text on each side of what was found
PIECE_CHARS = 1 << 16
SECONDS_MAX = 4.0  # an answer that somebody waits for; what has not been read by then is said


def search_text(reader: Reader, wanted: str, *, monotonic: Callable[[], float]) -> Value:
    """Case-insensitive. `complete` is false when time or room ran out before the oldest session."""
    deadline, needle = monotonic() + SECONDS_MAX, wanted.casefold()
    found: list[Value] = []
    seen: set[int] = set()  # nodes: branches share their beginnings
    sessions = reader.list_sessions() if needle else []
    for position, session in enumerate(sessions):
        dialect = stored_dialect(session.dialect)
        places = reader.block_messages(session.id)
        for block, _ in reversed(reader.load_blocks(session.id)):
            if len(found) >= FOUND_MAX or monotonic() > deadline:
                return {"found": found, "complete": False, "sessions_read": position, "sessions": len(sessions)}
            members = places.get(block.ordinal, {})
            fresh = dict.fromkeys(message for node, message in members.items() if node not in seen)
            seen.update(members)
            contents = reader.message_contents(fresh)
            for message in filter(contents.__contains__, fresh):  # a session may be removed while this is read
                text = readable(dialect, contents[message])
                if (place := _find(text, needle)) is not None:
                    found.append(
                        {
                            "session": session.name,
                            "title": session.title,
                            "ordinal": block.ordinal,
                            "kind": block.kind,
                            "excerpt": text[max(0, place.start - AROUND_CHARS) : place.stop + AROUND_CHARS],
                        }
                    )
                    break
    return {"found": found, "complete": True, "sessions_read": len(sessions), "sessions": len(sessions)}


def _find(text: str, needle: str) -> slice | None:
    """Where in the text a folded needle stands. Piece by piece: folding a text of many megabytes at once would hold up
    every other thread. A folded text is never shorter than the text, so a needle reaches over no more characters than
    it has itself."""
    for start in range(0, len(text), PIECE_CHARS):
        place = _find_in_piece(text[start : start + PIECE_CHARS + len(needle)], needle)
        if place is not None:
            return slice(start + place.start, start + place.stop)
    return None


def _find_in_piece(text: str, needle: str) -> slice | None:
    """Folding may lengthen a text (ß -> ss), and then its places shift."""
    folded = text.casefold()
    if (at := folded.find(needle)) < 0:
        return None
    end = at + len(needle)
    if len(folded) == len(text):
        return slice(at, end)
    ends = list(accumulate(len(character.casefold()) for character in text))  # of each character, in the folded text
    return slice(bisect_right(ends, at), bisect_left(ends, end) + 1)
