"""How an arriving history relates to a known one."""

from hypothesis import given
from hypothesis import strategies as st

from graphstore.blocks import Message
from graphstore.identity import chain_digests, message_digest
from proxy.lineage import Version, changed_in_place, common_prefix, relate


def version(text: str, role: str = "user", call: str | None = None) -> Version:
    answers = (call,) if role == "output" and call else ()
    calls = (call,) if role == "call" and call else ()
    message = Message(role, calls, answers, len(text))  # type: ignore[arg-type]
    return Version(message_digest(f"{role}{call}{text}".encode()), message, lambda: text)


def chain(*texts: str) -> list[bytes]:
    return chain_digests(b"scope", [text.encode() for text in texts])


def test_relations() -> None:
    known = chain("a", "b", "c")
    assert relate(known, chain("a", "b", "c")) == ("retry", 3)
    assert relate(known, chain("a", "b", "c", "d")) == ("extension", 3)
    assert relate(known, chain("a", "b")) == ("undo", 2)
    assert relate(known, chain("a", "b", "x")) == ("diverged", 2)
    assert relate(known, chain("x")) == ("diverged", 0)
    assert relate([], chain("a")) == ("extension", 0)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_binary_search_finds_the_first_difference(left: list[int], right: list[int]) -> None:
    a, b = chain(*map(str, left)), chain(*map(str, right))
    linear = 0
    while linear < min(len(left), len(right)) and left[linear] == right[linear]:
        linear += 1
    assert common_prefix(a, b) == linear


def test_scopes_keep_equal_histories_apart() -> None:
    assert common_prefix(chain_digests(b"one", [b"a"]), chain_digests(b"two", [b"a"])) == 0


CALL = version("", "call", "c1")
RESULT = version("a long file " * 200, "output", "c1")
CLEARED = version("[Old tool result content cleared]", "output", "c1")
DONE = version("done", "assistant")


def test_a_cleared_tool_result_is_pruning() -> None:
    assert changed_in_place([RESULT, DONE], [CLEARED, DONE, version("next")]) == "pruning"


def test_a_reminder_taken_from_an_old_user_message_is_an_amendment() -> None:
    old = version("please fix the parser <system-reminder>plan mode is on</system-reminder>")
    assert changed_in_place([old, CALL, RESULT], [version("please fix the parser"), CALL, RESULT, DONE]) == "amendment"


def test_a_rewritten_request_is_a_branch() -> None:
    old, new = version("please fix the parser of the config file"), version("write documentation instead, thanks")
    assert changed_in_place([old, DONE], [new, DONE, version("next")]) is None


def test_an_edited_last_message_is_a_branch_even_if_it_reads_the_same() -> None:
    old, new = version("please fix the parser"), version("please fix the parsers")
    assert changed_in_place([old], [new]) is None


def test_a_moved_message_is_not_an_amendment() -> None:
    assert changed_in_place([RESULT, DONE], [DONE, RESULT, version("next")]) is None
    assert changed_in_place([RESULT], [version("other", "output", "c2"), version("next")]) is None
