"""An answer's beginning, in any cut: nothing is lost, nothing waits that may pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.opening import Opening, spoken

CREATED = b'event: response.created\r\ndata: {"type":"response.created","response":{"error":null}}\r\n\r\n'
WAITS = b'data: {"type":"response.in_progress"}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
SAID = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
COMMENT = b": waiting\n\n"
REFUSAL = b'data: {"error":{"message":"prompt is too long"}}\n\n'
SILENT = [b"", CREATED, CREATED + WAITS, ROLE, COMMENT, COMMENT + ROLE]

beginnings = st.sampled_from(SILENT)
cuts = st.lists(st.integers(1, 40), max_size=12)


def fed(opening: Opening, body: bytes, cuts: list[int]) -> bytes:
    """What passes, until nothing more may be fed."""
    passed, start = b"", 0
    for length in [*cuts, len(body)]:
        passed += opening.feed(body[start : start + length])
        start += length
        if opening.is_over or opening.refusal is not None:
            return passed + body[start:] if opening.is_over else passed
    return passed


@given(beginnings, cuts)
def test_what_says_something_passes_whole_in_any_cut(begin: bytes, cuts: list[int]) -> None:
    opening = Opening()
    assert fed(opening, begin + SAID, cuts) == begin + SAID
    assert opening.is_over and opening.refusal is None


@given(beginnings, cuts)
def test_an_error_never_passes_and_is_there_to_go_out_after_all(begin: bytes, cuts: list[int]) -> None:
    opening = Opening()
    passed = fed(opening, begin + REFUSAL, cuts)
    assert opening.refusal is not None and b'error":{' not in passed
    assert begin.startswith(passed.rstrip(b"\r\n")) and (begin + REFUSAL).startswith(passed + opening.release())
    assert opening.has_begun <= (begin not in (b"", COMMENT))


@pytest.mark.parametrize("begin", SILENT[1:])
def test_what_says_nothing_waits_for_no_more(begin: bytes) -> None:
    opening = Opening()
    assert opening.feed(begin) == begin
    assert not opening.is_over and opening.has_begun == (begin != COMMENT)


@pytest.mark.parametrize("begin", SILENT)
def test_where_all_is_kept_nothing_passes_before_it_is_over(begin: bytes) -> None:
    opening = Opening(keeps_all=True)
    assert opening.feed(begin) == b"" and not opening.has_begun
    assert opening.feed(SAID) == begin + SAID


def test_a_comment_behind_a_beginning_ends_the_watch() -> None:
    for events in (ROLE + COMMENT,), (ROLE, COMMENT):
        opening = Opening()
        assert b"".join(map(opening.feed, events)) == ROLE + COMMENT
        assert opening.is_over
    opening = Opening()
    opening.feed(COMMENT)
    opening.feed(ROLE)
    assert not opening.is_over, "a comment before it does not"


def test_an_error_as_json_is_held_until_it_is_whole() -> None:
    opening = Opening()
    assert opening.feed(b'\n\n{"error": {"message": "prompt is') == b""
    assert opening.feed(b' too long"}}') == b"" and opening.refusal is not None


@pytest.mark.parametrize("begin", SILENT)
def test_another_answer_goes_on_with_what_it_says(begin: bytes) -> None:
    assert spoken(begin + SAID + ROLE) == SAID + ROLE
    assert spoken(begin) == b""
