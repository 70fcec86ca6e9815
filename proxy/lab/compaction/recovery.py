"""Recoverability (10.19.5): every byte that was left out can be had back, and the archive knows what was sent.

A promise. For each exchange: the history rebuilt from the archive is what the client sent; every message that was left
out is stored byte for byte under its digest; the history minus the blocks that the archive calls left out is what the
upstream got. At the end `verify` finds nothing.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from graphstore.identity import chain_digests, message_digest, row_id
from graphstore.records import ExchangeRow, SessionRow
from graphstore.selectors import Selector
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from graphstore.store.report import left_out_of
from graphstore.store.verify import verify
from proxy.commands.verify import recut
from proxy.lab.compaction import checks
from proxy.lab.compaction.bench import Bench, Lab, Served
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import History, made, said, step, user
from proxy.lab.compaction.retention import come_back_often

FAMILY = "recoverability"
EXCHANGES_AUDITED = 50  # of a session, the latest: each is read with its whole history
ODD = (
    b'{"role":"user","content":"two \\u0000 \\ud800 \\/ escapes"}',
    b'{ "content" : "spaces around",  "role":"user" }',
    b'{"role":"assistant","content":"\xf0\x9f\xa6\x89 and 1e400","n":1e400,"n":12345678901234567890123}',
    b'{"role":"assistant","content":"","tool_calls":[{"id":"\xc3\xa9","type":"function","function":{"name":"read",'
    b'"arguments":"{ \\"filePath\\" : 1 }"}}],"unknown":{"b":1,"a":[ ]}}',
    b'{"tool_call_id":"\xc3\xa9","role":"tool","content":[{"type":"text","text":"\\r\\n\\t"}]}',
    b'{"role":"assistant","content":"done"}',
)  # what a reader that parses and writes again would change


def _odd(seed: str) -> History:
    rest = made(seed)
    return History("odd bytes", "chat", (*ODD, *rest.messages), (0, *(len(ODD) + start for start in rest.starts)))


def _twins(seed: str) -> History:
    """Many equal results: one is stored, and each comes back in its place."""
    draw = random.Random(f"{seed}")
    messages: list[bytes] = []
    starts = []
    for turn in range(12):
        starts.append(len(messages))
        messages.append(user("chat", "Again."))
        for number in range(5):
            text = "nothing changed\n" * (20 + draw.randrange(2))
            messages += step("chat", "bash", {"command": "git status"}, text, f"same-{number}")
        messages.append(said("chat", f"Nothing new, {turn % 2}."))
    return History("equal results", "chat", tuple(messages), tuple(starts))


KINDS: dict[str, Callable[[str], History]] = {
    "a session, chat": lambda seed: made(seed, "chat"),
    "a session, responses": lambda seed: made(seed, "responses"),
    "odd bytes": _odd,
    "equal results": _twins,
}


def cases(seed: int) -> list[Case]:
    return [Case(FAMILY, name, partial(run, histories=(make(f"back {seed}"),))) for name, make in KINDS.items()]


def cases_in(histories: Sequence[History], source: str) -> list[Case]:
    return [Case(FAMILY, f"{source}: driven anew", partial(run, histories=tuple(histories)))]


async def run(lab: Lab, selector: Selector, *, histories: Sequence[History]) -> Tally:
    tally = Tally()
    for history in histories:
        with lab.place(selector.name) as settings:
            bench = Bench(settings, dialect=history.dialect)
            for _, served in await come_back_often(bench, history):
                tally.watch(served, history.id)
            await bench.close()
            for number, faults in enumerate(archive_faults(settings.db, bench.log)):
                tally.promise(faults, f"{history.id}, request {number + 1}" if number < len(bench.log) else history.id)
    return tally


def archive_faults(path: str, log: Sequence[Served | None]) -> Iterator[list[str]]:
    """What is wrong for each request that is not None, then what is wrong with the archive as a whole."""
    with open_reader(path) as reader:
        rows = sorted(
            (row for session in reader.list_sessions() for row in reader.session_exchanges(session.id)),
            key=lambda row: row.id,
        )
        if len(rows) != len(log):
            yield [f"{len(log)} requests were sent, {len(rows)} are stored"]
            return
        for served, row in zip(log, rows, strict=True):
            yield list(exchange_faults(reader, served, row)) if served is not None else []
        yield [f"verify: {finding}" for finding in verify(reader, recut)]


def exchange_faults(reader: Reader, served: Served, row: ExchangeRow) -> Iterator[str]:
    leading, _ = checks.blocks_of(served)
    history = served.client[leading:]
    stored = reader.path_contents(row.head_node_id) if row.head_node_id is not None else []
    if stored != history:
        yield "the history rebuilt is not what the client sent"
    gone = [served.client[index] for index in checks.left_out(served)]
    contents = reader.message_contents(reader.find_messages(map(message_digest, gone)).values())
    for raw in gone:
        if contents.get(row_id(message_digest(raw))) != raw:
            yield f"left out, and not to be had back: {checks.shown(raw)}"
    if stored == history and rebuilt(reader, row, stored) != checks.without_notice(served)[leading:]:
        yield "what the archive says was left out is not what was left out"


def rebuilt(reader: Reader, row: ExchangeRow, stored: Sequence[bytes]) -> list[bytes]:
    """The history without the blocks that this exchange left out, by the archive alone."""
    assert row.head_node_id is not None and row.session_id is not None
    numbers, gone = reader.block_ordinals(row.session_id), left_out_of(reader, row)
    nodes = [node for node, *_ in reader.load_path(row.head_node_id)]
    return [raw for node, raw in zip(nodes, stored, strict=True) if numbers.get(node) not in gone]


# -- an archive as it stands ------------------------------------------------------------------------------------------


def cases_of_archive(path: str) -> list[Case]:
    """What the user's own proxy served, by whatever selector it had: nothing is driven, nothing is written."""
    return [Case(FAMILY, "archive as it stands", partial(_inspect, path=path), once=True)]


async def _inspect(lab: Lab, selector: Selector, *, path: str) -> Tally:
    tally = Tally()
    for where, faults in audit(path):
        tally.promise(faults, where)
    return tally


def audit(path: str) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with each of the latest exchanges of every session, then with the archive as a whole."""
    with open_reader(path) as reader:
        for session in reader.list_sessions():
            for row in reader.session_exchanges(session.id)[-EXCHANGES_AUDITED:]:
                if row.head_node_id is not None:
                    yield f"{session.name}, exchange {row.id}", list(stored_faults(reader, session, row))
        yield "whole archive", [f"verify: {finding}" for finding in verify(reader, recut)]


def stored_faults(reader: Reader, session: SessionRow, row: ExchangeRow) -> Iterator[str]:
    """The chain of digests was made of the client's bytes when they came: it is the witness of what they were."""
    assert row.head_node_id is not None
    stored = reader.path_contents(row.head_node_id)
    digests = [digest for _, digest, _, _ in reader.load_path(row.head_node_id)]
    if chain_digests(session.scope, map(message_digest, stored)) != digests:
        yield "the history rebuilt is not what the client sent"
        return
    if len(stored) != row.messages_total:
        yield f"{row.messages_total} messages were sent by the client, {len(stored)} are stored"
    sent = rebuilt(reader, row, stored)
    if len(sent) != row.messages_sent:
        yield f"{row.messages_sent} messages went upstream, {len(sent)} by what the archive says was left out"
    if row.blocks_left_out:
        yield from chain(checks.pairs(sent), _lost_constraints(stored, sent))


def _lost_constraints(stored: Sequence[bytes], sent: Sequence[bytes]) -> Iterator[str]:
    if checks.constraints(stored) != checks.constraints(sent):
        yield "a constraint was left out"
