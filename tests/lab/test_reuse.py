"""What past attention chooses, by observations whose numbers the test gives."""

import json

import pytest

from graphstore.evidence import StoredObservation
from proxy.lab.coverage import ATTENTION_SIGNALS, Transition, choices, coverage, lost, pack, rankings, transitions
from proxy.lab.observed import Observed
from proxy.lab.recordings import Recording
from proxy.lab.reuse import measure, protected_lost
from tests.observed import replay_of
from tests.proxy.dialogue import Message, read, said, user

MESSAGES: list[Message] = [
    user("see the files"),
    *read("a", "word_one " * 8, "a"),
    *read("b", "word_two " * 8, "b"),
    user("go on"),
    *read("c", "word_three " * 8, "c"),
    said("so far"),
    user("more"),
    said("word_one and word_three"),
]  # fmt: skip
SESSION = Recording("s", tuple(json.dumps(m).encode() for m in MESSAGES), (0, 5, 9))
# Blocks: 0 user, 1 a, 2 b, 3 user, 4 c, 5 answer, 6 user, 7 answer


def observed(
    density: dict[int, float], mass: dict[int, float] | None = None, edges: tuple[tuple[int, int, float], ...] = ()
) -> Observed:
    replay = replay_of(density, edges, mass=mass)
    return Observed({2: StoredObservation(2, 2, 2, 0.0, replay, frozenset())}, {})


DENSE = {0: 0.01, 1: 0.3, 2: 0.1, 3: 0.01, 4: 0.2}


def last(observations: Observed, setting: str = "product") -> Transition:
    (found,) = transitions(SESSION, setting, "code", observations)  # type: ignore[arg-type]
    return found


def chosen(t: Transition, name: str, budget: float) -> set[int]:
    return dict(choices(t))[name](budget)


def test_only_transitions_whose_finished_turn_was_observed_count() -> None:
    assert [t.turn for t in transitions(SESSION, "product", "code")] == [2, 3]
    found = last(observed(DENSE))
    assert found.turn == 3 and found.attended is not None
    assert found.attended.density == (0.01, 0.3, 0.1, 0.01, 0.2, 0.0), "the answer was no block yet"
    assert len(last(observed(DENSE), "B.1").costs) == 3, "candidates before the completed turn"


def test_attention_packs_by_density_and_mass_by_the_block() -> None:
    t = last(observed(DENSE, mass={0: 0.01, 1: 0.1, 2: 0.5, 3: 0.01, 4: 0.1}))
    one = max(t.costs) / sum(t.costs)
    assert pack(ATTENTION_SIGNALS["attention"](t), t.costs, one) >= {1} and 2 not in chosen(t, "attention", one)
    assert 2 in chosen(t, "mass + query", one) and 1 not in chosen(t, "mass + query", one)
    assert coverage(t, chosen(t, "attention", one)) == pytest.approx(0.5), "word_one of word_one and word_three"
    assert coverage(t, chosen(t, "attention", 0.75)) == 1.0


def test_the_request_and_past_use_add_to_attention() -> None:
    asked = [*MESSAGES[:9], user("what of word_two"), said("word_two")]
    session = Recording("s", tuple(json.dumps(m).encode() for m in asked), (0, 5, 9))
    flat = observed(dict.fromkeys(range(5), 0.1))
    (t,) = transitions(session, "product", "code", flat)
    one = max(t.costs) / sum(t.costs)
    assert 2 in chosen(t, "attention + query", one) and 2 not in chosen(t, "attention", one)
    past = ATTENTION_SIGNALS["past use + mass + query"](t)
    assert past[4] > past[1], "the finished turn named word_three"


def test_the_graph_brings_in_what_a_chosen_block_depends_on() -> None:
    """Both files are too much to pack, and just fit into what expansion may use."""
    dense = {0: 0.01, 1: 0.3, 2: 0.0, 3: 0.01, 4: 0.0}
    alone, linked = last(observed(dense)), last(observed(dense, edges=((2, 3, 0.5),)))
    fitting = {0, 1, 2, 3, 5}
    budget = sum(alone.costs[i] for i in fitting) / sum(alone.costs) + 0.005
    assert chosen(alone, "recap (paper)", budget) == {0, 1, 3, 5}
    assert chosen(linked, "recap (paper)", budget) == fitting, "no more than any other choice may send"


def test_without_protection_users_and_edits_are_lost_though_there_is_room() -> None:
    t = last(observed(DENSE))
    found = lost(t, dict(choices(t))["attention"], 0.1)
    assert found is not None and (found.users, found.edits, found.edits_lost) == (2, 0, 0)
    everything = lost(t, lambda _: set(range(len(t.costs))), 0.1)
    nothing = lost(t, lambda _: set(), 0.1)
    assert everything is not None and nothing is not None
    assert (everything.users_lost, nothing.users_lost) == (0, 2)
    budgets: list[float] = []
    lost(t, lambda budget: set(budgets.append(budget) or ()), 0.0)
    assert budgets == [pytest.approx((t.costs[0] + t.costs[3]) / sum(t.costs))], "room for all that is protected"


def test_every_way_to_choose_is_measured_on_the_same_transitions() -> None:
    found = measure(SESSION, observed(DENSE))
    plain = measure(SESSION)
    counts = {key.split("|")[2]: len(values) for key, values in found.items() if key.startswith("product|code")}
    assert set(counts.values()) == {1} and {"oracle", "attention", "recap (paper)", "recap (hybrid)"} <= counts.keys()
    assert "product|code|recency|0.1" in plain and "product|code|attention|0.1" not in plain
    losses = protected_lost(SESSION, observed(DENSE))
    assert {len(rows) for rows in losses.values()} == {1} and losses.keys() == dict(
        rankings(last(observed(DENSE)))
    ).keys()
