"""What replays said, in words: for `show`, `explain` and everything else that prints it."""

from collections.abc import Collection
from pathlib import Path

from graphstore.evidence import OF_IMPORTANCE, OF_PAST_USE, Rule
from graphstore.records import JobRow, ReplayRow
from graphstore.store.reader import Reader
from graphstore.store.replays import worker_runs
from proxy.attention import DIED_OTHERWISE, how_it_died, why_none
from proxy.commands.text import count, duration, number, plain, short
from proxy.settings import Settings

MODEL_CHARS = 60
NAMED_BLOCKS = 8  # of a list of block numbers: one line of a terminal


def signals(rule: Rule) -> str:
    """What a score under this rule rests on, as a formula's left part."""
    parts = ["z(u)"] * (rule in OF_IMPORTANCE) + ["z(past)"] * (rule in OF_PAST_USE)
    return " + ".join(parts)


def attention_state(reader: Reader, session_id: int, settings: Settings) -> str:
    """One line: what has observed this session; or that nothing has, and why as far as the archive knows."""
    observed = reader.load_replays(session_id)
    if observed:
        last = observed[-1]
        return (
            f"attention: {count(len(observed), 'replay')} by {short(plain(last.model), MODEL_CHARS)}, "
            f"the last of turn {last.turn}"
        )
    if reader.last_observed(session_id) is not None:
        return "attention: inherited from the session that this one branched from; no replay of its own yet"
    return f"attention: none, so no importance, edges or stale marks: {_why_none(reader, session_id, settings)}"


def _why_none(reader: Reader, session_id: int, settings: Settings) -> str:
    jobs = reader.load_jobs(session_id)
    failed = next((job for job in reversed(jobs) if job.state == "failed"), None)
    status = reader.worker_status()
    runs = worker_runs(Path(settings.db))
    if not runs and (absent := why_none(settings)):
        return f"{absent[0]}; {absent[1]}"
    if status is not None and status.problem:
        return plain(status.problem)
    if failed is not None:
        return f"the replay of turn {failed.turn} failed: {plain(failed.error or '')}"
    if any(job.state in ("queued", "claimed") for job in jobs):
        if status is None or not runs:
            problem, remedy = DIED_OTHERWISE if status is None else how_it_died(status)
            return f"a turn waits: {problem}; {remedy}"
        return f"a turn waits for the worker, which is {status.state}"
    return "no turn of it has ended yet"


def replay_line(job: JobRow | None, replay: ReplayRow | None) -> str | None:
    """One line on the replay of a turn; None when there never was a job for it."""
    if replay is not None:
        since = f" (turns {replay.since_turn} to {replay.turn})" if replay.since_turn < replay.turn else ""
        missing = f", {_unobserved(replay)}" if replay.unobserved else ""
        stale = f", stale: {_named(replay.replaced)}" if replay.replaced else ""
        return (
            f"replay{since}: {count(replay.blocks, 'block')} in {number(replay.tokens)} tokens "
            f"({number(replay.tokens_computed)} computed in {duration(replay.seconds)}), {replay.rows} rows, "
            f"{count(replay.edges, 'edge')}{missing}{stale}"
        )
    if job is None:
        return None
    match job.state:
        case "queued":
            again = f" again after: {plain(job.error)}" if job.error else ""
            return f"replay: waits for a worker{again}"
        case "claimed":
            return "replay: running"
        case "folded":
            return f"replay: none of its own: {plain(job.error)}" if job.error else "replay: part of a later turn's"
        case "failed":
            return f"replay: failed after {count(job.attempts, 'attempt')}: {plain(job.error or 'no reason was kept')}"
        case _:
            return None


def _unobserved(replay: ReplayRow) -> str:
    """What a context that was too long lost, oldest first; a replay that saw nothing else says what would help."""
    lost = f"{count(len(replay.unobserved), 'block')} did not fit: {_named(replay.unobserved)}"
    return lost if replay.blocks else f"{lost} (raise attention_max_tokens, or choose a model that takes longer ones)"


def _named(ordinals: Collection[int]) -> str:
    more = f" and {len(ordinals) - NAMED_BLOCKS} more" if len(ordinals) > NAMED_BLOCKS else ""
    return ", ".join(str(v) for v in sorted(ordinals)[:NAMED_BLOCKS]) + more
