"""How the proxy is: its archive, the replay worker, and what went wrong lately, each with a remedy."""

from pathlib import Path

from graphstore.records import ExchangeRow, SessionRow
from graphstore.store.engine import ArchiveUnavailable
from graphstore.store.reader import Reader
from graphstore.store.report import failed_exchanges, last_answered
from proxy.commands.text import count, number
from proxy.failures import explained
from proxy.inspector.sessions import Value, View
from proxy.settings import Settings

ERRORS_SHOWN = 20
KEPT_FOR_EVER = "everything is kept; nothing is deleted by itself (`recap forget` removes a session)"


def show_health(view: View, said: Value) -> Value:
    """`said` is what /recap/health says."""
    names = {session.id: session for session in view.reader.list_sessions()}
    failed = failed_exchanges(view.reader, ERRORS_SHOWN, running_since=view.started_at)
    return {
        "started_at": view.started_at,
        "health": said,
        "database": _database(view.settings) | {"sessions": len(names), "problem": None},
        "pass_through": [
            {"session": session.name, "reason": session.state_reason}
            for session in names.values()
            if session.state != "normal"
        ],
        "upstream_problem": _of_the_last(view.reader),
        "errors": [_error(row, names.get(row.session_id or 0)) for row in failed],
    }


def health_without_archive(settings: Settings, started_at: float, said: Value, error: ArchiveUnavailable) -> Value:
    """The same while the archive cannot be read: what is known without it, and why."""
    return {
        "started_at": started_at,
        "health": said,
        "database": _database(settings) | {"sessions": None, "problem": str(error)},
        "pass_through": [],
        "upstream_problem": None,
        "errors": [],
    }


def _database(settings: Settings) -> Value:
    database = Path(settings.db)
    files = (database, database.with_name(f"{database.name}-wal"))
    return {
        "path": str(database),
        "bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "retention": _retention(settings),
    }


def _retention(settings: Settings) -> str:
    rules = [
        f"after {count(settings.keep_days, 'day')} without a request" if settings.keep_days else "",
        f"the oldest first when there are more than {number(settings.keep_bytes)} bytes" if settings.keep_bytes else "",
    ]
    said = " and ".join(filter(None, rules))
    return f"sessions are removed {said}" if said else KEPT_FOR_EVER


def _of_the_last(reader: Reader) -> str | None:
    """Why the latest request that waited for its answer got none from the upstream; None when it got one."""
    last = last_answered(reader)
    if last is None or (last.status is not None and last.status < 500):
        return None
    problem, remedy = explained(last)
    return f"{problem}; {remedy}"


def _error(row: ExchangeRow, session: SessionRow | None) -> Value:
    problem, remedy = explained(row)
    return {
        "at": row.started_at,
        "session": session.name if session else None,
        "turn": row.turn if session else None,
        "status": row.status,
        "problem": problem,
        "remedy": remedy,
    }
