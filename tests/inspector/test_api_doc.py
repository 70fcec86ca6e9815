"""docs/api.md names exactly the routes, fields and errors that there are: real answers are walked and compared."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Mount, Route

from graphstore.records import WorkerStatus
from graphstore.store.archive import open_queue
from proxy.conversations import open_conversations
from proxy.inspector import routes
from proxy.inspector.sessions import SESSIONS_MAX
from proxy.ledger import Price
from proxy.metrics import Meters
from proxy.settings import Settings
from scripts.openapi import FILE, NUMBERS, PAGE, Fields, anchor, errors, linked, render, tables
from tests.clock import VirtualClock
from tests.inspector.conftest import Recorded
from tests.inspector.looking import Look, looking, said
from tests.inspector.world import HOSTILE
from tests.support import running_proxy

DOC = PAGE.read_text("utf-8")
API = "/recap/api/"


TABLES = tables(DOC)


def documented(heading: str) -> Fields:
    """All fields of a route, those of the objects that it links to among them."""
    by_anchor = {anchor(other): other for other in TABLES}
    found: Fields = {}
    for name, kind in TABLES[heading].items():
        target = linked(kind)
        if target is None:
            found[name] = kind
            continue
        found |= {f"{name}.{inner}": k for inner, k in documented(by_anchor[target]).items()}
        if kind.endswith(" or null"):
            found[name] = "object or null"
    return found


def walk(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf with its dotted name. A list of objects goes on, any other list is a leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from walk(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from walk(inner, f"{name}[]")
    else:
        yield name, value


def kind_of(name: str, fields: Fields) -> str | None:
    """Type of a leaf, or of what holds it: an object or list of which the page names no parts."""
    if name in fields:
        return fields[name]
    if any(other.startswith((f"{name}.", f"{name}[]")) for other in fields):
        return "empty"
    parent = name.rpartition(".")[0]
    return "part" if fields.get(parent, "").startswith("object of") else None


def fits(value: object, kind: str) -> bool:
    plain = kind.removesuffix(" or null")
    if value is None:
        return kind.endswith(" or null")
    match plain:
        case "text":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "empty":
            return value in ([], {})
        case "part":
            return True
        case _ if plain in NUMBERS:
            return isinstance(value, int | float) and not isinstance(value, bool)
        case _ if plain.startswith("object of"):
            return isinstance(value, dict)
        case _:
            assert plain.startswith(("list of", "blocks as runs", "turns as runs")), f"unknown type {plain!r}"
            return isinstance(value, list)


def complaints(heading: str, answers: list[Any]) -> list[str]:
    fields, seen, found = documented(heading), set[str](), set[str]()
    for answer in answers:
        for name, value in walk(answer):
            kind = kind_of(name, fields)
            if kind is None:
                found.add(f"{name} is not on the page")
            elif not fits(value, kind) and not (value is None and parts_may_be_absent(name, heading)):
                found.add(f"{name} is {value!r}, not {kind}")
            seen.add(name if kind != "part" else name.rpartition(".")[0])
    return sorted(found) + [f"{name} is in no answer" for name in sorted(fields) if name not in seen]


def parts_may_be_absent(name: str, heading: str) -> bool:
    """Said of the first of its parts: `verdict` is null where ..."""
    section = DOC.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    return f"`{name}` is null where" in section


async def answers_of(look: Look) -> dict[str, list[Any]]:
    """Every route, asked for everything that the archive has."""
    found: dict[str, list[Any]] = {}

    def keep(heading: str, answer: Any) -> None:
        found.setdefault(heading, []).append(answer)

    session = "sessions/{session}"
    for plain in ("self", "savings", "health"):
        keep(f"GET {API}{plain}", await look.get(plain))
    keep(f"GET {API}sessions", await look.get("sessions", side=1))
    keep(f"GET {API}search", await look.get("search", q="the"))
    for row in look.reader.list_sessions():
        shown = await look.get(f"sessions/{row.name}")
        keep(f"GET {API}{session}", shown)
        for part in ("map", "graph"):
            keep(f"GET {API}{session}/{part}", await look.get(f"sessions/{row.name}/{part}"))
        for turn in shown["turns"]:
            answer = await look.get(f"sessions/{row.name}/turns/{turn['turn']}")
            keep(f"GET {API}{session}/turns/{{turn}}", answer)
        for block, _ in look.reader.load_blocks(row.id):
            answer = await look.get(f"sessions/{row.name}/blocks/{block.ordinal}")
            keep(f"GET {API}{session}/blocks/{{block}}", answer)
        keep(f"POST {API}{session}/what-if", await look.post(f"sessions/{row.name}/what-if", {"query": "error"}))
    for mark in ("pin", None):
        answer = await look.post(f"sessions/{look.names[HOSTILE]}/blocks/0/mark", {"mark": mark})
        keep(f"POST {API}{session}/blocks/{{block}}/mark", answer)
    keep("GET /recap/health", (await look.client.get("/recap/health")).json())
    return found


def all_routes() -> set[str]:
    (_, mount) = routes.Inspector(Settings(), dict, lambda: 0.0, Meters()).routes()
    assert isinstance(mount, Mount)
    inner = [route for route in mount.routes if isinstance(route, Route) and route.path.startswith("/api")]
    return {f"{m} /recap{route.path}" for route in inner for m in (route.methods or set()) - {"HEAD"}}


def test_the_page_names_every_route_and_no_other() -> None:
    named = {heading for heading in TABLES if re.match("(GET|POST) /", heading)}
    assert named == all_routes() | {"GET /recap/health"}


async def test_the_page_names_every_field_of_every_answer_and_no_other(recorded: Recorded, tmp_path: Path) -> None:
    prices = {"gpt-*": Price(input=1)}
    async with looking(recorded, tmp_path, prices=prices) as look:
        status = WorkerStatus(1, "stopped", "test/model", "cpu", None, look.clock())
        with open_queue(look.proxy.settings.db) as queue:
            queue.set_status(status)
        found = await answers_of(look)
    broken = Settings(db=str(tmp_path / "recap.db" / "below.db"))
    async with running_proxy(broken, open_conversations(broken, VirtualClock())) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url) as client:
            found["GET /recap/health"].append((await client.get("/recap/health")).json())
    assert found.keys() | {f"GET {API}events"} == all_routes() | {"GET /recap/health"}
    assert {heading: said for heading, answers in found.items() if (said := complaints(heading, answers))} == {}


def test_the_comparison_would_notice_a_difference() -> None:
    """A check that finds nothing is worth as much as what it would have found."""
    heading = f"GET {API}self"
    full: dict[str, Any] = dict.fromkeys(TABLES[heading], "") | {"now": 1.5, "idle_after_s": 1, "priced": True}
    assert complaints(heading, [full]) == []
    assert complaints(heading, [full | {"more": 1}]) == ["more is not on the page"]
    assert complaints(heading, [full | {"now": None}]) == ["now is None, not time"]
    assert complaints(heading, [full | {"priced": 1}]) == ["priced is 1, not boolean"]
    assert complaints(heading, [{k: v for k, v in full.items() if k != "mode"}]) == ["mode is in no answer"]


async def test_the_page_names_every_error_and_no_other(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[tuple[int, str]] = set()

    def keep(reply: httpx.Response) -> None:
        status, code, message = said(reply)
        assert message and message[0] != "{"
        found.add((status, code))

    def fail(*_: object) -> None:
        raise RuntimeError("a view fails")

    monkeypatch.setattr(routes, "sum_up", fail)
    async with looking(recorded, tmp_path) as look:
        client, name = look.client, look.names[HOSTILE]
        for path, headers in (
            ("nothing", {}),
            (f"sessions/{name}/turns/x", {}),
            ("self", {"host": "evil.test"}),
            ("self", {"origin": "https://evil.test"}),
            ("self", {"sec-fetch-site": "cross-site"}),
            ("savings", {}),
        ):
            keep(await client.get(API + path, headers=headers))
        keep(await look.send("sessions", {}))
        keep(await look.send(f"sessions/{name}/blocks/0/mark", {"mark": "mute"}))
        with closing(sqlite3.connect(tmp_path / "recap.db")) as db:
            db.execute("INSERT INTO edges SELECT id, 0, 9999, 1.0, 99999 FROM sessions")
            db.commit()
        keep(await client.get(f"{API}sessions/{name}/graph"))
        look.proxy.app.state.inspector.stop()
        keep(await client.get(f"{API}sessions"))
    absent = str(tmp_path / "absent.db")
    for key, path in (("k", "self"), ("", "sessions")):
        async with (
            running_proxy(Settings(db=absent, proxy_key=key)) as proxy,
            httpx.AsyncClient(base_url=proxy.url) as client,
        ):
            keep(await client.get(API + path))
    assert found == set(errors(DOC))


def test_the_page_names_the_limits_that_hold() -> None:
    assert f"{routes.BODY_BYTES_MAX:,} bytes" in DOC and f"at most {SESSIONS_MAX}" in DOC
    assert routes.NUMBER_DIGITS == 9 and "nine digits" in DOC


def test_the_openapi_file_is_the_page() -> None:
    assert FILE.read_text("utf-8") == render(DOC), "python scripts/openapi.py > docs/openapi.json"
