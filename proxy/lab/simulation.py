"""recap eval simulate: recorded sessions through the proxy, with pauses and a provider's cache (Figures 5 and 8).

One row in the results for each session, selector and distribution of pauses. A pause is drawn before every user request
but the first, the same for every selector; as p(warm) grows, what was warm stays warm. Agent and user say what was
recorded, whatever they were sent: this measures what is sent and what it costs, not what the agent would have done.
"""

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from pathlib import Path
from statistics import NormalDist
from typing import get_args

from graphstore.records import SelectionRow
from graphstore.selectors import TOOL_RESULTS_KEPT, SelectorName
from graphstore.store.tokens import problem
from proxy.inspector.selections import changes_since
from proxy.lab.drive import STEP_S, Driven, Request, Tokens, drive, empty_archive, laid_out, requests_of
from proxy.lab.errors import LabError
from proxy.lab.provider_cache import CacheRules, ProviderCache
from proxy.lab.results import Results, Row
from proxy.lab.simulation_page import FULL, ORIGINS, TENTHS, page_of
from proxy.lab.study import Study, add_data, begin, command_of, load_data, remaining
from proxy.settings import Settings

NAME = "simulate"
ORACLE = "oracle"
COMPARED: tuple[str, ...] = (
    FULL, "recap", "recap-without-graph", "recency", "user-messages", "clear-tool-results", ORACLE,
)  # fmt: skip
P_WARM = (0.25, 0.5, 0.75)  # paper §5.5
WARM_S = 60.0  # a pause in which nothing expires; a cold one is twice what expires last
PREFILL = 29_000.0  # tokens a second: the paper's 28,504 in 0.985 s (Qwen3-Coder-30B on one H100, §5.3)
SIGMA = 2.0  # of the logarithm: seven in ten pauses within a factor of eight of the median
EPSILON = 1e-12  # a draw of 0 has no place in a normal distribution
DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long a user is away: warm with a probability, or log-normal with a median (seconds) and a sigma."""

    p_warm: float | None = None
    median_s: float = 0.0
    sigma: float = 0.0

    def __str__(self) -> str:
        if self.p_warm is not None:
            return f"p(warm) {self.p_warm:g}"
        return f"log-normal {self.median_s:g} s, sigma {self.sigma:g}"

    def draw(self, u: float, longest_s: float) -> float:
        """Seconds for a uniform draw: a smaller one is never a longer pause."""
        if self.p_warm is not None:
            return WARM_S if u < self.p_warm else 2 * longest_s
        return self.median_s * exp(self.sigma * NormalDist().inv_cdf(u or EPSILON))


NUMBERS: Mapping[str, tuple[float, str]] = {  # option -> default, help
    "ttl": (DEFAULTS.idle_after, "seconds for which the provider keeps a prefix after its last use"),
    "idle_after": (DEFAULTS.idle_after, "seconds after which the proxy believes it gone"),
    "min_history_tokens": (DEFAULTS.min_history_tokens, "the proxy leaves a shorter history alone"),
    "tool_results_kept": (TOOL_RESULTS_KEPT, "tool calls with their results that `clear-tool-results` keeps"),
    "price_cached": (0.1, "of a token read from the cache; an uncached one costs 1"),
    "price_output": (8.0, "of an output token"),
    "prefill": (PREFILL, "tokens a second, for the estimated time to the first token"),
}


MOST = {"gap_median": 1e7, "gap_sigma": 5.0, "prefill": 1e9}  # beyond them a clock in seconds has no meaning
OWN = "simulated_"  # keeps these apart from the settings of the same names, which are the user's own proxy's


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    parser.add_argument(
        "--selector",
        dest="selectors",
        action="append",
        choices=(*get_args(SelectorName), ORACLE),
        help=f"may be repeated (default {', '.join(COMPARED)}); `{FULL}` is always among them, "
        f"`{ORACLE}` knows what the turn will name",
    )
    parser.add_argument(
        "--p-warm",
        action="append",
        type=float,
        metavar="P",
        help=f"probability that the user is back in time; may be repeated (default {', '.join(map(str, P_WARM))})",
    )
    parser.add_argument(
        "--gap-median", type=float, metavar="X", help="seconds: draw pauses from a log-normal distribution instead"
    )
    parser.add_argument("--gap-sigma", type=float, default=SIGMA, metavar="X", help=f"its width (default {SIGMA:g})")
    parser.add_argument(
        "--breakpoints", action="store_true", help="the cache serves whole former prompts, nothing less"
    )
    for name, (default, text) in NUMBERS.items():
        parser.add_argument(
            flag_of(name),
            dest=OWN + name,
            type=type(default),
            default=default,
            metavar="X",
            help=f"{text} (default {default:g})",
        )


# -- the run ----------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    """The settings are the product's defaults but for what is asked for here: a page says all of it."""
    numbers = {name: getattr(arguments, OWN + name) for name in NUMBERS}
    _check(arguments, numbers)
    every, data = _pauses(arguments), load_data(arguments)
    selectors = list(dict.fromkeys((FULL, *(arguments.selectors or COMPARED))))
    sessions = [
        (f"{number} {recording.id}", recording, requests)
        for number, recording in enumerate(data.recordings)
        if (requests := requests_of(recording))
    ]
    if not sessions:
        raise LabError("no session has a request that an agent answered: name another file")
    results = begin(
        NAME,
        arguments,
        files=dict(data.files),
        selectors=selectors,
        pauses=[str(pauses) for pauses in every],
        breakpoints=arguments.breakpoints,
        **numbers,
        tokens=problem() or "o200k_base",
    )
    items = [
        (f"{session[0]}|{selector}|{pauses}", (*session, selector, pauses))
        for session in sessions
        for pauses in every
        for selector in selectors
    ]
    rules, tokens = CacheRules(ttl_s=numbers["ttl"], at_breakpoints=arguments.breakpoints), Tokens()
    longest = max(numbers["ttl"], numbers["idle_after"])
    with empty_archive() as archive:
        for item, (session, recording, requests, selector, pauses) in remaining(results, items, NAME):
            seed = f"{arguments.seed}|{recording.id}"
            waits = list(waits_of(requests, pauses, longest, seed))
            with laid_out(archive, seed) as path:
                asked = Settings(
                    db=str(path),
                    mode="idle",
                    selector=FULL if selector == ORACLE else selector,
                    seed=arguments.seed,
                    idle_after=numbers["idle_after"],
                    min_history_tokens=numbers["min_history_tokens"],
                    tool_results_kept=numbers["tool_results_kept"],
                )
                cache, foresees = ProviderCache(rules), selector == ORACLE
                driven = asyncio.run(drive(recording, requests, waits, asked, cache, tokens, foresees=foresees))
            found = measure(requests, waits, driven, rules)
            results.add(item, session=session, selector=selector, pauses=str(pauses), **found)
    return results


def _check(arguments: argparse.Namespace, numbers: Mapping[str, float]) -> None:
    for p in arguments.p_warm or ():
        if not 0 <= p <= 1:
            raise LabError(f"--p-warm is {p:g}: give a probability, from 0 to 1")
    for name in ("ttl", "idle_after"):
        if not WARM_S < numbers[name] < inf:
            raise LabError(f"{flag_of(name)} is {numbers[name]:g}: give more than the {WARM_S:g} s of a warm pause")
    above_zero = {"gap_median": arguments.gap_median, "gap_sigma": arguments.gap_sigma, "prefill": numbers["prefill"]}
    for name, value in above_zero.items():
        if value is not None and not 0 < value <= MOST[name]:
            raise LabError(f"{flag_of(name)} is {value:g}: give a number above 0 and at most {MOST[name]:g}")
    for name in ("price_cached", "price_output", "min_history_tokens", "tool_results_kept"):
        if not 0 <= numbers[name] < inf:
            raise LabError(f"{flag_of(name)} is {numbers[name]:g}: give 0 or more")


def _pauses(arguments: argparse.Namespace) -> list[Pauses]:
    if arguments.gap_median is None:
        return [Pauses(p) for p in dict.fromkeys(arguments.p_warm or P_WARM)]
    log_normal = Pauses(None, arguments.gap_median, arguments.gap_sigma)
    return [*map(Pauses, dict.fromkeys(arguments.p_warm or ())), log_normal]


def waits_of(requests: Sequence[Request], pauses: Pauses, longest_s: float, seed: str) -> Iterator[float]:
    draw = random.Random(seed)
    for number, request in enumerate(requests):
        yield pauses.draw(draw.random(), longest_s) if request.opens_turn and number else STEP_S


def measure(requests: Sequence[Request], waits: Sequence[float], driven: Driven, rules: CacheRules) -> Row:
    """Sums over a session's requests. Tokens are those that the archive noted of the usage."""
    rows = driven.exchanges
    after: dict[str, list[int]] = {"cold": [], "warm": []}  # uncached tokens of the first request after a pause
    for number, (request, wait, row) in enumerate(zip(requests, waits, rows, strict=True)):
        if request.opens_turn and number:
            after["cold" if wait > rules.ttl_s else "warm"].append((row.input_tokens or 0) - (row.cached_tokens or 0))
    return {
        "requests": len(rows),
        "served": sum(row.input_tokens or 0 for row in rows),
        "cached": sum(row.cached_tokens or 0 for row in rows),
        "output": sum(row.output_tokens or 0 for row in rows),
        "after": after,
        "read_again": sum(missed.read for missed in driven.missed),
        "refused": sum("original sent" in row.reason for row in rows),
        **_changes(
            [(request.turn, driven.selections.get(row.id)) for request, row in zip(requests, rows, strict=True)]
        ),
    }


def _changes(selections: Sequence[tuple[int, SelectionRow | None]]) -> Row:
    """Figure 8: what became of the blocks at each selection, and where in the history the chosen ones stood."""
    former, changes, tenths = None, [], [0] * TENTHS
    for turn, selection in selections:
        if selection is None:
            continue
        counted = Counter[str](changes_since(former, selection).values())
        chosen = [verdict.kept for verdict in selection.verdicts]
        changes.append({"turn": turn, **{name: counted[name] for name in ORIGINS}, "left out": chosen.count(False)})
        for position, is_chosen in enumerate(chosen):
            tenths[TENTHS * position // len(chosen)] += is_chosen
        former = selection
    return {"changes": changes, "tenths": tenths}


def render(results: Results, folder: Path) -> str:
    return page_of(results, folder, command_of(NAME, *_words(results.about)))


def _words(about: Row) -> Iterator[str]:
    """What was asked for, as on the command line."""
    yield from about["files"]
    if about["selectors"] != list(COMPARED):
        for selector in about["selectors"]:
            yield from ("--selector", selector)
    if about["pauses"] != [str(Pauses(p)) for p in P_WARM]:
        for kind, *values in (pauses.replace(",", "").split() for pauses in about["pauses"]):
            flags = ("--p-warm",) if kind == "p(warm)" else ("--gap-median", "--gap-sigma")
            numbers = values if kind == "p(warm)" else (values[0], values[-1])
            yield from (word for pair in zip(flags, numbers, strict=True) for word in pair)
    if about["breakpoints"]:
        yield "--breakpoints"
    for name, (default, _) in NUMBERS.items():
        if about.get(name, default) != default:
            yield from (flag_of(name), f"{about[name]:g}")
    if about["seed"]:
        yield from ("--seed", str(about["seed"]))


STUDY = Study(NAME, "what is sent, cached and paid over a session (Figures 5 and 8)", add_arguments, run, render)
