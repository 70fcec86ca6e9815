"""Imports point one way: proxy -> graphstore <- proxy_model, and the pure parts stay pure.

Read from the source, so that a lazy import inside a function counts like any other.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proxy", "graphstore", "proxy_model", "migrations")
MODEL_LIBRARIES = {"torch", "transformers", "safetensors", "accelerate"}

# Which of our own packages each may import besides itself.
ALLOWED = {
    "proxy": {"graphstore"},
    "graphstore": set[str](),
    "proxy_model": {"graphstore"},
    "migrations": {"graphstore"},
}
COMPOSITION_ROOT = "proxy/wiring.py"  # may also start the model's worker
MODEL_COMMANDS = {
    COMPOSITION_ROOT,
    "proxy/commands/model.py",
    "proxy/commands/worker.py",
    "proxy/lab/replayed.py",  # replays recorded sessions
    "proxy/lab/kv.py",  # answers over a shortened cache
}
MODEL_VALUES = {"proxy_model.config", "proxy_model.context", "proxy_model.errors"}  # for everybody: they import nothing


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of everything that a module imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide their direction"
            assert node.module is not None
            yield node.module


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_in_one_direction(package: str) -> None:
    for path in modules(package):
        names = set(imported(path)) - MODEL_VALUES
        own = {name.partition(".")[0] for name in names} & {*PACKAGES, "tests", "scripts"} - {package}
        extra = {"proxy_model"} if relative(path) in MODEL_COMMANDS else set()
        assert own <= ALLOWED[package] | extra, relative(path)


def test_starting_the_proxy_loads_no_model_library() -> None:
    """What loads torch is imported when it is needed: it takes seconds, and hundreds of megabytes."""
    code = f"import sys, proxy.cli; print(sorted(set(sys.modules) & {MODEL_LIBRARIES!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_values_of_the_model_package_need_nothing() -> None:
    for name in MODEL_VALUES:
        path = ROOT / (name.replace(".", "/") + ".py")
        assert roots(path) <= sys.stdlib_module_names, name


def test_the_graph_outside_its_store_uses_the_standard_library_only() -> None:
    for path in modules("graphstore"):
        if "graphstore/store/" in relative(path):
            continue
        assert roots(path) - {"graphstore"} <= sys.stdlib_module_names, relative(path)
        assert not any(name.startswith("graphstore.store") for name in imported(path)), relative(path)


def test_only_the_model_package_knows_model_libraries() -> None:
    for package in set(PACKAGES) - {"proxy_model"}:
        for path in modules(package):
            assert not roots(path) & MODEL_LIBRARIES, relative(path)


def test_the_model_package_knows_no_http() -> None:
    for path in modules("proxy_model"):
        assert not roots(path) & {"starlette", "uvicorn", "httpx", "aiohttp"}, relative(path)


def test_dialects_and_the_rules_of_a_request_know_no_sockets_and_no_archive() -> None:
    pure = [
        *modules("proxy/dialects"),
        ROOT / "proxy/boundary.py",
        ROOT / "proxy/rewrite.py",
        ROOT / "proxy/lineage.py",
    ]
    for path in pure:
        forbidden = {"starlette", "uvicorn", "httpx", "aiohttp", "sqlalchemy", "sqlite3", "asyncio", "socket"}
        assert not roots(path) & forbidden, relative(path)
        assert not any(name.startswith("graphstore.store") for name in imported(path)), relative(path)
