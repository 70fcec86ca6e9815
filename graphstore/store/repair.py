"""What can be saved of a damaged archive, as a new one that verifies.

Records are read page by page (`pages`) and told apart by their shape. A message counts when its bytes have its digest,
a place in a history when it follows from its parent, a session up to the first message that is lost. Blocks are cut
anew, importances derived anew. What has no hash (titles, token counts, measurements) is taken as it is found.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Boolean, Double, Integer, LargeBinary, Table
from sqlalchemy.types import TypeDecorator

from graphstore.blocks import Block
from graphstore.evidence import RULES
from graphstore.identity import chain_digests, message_digest, row_id
from graphstore.records import SessionRow
from graphstore.store import schema
from graphstore.store.archive import Archive, known_revisions, newer, open_queue
from graphstore.store.blobs import is_redacted, unpack
from graphstore.store.engine import ArchiveUnavailable, pragma, writer_engine
from graphstore.store.pages import Record, Value, read_records
from graphstore.store.replays import GROUPS, INHERITED
from graphstore.store.verify import Recut

Row = dict[str, Any]
Found = dict[str, list[Row]]

ADDED_LATER = {"sessions": 2, "selection_blocks": 1}  # columns at the end that old rows lack
IGNORED = frozenset({"edges", "workers"})  # derived from the rest, or of the moment
KINDS, STATES, MARKS = ("agent", "side"), ("normal", "pass-through"), ("pin", "mute")
JOB_STATES = ("queued", "claimed", "done", "failed", "folded")


@dataclass
class Salvage:
    """What was saved. `cut` has, for a session that lost its end, how many messages it kept and had; `nameless` are
    sessions whose own row is lost."""

    kept: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    cut: dict[str, tuple[int, int]] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)
    lost_secret: bool = False

    @property
    def is_whole(self) -> bool:
        return not (self.cut or self.nameless or self.lost_secret) and self.kept == self.found


def salvage(source: Path, target: Path, recut: Recut, dialects: Sequence[str]) -> Salvage:
    """Write what can be saved of `source` into a new archive at `target`; reads `source` and its -wal, nothing else.

    Raises `ArchiveUnavailable`: written by a newer version, or nothing to save.
    """
    log = source.with_name(f"{source.name}-wal")
    records = list(read_records(source.read_bytes(), log.read_bytes() if log.is_file() else b""))
    _refuse_newer(source, records)
    Archive.open(target, count_tokens=len).close()
    engine = writer_engine(target)
    try:
        layout = _layout(engine)
        saved = _Saved(_sorted_out(records, layout), _scopes(records), recut, dialects)
        saved.work_out()
        if not saved.kept["sessions"] and not saved.kept["messages"]:
            problem = f"nothing of an archive can be read in {str(source)!r}"
            raise ArchiveUnavailable("corrupt", problem, "restore a backup of it")
        with engine.connect() as connection:
            pragma(connection, "foreign_keys=OFF")
            with connection.begin():
                for name, columns in layout.items():
                    rows = [tuple(row[column] for column in columns) for row in saved.kept.get(name, ())]
                    marks = ", ".join("?" * len(columns))
                    if rows:
                        connection.exec_driver_sql(f"INSERT OR REPLACE INTO {name} VALUES ({marks})", rows)
    finally:
        engine.dispose()
    with open_queue(target, clock=lambda: 0.0, claims=False) as queue:
        for row in saved.kept["sessions"]:
            if row["evidence"]:
                queue.rebuild(row["id"], row["evidence"])
    return saved.report


def _refuse_newer(source: Path, records: Iterable[Record]) -> None:
    versions = {r.values[0] for r in records if r.rowid is not None and len(r.values) == 1}
    named = {version for version in versions if isinstance(version, str)}
    if named and not named & known_revisions():
        raise newer(source, min(named))


def _layout(engine: Any) -> dict[str, list[str]]:
    """Table -> columns in the order in which the file has them, which migrations decide."""
    with engine.connect() as db:
        names = [name for name in schema.metadata.tables if name not in IGNORED]
        return {name: [row[1] for row in db.exec_driver_sql(f"PRAGMA table_info({name})")] for name in names}


def _sorted_out(records: Iterable[Record], layout: Mapping[str, list[str]]) -> Found:
    """Table -> the records that may be its rows. Two tables may claim one: what they refer to decides later."""
    found: Found = {name: [] for name in layout}
    tables = {name: schema.metadata.tables[name] for name in layout}
    shapes: dict[tuple[bool, int], list[str]] = {}
    for name, columns in layout.items():
        has_rowid = tables[name].dialect_options["sqlite"]["with_rowid"]
        for length in range(len(columns) - ADDED_LATER.get(name, 0), len(columns) + 1):
            shapes.setdefault((has_rowid, length), []).append(name)
    for record in records:
        for name in shapes.get((record.rowid is not None, len(record.values)), ()):
            row = _row(record, tables[name], layout[name])
            if row is not None:
                found[name].append(row)
    return found


def _row(record: Record, table: Table, columns: Sequence[str]) -> Row | None:
    row: Row = dict(zip(columns, record.values, strict=False))
    for name in columns:
        column, value = table.c[name], row.get(name)
        if name not in row:
            value = row[name] = "" if not column.nullable else None
        elif value is None and column.primary_key and record.rowid is not None:
            row[name] = record.rowid
        if row[name] is None:
            if not column.nullable:
                return None
        elif not isinstance(row[name], _python_types(table, name)):
            return None
    return row


def _python_types(table: Table, name: str) -> tuple[type, ...]:
    kind = table.c[name].type
    kind = kind.impl_instance if isinstance(kind, TypeDecorator) else kind
    if isinstance(kind, Double):
        return (float, int)
    if isinstance(kind, (BigInteger, Integer, Boolean)):
        return (int,)
    return (bytes,) if isinstance(kind, LargeBinary) else (str,)


def _scopes(records: Iterable[Record]) -> dict[int, bytes]:
    """Session id -> scope, as the indexes of sessions have it too."""
    found = {}
    for record in records:
        values: tuple[Value, ...] = record.values
        if record.rowid is None and len(values) == 3:
            scope, between, id = values
            if isinstance(scope, bytes) and isinstance(id, int) and not isinstance(between, bytes):
                found[id] = scope
    return found


def _by_key(rows: Iterable[Row], *names: str, newest: Callable[[Row], Any] | None = None) -> dict[Any, Row]:
    """One row for each key: an old copy of a page may hold an earlier version of it."""
    found: dict[Any, Row] = {}
    for row in rows:
        key = tuple(row[name] for name in names) if len(names) > 1 else row[names[0]]
        if newest is None or key not in found or newest(row) >= newest(found[key]):
            found[key] = row
    return found


class _Saved:
    """Works out, table by table, which of the rows found can stand. `kept` has them."""

    def __init__(self, found: Found, scopes: dict[int, bytes], recut: Recut, dialects: Sequence[str]) -> None:
        self.found = found
        self.scopes = scopes
        self.recut = recut
        self.dialects = dialects
        self.kept: Found = {}
        self.report = Salvage()
        self.raws: dict[int, bytes] = {}
        self.nodes: dict[int, Row] = {}

    def work_out(self) -> None:
        self._messages()
        exchanges = _by_key(self.found["exchanges"], "id", newest=lambda row: row["ended_at"] or 0.0)
        sessions = self._sessions(exchanges)
        self._nodes(sessions)
        self._heads(sessions, exchanges)
        blocks = self._blocks(sessions)
        self._exchanges(sessions, exchanges, blocks)
        self._observations(sessions, exchanges, blocks)
        self._rest(sessions, exchanges)
        self._drop_orphans(sessions, exchanges)
        self._count()

    def _messages(self) -> None:
        for row in self.found["messages"]:
            try:
                raw = unpack(row["codec"], row["content"])
            except ValueError:
                continue
            digest = row["digest"] if is_redacted(row["codec"]) else message_digest(raw)
            if (digest, row_id(digest), len(raw)) == (row["digest"], row["id"], row["size"]):
                self.raws[row["id"]] = raw
                self.kept.setdefault("messages", []).append(row)
        self.kept["messages"] = list(_by_key(self.kept.get("messages", ()), "id").values())

    def _sessions(self, exchanges: Mapping[int, Row]) -> dict[int, Row]:
        """Those found, and one without a name for each that only its requests speak of."""
        sessions = _by_key(self.found["sessions"], "id", newest=lambda row: row["last_active_at"])
        requests: dict[int, list[Row]] = {}
        for row in sorted(exchanges.values(), key=lambda row: int(row["id"])):
            if row["session_id"] is not None:
                requests.setdefault(row["session_id"], []).append(row)
        for id, own in requests.items():
            if id not in sessions and id in self.scopes:
                sessions[id] = _nameless(id, self.scopes[id], own)
                self.report.nameless.append(sessions[id]["name"])
        names: set[str] = set()
        for id, row in list(sessions.items()):
            if id in self.scopes:
                row["scope"] = self.scopes[id]
            if row["dialect"] not in self.dialects:
                spoken = Counter(r["dialect"] for r in requests.get(id, ()) if r["dialect"] in self.dialects)
                row["dialect"] = spoken.most_common(1)[0][0] if spoken else self.dialects[0]
            row["kind"] = row["kind"] if row["kind"] in KINDS else "agent"
            row["state"] = row["state"] if row["state"] in STATES else "normal"
            row["evidence"] = row["evidence"] if row["evidence"] in RULES else ""
            row["selection_id"] = None  # a decision that may be in part is none: the whole history is always right
            if row["name"] in names:
                row["name"] = f"{row['name']}-{id}"
            names.add(row["name"])
        for row in sessions.values():
            if row["parent_id"] not in sessions:
                row["parent_id"] = row["fork_depth"] = None
        return sessions

    def _nodes(self, sessions: Mapping[int, Row]) -> None:
        scopes = {row["scope"] for row in sessions.values()}
        digests = {row["id"]: row["digest"] for row in self.kept["messages"]}
        for row in sorted(self.found["nodes"], key=lambda row: int(row["depth"])):
            message, parent = digests.get(row["message_id"]), self.nodes.get(row["parent_id"])
            if message is None or row["id"] != row_id(row["digest"]):
                continue
            roots = scopes if row["parent_id"] is None else {parent["digest"]} if parent else set()
            depth = 0 if parent is None else parent["depth"] + 1
            if row["depth"] == depth and any(chain_digests(root, [message]) == [row["digest"]] for root in roots):
                self.nodes[row["id"]] = row

    def _heads(self, sessions: dict[int, Row], exchanges: Mapping[int, Row]) -> None:
        """A history that is broken ends at the last message before the break."""
        raw = {row["id"]: row for row in self.found["nodes"]}
        for row in sessions.values():
            head, had = row["head_node_id"], raw.get(row["head_node_id"])
            while head is not None and head not in self.nodes:
                head = raw[head]["parent_id"] if head in raw else None
            if head is None:  # the end itself is lost: what the requests say of it
                ends = [r["head_node_id"] for r in exchanges.values() if r["session_id"] == row["id"]]
                mine = [r["node_id"] for r in self.found["block_nodes"] if r["session_id"] == row["id"]]
                standing = [self.nodes[n] for n in (*ends, *mine) if n in self.nodes]
                head = max(standing, key=lambda node: int(node["depth"]), default={"id": None})["id"]
            if head != row["head_node_id"]:
                kept = self.nodes[head]["depth"] + 1 if head is not None else 0
                self.report.cut[row["name"]] = (kept, max(kept, had["depth"] + 1 if had else 0))
            row["head_node_id"] = head

    def _blocks(self, sessions: Mapping[int, Row]) -> set[tuple[int, int]]:
        stored = _by_key(self.found["blocks"], "session_id", "ordinal")
        owners: dict[int, dict[int, int]] = {id: {} for id in sessions}
        for link in self.found["block_nodes"]:
            if link["session_id"] in sessions and link["node_id"] in self.nodes:
                owners[link["session_id"]][link["node_id"]] = link["ordinal"]
        kept: dict[tuple[int, int], Row] = {}
        links = []
        for id, session in sessions.items():
            owner = owners[id]
            cut = self._recut(session, owner)
            for node, ordinal in owner.items():
                key = (id, ordinal)
                row: Row | None = kept.get(key) or stored.get(key)
                if ordinal in cut:
                    block = cut[ordinal]
                    row = (row or {"session_id": id, "ordinal": ordinal, "label": ""}) | {
                        "kind": block.kind,
                        "cost": block.cost,
                        "edits": json.dumps(block.edits),
                    }
                if row is not None:
                    kept[key] = row | {"u": 0.0, "observed": 0, "stale": 0}
                    links.append({"session_id": id, "node_id": node, "ordinal": ordinal})
        self.kept["blocks"], self.kept["block_nodes"] = list(kept.values()), links
        return set(kept)

    def _recut(self, session: Row, owner: dict[int, int]) -> dict[int, Block]:
        """Ordinal -> block of the present history; numbers that are lost are given anew."""
        path: list[int] = []
        node = session["head_node_id"]
        while node is not None:
            path.append(node)
            node = self.nodes[node]["parent_id"]
        path.reverse()
        contents = [self.raws[self.nodes[node]["message_id"]] for node in path]
        fresh = max(owner.values(), default=-1) + 1
        cut: dict[int, Block] = {}
        names = {name: session[name] for name in SessionRow.__slots__}
        for block in self.recut(SessionRow(**names), contents) if path else ():
            numbers = sorted({owner[path[i]] for i in block.messages if path[i] in owner} - cut.keys())
            ordinal = numbers[0] if numbers else fresh
            fresh = max(fresh, ordinal + 1)
            cut[ordinal] = block
            owner.update({path[i]: ordinal for i in block.messages})
        return cut

    def _exchanges(self, sessions: Mapping[int, Row], exchanges: dict[int, Row], blocks: set[tuple[int, int]]) -> None:
        for id, row in list(exchanges.items()):
            if row["session_id"] is not None and row["session_id"] not in sessions:
                del exchanges[id]
        verdicts: dict[int, list[Row]] = {}
        for row in _by_key(self.found["selection_blocks"], "selection_id", "ordinal").values():
            verdicts.setdefault(row["selection_id"], []).append(row)
        selections = {}
        for id, row in _by_key(self.found["selections"], "id").items():
            own = verdicts.get(id, [])
            stands = row["session_id"] in sessions and row["exchange_id"] in exchanges and own
            if stands and all((row["session_id"], v["ordinal"]) in blocks for v in own):
                selections[id] = row
        self.kept["selections"] = list(selections.values())
        self.kept["selection_blocks"] = [v for id in selections for v in verdicts[id]]
        for row in (*exchanges.values(), *sessions.values()):
            for name in ("instructions_id", "tools_id"):
                row[name] = row[name] if row[name] in self.raws else None
        for row in exchanges.values():
            row["head_node_id"] = row["head_node_id"] if row["head_node_id"] in self.nodes else None
            row["selection_id"] = row["selection_id"] if row["selection_id"] in selections else None
        answers = _by_key(self.found["answers"], "exchange_id", "position").values()
        self.kept["answers"] = [r for r in answers if r["exchange_id"] in exchanges and r["message_id"] in self.raws]

    def _observations(
        self, sessions: Mapping[int, Row], exchanges: Mapping[int, Row], blocks: set[tuple[int, int]]
    ) -> None:
        """Nothing is kept of lost blocks: another block of that number, stored later, was not what was observed."""
        kept, turns = {}, set()
        for id, row in _by_key(self.found["observations"], "id").items():
            turn = (row["session_id"], row["turn"])
            stands = row["session_id"] in sessions and row["exchange_id"] in exchanges and turn not in turns
            if stands and _numbers(row["layers"]) is not None and _numbers(row["unobserved"]) is not None:
                kept[id] = row
                turns.add(turn)
        readings: dict[int, list[Row]] = {}
        for row in _by_key(self.found["observation_blocks"], "observation_id", "ordinal").values():
            readings.setdefault(row["observation_id"], []).append(row)
        for id, row in list(kept.items()):
            sizes = {0, 8 * len(GROUPS) * len(_numbers(row["layers"]) or ())}
            if any(len(r["by_layer"]) not in sizes for r in readings.get(id, ())):
                del kept[id]
        links = _by_key(self.found["observation_edges"], "observation_id", "support", "dependent").values()
        self.kept["observations"] = list(kept.values())
        owner = {id: row["session_id"] for id, row in kept.items()}
        self.kept["observation_blocks"] = [
            r for id in kept for r in readings.get(id, ()) if (owner[id], r["ordinal"]) in blocks
        ]
        self.kept["observation_edges"] = [
            r for r in links if {(owner.get(r["observation_id"]), r[end]) for end in ("support", "dependent")} <= blocks
        ]

    def _rest(self, sessions: Mapping[int, Row], exchanges: Mapping[int, Row]) -> None:
        jobs = _by_key(self.found["replay_jobs"], "session_id", "turn").values()
        self.kept["replay_jobs"] = [
            r
            for r in _by_key(jobs, "id").values()
            if r["session_id"] in sessions and r["exchange_id"] in exchanges and r["state"] in JOB_STATES
        ]
        self.kept["inheritances"] = [
            r
            for r in _by_key(self.found["inheritances"], "session_id").values()
            if {r["session_id"], r["parent_id"]} <= sessions.keys() and _numbers(r["ordinals"]) is not None
        ]
        marks = _by_key(self.found["marks"], "session_id", "ordinal").values()
        self.kept["marks"] = [r for r in marks if r["session_id"] in sessions and r["mark"] in MARKS]
        inherited = {f"{INHERITED}{id}" for id in sessions}
        notes = _by_key(self.found["meta"], "key").values()
        self.kept["meta"] = [r for r in notes if r["key"] == "secret" or r["key"] in inherited]
        self.report.lost_secret = not any(r["key"] == "secret" for r in self.kept["meta"])

    def _drop_orphans(self, sessions: Mapping[int, Row], exchanges: Mapping[int, Row]) -> None:
        owners = (*sessions.values(), *exchanges.values())
        used: set[int] = set()
        for node in [r["head_node_id"] for r in owners] + [r["node_id"] for r in self.kept["block_nodes"]]:
            while node is not None and node not in used:
                used.add(node)
                node = self.nodes[node]["parent_id"]
        self.kept["nodes"] = [self.nodes[node] for node in used]
        needed = {r["message_id"] for r in (*self.kept["nodes"], *self.kept["answers"])}
        needed |= {r[name] for r in owners for name in ("instructions_id", "tools_id")}
        self.kept["messages"] = [row for row in self.kept["messages"] if row["id"] in needed]
        self.kept["sessions"], self.kept["exchanges"] = list(sessions.values()), list(exchanges.values())

    def _count(self) -> None:
        counted = ("sessions", "exchanges", "messages", "nodes", "selections", "observations")
        for name in counted:
            self.report.kept[name] = len(self.kept[name])
            self.report.found[name] = max(len(_by_key(self.found[name], "id")), len(self.kept[name]))
        wanted = {row["message_id"] for row in (*self.found["nodes"], *self.kept["answers"])}
        self.report.found["messages"] = max(self.report.found["messages"], len(wanted | self.raws.keys()))


def _nameless(id: int, scope: bytes, requests: Sequence[Row]) -> Row:
    """What the requests of a session say about it."""
    last = requests[-1]
    heads = [row["head_node_id"] for row in requests if row["outcome"] not in ("side", "opaque")]
    return {
        "id": id, "name": f"recovered{id}", "scope": scope, "upstream": "", "dialect": last["dialect"],
        "client": "other", "client_id": None, "kind": "agent", "model": last["model"],
        "instructions_id": last["instructions_id"], "tools_id": last["tools_id"], "parent_id": None, "fork_depth": None,
        "head_node_id": heads[-1] if heads else None, "state": "normal", "state_reason": None,
        "turns": max(row["turn"] for row in requests), "selection_id": None, "created_at": requests[0]["started_at"],
        "last_active_at": last["started_at"], "title": "", "evidence": "", "arm": None,
    }  # fmt: skip


def _numbers(text: str) -> list[int] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) and all(isinstance(item, int) for item in value) else None
