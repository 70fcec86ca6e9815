"""recap eval modes: what the boundary policies cost under each provider's cache and prices.

Every shipped profile is a world of its own: prices and matching are the profile's, and a prefix lives for a time that
the proxy does not know, the geometric middle between the profile's bounds. Recorded sessions go through the proxy one
after the other, into one archive, so that mode `auto` learns from one for the next.
"""

import argparse
import asyncio
from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import get_args

from graphstore.records import ExchangeRow
from proxy.boundary import Mode
from proxy.economics.profiles import STEP_TOKENS, Profile, shipped
from proxy.lab.drive import STARTS_AT, Missed, Tokens, drive, empty_archive, laid_out, requests_of
from proxy.lab.errors import LabError
from proxy.lab.pages import markdown_table
from proxy.lab.provider_cache import CacheRules, ProviderCache
from proxy.lab.results import Results, Row
from proxy.lab.simulation import SIGMA, Pauses, waits_of
from proxy.lab.study import Study, add_data, begin, command_of, load_data, provenance, remaining
from proxy.settings import Settings

NAME = "modes"
MODES: tuple[Mode, ...] = get_args(Mode)
PAUSES = (Pauses(0.5), Pauses(None, 900.0, SIGMA))
BETWEEN_S = 1e6  # between two sessions: nothing of one is left in the cache for the next
WANTED = 1.02  # of the cheapest other mode
ABOUT = (
    "Recorded sessions through the proxy's own session logic under every shipped profile: its prices, its way of "
    "matching, and a cache that keeps a prefix for the geometric middle of `warm_s` and `cold_s`, which the proxy does "
    "not know. Input cost in thousand uncached tokens, summed over the sessions; `auto / cheapest` is that of `auto` "
    f"over the cheapest of the others (wanted: at most {WANTED:g}). Agent and user say what was recorded, so nothing "
    "is read again that was left out. The last columns add what it would have cost: a left-out message is read again "
    "when an answer names a code-like identifier that stands there and in nothing that was sent."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    parser.add_argument(
        "--profile",
        dest="profile_names",
        action="append",
        choices=[profile.name for profile in shipped()],
        help="may be repeated (default: all)",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    data = load_data(arguments)
    sessions = [(recording, requests) for recording in data.recordings if (requests := requests_of(recording))]
    if not sessions:
        raise LabError("no session has a request that an agent answered: name another file")
    wanted = arguments.profile_names or [profile.name for profile in shipped()]
    results = begin(NAME, arguments, files=dict(data.files), profiles=wanted, pauses=[str(p) for p in PAUSES])
    items = [
        (f"{profile.name}|{pauses}|{mode}", (profile, pauses, mode))
        for profile in shipped()
        if profile.name in wanted
        for pauses in PAUSES
        for mode in MODES
    ]
    tokens = Tokens()
    with empty_archive() as archive:
        for item, (profile, pauses, mode) in remaining(results, items, NAME):
            rules = rules_of(profile)
            longest = max(rules.ttl_s, Settings().idle_after)
            costs, again, rewritten = [], [], 0
            with laid_out(archive, f"{arguments.seed}") as path:
                own = {"name": profile.name, "hosts": ["*"], "models": ["*"]}
                asked = Settings(db=str(path), mode=mode, seed=arguments.seed, profiles=(own,))
                starts_at = STARTS_AT
                for recording, requests in sessions:
                    waits = list(waits_of(requests, pauses, longest, f"{arguments.seed}|{recording.id}"))
                    driven = asyncio.run(
                        drive(recording, requests, waits, asked, ProviderCache(rules), tokens, starts_at=starts_at)
                    )
                    starts_at += sum(waits) + BETWEEN_S
                    costs.append(sum(input_cost(row, profile) for row in driven.exchanges))
                    again.append(
                        sum(reread_cost(*pair, profile) for pair in zip(driven.exchanges, driven.missed, strict=True))
                    )
                    rewritten += len({row.selection_id for row in driven.exchanges} - {None})
            results.add(
                item,
                profile=profile.name,
                pauses=str(pauses),
                mode=mode,
                costs=[round(cost) for cost in costs],
                rereads=[round(cost) for cost in again],
                selections=rewritten,
            )
    return results


def rules_of(profile: Profile) -> CacheRules:
    return CacheRules(
        ttl_s=sqrt(profile.warm_s * profile.cold_s),
        minimum_tokens=profile.minimum_tokens,
        step_tokens=STEP_TOKENS,
        at_breakpoints=profile.match == "requests",
    )


def input_cost(row: ExchangeRow, profile: Profile) -> float:
    """In uncached input tokens. What is not read from the cache is written to it."""
    given, cached = row.input_tokens or 0, row.cached_tokens or 0
    factor = profile.cliff_factor if 0 < profile.cliff_tokens < given else 1.0
    return factor * (profile.read * cached + profile.write * (given - cached))


def reread_cost(row: ExchangeRow, missed: Missed, profile: Profile) -> float:
    """In uncached input tokens: what was read again is written once and then carried; reading it takes a request."""
    request = profile.read * (row.input_tokens or 0) if missed.read else 0.0
    return profile.write * missed.read + profile.read * missed.carried + request


def ratio(costs: Mapping[Mode, float]) -> float:
    """Cost of mode `auto` over that of the cheapest other one."""
    return costs["auto"] / min(cost for mode, cost in costs.items() if mode != "auto")


def render(results: Results, folder: Path) -> str:
    command = command_of(NAME, *results.about["files"], *_chosen(results.about))
    parts = ["## Modes", ABOUT, provenance(results, command)]
    header = ["profile", *(f"{mode} (rewrites)" for mode in MODES), "auto / cheapest"]
    header += [f"{mode}, read again" for mode in MODES if mode != "off"] + ["auto / cheapest"]
    for pauses in results.about["pauses"]:
        table: list[list[object]] = []
        for profile in results.about["profiles"]:
            rows = {r["mode"]: r for r in results.rows if (r["profile"], r["pauses"]) == (profile, pauses)}
            if len(rows) == len(MODES):
                own = {mode: sum(rows[mode]["costs"]) for mode in MODES}
                whole = {mode: own[mode] + sum(rows[mode]["rereads"]) for mode in MODES}
                shown = [f"{own[mode] / 1000:.0f} ({rows[mode]['selections']})" for mode in MODES]
                again = [f"{whole[mode] / 1000:.0f}" for mode in MODES if mode != "off"]
                table.append([profile, *shown, ratio(own), *again, ratio(whole)])
        parts += ["", f"### {pauses}", "", markdown_table(header, table)]
    return "\n".join(parts) + "\n"


def _chosen(about: Row) -> Iterator[str]:
    if about["profiles"] != [profile.name for profile in shipped()]:
        for name in about["profiles"]:
            yield from ("--profile", name)
    if about["seed"]:
        yield from ("--seed", str(about["seed"]))


STUDY = Study(NAME, "what each boundary policy costs under every provider's prices", add_arguments, run, render)
