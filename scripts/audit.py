"""What is installed for serving: a list of it (SBOM, CycloneDX), and whether anything is known against it.

    python scripts/audit.py SITE_PACKAGES [--sbom FILE] [--require] [options of pip-audit]

`make audit` runs it by an interpreter that has pip-audit, so that the proxy's own environment needs none of its tools.
An index may answer without knowing anything of advisories, and pip-audit then finds nothing; so a release that is known
to be vulnerable is asked about first. Exit status: 0 nothing is known, or nobody could be asked, which is said (with
`--require` that is 2); 1 a vulnerability is known; 2 the proxy or pip-audit is not installed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = "recap-proxy"
EXTRAS = ("", "attention")  # what `make serve` installs, as far as it could be
CANARY = "requests==2.19.0"  # CVE-2018-18074
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What pip-audit said: `known` has a line for each vulnerability. `failure`: it said nothing that can be read."""

    known: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    failure: str | None = None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="SBOM and known vulnerabilities of what is installed for serving")
    parser.add_argument("site", type=Path, help="the site-packages folder of the environment that serves")
    parser.add_argument("--sbom", type=Path, help="write the list there, as CycloneDX JSON")
    parser.add_argument("--require", action="store_true", help="fail when nobody could be asked")
    given, options = parser.parse_known_args(argv)
    installed: dict[str, Distribution] = {
        canonicalize_name(found.name): found for found in distributions(path=[str(given.site)])
    }
    problem = None if ROOT in installed else f"{ROOT} is not installed in {given.site}: make serve"
    problem = problem or (None if find_spec("pip_audit") else f"pip-audit is not installed for {sys.executable}")
    if problem is not None:
        print(f"audit: {problem}", file=sys.stderr)
        return 2
    needs = closure(installed)
    if given.sbom is not None:
        given.sbom.write_text(json.dumps(sbom(installed, needs), indent=2) + "\n")
        print(f"audit: {len(needs)} packages in {given.sbom}")
    pins = [f"{name}=={Version(installed[name].version).public}" for name in needs if name != ROOT]
    status, said = verdict(ask([CANARY], options), ask(pins, options), len(pins), required=given.require)
    print(f"audit: {said}", file=sys.stderr if status else sys.stdout)
    return status


def closure(installed: Mapping[str, Distribution]) -> dict[str, list[str]]:
    """Each package that serving needs and that is installed, with those that it needs itself. Sorted by name."""
    found: dict[str, set[str]] = {}
    asked: set[tuple[str, str]] = set()
    left = [(ROOT, extra) for extra in EXTRAS]
    while left:
        name, extra = left.pop()
        if (name, extra) in asked or name not in installed:
            continue
        asked.add((name, extra))
        needed = list(_needed(installed[name], extra))
        found.setdefault(name, set()).update(other for other, _ in needed if other in installed)
        left += needed
    return {name: sorted(found[name]) for name in sorted(found)}


def _needed(package: Distribution, extra: str) -> Iterator[tuple[str, str]]:
    for line in package.requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            yield from ((canonicalize_name(wanted.name), inner) for inner in ("", *wanted.extras))


def sbom(installed: Mapping[str, Distribution], needs: Mapping[str, Sequence[str]]) -> Json:
    """CycloneDX 1.6; the same for the same environment."""
    components = {name: _component(installed[name]) for name in needs}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": components[ROOT] | {"type": "application"}},
        "components": [component for name, component in components.items() if name != ROOT],
        "dependencies": [
            {"ref": components[name]["bom-ref"], "dependsOn": [components[other]["bom-ref"] for other in others]}
            for name, others in needs.items()
        ],
    }


def _component(package: Distribution) -> Json:
    name, version = canonicalize_name(package.name), package.version
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    found: Json = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if "License-Expression" in package.metadata:
        found["licenses"] = [{"expression": package.metadata["License-Expression"]}]
    return found


def ask(pins: Sequence[str], options: Sequence[str]) -> Report:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "--requirement", file.name, "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return read(done.stdout, done.stderr)


def read(said: str, complained: str) -> Report:
    """pip-audit exits with 1 for a vulnerability and for a failure alike; only the former comes with JSON."""
    try:
        packages = json.loads(said)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return Report(failure=(complained.strip().splitlines() or ["pip-audit said nothing"])[-1])
    known = [f"{p['name']} {p['version']}: {_named(v)}" for p in packages for v in p.get("vulns", ())]
    return Report(tuple(known), tuple(p["name"] for p in packages if "skip_reason" in p))


def _named(vulnerability: Json) -> str:
    names = ", ".join([vulnerability["id"], *vulnerability.get("aliases", ())])
    fixed = ", ".join(vulnerability.get("fix_versions", ()))
    return f"{names}; " + (f"fixed in {fixed}" if fixed else "no release without it")


def verdict(canary: Report, report: Report, count: int, *, required: bool) -> tuple[int, str]:
    """Exit status, and the sentence that goes with it."""
    if report.known:
        return 1, "\n  ".join(["known vulnerabilities:", *report.known])
    why = report.failure or canary.failure
    if why is None and not canary.known:
        why = f"it knows nothing of {CANARY}, which is vulnerable"
    if why is not None:
        return (2 if required else 0), f"skipped, for the advisory service could not be asked: {why}"
    if report.skipped:
        return 0, f"nothing is known against {count - len(report.skipped)} packages; not asked: {report.skipped}"
    return 0, f"nothing is known against {count} packages"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
