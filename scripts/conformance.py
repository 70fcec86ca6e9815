"""Run a golden file of selections against the product's own code.

GOLDEN.json is a list of cases: `id` names a session, `config` its parameters, and `turns` hold made-up observations
(`rho_bar` by block, `dep` as [support, dependent, mass]) with the graph and the selection that must follow.
SESSIONS.jsonl has one object a line with `id` and `messages` (chat completions).

Every mismatch is printed. Exit status: 0 all equal, 1 at least one mismatch, 2 a file that cannot be read as this.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from math import isclose
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from graphstore.blocks import Cut, Message, cut_blocks
from graphstore.graph import ContextGraph
from graphstore.identifiers import IdentifierIndex, identifiers, leading_identifiers
from graphstore.observation import Observation
from graphstore.parameters import Parameters
from graphstore.selection import HistoryBlock, Selection, select
from proxy.dialects.chat import ChatDialect

TOLERANCE = 1e-9
PARAMETER_NAMES = {"request_cap": "request_cap_chars"} | {field.name: field.name for field in fields(Parameters)}

T = TypeVar("T")


class BadFile(Exception):
    """A file is not what this script reads; the text says which and why."""


class GoldenGraph(msgspec.Struct):
    u: dict[int, float]
    observed: list[int]
    stale: list[int]
    edges: list[tuple[int, int, float]]  # grouped by dependent; groups and members in the order they were stored


class GoldenSelection(msgspec.Struct):
    chosen: list[int]
    protected: list[int]
    seeds: list[int]
    expanded: list[int]
    budget: int
    cost: int
    total: int
    scores: list[float]


class Turn(msgspec.Struct):
    turn: int
    history_messages: int
    rho_bar: dict[int, float]
    dep: list[tuple[int, int, float]]
    graph: GoldenGraph
    selection: GoldenSelection


class Case(msgspec.Struct):
    id: str
    turns: list[Turn]
    config: dict[str, Any] = {}


class Session(msgspec.Struct):
    id: str
    messages: list[msgspec.Raw]


class Transcript:
    """A session's messages as the proxy's own dialect reads them, each read once."""

    def __init__(self, session: Session) -> None:
        dialect = ChatDialect()
        raws = [bytes(raw) for raw in session.messages]
        self._messages: list[Message] = [dialect.parse_message(raw) for raw in raws]
        self._texts = [dialect.message_text(raw) for raw in raws]

    def cut_at_request(self, before: int) -> Cut:
        """Blocks of the request that follows the first `before` messages: the history and the user's new words."""
        end = before
        while end < len(self._messages) and self._messages[end].role == "user":
            end += 1
        if not 0 < before < end:
            raise BadFile(f"history_messages {before}: no user message stands at this index of the session")
        return cut_blocks(self._messages[:end])

    def text(self, messages: tuple[int, ...]) -> str:
        return "\n".join(self._texts[i] for i in messages)


def run_case(case: Case, transcript: Transcript) -> Iterator[str]:
    """Every mismatch of one case as text, turn by turn."""
    try:
        known = {PARAMETER_NAMES[name]: value for name, value in case.config.items() if name in PARAMETER_NAMES}
        parameters = replace(Parameters(), **known)
        parameters.check()
    except ValueError as error:
        raise BadFile(f"case {case.id}: config: {error}") from error
    graph = ContextGraph()
    for turn in case.turns:
        cut = transcript.cut_at_request(turn.history_messages)
        texts = [transcript.text(block.messages) for block in cut.blocks]
        observe(graph, turn, texts, parameters)
        history = [HistoryBlock(i, b.kind, b.cost, b.edits) for i, b in enumerate(cut.blocks[: cut.turn_start])]
        known_words = IdentifierIndex(map(identifiers, texts[: cut.turn_start]))
        request = identifiers("\n".join(texts[cut.turn_start :]))
        selection = select(history, known_words, request, graph, parameters, session=case.id, turn=turn.turn)
        where = f"{case.id} turn {turn.turn}"
        yield from differences(turn.graph, golden_graph(graph), f"{where} graph")
        yield from differences(turn.selection, golden_selection(selection), f"{where} selection")


def observe(graph: ContextGraph, turn: Turn, texts: list[str], parameters: Parameters) -> None:
    limits = {"chars": parameters.stale_chars, "matches": parameters.stale_matches}
    words = {i: leading_identifiers(text, **limits) for i, text in enumerate(texts)}
    try:
        graph.update(Observation(turn.rho_bar, tuple(turn.dep), words), parameters)
    except ValueError as error:
        raise BadFile(f"turn {turn.turn}: {error}") from error
    graph.check_integrity()


def golden_graph(graph: ContextGraph) -> GoldenGraph:
    nodes, edges = graph.to_rows()
    groups: dict[int, list[tuple[int, int, float]]] = {}
    for edge in edges:
        groups.setdefault(edge.dependent, []).append((edge.support, edge.dependent, edge.weight))
    return GoldenGraph(
        u={node.ordinal: node.u for node in nodes},
        observed=[node.ordinal for node in nodes if node.observed],
        stale=[node.ordinal for node in nodes if node.stale],
        edges=[edge for group in groups.values() for edge in group],
    )


def golden_selection(selection: Selection) -> GoldenSelection:
    return GoldenSelection(
        chosen=list(selection.chosen),
        protected=list(selection.protected),
        seeds=list(selection.seeds),
        expanded=list(selection.expanded),
        budget=selection.budget,
        cost=selection.cost,
        total=selection.total_cost,
        scores=selection.scores.total,
    )


def differences(expected: Any, actual: Any, where: str) -> Iterator[str]:
    """Where two values of one type differ; floats may be off by `TOLERANCE`."""
    if isinstance(expected, msgspec.Struct):
        for name in expected.__struct_fields__:
            yield from differences(getattr(expected, name), getattr(actual, name), f"{where}.{name}")
    elif isinstance(expected, Mapping) and expected.keys() == actual.keys():
        for key in expected:
            yield from differences(expected[key], actual[key], f"{where}[{key}]")
    elif isinstance(expected, list | tuple) and len(expected) == len(actual):
        for index, pair in enumerate(zip(expected, actual, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif isinstance(expected, float) and isclose(expected, actual, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        return
    elif expected != actual:
        yield f"{where}: expected {expected!r}, found {actual!r}"


def read_cases(path: Path) -> list[Case]:
    return _decoded(path, path.read_bytes(), list[Case])


def read_sessions(path: Path) -> dict[str, Session]:
    lines = enumerate(path.read_bytes().splitlines(), 1)
    sessions = [_decoded(f"{path} line {number}", line, Session) for number, line in lines if line.strip()]
    return {session.id: session for session in sessions}


def _decoded(name: Path | str, content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFile(f"{name}: {error}") from error


def mismatches(cases: list[Case], sessions: Mapping[str, Session]) -> Iterator[str]:
    for case in cases:
        if case.id not in sessions:
            raise BadFile(f"no session {case.id!r} in the sessions file")
        yield from run_case(case, Transcript(sessions[case.id]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path, metavar="GOLDEN.json")
    parser.add_argument("sessions", type=Path, metavar="SESSIONS.jsonl")
    arguments = parser.parse_args()
    try:
        cases = read_cases(arguments.golden)
        if not cases:
            raise BadFile(f"{arguments.golden}: no cases")
        count = 0
        for mismatch in mismatches(cases, read_sessions(arguments.sessions)):
            print(mismatch)
            count += 1
    except (BadFile, OSError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    turns = sum(len(case.turns) for case in cases)
    print(f"{len(cases)} cases, {turns} turns, {count} mismatches")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
