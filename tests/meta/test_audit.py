"""scripts/audit.py: what is listed, and what is said of each outcome. Nobody is asked here."""

import json
from importlib.metadata import Distribution, distributions

import pytest
from packaging.utils import canonicalize_name

from scripts.audit import CANARY, Report, closure, main, read, sbom, verdict

INSTALLED: dict[str, Distribution] = {canonicalize_name(found.name): found for found in distributions()}
KNOWN = Report(known=("requests 2.19.0: PYSEC-2018-28",))
NOT_FOUND = {"name": "aiohttp", "skip_reason": "Dependency not found on PyPI and could not be audited"}
FINE = {"name": "aiohttp", "version": "3", "vulns": []}
BAD = {"name": "x", "version": "1", "vulns": [{"id": "A-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}]}


def test_the_list_holds_what_serving_needs_and_nothing_of_the_tests() -> None:
    needs = closure(INSTALLED)
    assert {"recap-proxy", "starlette", "anyio", "aiohttp", "multidict"} <= needs.keys()
    assert not {"pytest", "hypothesis", "mypy", "playwright"} & needs.keys()
    assert "anyio" in needs["starlette"] and all(other in needs for others in needs.values() for other in others)


def test_the_sbom_names_each_package_once_with_its_version() -> None:
    needs = closure(INSTALLED)
    found = sbom(INSTALLED, needs)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert [part["name"] for part in found["components"]] == [name for name in needs if name != "recap-proxy"]
    assert all(part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}" or "+" in part["version"]
               for part in found["components"])  # fmt: skip
    refs = {part["bom-ref"] for part in [found["metadata"]["component"], *found["components"]]}
    assert {entry["ref"] for entry in found["dependencies"]} == refs
    assert {ref for entry in found["dependencies"] for ref in entry["dependsOn"]} <= refs


def said(*packages: object) -> Report:
    return read(json.dumps({"dependencies": packages, "fixes": []}), "Found 1 known vulnerability in 1 package")


def test_a_vulnerability_is_a_failure_whatever_else_went_wrong() -> None:
    for canary in (KNOWN, said(NOT_FOUND), Report(failure="no route")):
        status, text = verdict(canary, said(FINE, BAD, NOT_FOUND), 3, required=False)
        assert status == 1 and "x 1: A-1, CVE-1; fixed in 2" in text


@pytest.mark.parametrize(
    ("canary", "report", "reason"),
    [
        (read("", "Traceback\nConnectionError: no route\n"), read("", ""), "pip-audit said nothing"),
        (read("", "Traceback\nConnectionError: no route\n"), said(FINE), "no route"),
        (said(NOT_FOUND), said(NOT_FOUND), CANARY),  # an index that knows nothing of advisories
        (said(FINE), said(FINE), CANARY),
        (KNOWN, read("[]", "odd"), "odd"),
    ],
)
def test_that_nobody_could_be_asked_is_not_taken_for_good_news(canary: Report, report: Report, reason: str) -> None:
    for required, status in ((False, 0), (True, 2)):
        found, text = verdict(canary, report, 1, required=required)
        assert found == status and text.startswith("skipped") and reason in text


def test_what_was_not_asked_about_is_named() -> None:
    assert verdict(KNOWN, said(FINE), 1, required=True) == (0, "nothing is known against 1 packages")
    status, text = verdict(KNOWN, said(FINE, NOT_FOUND), 2, required=True)
    assert status == 0 and "1 packages; not asked" in text and "aiohttp" in text


def test_an_environment_without_the_proxy_is_said(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    assert main([str(tmp_path)]) == 2 and "is not installed" in capsys.readouterr().err
