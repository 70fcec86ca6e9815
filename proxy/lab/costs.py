"""recap eval costs: what a selection takes, what a graph weighs, what a replay takes (paper Tables 1 and 4, C.4).

Each session first goes through the proxy, warm throughout, so that the archive holds its blocks. With a local model its
turns are then replayed as the worker does, and the graph is what that made; without one the graph has made-up edges, as
many as the paper counts. Selections are timed at every user request with a history, in CPU time of one core: once with
nothing known of the history (the paper's way), once as in the running proxy, which keeps the identifiers of blocks.
"""

import argparse
import asyncio
import os
import platform
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Protocol

import msgspec

from graphstore.blocks import cut_blocks
from graphstore.evidence import Rule, default_rule, restricted
from graphstore.graph import ContextGraph
from graphstore.parameters import Parameters
from graphstore.records import EdgeRow, NodeState
from graphstore.replays import Replay
from graphstore.store.archive import open_queue, open_reader
from graphstore.store.reader import load_evidence
from proxy.commands.worker import ArchivedJobs
from proxy.conversations import parameters_of
from proxy.lab.drive import STEP_S, Request, Tokens, drive, empty_archive, laid_out, requests_of
from proxy.lab.errors import LabError
from proxy.lab.pages import markdown_table
from proxy.lab.provider_cache import CacheRules, ProviderCache
from proxy.lab.recordings import CHAT, Recording
from proxy.lab.results import Results, Row
from proxy.lab.study import Study, add_data, begin, command_of, load_data, provenance, remaining
from proxy.selecting import IdentifierCache, choose
from proxy.settings import Settings
from proxy_model.context import ContextBlock
from proxy_model.errors import ReplayError

NAME = "costs"
PASSES = 5  # of which the median counts
EDGES_A_BLOCK = 6.5  # the paper's (appendix C)
TTL_S = 3600.0
WAYS = {"first": "nothing known of the history", "again": "identifiers kept, as the proxy does"}
PAPER_TIMES = (  # Table 4: benchmark and backbone, blocks, median, p90, max in ms
    ("SWE-Together, Qwen3-Coder", 132, 20.2, 45.2, 112.6),
    ("SWE-Together, gpt-oss", 18, 1.4, 4.4, 20.3),
    ("LiC, Qwen3-Coder", 6, 0.30, 0.80, 1.69),
    ("LiC, gpt-oss", 6, 0.26, 0.65, 1.51),
)


class Observer(Protocol):
    """A local model as the worker uses it."""

    def observe(self, blocks: Sequence[ContextBlock], session: int) -> Replay: ...
    def forget(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    parser.add_argument(
        "--model", metavar="NAME", help="local model for replays: a Hugging Face name, a folder or a .gguf file"
    )


def hardware() -> str:
    """Processor, number of processors, system and Python: what times depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        named = platform.processor() or platform.machine()
    return f"{named} × {os.cpu_count()}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


# -- the run ----------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, settings: Settings) -> Results:
    data = load_data(arguments)
    model = arguments.model
    named = Path(model).name if model and Path(model).is_dir() else model
    results = begin(NAME, arguments, files=dict(data.files), model=named, hardware=hardware())
    sessions = [
        (f"{number} {recording.id}", (recording, requests))
        for number, recording in enumerate(data.recordings)
        if (requests := requests_of(recording))
    ]
    if not sessions:
        raise LabError("no session has a request that an agent answered: name another file")
    asked = Settings(seed=arguments.seed, attention_model=model or "")
    tokens = Tokens()
    observer: Observer | None = None
    with empty_archive() as archive:
        for item, (recording, requests) in remaining(results, sessions, NAME):
            with laid_out(archive, f"{arguments.seed}|{recording.id}") as path:
                here = msgspec.structs.replace(asked, db=str(path))
                cache = ProviderCache(CacheRules(TTL_S))
                asyncio.run(drive(recording, requests, [STEP_S] * len(requests), here, cache, tokens))
                replays: list[Replay] = []
                if model:
                    observer, replays = replay_all(here, observer)
                rule, graph = _graph(here, replays, arguments.seed)
            of_nodes, of_edges = graph.held_bytes()
            nodes, edges = graph.to_rows()
            results.add(
                item,
                selections=list(time_selections(recording, requests, graph, rule)),
                graph={"nodes": len(nodes), "edges": len(edges), "node bytes": of_nodes, "edge bytes": of_edges},
                replays=[
                    {"tokens": r.tokens_computed, "seconds": round(r.seconds, 3), "device": r.device, "dtype": r.dtype}
                    for r in replays
                ],
            )
    return results


def time_selections(
    recording: Recording, requests: Sequence[Request], graph: ContextGraph, rule: Rule
) -> Iterator[Row]:
    """One row for each user request with a history, in milliseconds."""
    parameters = Parameters()
    asked = [recording.request(r.messages) for r in requests if r.opens_turn]
    graphs = [restricted(graph, frozenset(range(cut_blocks(request.messages).turn_start))) for request in asked]

    def once(number: int, cache: IdentifierCache) -> float:
        request = asked[number]
        start = time.process_time_ns()
        cut = cut_blocks(request.messages)
        ordinals = range(len(cut.blocks))
        choose(
            CHAT, request, cut, ordinals, graphs[number], parameters, cache, session="s", turn=number + 1, rule=rule
        )  # fmt: skip
        return (time.process_time_ns() - start) / 1e6

    chosen = [i for i, request in enumerate(asked) if cut_blocks(request.messages).turn_start]
    times: dict[str, dict[int, list[float]]] = {way: {i: [] for i in chosen} for way in WAYS}
    for _ in range(PASSES):
        kept = IdentifierCache()
        for i in chosen:
            times["first"][i].append(once(i, IdentifierCache()))
            times["again"][i].append(once(i, kept))
    for i in chosen:
        history = cut_blocks(asked[i].messages)
        blocks = history.blocks[: history.turn_start]
        yield {
            "blocks": len(blocks),
            "chars": sum(block.cost for block in blocks),
            **{way: round(median(times[way][i]), 4) for way in WAYS},
        }


def replay_all(settings: Settings, observer: Observer | None) -> tuple[Observer, list[Replay]]:
    """Replay the turns that wait in an archive, and keep what that says in it. Raises LabError: no such model."""
    found: list[Replay] = []
    with open_queue(settings.db, parameters=parameters_of(settings)) as queue, open_reader(settings.db) as reader:
        jobs = ArchivedJobs(queue, reader, settings)
        try:
            observer = observer or jobs.load()
            while (job := jobs.claim()) is not None:
                context = jobs.context(job)
                found.append(observer.observe(context.blocks, job.session_id))
                jobs.finish(job, found[-1], context.identifiers)
            observer.forget()
        except ReplayError as error:
            raise LabError(f"--model {settings.attention_model!r}: {error}") from error
    return observer, found


def _graph(settings: Settings, replays: Sequence[Replay], seed: int) -> tuple[Rule, ContextGraph]:
    """The only session's graph: what replays made of it, or made-up edges between its blocks."""
    with open_reader(settings.db) as reader:
        (session,) = reader.list_sessions()
        if replays:
            return load_evidence(reader, session.id, None, parameters_of(settings))
        blocks = len(reader.load_blocks(session.id))
    return default_rule(None), made_up(blocks, seed)


def made_up(blocks: int, seed: int) -> ContextGraph:
    """All blocks observed, and as many edges as the paper counts, as far as there are pairs."""
    draw = random.Random(seed)
    pairs = [(a, b) for b in range(blocks) for a in range(b)]
    edges = sorted(draw.sample(pairs, min(len(pairs), int(EDGES_A_BLOCK * blocks))), key=lambda pair: pair[::-1])
    nodes = [NodeState(i, draw.random(), True, False) for i in range(blocks)]
    return ContextGraph.from_rows(nodes, [EdgeRow(a, b, draw.random(), i) for i, (a, b) in enumerate(edges)])


# -- the page ---------------------------------------------------------------------------------------------------------


def render(results: Results, folder: Path) -> str:
    about = results.about
    words = [*about["files"], *(("--model", about["model"]) if about["model"] else ())]
    parts = [
        "## Costs",
        "What a selection takes (paper, Table 4 and C.4), from cutting the history into blocks to expansion, in CPU "
        f"time of one core; median of {PASSES} passes for each user request with a history. The paper's times are of "
        "an AMD EPYC 7453 and of other sessions: sizes stand beside them.",
        provenance(results, command_of(NAME, *words)),
        "",
        _times(results),
        "",
        _memory(results),
        "",
        _replays(results),
    ]
    return "\n".join(parts) + "\n"


def _times(results: Results) -> str:
    every = [selection for row in results.rows for selection in row["selections"]]
    header = ["selection, ms", "requests", "blocks (median)", "median", "p90", "p95", "max"]
    rows: list[list[object]] = []
    for way, said in WAYS.items():
        times = [selection[way] for selection in every]
        if len(times) > 1:
            cuts = quantiles(times, n=20, method="inclusive")
            blocks = int(median(selection["blocks"] for selection in every))
            rows.append([f"here, {said}", len(every), blocks, median(times), cuts[17], cuts[18], max(times)])
    for name, blocks, middle, p90, largest in PAPER_TIMES:
        rows.append([f"paper, {name}", None, blocks, f"{middle:g}", f"{p90:g}", None, f"{largest:g}"])
    return markdown_table(header, rows)


def _memory(results: Results) -> str:
    graphs = [row["graph"] for row in results.rows]
    nodes, edges = (sum(graph[name] for graph in graphs) for name in ("nodes", "edges"))
    of_nodes, of_edges = (sum(graph[f"{name} bytes"] for graph in graphs) for name in ("node", "edge"))
    origin = "made by replays" if results.about["model"] else "made-up edges"
    rows: list[list[object]] = [
        [
            f"here, {origin}",
            of_nodes / nodes if nodes else None,
            of_edges / edges if edges else None,
            edges / nodes if nodes else None,
            fmean(graph["node bytes"] + graph["edge bytes"] for graph in graphs) / 1000 if graphs else None,
        ],
        ["paper, SWE-Together, Qwen3-Coder", 12, 12, f"at most {EDGES_A_BLOCK}", 19],
        ["paper, elsewhere", 12, 12, f"at most {EDGES_A_BLOCK}", "under 3"],
    ]
    return markdown_table(["graph", "bytes a node", "bytes an edge", "edges a node", "kB a session"], rows)


def _replays(results: Results) -> str:
    replays = [replay for row in results.rows for replay in row["replays"]]
    if not replays:
        return (
            f"Replay: not measured, {'no turn waited for one' if results.about['model'] else 'no --model was named'}."
        )
    tokens, seconds = ([replay[name] for replay in replays] for name in ("tokens", "seconds"))
    kinds = ", ".join(sorted({f"{replay['dtype']} on {replay['device']}" for replay in replays}))
    rate = sum(tokens) / sum(seconds)
    return (
        f"Replay with {results.about['model']} ({kinds}), all turns of a session at once: {len(replays)} replays, "
        f"in the median {median(tokens):,.0f} tokens in {median(seconds):.1f} s, {rate:,.0f} tokens a second (wall "
        "time). What a model's window does not hold is not read. The paper reads attention while the agent's model "
        "runs and gives no time for a replay."
    )


STUDY = Study(NAME, "what selections, the graph and replays cost (Tables 1 and 4)", add_arguments, run, render)
