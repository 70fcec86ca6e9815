"""The index of identifiers that a session keeps between selections."""

import json
from collections.abc import Sequence

import pytest

from graphstore.blocks import Block, cut_blocks
from graphstore.blocks import Message as Facts
from graphstore.identifiers import IdentifierIndex
from proxy.dialects.base import ParsedRequest
from proxy.dialects.chat import ChatDialect
from proxy.selecting import IdentifierCache, finished_turn
from tests.proxy.dialogue import SYSTEM, Message, said, turn, user

WORDS = ("unique_alpha", "unique_beta", "unique_gamma", "filler", "again")
ALPHA, BETA, GAMMA = (turn(f"look at {name} again", name) for name in ("alpha", "beta", "gamma"))


def indexed(cache: IdentifierCache, messages: Sequence[Message], session: str = "s") -> IdentifierIndex:
    request, blocks = parsed(messages)
    return cache.index(ChatDialect(), request, blocks, session=session)


def parsed(messages: Sequence[Message]) -> tuple[ParsedRequest, Sequence[Block]]:
    request = ChatDialect().parse_request(json.dumps({"model": "m", "messages": [SYSTEM, *messages]}).encode())
    return request, cut_blocks(request.messages).blocks


def content(index: IdentifierIndex) -> tuple[int, dict[str, list[int]]]:
    return len(index), {word: list(index.naming(word)) for word in WORDS}


def test_an_index_names_the_blocks_of_an_identifier() -> None:
    assert content(indexed(IdentifierCache(), [*ALPHA, *BETA])) == (
        6,
        {"unique_alpha": [1], "unique_beta": [4], "unique_gamma": [], "filler": [1, 4], "again": [0, 3]},
    )


@pytest.mark.parametrize(
    "then",
    [
        [*ALPHA, *BETA],
        [*ALPHA, *BETA, *GAMMA],
        ALPHA,
        [*ALPHA, *GAMMA],
        [*GAMMA, *BETA, *ALPHA],
        [user("look at alpha"), *ALPHA[1:], *BETA],
        [],
    ],
    ids=["same", "longer", "shorter", "other end", "other order", "other beginning", "nothing"],
)
def test_a_session_that_goes_on_anyhow_has_the_index_of_its_history(then: list[Message]) -> None:
    cache = IdentifierCache()
    indexed(cache, [*ALPHA, *BETA])
    assert content(indexed(cache, then)) == content(indexed(IdentifierCache(), then))


def test_only_what_is_new_is_added() -> None:
    cache = IdentifierCache()
    first = indexed(cache, ALPHA)
    assert indexed(cache, [*ALPHA, *BETA]) is first
    assert indexed(cache, BETA) is not first


def test_a_result_that_came_late_is_found() -> None:
    """The block is the same by number, but no longer by its messages."""
    cache = IdentifierCache()
    begun = [*ALPHA[:2], said("waiting")]
    indexed(cache, begun)
    assert content(indexed(cache, [*begun, ALPHA[2]]))[1]["unique_alpha"] == [1]


def test_indexes_stay_within_the_bound_and_the_newest_stays() -> None:
    cache = IdentifierCache(blocks=7)
    first, second = indexed(cache, ALPHA, "one"), indexed(cache, BETA, "two")
    assert indexed(cache, ALPHA, "one") is first  # 3 + 3 blocks fit
    large = indexed(cache, [*ALPHA, *BETA, *GAMMA], "three")
    assert indexed(cache, [*ALPHA, *BETA, *GAMMA], "three") is large
    assert indexed(cache, BETA, "two") is not second


def test_identifiers_of_messages_stay_within_the_bound_and_are_read_again() -> None:
    whole, small = IdentifierCache(), IdentifierCache(size=5)
    request, blocks = parsed([*ALPHA, *BETA, *GAMMA])
    for _ in range(2):
        for block in blocks:
            expected = whole.of_messages(ChatDialect(), request, block.messages)
            assert small.of_messages(ChatDialect(), request, block.messages) == expected
        assert small._held == sum(map(len, small._known.values())) <= 5


def finished(*roles: str) -> list[tuple[int, ...]]:
    """Messages of the blocks that count as the finished turn, in a history of these roles."""
    return [block.messages for block in finished_turn(cut_blocks([Facts(role) for role in roles]))]  # type: ignore[arg-type]


def test_the_finished_turn_is_what_the_agent_did_last() -> None:
    assert finished("user", "assistant", "user", "assistant", "user") == [(3,)]
    assert finished("user") == []
    assert finished("user", "assistant", "user", "instruction", "user") == [(1,)], "a request without an answer is none"
    assert finished("user", "assistant", "instruction", "user") == [(1,)], "what is pinned is no work of the agent"
