"""recap eval queries: does the arriving request redirect attention? (paper Observation 3, Figures 2 right and 7, B.2)

One history of each session is held fixed and only the request changes: two targets that the history names, two wordings
for each, in two families, short and framed. The request's tokens ask; the attention that they give the blocks of the
history, without the first user message (the task), is normalised to a distribution. Two distributions are compared by
their total-variation distance. Paraphrase: the mean of the two pairs of one target. Changed target: the mean of the
four pairs across.

The history is the session's latest that fits and has two targets; targets are chosen by its words alone. The paper has
histories that a selection had made, of 8k to 32k tokens, and files as targets. One row in the results for each session.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import fmean

from graphstore.replays import Replay
from proxy.lab.attention import add_model, load_model, words_of
from proxy.lab.coverage import read_identifiers
from proxy.lab.errors import LabError
from proxy.lab.pages import markdown_table, plot_lines
from proxy.lab.recordings import Recording
from proxy.lab.replayed import ModelAttention, history_before
from proxy.lab.results import Results, Row
from proxy.lab.statistics import mean_of_sessions, paired_difference
from proxy.lab.study import Study, add_data, begin, command_of, load_data, provenance, remaining
from proxy.settings import Settings
from proxy_model.context import ContextBlock, Part

NAME = "queries"
BLOCKS_MIN = 5  # of a history, without the task
TEMPLATES: Mapping[str, tuple[str, str]] = {
    "short": ("Continue with {}.", "Please go back to {} and carry on there."),
    "framed": (
        "Before you continue with {}, recall what this session has shown about it: how it is built, which limits it "
        "has to keep and what the tools reported. Then carry on with it.",
        "We return to {} now. Bring back the facts, the constraints and the tool output about it that you have seen "
        "so far and that still hold, and go on from there.",
    ),
}
PAPER = {"short": (0.0533, 0.1013, "28/32"), "framed": (0.0382, 0.0846, "30/32")}
FILES = frozenset(
    "c cc cpp cs css go h html java js json jsx kt md php py rb rs sh sql toml ts tsx txt yaml yml".split()
)

Distribution = Mapping[int, float]  # block -> share; sums to 1, or is empty
Wordings = tuple[str, str]


# -- requests ---------------------------------------------------------------------------------------------------------


def targets(words: Sequence[frozenset[str]]) -> tuple[str, str] | None:
    """Two code-like identifiers of a history, which is given by block; None: it has no two.

    At most half of the blocks name one. Files go first, then names without a dot, then what more blocks name, then the
    alphabet. The second is of the same kind if there is one, and shares as few of its blocks with the first as can be.
    """
    naming: dict[str, set[int]] = {}
    for block, found in enumerate(words):
        for word in found:
            naming.setdefault(word, set()).add(block)
    known = [word for word, blocks in naming.items() if 2 * len(blocks) <= len(words)]
    if len(known) < 2:
        return None
    first = min(known, key=lambda word: (_kind(word), -len(naming[word]), word))

    def rank(word: str) -> tuple[int, float, int, str]:
        shared = len(naming[word] & naming[first]) / len(naming[word])
        return abs(_kind(word) - _kind(first)), shared, -len(naming[word]), word

    return first, min((word for word in known if word != first), key=rank)


def _kind(word: str) -> int:
    """0: a file. 1: a name. 2: something dotted."""
    stem, dot, ending = word.rpartition(".")
    return 0 if stem and ending in FILES else 2 if dot else 1


def requests(pair: tuple[str, str]) -> dict[str, tuple[Wordings, Wordings]]:
    """Family -> for each target its two wordings."""
    (a, b) = pair
    return {
        family: ((one.format(a), two.format(a)), (one.format(b), two.format(b)))
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
        results.add(item, session=item, **measure(recording, model))
    return results


def measure(recording: Recording, model: ModelAttention) -> Row:
    """What one session says, or under `skipped` why it says nothing."""
    why = f"no history of {BLOCKS_MIN} blocks with two targets"
    model.begin()
    for turn in range(len(recording.turns()), 1, -1):
        start, _ = recording.turns()[turn - 1]
        blocks = studied(recording, start)
        pair = targets([read_identifiers(recording.text_of(recording.blocks[i]), "code") for i in blocks])
        if len(blocks) < BLOCKS_MIN or pair is None:
            continue
        asked = requests(pair)
        replays = _replays(model, history_before(recording, start), asked)
        if isinstance(replays, str):
            why = replays
            continue
        moved = {}
        for family, by_target in asked.items():
            found = [[_attended(replays[text], blocks) for text in wordings] for wordings in by_target]
            moved[family] = [round(value, 6) for value in redistribution(found)]
        tokens = max(replay.tokens for replay in replays.values())
        return {"turn": turn, "blocks": len(blocks), "tokens": tokens, "targets": pair, "moved": moved}
    return {"skipped": why}


def studied(recording: Recording, end: int) -> list[int]:
    """Places of the blocks before this message, without the task: the first user message."""
    places = [i for i, block in enumerate(recording.blocks) if recording.start_of(block) < end]
    task = next((i for i in places if recording.blocks[i].kind == "user"), None)
    return [i for i in places if i != task]


def _replays(
    model: ModelAttention, history: Sequence[ContextBlock], asked: Mapping[str, Sequence[Wordings]]
) -> dict[str, Replay] | str:
    """By the request's words; or why one of them has none."""
    found = {}
    for text in (text for family in asked.values() for wordings in family for text in wordings):
        replay = model.replay([*history, ContextBlock(None, (Part("user", text),), in_turn=True)])
        if isinstance(replay, str):
            return replay
        found[text] = replay
    return found


def _attended(replay: Replay, blocks: Sequence[int]) -> Distribution:
    wanted = frozenset(blocks)
    return distribution({block.ordinal: block.mass for block in replay.blocks if block.ordinal in wanted})


# -- the page ---------------------------------------------------------------------------------------------------------


def render(results: Results, folder: Path) -> str:
    rows = [row for row in results.rows if "moved" in row]
    skipped = Counter(row["skipped"] for row in results.rows if "skipped" in row)
    parts = [
        "## Requests over a fixed history",
        "Share of the attention on the history that moves when the request says the same in other words, and when it "
        "names another target (paper Observation 3, Figure 7, B.2). Means over sessions, differences with the 95 % "
        "interval of a paired bootstrap over sessions.",
        provenance(results, command_of(NAME, *words_of(results.about))),
        "",
    ]
    listed = "; ".join(f"{count} {why}" for why, count in sorted(skipped.items()))
    parts += [f"Sessions that say nothing: {listed}.", ""] if skipped else []
    if not rows:
        return "\n".join([*parts, "No session is left."]) + "\n"
    tokens = [row["tokens"] for row in rows]
    files = sum(all(_kind(word) == 0 for word in row["targets"]) for row in rows)
    parts += [
        f"{len(rows)} histories of {min(tokens):,} to {max(tokens):,} tokens; both targets are files in {files}.",
        "",
        markdown_table(
            ["requests", "paraphrase", "changed target", "difference", "changed is larger"],
            list(_lines(rows, results.about["seed"])),
        ),
        "",
    ]
    counts = [i / len(rows) for i in range(1, len(rows) + 1)]
    series = {
        f"{family}, {name}": (sorted(row["moved"][family][i] for row in rows), counts)
        for family in TEMPLATES
        for i, name in enumerate(("paraphrase", "changed target"))
    }
    title = "Attention that a request redistributes"
    parts.append(plot_lines(folder / NAME, series, x="distance at most", y="share of the histories", title=title))
    return "\n".join(parts) + "\n"


def _lines(rows: Sequence[Row], seed: int) -> Iterator[list[object]]:
    for family in TEMPLATES:
        same, other = ({row["session"]: [row["moved"][family][i]] for row in rows} for i in range(2))
        means = [mean_of_sessions(values, seed=seed).mean for values in (same, other)]
        larger = sum(other[session] > same[session] for session in same)
        yield [family, *means, str(paired_difference(other, same, seed=seed)), f"{larger}/{len(rows)}"]
        paraphrase, changed, count = PAPER[family]
        yield [f"paper, {family}", paraphrase, changed, f"{changed - paraphrase:+.3f}", count]


STUDY = Study(NAME, "does the request redirect attention? (Observation 3, Figure 7)", add_arguments, run, render)
