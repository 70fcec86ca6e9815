"""recap eval compaction: what is lost, kept and had back when blocks are left out (book chapter, 10.19 and 10.20).

One row in the results for each case and selector. Cases need no model; with `--base-url` the differential ones ask it.
"""

import argparse
import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import httpx

from graphstore.selectors import SELECTORS, SelectorName
from graphstore.store.archive import open_reader
from proxy.conversations import parameters_of
from proxy.lab.chat_model import ChatModel, Sampling
from proxy.lab.compaction import adversarial, differential, horizon, needle, recovery, replay, retention
from proxy.lab.compaction.bench import PATHS, Lab
from proxy.lab.compaction.cases import Case
from proxy.lab.compaction.histories import History, of_archive, of_recording
from proxy.lab.compaction.page import NAME, render
from proxy.lab.drive import empty_archive
from proxy.lab.errors import LabError
from proxy.lab.recordings import read_recordings
from proxy.lab.results import Results, Row
from proxy.lab.study import Study, begin, remaining
from proxy.settings import Settings
from proxy.upstream.target import is_loopback, join_target

FAMILIES = tuple(module.FAMILY for module in (needle, retention, recovery, adversarial, horizon, replay, differential))
KEY = "OPENAI_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def option(flag: str, help_text: str, **more: Any) -> None:
        parser.add_argument(flag, help=help_text, **more)

    several: dict[str, Any] = {"action": "append", "help_text": "may be repeated (default: all)"}
    trials, turns = differential.TRIALS, horizon.TURNS
    option("sessions", "JSONL of sessions, to test with as well", nargs="*", type=Path, metavar="FILE")
    option("--archive", "test with this archive as well; it is only read", type=Path, metavar="DB")
    option("--session", "of the archive; may be repeated (default: the newest)", action="append", metavar="ID")
    option("--selector", dest="selectors", choices=get_args(SelectorName), **several)
    option("--family", dest="families", choices=FAMILIES, **several)
    option("--turns", f"of the long horizon (default {turns})", type=int, default=turns, metavar="N")
    option("--base-url", "of a provider, as an SDK gets it: its model is asked as well", metavar="URL")
    option("--model", "as the provider calls it", metavar="NAME")
    option("--key-env", f"variable with the key (default {KEY})", default=KEY, metavar="NAME")
    option("--trials", f"of each question to the model (default {trials})", type=int, default=trials, metavar="N")
    option("--temperature", "of the model (default 0)", type=float, default=0.0, metavar="T")


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    for flag in ("turns", "trials"):
        if getattr(arguments, flag) < 1:
            raise LabError(f"--{flag} is {getattr(arguments, flag)}: give at least 1")
    key = _key(arguments)
    selectors = list(dict.fromkeys(arguments.selectors or get_args(SelectorName)))
    families = [family for family in FAMILIES if family in (arguments.families or FAMILIES)]
    if not arguments.base_url:
        if arguments.families and differential.FAMILY in families:
            raise LabError(f"--family {differential.FAMILY} asks a model: name it with --base-url and --model")
        families = [family for family in families if family != differential.FAMILY]
    data = read_recordings(arguments.sessions) if arguments.sessions else None
    recorded = [of_recording(recording) for recording in data.recordings] if data else []
    archived = _archived(arguments.archive, arguments.session or ()) if arguments.archive else []
    results = begin(
        NAME,
        arguments,
        files=dict(data.files) if data else None,
        archive={arguments.archive.name: _digest(archived)} if arguments.archive else None,
        sessions=arguments.session,
        selectors=selectors,
        families=families,
        turns=arguments.turns,
        parameters=_changed(settings),
        **_model(arguments),
    )
    asyncio.run(_run(arguments, settings, results, recorded, archived, key))
    return results


async def _run(
    arguments: argparse.Namespace,
    settings: Settings,
    results: Results,
    recorded: Sequence[History],
    archived: Sequence[History],
    key: str | None,
) -> None:
    seed = arguments.seed
    async with AsyncExitStack() as stack:
        cases = [
            *needle.cases(seed),
            *retention.cases(seed),
            *recovery.cases(seed),
            *adversarial.cases(),
            *horizon.cases(arguments.turns),
            *replay.cases(seed),
        ]
        for source, histories in (("files", recorded), ("archive", archived)):
            if histories:
                cases += [*needle.cases_in(histories, source), *retention.cases_in(histories, source)]
                cases += recovery.cases_in(histories, source)
        if arguments.archive:
            cases += recovery.cases_of_archive(str(arguments.archive))
        if arguments.base_url:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=settings.read_timeout, headers=headers))
            ask = _asking(client, arguments)
            cases += differential.cases(seed, ask, [*recorded, *archived], arguments.trials)
        lab = Lab(settings, stack.enter_context(empty_archive()), seed)
        for item, (case, selector) in remaining(results, _items(cases, results.about), NAME):
            tally = await case.run(lab, SELECTORS[selector])
            about = {"family": case.family, "case": case.name, "selector": selector, "once": case.once}
            results.add(item, **about, **tally.to_row())


def _items(cases: Sequence[Case], about: Row) -> list[tuple[str, tuple[Case, SelectorName]]]:
    return [
        (f"{case.family}|{case.name}|{selector}", (case, selector))
        for case in cases
        if case.family in about["families"]
        for selector in (about["selectors"][:1] if case.once else about["selectors"])
    ]


# -- what it is run with ----------------------------------------------------------------------------------------------


def _archived(path: Path, names: Sequence[str]) -> list[History]:
    with open_reader(path) as reader:
        found = of_archive(reader, names)
    if not found:
        raise LabError(f"the archive {str(path)!r} has no session with a history: name another one with --archive")
    return found


def _digest(histories: Sequence[History]) -> str:
    parts = (part for history in histories for part in (history.id.encode(), *history.messages))
    return sha256(b"\n".join(parts)).hexdigest()[:16]


def _changed(settings: Settings) -> Row | None:
    """Parameters of the selection that are not the product's defaults."""
    mine, theirs = parameters_of(settings), parameters_of(Settings())
    names = [field.name for field in fields(mine) if field.name != "seed"]
    changed = {name: getattr(mine, name) for name in names if getattr(mine, name) != getattr(theirs, name)}
    return changed or None


def _key(arguments: argparse.Namespace) -> str | None:
    url, variable = arguments.base_url, arguments.key_env
    if bool(url) != bool(arguments.model):
        raise LabError("a model needs both: --base-url and --model")
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LabError(f"{url!r} is no base URL; give one like https://api.openai.com/v1 with --base-url")
    key = os.environ.get(variable, "").strip()
    if not key and not is_loopback(parts.hostname):
        raise LabError(f"the variable {variable} is empty: put the key of {parts.hostname} there, or name --key-env")
    return key or None


def _model(arguments: argparse.Namespace) -> Row:
    if not arguments.base_url:
        return {}
    names = ("base_url", "model", "trials", "temperature")
    return {name: getattr(arguments, name) for name in names}


def _asking(client: httpx.AsyncClient, arguments: argparse.Namespace) -> differential.Ask:
    sampling = Sampling(arguments.model, arguments.temperature, None)
    model = ChatModel(client, join_target(arguments.base_url, PATHS["chat"], ""), sampling)

    async def ask(prompt: str) -> tuple[str, int | None]:
        answer = await model.ask([{"role": "user", "content": prompt}], sha256(prompt.encode()).hexdigest()[:16])
        return answer.text, answer.prompt_tokens

    return ask


STUDY = Study(NAME, "what is lost, kept and had back when blocks are left out", add_arguments, run, render)
