"""Attention over recorded sessions: replayed turn by turn as the product's worker does, or read from an archive.

A turn is replayed over everything that stood in its last request and what came back: nothing is left out, because
nothing was when the session was recorded. A context that is longer than the limit is not replayed rather than cut, so
every block of a replay was seen. Torch is loaded only here, and only when a model is named.
"""

import argparse
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from graphstore.evidence import StoredObservation
from graphstore.identifiers import leading_identifiers
from graphstore.parameters import Parameters
from graphstore.replays import BlockReading, Replay
from graphstore.scoring import replaced
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from graphstore.store.report import find_session, latest_answer
from proxy.contexts import parts_of
from proxy.lab.errors import LabError
from proxy.lab.recordings import CHAT, Data, Recording, user_turns
from proxy.lab.results import Row
from proxy.lab.study import load_data
from proxy.settings import Settings
from proxy_model.context import ContextBlock, Part
from proxy_model.errors import ModelUnavailable, ReplayError

if TYPE_CHECKING:
    from proxy_model.config import ReplayConfig

TOKENS_MIN = 64  # with fewer no turn fits
NEEDED = "attention is needed: name a model with --model, or an archive with --archive and --session"
PARAMETERS = Parameters()  # the stale rule's constants


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of one session, by finished turn, counted from 1.

    Blocks are named by their place in `Recording.blocks`. `unread`: turns without an observation.
    """

    turns: Mapping[int, StoredObservation]
    unread: int

    def until(self, turn: int) -> list[StoredObservation]:
        """In order, up to this turn and with it."""
        return [self.turns[number] for number in sorted(self.turns) if number <= turn]


class Attention(Protocol):
    """Where observations come from. `about` names it in the results."""

    @property
    def about(self) -> Row: ...

    def observe(self, recording: Recording, turns: int) -> Observed:
        """The first `turns` turns. Raises LabError when nothing can be observed at all."""


# -- as arguments -----------------------------------------------------------------------------------------------------


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Sessions in files to be replayed, or sessions of an archive that the worker has observed."""
    parser.add_argument("sessions", nargs="*", type=Path, metavar="FILE", help="JSONL of recorded sessions")
    add_model(parser)
    parser.add_argument(
        "--archive", type=Path, metavar="DB", help="sessions that the worker observed, instead of files"
    )
    parser.add_argument(
        "--session", action="append", default=[], metavar="ID", help="of the archive; may be given several times"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="local model: a Hugging Face name, a folder or a .gguf file")
    parser.add_argument(
        "--tokens-max",
        type=int,
        metavar="N",
        help="do not replay longer contexts (default: the setting attention_max_tokens)",
    )


def load_attention(arguments: argparse.Namespace, settings: Settings) -> tuple[Data, Attention | None]:
    """The sessions, and what observes them; None where neither a model nor an archive is named."""
    if arguments.archive is None:
        if arguments.session:
            raise LabError(f"--session {arguments.session[0]!r} is looked for in an archive: name it with --archive")
        if not arguments.sessions:
            raise LabError("there is nothing to read: name files of sessions, or --archive and --session")
        data = load_data(arguments)
        return data, load_model(arguments, settings) if arguments.model is not None else None
    if arguments.model is not None or arguments.sessions:
        raise LabError("--archive brings its own sessions and observations: leave out --model and the files")
    if not arguments.session:
        raise LabError("--archive needs a session: name one with --session; `recap sessions` lists them")
    return read_archive(arguments.archive, arguments.session)


def words_of(about: Row) -> list[object]:
    """What stood behind the study's name on the command line."""
    if "archive" in about:
        return ["--archive", about["archive"], *(w for name in about["files"] for w in ("--session", name))]
    words: list[object] = [*about["files"]]
    return [*words, "--model", about["model"], "--tokens-max", about["tokens_max"]] if "model" in about else words


# -- replayed ---------------------------------------------------------------------------------------------------------


def context_at(recording: Recording, turn: int) -> tuple[ContextBlock, ...]:
    """The context at the end of a turn, counted from 1, as the worker would find it (`proxy.contexts`).

    The answer that ends the turn is no block of the graph yet: no request has brought it back.
    """
    start, end = recording.turns()[turn - 1]
    firsts = [recording.start_of(block) for block in recording.blocks]
    dependent = max((first for first in firsts if first < start), default=start)  # what the agent said last is one

    def marked(block: ContextBlock) -> ContextBlock:
        if block.ordinal is None:
            return block
        first, known = firsts[block.ordinal], recording.blocks[block.ordinal]
        is_answer = known.kind == "assistant" and recording.leading + known.messages[-1] == end - 1
        return replace(
            block,
            ordinal=None if is_answer else block.ordinal,
            in_turn=first >= start,
            is_dependent=first >= dependent and not is_answer,
        )

    return tuple(map(marked, history_before(recording, end)))


def history_before(recording: Recording, end: int) -> tuple[ContextBlock, ...]:
    """Instructions and all blocks before this message."""
    text = "\n\n".join(filter(None, recording.texts[: recording.leading]))
    head = (ContextBlock(None, (Part("system", text),)),) if text else ()
    return head + tuple(
        ContextBlock(i, parts_of(CHAT, [recording.messages[recording.leading + m] for m in block.messages]))
        for i, block in enumerate(recording.blocks)
        if recording.start_of(block) < end
    )


def leading_words(recording: Recording, replay: Replay) -> dict[int, frozenset[str]]:
    """What the stale rule compares."""
    return {b.ordinal: leading_identifiers(recording.text_of(recording.blocks[b.ordinal])) for b in replay.blocks}


class ModelAttention:
    """Replays with one loaded model."""

    def __init__(self, config: "ReplayConfig") -> None:
        """Takes seconds. Raises LabError: no torch, no weights, a model that cannot be read."""
        from proxy_model.check import proven
        from proxy_model.loader import load

        try:
            self._model = load(config)
            self._replayer = proven(self._model, config)
        except ModelUnavailable as error:
            raise LabError(str(error)) from error
        self._session = 0
        self.tokens_max = self._model.max_tokens

    @property
    def about(self) -> Row:
        model, name = self._model, Path(self._model.name)
        return {
            "model": name.name if name.exists() else model.name,
            "parameters": model.parameters,
            "layers": list(model.layers),
            "dtype": model.dtype,
            "tokens_max": self.tokens_max,
        }

    def fits(self, context: Sequence[ContextBlock]) -> bool:
        """Whether all of it is read."""
        return not self._model.encode(context).unobserved

    def read(self, context: Sequence[ContextBlock], session: int) -> Replay | None:
        """None: this context cannot be replayed. Raises LabError when none can."""
        try:
            return self._replayer.observe(context, session)
        except ModelUnavailable as error:
            raise LabError(str(error)) from error
        except ReplayError:
            return None
        except MemoryError as error:
            raise LabError("memory is exhausted; lower --tokens-max or choose a smaller --model") from error

    def observe(self, recording: Recording, turns: int) -> Observed:
        self._session += 1
        found = {}
        for turn in range(1, turns + 1):
            context = context_at(recording, turn)
            if not self.fits(context):
                break  # and no later one does
            replay = self.read(context, self._session)
            if replay is not None:
                found[turn] = stored(recording, turn, replay)
        return Observed(found, turns - len(found))


def stored(recording: Recording, turn: int, replay: Replay) -> StoredObservation:
    """As the archive would keep it."""
    density = {block.ordinal: block.density for block in replay.blocks}
    stale = replaced(density, leading_words(recording, replay), PARAMETERS)
    return StoredObservation(turn, turn, turn, 0.0, replay, frozenset(stale))


def load_model(arguments: argparse.Namespace, settings: Settings) -> ModelAttention:
    """The model that is named, resolved and run as the settings `attention_*` say for the product."""
    from proxy.commands.model import replay_config

    if not arguments.model:
        raise LabError("the model's name is empty: give a Hugging Face name, a folder or a .gguf file with --model")
    config = replace(replay_config(settings), model=arguments.model)
    if arguments.tokens_max is not None:
        if arguments.tokens_max < TOKENS_MIN:
            raise LabError(f"--tokens-max {arguments.tokens_max} holds no turn: give {TOKENS_MIN} at least")
        config = replace(config, max_tokens=arguments.tokens_max)
    return ModelAttention(config)


# -- read from an archive ---------------------------------------------------------------------------------------------


class ArchivedAttention:
    """What the worker observed while the sessions ran. What a branch inherits from its parent is not among it."""

    def __init__(self, about: Row, observed: Mapping[str, Mapping[int, StoredObservation]]) -> None:
        self.about = about
        self._observed = observed

    def observe(self, recording: Recording, turns: int) -> Observed:
        found = {turn: one for turn, one in self._observed[recording.id].items() if turn <= turns}
        return Observed(found, turns - len(found))


def read_archive(path: Path, names: Sequence[str]) -> tuple[Data, ArchivedAttention]:
    """Sessions in chat form with their observations. Raises LabError: a session has none, or two models made them."""
    recordings, observed, models = [], {}, set()
    with open_reader(path) as reader:
        for name in names:
            recording, observations = _archived(reader, name)
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


def _archived(reader: Reader, name: str) -> tuple[Recording, dict[int, StoredObservation]]:
    from proxy.commands.export import chat_form

    session = find_session(reader, name)
    head = session.head_node_id
    nodes = [node for node, *_ in reader.load_path(head)] if head is not None else []
    contents = reader.path_contents(head) if head is not None else []
    pairs = [*zip(nodes, contents, strict=True), *((None, raw) for raw in latest_answer(reader, session))]
    forms = [(node, form) for node, raw in pairs if (form := chat_form(session.dialect, raw)) is not None]
    messages = tuple(form for _, form in forms)
    starts = user_turns([CHAT.parse_message(raw).role for raw in messages])
    if not starts:
        raise LabError(f"session {session.name!r} has no message of a user; name another one with --session")
    recording = Recording(session.name, messages, tuple(starts))
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
        if depth is not None:  # else the user went back before it
            turn = sum(start <= depth for start in starts)
            found[turn] = _moved(one, turn, places)
    return recording, found


def _moved(one: StoredObservation, turn: int, places: Mapping[int, int]) -> StoredObservation:
    """With other names for the blocks; what has none is left away."""
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
