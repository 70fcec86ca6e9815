"""recap eval queries: does the arriving request redirect attention? (paper Observation 3, Figures 2 right and 7, B.2)

One history of each session is held fixed and only the request changes: two targets that the history names, two wordings
for each, in two families, short and framed. The request's tokens ask; the attention that they give the blocks of the
history, without the first user message (the task), is normalised to a distribution. Two distributions are compared by
their total-variation distance. Paraphrase: the mean of the two pairs of one target. Changed target: the mean of the
four pairs of two. Reference: how far a distribution is from itself with its blocks permuted, as if attention knew no
block from another.

Targets are chosen by the words of the history alone. One row in the results for each session.
"""

import argparse
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import fmean

from graphstore.replays import Replay
from proxy.lab.attention import ModelAttention, add_model, history_before, load_model
from proxy.lab.coverage import read_identifiers
from proxy.lab.errors import LabError
from proxy.lab.pages import markdown_table, plot_lines
from proxy.lab.recordings import Recording
from proxy.lab.results import Results, Row
from proxy.lab.statistics import mean_of_sessions, paired_difference
from proxy.lab.study import Study, add_data, begin, command_of, load_data, provenance, remaining
from proxy.settings import Settings
from proxy_model.context import ContextBlock, Part

NAME = "queries"
BLOCKS_MIN = 5  # of a history, without the task
PERMUTATIONS = 200
TEMPLATES: Mapping[str, tuple[str, str]] = {
    "short": ("Continue with {}.", "Please go back to {} and carry on there."),
    "framed": (
        "Before you continue with {}, recall what this session has shown about it: how it is built, which limits it "
        "has to keep and what the tools reported. Then carry on with it.",
        "We return to {} now. Bring back the facts, the constraints and the tool output about it that you have seen "
        "so far and that still hold, and go on from there.",
    ),
}
_FILE = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,4}$")

Distribution = Mapping[int, float]  # block -> share; sums to 1


# -- requests ---------------------------------------------------------------------------------------------------------


def targets(words: Sequence[frozenset[str]]) -> tuple[str, str] | None:
    """Two code-like identifiers of a history, given by block; None: it has no two.

    Each is named by at least one block and at most half of them. What looks like a file goes first, then what more blocks name,
    then the alphabet. The second is the best of those that share the fewest blocks with the first.
    """
    naming: dict[str, set[int]] = {}
    for block, found in enumerate(words):
        for word in found:
            naming.setdefault(word, set()).add(block)
    known = [word for word, blocks in naming.items() if 2 * len(blocks) <= len(words)]
    if len(known) < 2:
        return None

    def rank(word: str) -> tuple[bool, int, str]:
        return not _FILE.search(word), -len(naming[word]), word

    first = min(known, key=rank)
    files = [word for word in known if word != first and bool(_FILE.search(word)) == bool(_FILE.search(first))]
    others = files or [word for word in known if word != first]
    return first, min(others, key=lambda word: (len(naming[word] & naming[first]) / len(naming[word]), *rank(word)))


def requests(pair: tuple[str, str]) -> dict[str, tuple[tuple[str, str], tuple[str, str]]]:
    """Family -> for each target its two wordings."""
    return {
        family: ((one.format(pair[0]), two.format(pair[0])), (one.format(pair[1]), two.format(pair[1])))
        for family, (one, two) in TEMPLATES.items()
    }


# -- distances --------------------------------------------------------------------------------------------------------


def distribution(masses: Mapping[int, float]) -> Distribution:
    whole = sum(masses.values())
    return {block: mass / whole for block, mass in masses.items()} if whole > 0 else {}


def distance(p: Distribution, q: Distribution) -> float:
    """Total variation (Eq. 4), 0 to 1."""
    return sum(abs(p.get(block, 0.0) - q.get(block, 0.0)) for block in p.keys() | q.keys()) / 2


def redistribution(by_target: Sequence[Sequence[Distribution]]) -> tuple[float, float]:
    """(paraphrase, changed target): mean distance of the pairs within a target and of those across."""
    within = [distance(p, q) for wordings in by_target for p, q in combinations(wordings, 2)]
    across = [distance(p, q) for one, two in combinations(by_target, 2) for p, q in product(one, two)]
    return fmean(within), fmean(across)


def permuted(distributions: Iterable[Distribution], draw: random.Random) -> float:
    """Mean distance of a distribution from itself with its blocks permuted."""
    found = []
    for p in distributions:
        shares = list(p.values())
        for _ in range(PERMUTATIONS):
            other = draw.sample(shares, len(shares))
            found.append(sum(abs(a - b) for a, b in zip(shares, other, strict=True)) / 2)
    return fmean(found)


# -- the study --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    add_model(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    data = load_data(arguments)
    if arguments.model is None:
        raise LabError("a model has to read the requests: name one with --model; no archive has them")
    model = load_model(arguments, settings)
    results = begin(NAME, arguments, files=dict(data.files), **model.about)
    items = [(f"{number} {recording.id}", recording) for number, recording in enumerate(data.recordings)]
    for item, recording in remaining(results, items, NAME):
        results.add(item, session=item, **measure(recording, model, arguments.seed, key=len(results.rows)))
    return results


def measure(recording: Recording, model: ModelAttention, seed: int, *, key: int) -> Row:
    """What one session says, or under `skipped` why it says nothing. `key` names its history to the model's cache."""
    last = "it has no later request"
    for turn in range(len(recording.turns()), 1, -1):
        start, _ = recording.turns()[turn - 1]
        blocks = studied(recording, start)
        pair = targets([read_identifiers(recording.text_of(recording.blocks[i]), "code") for i in blocks])
        if len(blocks) < BLOCKS_MIN or pair is None:
            last = f"no history has {BLOCKS_MIN} blocks and two targets"
            break  # nor has an earlier one
        history = history_before(recording, start)
        asked = requests(pair)
        contexts = {text: (*history, _asking(text)) for family in asked.values() for one in family for text in one}
        if not all(map(model.fits, contexts.values())):
            last = "no history with two targets fits"
            continue
        replays = {text: model.read(context, key) for text, context in contexts.items()}
        return {"turn": turn, "blocks": len(blocks), "targets": pair} | _measured(recording.id, blocks, asked, replays, seed)
    return {"skipped": last}
