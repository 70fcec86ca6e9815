"""recap eval lic: Lost in Conversation, code (paper §5.1, Tables 1-3): does a model solve what it is told in pieces?

A user says the shards of a task one after the other, verbatim. After each the model answers; the code in its answer is
run against the task's tests; the conversation ends at the first answer that passes, or after the last shard. All but
`full` goes through the product's own proxy, which selects anew at every user message; what changes the text, as the
proxy never does (`compactors`), is done here and goes to the model. One row in the results for each conversation. The
k-th conversations of all tasks are repeat k; what is shown is the mean of the repeats and their sample standard
deviation (paper, Appendix C).
"""

import argparse
import asyncio
import hashlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from proxy.conversations import parameters_of
from proxy.lab.chat_model import Answer, ChatModel, Sampling
from proxy.lab.compactors import Compacted, Compactors, Summariser, UnitSelector
from proxy.lab.errors import LabError
from proxy.lab.kv import EvictingChat
from proxy.lab.lic_page import COMPACTORS, FULL, KV, NAME, ROWS, SELECTORS, render
from proxy.lab.lic_tasks import SYSTEM, Task, code_of, read_tasks
from proxy.lab.lingua import WEIGHTS, Squeezer, load_lingua
from proxy.lab.own_proxy import OwnProxy, own_proxy
from proxy.lab.results import Results, Row
from proxy.lab.sandbox import GUARDS, MISSING, Outcome, Program, run_tests
from proxy.lab.study import Study, begin, remaining
from proxy.lab.units import Granularity
from proxy.settings import Settings
from proxy.upstream.target import is_loopback, join_target

CONVERSATIONS = 5  # the paper's
TEMPERATURE = 1.0  # Lost in Conversation's own default; the paper gives none
PATH = "/v1/chat/completions"
NO_CODE = "no code that defines a function"


@dataclass(frozen=True, slots=True)
class Conversation:
    selector: str
    repeat: int
    task: Task

    @property
    def item(self) -> str:
        return f"{self.selector} {self.repeat} {self.task.id}"

    @property
    def client_id(self) -> str:
        return f"lic-{hashlib.sha256(self.item.encode()).hexdigest()[:24]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", required=True, metavar="URL", help="of the provider, as an SDK gets it")
    parser.add_argument("--model", required=True, metavar="NAME", help="as the provider calls it")
    parser.add_argument(
        "--key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the key (default OPENAI_API_KEY)"
    )
    parser.add_argument("--tasks", type=Path, metavar="FILE", help="JSON or JSONL of tasks (default: the 100 shipped)")
    parser.add_argument("--instances", type=int, metavar="N", help="only the first N of them")
    parser.add_argument(
        "--conversations", type=int, default=CONVERSATIONS, metavar="N", help=f"of each task (default {CONVERSATIONS})"
    )
    parser.add_argument(
        "--selectors",
        default=",".join(SELECTORS),
        metavar="NAMES",
        help=f"which rows, separated by commas (default {','.join(SELECTORS)}; also {', '.join((*COMPACTORS, KV))})",
    )
    parser.add_argument(
        "--lingua-model",
        metavar="NAME",
        help=f"weights of the row {' or '.join(WEIGHTS)}: a folder or a Hugging Face name (default: the paper's)",
    )
    parser.add_argument(
        "--kv-model", metavar="NAME", help=f"of the row {KV}, in place of the provider: a folder or a Hugging Face name"
    )
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, metavar="T", help=f"default {TEMPERATURE}")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: the provider's)")
    parser.add_argument("--parallel", type=int, default=4, metavar="N", help="conversations at a time (default 4)")
    parser.add_argument(
        "--replay", action="store_true", help="replay each turn through the local model before the next (Table 3)"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    selectors = _selectors(arguments.selectors)
    for flag in ("conversations", "parallel", "instances", "max_tokens"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise LabError(f"--{flag.replace('_', '-')} is {value}; it must be at least 1")
    if not 0 <= arguments.temperature < math.inf:
        raise LabError(f"--temperature is {arguments.temperature}; it must be a number from 0 on")
    if arguments.lingua_model and len(named := [name for name in selectors if name in WEIGHTS]) != 1:
        raise LabError(f"--lingua-model is of one row: --selectors names {' and '.join(named) or 'none of them'}")
    if bool(arguments.kv_model) != (KV in selectors):
        raise LabError(f"the row {KV} and --kv-model go together: name both, or neither")
    key = _key(arguments.base_url, arguments.key_env)
    tasks = read_tasks(arguments.tasks)
    chosen = tasks.tasks[: arguments.instances]
    results = begin(
        NAME,
        arguments,
        tasks={tasks.file: tasks.digest},
        endpoint=arguments.base_url,
        model=arguments.model,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        beta=settings.beta,
        evidence=settings.evidence,
        replay=settings.attention_model if arguments.replay else None,
        **({"lingua_model": arguments.lingua_model} if arguments.lingua_model else {}),
        **({"kv_model": arguments.kv_model} if arguments.kv_model else {}),
    )
    _warn_of_missing_guards()
    for selector in selectors:
        repeats = range(1, arguments.conversations + 1)
        conversations = [Conversation(selector, repeat, task) for repeat in repeats for task in chosen]
        if all(conversation.item in results.done for conversation in conversations):
            continue
        asyncio.run(_run_selector(arguments, settings, results, conversations, key))
    return results


def _selectors(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in ROWS]:
        raise LabError(f"unknown selector {unknown[0]!r}; there are {', '.join(ROWS)}")
    if not names:
        raise LabError(f"--selectors names none; there are {', '.join(ROWS)}")
    return names


def _key(url: str, variable: str) -> str | None:
    """Raises `LabError` for a URL that is none, or that holds what should not be written down."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise LabError(f"{url!r} is no base URL; give one like https://api.openai.com/v1 with --base-url")
    if parts.username is not None or parts.query or parts.fragment:
        raise LabError(
            "--base-url takes no user, query or fragment: the key goes into the variable that --key-env names"
        )
    key = os.environ.get(variable, "").strip()
    if not key and not is_loopback(host):
        raise LabError(f"the variable {variable} is empty: put the key of {host} there, or name --key-env")
    if not key.isascii():
        raise LabError(f"the variable {variable} holds no key: a header is ASCII")
    return key or None


def _warn_of_missing_guards() -> None:
    """What this system cannot forbid to the code of the model."""
    outcome = run_tests(Program("def f(): return 1", "f", "def check(candidate): assert candidate() == 1"))
    if not outcome.passed:
        raise LabError(f"the sandbox does not work here: {outcome.detail}; run the lab in a container")
    for guard in GUARDS:
        if guard not in outcome.guards and guard in MISSING:
            print(f"recap: no {guard} here: {MISSING[guard]}; prefer a container", file=sys.stderr)


# -- one selector ------------------------------------------------------------------------------------------------------


async def _run_selector(
    arguments: argparse.Namespace,
    settings: Settings,
    results: Results,
    conversations: Sequence[Conversation],
    key: str | None,
) -> None:
    selector = conversations[0].selector
    if selector == KV:
        left = remaining(results, [(c.item, c) for c in conversations], f"{NAME} {selector}")
        evicting = EvictingChat(
            arguments.kv_model,
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            seed=arguments.seed,
        )
        await _in_parallel(arguments.parallel, left, results, Talk(evicting))
        return
    sampling = Sampling(arguments.model, arguments.temperature, arguments.max_tokens)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=settings.read_timeout, headers=headers) as client:
        left = remaining(results, [(c.item, c) for c in conversations], f"{NAME} {selector}")
        if selector == FULL:
            model = ChatModel(client, join_target(arguments.base_url, PATH, ""), sampling)
            await _in_parallel(arguments.parallel, left, results, Talk(model))
            return
        if selector in COMPACTORS:
            model = ChatModel(client, join_target(arguments.base_url, PATH, ""), sampling)
            compactors = _compactors(selector, settings, arguments)
            await _in_parallel(arguments.parallel, left, results, Talk(model, compactors=compactors))
            return
        changed = msgspec.structs.replace(
            settings,
            upstream=arguments.base_url,
            mode="always",
            min_history_tokens=0,
            selector=selector,
            seed=arguments.seed,
        )
        replays = arguments.replay and selector == "recap"
        async with own_proxy(changed, replays=replays) as proxy:
            model = ChatModel(client, proxy.url + PATH, sampling)
            await _in_parallel(arguments.parallel, left, results, Talk(model, proxy, replays=replays))


def _compactors(name: str, settings: Settings, arguments: argparse.Namespace) -> Compactors:
    if name == "summary":
        return Summariser
    if name in WEIGHTS:
        squeeze = load_lingua(name, arguments.lingua_model)
        return lambda model, session: Squeezer(squeeze)
    parameters = replace(parameters_of(settings), seed=arguments.seed)
    granularity: Granularity = "paragraph" if name == "paragraph-blocks" else "line"
    return lambda model, session: UnitSelector(granularity, parameters, session, notice=settings.notice)


@dataclass(frozen=True, slots=True)
class Talk:
    """Who answers, and what stands between."""

    model: ChatModel | EvictingChat
    proxy: OwnProxy | None = None
    replays: bool = False
    compactors: Compactors | None = None


async def _in_parallel(count: int, left: Iterator[tuple[str, Conversation]], results: Results, talk: Talk) -> None:
    """The first error stops what still runs; rows that are written stay."""

    async def work() -> None:
        for item, conversation in left:
            results.add(item, **await converse(conversation, talk))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except* LabError as errors:
        raise _first(errors) from None


def _first(errors: BaseExceptionGroup[LabError]) -> LabError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, LabError)
    return error


async def converse(conversation: Conversation, talk: Talk) -> Row:
    """Say the shards until an answer passes. Raises `LabError` for errors of the model."""
    messages = [{"role": "system", "content": SYSTEM}]
    outcome = Outcome(False, "", ())
    proxy, name = talk.proxy, conversation.client_id
    compactor = None
    if talk.compactors is not None:
        assert isinstance(talk.model, ChatModel)
        compactor = talk.compactors(talk.model, name)
    made: list[Compacted] = []
    answers: list[Answer] = []
    for number, shard in enumerate(conversation.task.shards):
        if talk.replays and proxy is not None and number:
            await proxy.replayed(name)
        request, sent = {"role": "user", "content": shard}, messages
        if compactor is not None and number:
            made.append(await compactor.compact(messages, shard))
            sent = list(made[-1].messages)
        answer = await talk.model.ask([*sent, request], name)
        answers.append(answer)
        messages.append(request)
        messages.append({"role": "assistant", "content": answer.text})
        outcome = await asyncio.to_thread(_tested, conversation.task, answer.text)
        if outcome.passed:
            break
    served = await proxy.exchanges(name) if proxy is not None else []
    if isinstance(talk.model, EvictingChat):
        talk.model.ended(name)
    short = [row.blocks_left_out > 0 and not row.fell_back for row in served] or [one.shortened for one in made]
    short = short or [answer.shortened for answer in answers]
    return {
        "selector": conversation.selector,
        "repeat": conversation.repeat,
        "task": conversation.task.id,
        "solved": outcome.passed,
        "answers": len(answers),
        "shards": len(conversation.task.shards),
        "prompt_tokens": [answer.prompt_tokens for answer in answers],
        "shortened": sum(short),
        "fell_back": sum(row.fell_back for row in served),
        "detail": outcome.detail,
        **({"compaction": _taken(made)} if compactor is not None else {}),
    }


def _taken(made: Sequence[Compacted]) -> Row:
    """Sums. Tokens are None when the provider left one of them out."""
    prompt, completion = [one.prompt_tokens for one in made], [one.completion_tokens for one in made]
    return {
        "compactions": len(made),
        "calls": sum(one.calls for one in made),
        "prompt_tokens": None if None in prompt else sum(filter(None, prompt)),
        "completion_tokens": None if None in completion else sum(filter(None, completion)),
        "seconds": round(sum(one.seconds for one in made), 6),
    }


def _tested(task: Task, answer: str) -> Outcome:
    found = code_of(answer, task.function)
    return run_tests(task.program(*found)) if found else Outcome(False, NO_CODE, ())


STUDY = Study(
    NAME, "does a model solve what it is told in pieces? (Lost in Conversation, Tables 1-3)", add_arguments, run, render
)
