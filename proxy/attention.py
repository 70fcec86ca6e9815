"""Whether replays are made here, and if not, why: for health, for `show`, for starting the worker. Imports no torch."""

from importlib.util import find_spec
from pathlib import Path

from graphstore.records import WorkerStatus
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.reader import Reader
from graphstore.store.replays import worker_runs
from proxy.settings import Settings
from proxy_model.errors import INSTALL

LIBRARIES = ("torch", "transformers")
INSTALL_AND_RESTART = f"{INSTALL}, then restart the proxy"
DIED = {
    "loading": ("the worker ended while it loaded the model", "if memory ran out, choose a smaller attention_model"),
    "replaying": (
        "the worker ended while it replayed a turn",
        "if memory ran out, lower attention_max_tokens or choose a smaller attention_model",
    ),
}
DIED_OTHERWISE = ("no worker runs", "see the proxy's log; `recap serve` starts one, or run `recap worker`")


def missing_libraries() -> list[str]:
    return [name for name in LIBRARIES if find_spec(name) is None]


def why_none(settings: Settings) -> tuple[str, str] | None:
    """Problem and remedy when no worker is to run; None when one is."""
    if settings.attention == "off":
        too = f", and {INSTALL_AND_RESTART}" if missing_libraries() else ""
        return "the setting attention is off", f"set attention to auto{too}"
    if missing := missing_libraries():
        return f"{' and '.join(missing)} cannot be imported here", INSTALL_AND_RESTART
    return None


def how_it_died(status: WorkerStatus) -> tuple[str, str]:
    """Problem and remedy, from what a worker that runs no longer said last."""
    return DIED.get(status.state, DIED_OTHERWISE)


def attention_health(reader: Reader, settings: Settings) -> dict[str, object]:
    """`state`: off, missing (libraries), waiting (no worker has started yet), dead, or what the worker last said."""
    found: dict[str, object] = {"state": "off", "evidence": settings.evidence, "model": settings.attention_model}
    runs = worker_runs(Path(settings.db))  # perhaps in another container, which has the libraries
    absent = None if runs else why_none(settings)
    try:
        jobs, status, failed = reader.count_jobs(), reader.worker_status(), reader.last_failed_job()
    except ArchiveUnavailable as error:
        return found | {"state": "unknown", "problem": error.problem, "remedy": error.remedy}
    found |= {"queued": jobs.get("queued", 0), "done": jobs.get("done", 0), "failed": jobs.get("failed", 0)}
    found |= {"last_error": failed.error if failed else None, "problem": None, "remedy": None}
    if absent is not None:
        state = "off" if settings.attention == "off" else "missing"
        return found | {"state": state, "problem": absent[0], "remedy": absent[1]}
    if status is None:
        return found | {"state": "waiting"}
    problem, _, remedy = (status.problem or "").partition("; ")
    dead = not runs and status.state != "stopped"
    if dead and not problem:
        problem, remedy = how_it_died(status)
    return found | {
        "state": "dead" if dead else status.state,
        "model": status.model,
        "device": status.device,
        "problem": problem or None,
        "remedy": remedy or None,
    }
