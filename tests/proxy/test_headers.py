"""The lists of what crosses, without a server around them."""

import pytest

from proxy.headers import has_body, request_headers, response_headers, tokens_of

HOP_BY_HOP = [
    b"Connection",
    b"Keep-Alive",
    b"Proxy-Connection",
    b"Proxy-Authorization",
    b"TE",
    b"Trailer",
    b"Transfer-Encoding",
    b"Upgrade",
]


@pytest.mark.parametrize("name", [*HOP_BY_HOP, b"Host", b"Expect", b"X-Recap-Key"])
def test_request_header_ends_here(name: bytes) -> None:
    assert request_headers([(name, b"v"), (b"a", b"1"), (b"A", b"1")]) == [(b"a", b"1"), (b"A", b"1")]


@pytest.mark.parametrize("name", [*HOP_BY_HOP, b"Alt-Svc", b"Strict-Transport-Security"])
def test_response_header_ends_here(name: bytes) -> None:
    assert response_headers([(b"x-request-id", b"r"), (name, b"v")], 200) == [(b"x-request-id", b"r")]


def test_connection_names_more_headers_but_never_those_of_the_body() -> None:
    """`Connection: content-length` from a hostile or confused sender would take the framing away."""
    headers = [(b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"content-length", b"2")]
    assert request_headers([*headers, (b"Connection", b"Content-Length")]) == [(b"content-length", b"2")]


def test_new_body_replaces_every_length_and_encoding() -> None:
    old = [(b"Content-Length", b"9"), (b"a", b"1"), (b"content-encoding", b"zstd")]
    assert request_headers(old, new_body=b"four") == [(b"a", b"1"), (b"content-length", b"4")]


@pytest.mark.parametrize(("status", "kept"), [(200, True), (206, True), (204, False), (304, False)])
def test_length_goes_with_a_body_only(status: int, kept: bool) -> None:
    assert bool(response_headers([(b"content-length", b"5")], status)) == kept


def test_length_goes_where_the_answer_was_chunked() -> None:
    assert response_headers([(b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked")], 200) == []


def test_tokens_join_repeated_headers_in_order() -> None:
    assert tokens_of([(b"A", b"x, Y"), (b"b", b"q"), (b"a", b" ,z")], b"a") == [b"x", b"y", b"z"]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [([], False), ([(b"content-length", b"0")], False), ([(b"Content-Length", b"1")], True)]
    + [([(b"Transfer-Encoding", b"chunked")], True)],
)
def test_has_body(headers: list[tuple[bytes, bytes]], expected: bool) -> None:
    assert has_body(headers) == expected
