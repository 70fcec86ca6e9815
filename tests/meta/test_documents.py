"""What the documents say exists: links, commands, settings, tests. What no file may say: where it was made."""

import ast
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy import headers
from proxy.cli import COMMANDS
from proxy.settings import HINTS, env_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "eval"  # of studies: quotes of whatever they read
NOT_OURS = {".git", ".venv", ".agents", ".audit", ".models", ".peers", ".hypothesis", "build", "dist", "node_modules"}
RECORDED = ("tests/wire/", "tests/data/")  # bytes of others, never edited
NAMESPACE = "www.w3.org"  # of SVG: nobody is called
HOSTS = {
    NAMESPACE,
    "api.openai.com",
    "openrouter.ai",
    "api.z.ai",
    "opencode.ai",
    "name.openai.azure.com",
    "x.openai.azure.com",
}
PLACES = re.compile(r"/(?:root|work|Users|mnt|opt|srv)/[\w.]|/home/(?!user/)[\w.]")


def files() -> list[Path]:
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if (
            parts[0] != RESULTS
            and not NOT_OURS.intersection(parts)
            and not any(p.endswith(("_cache", "__", ".egg-info")) for p in parts)
        ):
            found += [path] if path.is_file() else []
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


FILES = files()
DOCUMENTS = [path for path in FILES if path.suffix == ".md"]
WRITTEN = [path for path in FILES if not name_of(path).startswith(RECORDED) and path != Path(__file__)]


def options() -> set[str]:
    """Every flag of any command, and `--no-` forms."""
    folders = (ROOT / "proxy/commands", ROOT / "proxy/lab")
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    own = set(re.findall(r'"(--[a-z-]+)"', source)) | {"--config", "--version", "--help"}
    settings = {"--" + name.replace("_", "-") for name in HINTS}
    return own | settings | {flag.replace("--", "--no-", 1) for flag in settings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_flags_and_variables_exist(path: Path) -> None:
    text = path.read_text()
    commands = {module.__name__.rpartition(".")[2] for module in COMMANDS}
    assert set(re.findall(r"(?:`|bin/)recap ([a-z]+)", text)) <= commands
    assert set(re.findall(r"\bRECAP_[A-Z_]*[A-Z]\b", text)) <= {env_of(name) for name in HINTS} | {"RECAP_CONFIG"}
    ours = re.findall(r"(?:`|recap [a-z]+ |ARGS=\")(--[a-z-]*[a-z])", text)
    assert set(ours) <= options()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(path: Path) -> None:
    for name in re.findall(
        r"`((?:proxy|graphstore|proxy_model|tests|docs|scripts|migrations)/[\w./-]+)`", path.read_text()
    ):
        assert (ROOT / name).exists(), name


def test_every_trap_has_its_test() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/testing.md").read_text())
    assert len(named) > 60
    for file, test in named:
        path = ROOT / "tests" / file
        assert path.exists() and re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), (
            f"{file}::{test}"
        )


def test_the_design_names_every_header_that_ends_here() -> None:
    text = (ROOT / "proxy/DESIGN.md").read_text()
    table = dict(re.findall(r"^\| (both|to the upstream|to the client) \| (.*) \|$", text, re.MULTILINE))
    named = {row: {name.encode() for name in re.findall(r"`([a-z-]+)`", cell)} for row, cell in table.items()}
    assert named == {
        "both": set(headers._HOP_BY_HOP),
        "to the upstream": set(headers._REQUEST_ONLY),
        "to the client": set(headers._RESPONSE_ONLY),
    }


@pytest.mark.parametrize("package", ["proxy", "graphstore", "proxy_model"])
def test_every_package_has_its_design(package: str) -> None:
    assert len((ROOT / package / "DESIGN.md").read_text()) > 500


def test_every_module_says_what_it_is_for() -> None:
    for path in FILES:
        if path.suffix == ".py" and path.read_text().strip():
            assert ast.get_docstring(ast.parse(path.read_text())), name_of(path)


def test_every_module_stands_in_the_code_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    code_map = text[text.index("## Code map") : text.index("Imports point one way")]
    for package in ("proxy", "graphstore"):
        for path in (ROOT / package).glob("*.py"):
            assert path.stem.startswith("__") or re.search(rf"\b{path.stem}\b", code_map), name_of(path)


def test_no_file_tells_where_it_was_made() -> None:
    here = str(ROOT) + "/" if len(ROOT.parts) > 2 else "\0"
    for path in WRITTEN:
        text = path.read_text(errors="replace")
        assert not PLACES.search(text) and here not in text, name_of(path)


def test_no_file_names_a_host_that_no_user_needs() -> None:
    """Mirrors and registries of the machine that a file was made on get in by lock files and logs."""
    for path in WRITTEN:
        if path.suffix == ".py" and name_of(path).startswith("tests/"):
            continue
        for url in re.findall(r"https?://[^\s\"'`)<>|,]+", path.read_text(errors="replace")):
            host = (urlsplit(url.replace("{", "").replace("}", "")).hostname or "").lower()
            assert "%" in host or host in HOSTS | {"127.0.0.1", "localhost", "verbatim", "u", ""}, (
                f"{name_of(path)}: {url}"
            )
