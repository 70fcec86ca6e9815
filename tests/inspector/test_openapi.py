"""The API by its description: whatever parameters and bodies come, an answer of the form that it promises."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.openapi import FILE
from tests.inspector.conftest import Recorded
from tests.inspector.looking import Look, looking

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: make test")

DESCRIPTION = json.loads(FILE.read_text("utf-8"))
CALLS = [
    (method.upper(), path)
    for path, methods in DESCRIPTION["paths"].items()
    for method in methods
    if not path.endswith("/events")  # it would not end
]
FEWER = max(1, settings().max_examples // 4)


@contextmanager
def running(recorded: Recorded, folder: Path) -> Iterator[Look]:
    """A proxy in a thread: the generated calls wait for their answers in this one."""
    ready, done = threading.Event(), asyncio.Event()
    found: list[tuple[Look, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with looking(recorded, folder) as look:
            found.append((look, asyncio.get_running_loop()))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0][0]
    finally:
        if found:
            found[0][1].call_soon_threadsafe(done.set)
        thread.join()


@pytest.fixture(scope="module")
def served(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Look]:
    with running(recorded, tmp_path_factory.mktemp("api")) as look:
        yield look


@pytest.mark.parametrize(("method", "path"), CALLS, ids=[" ".join(call) for call in CALLS])
def test_every_route_keeps_its_description(method: str, path: str, served: Look) -> None:
    """No 5xx, the type and the form that are described, nothing odd accepted; with real sessions and invented ones."""
    api = schemathesis.openapi.from_dict(DESCRIPTION)
    operation = api[path][method]
    names = st.sampled_from(sorted(served.names.values()))

    @settings(max_examples=FEWER, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(), name=st.none() | names)
    def check(case: Any, name: str | None) -> None:
        if name is not None and "session" in case.path_parameters:
            case.path_parameters["session"] = name
        case.call_and_validate(
            base_url=served.proxy.url,
            headers={"x-recap-token": served.token},
            excluded_checks=[schemathesis.checks.unsupported_method],  # a GET of what is only posted to finds nothing
        )

    check()
