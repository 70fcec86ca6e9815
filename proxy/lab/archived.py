"""Sessions of an archive with what the worker observed while they ran.

They are read in chat form, so blocks have other names than in the archive. What a branch inherits from its parent is
not among its observations, nor is a turn that the user took back.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from graphstore.evidence import StoredObservation
from graphstore.replays import BlockReading
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from graphstore.store.report import find_session, latest_answer
from proxy.commands.export import chat_form
from proxy.lab.errors import LabError
from proxy.lab.observed import Observed
from proxy.lab.recordings import CHAT, Data, Recording, user_turns
from proxy.lab.results import Row

MISSING = "not replayed by the worker"


class ArchivedAttention:
    def __init__(self, about: Row, observed: Mapping[str, Mapping[int, StoredObservation]]) -> None:
        self.about = about
        self._observed = observed

    def observe(self, recording: Recording, turns: int) -> Observed:
        found = {turn: one for turn, one in self._observed[recording.id].items() if turn <= turns}
        return Observed(found, {MISSING: turns - len(found)} if len(found) < turns else {})


def read_archive(path: Path, names: Sequence[str]) -> tuple[Data, ArchivedAttention]:
    """Sessions with their observations. Raises LabError: a session has none, or two models made them."""
    recordings, observed, models = [], {}, set()
    with open_reader(path) as reader:
        for name in names:
            recording, observations = _read(reader, name)
            if not observations:
                raise LabError(f"session {recording.id!r} has no observation; run `recap worker`, or name another one")
            models |= {(o.replay.model, o.replay.parameters, o.replay.layers) for o in observations.values()}
            recordings.append(recording)
            observed[recording.id] = observations
    if len(models) > 1:
        listed = ", ".join(sorted(repr(name) for name, _, _ in models))
        raise LabError(f"the observations were made by several models or layers ({listed}); name sessions of one")
    ((model, parameters, layers),) = models
    shown = Path(model).name if Path(model).is_absolute() else model
    about = {"archive": path.name, "model": shown, "parameters": parameters, "layers": list(layers)}
    files = tuple((one.id, _digest(one, observed[one.id])) for one in recordings)
    return Data(tuple(recordings), files), ArchivedAttention(about, observed)


def _read(reader: Reader, name: str) -> tuple[Recording, dict[int, StoredObservation]]:
    session = find_session(reader, name)
    head = session.head_node_id
    nodes = [node for node, *_ in reader.load_path(head)] if head is not None else []
    contents = reader.path_contents(head) if head is not None else []
    pairs = [*zip(nodes, contents, strict=True), *((None, raw) for raw in latest_answer(reader, session))]
    forms = [(node, form) for node, raw in pairs if (form := chat_form(session.dialect, raw)) is not None]
    starts = user_turns([CHAT.parse_message(form).role for _, form in forms])
    if not starts:
        raise LabError(f"session {session.name!r} has no message of a user; name another one with --session")
    recording = Recording(session.name, tuple(form for _, form in forms), tuple(starts))
    numbers = reader.block_ordinals(session.id)
    places: dict[int, int] = {}  # ordinal in the archive -> place among our blocks
    for place, block in enumerate(recording.blocks):
        node = forms[recording.start_of(block)][0]
        if node is not None and node in numbers:
            places.setdefault(numbers[node], place)
    depths = {node: depth for depth, (node, _) in enumerate(forms)}
    found = {}
    for one in reader.load_observations(session.id):
        exchange = reader.load_exchange(one.exchange_id)
        depth = depths.get(exchange.head_node_id) if exchange is not None else None
        if depth is not None:
            turn = sum(start <= depth for start in starts)
            found[turn] = _moved(one, turn, places)
    return recording, found


def _moved(one: StoredObservation, turn: int, places: Mapping[int, int]) -> StoredObservation:
    """With our names for turn and blocks; what has none is left away."""
    read = one.replay
    blocks = tuple(_readings(read.blocks, places))
    edges = tuple((places[a], places[b], mass) for a, b, mass in read.edges if a in places and b in places)
    return replace(
        one,
        turn=turn,
        replay=replace(read, blocks=blocks, edges=edges),
        replaced=frozenset(places[v] for v in one.replaced if v in places),
    )


def _readings(blocks: Sequence[BlockReading], places: Mapping[int, int]) -> Iterator[BlockReading]:
    for block in blocks:
        if block.ordinal in places:
            yield replace(block, ordinal=places[block.ordinal])


def _digest(recording: Recording, observed: Mapping[int, StoredObservation]) -> str:
    """Of the words and of what was measured."""
    said = hashlib.sha256(b"\n".join(recording.messages))
    said.update(repr([(turn, observed[turn].replay.blocks) for turn in sorted(observed)]).encode())
    return said.hexdigest()[:16]
