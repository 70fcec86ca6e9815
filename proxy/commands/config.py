"""recap config: every setting, its value and where it comes from, as `serve` would see them now."""

import argparse
import json
import os

import msgspec

from proxy.settings import HINTS, SECRETS, Settings, description_of, load_settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("config", help="print every setting, its value and where it comes from")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as one JSON object")
    form.add_argument("--markdown", action="store_true", help="no values: the table of docs/configuration.md")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.markdown:
        print(render_reference())
        return 0
    sources = load_settings(arguments, os.environ).sources
    shown = {name: _shown(settings, name) for name in HINTS}
    if arguments.json:
        rows = {name: {"value": value, "source": sources[name]} for name, value in shown.items()}
        print(json.dumps(rows, indent=2))
        return 0
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in shown.items()}
    width = max(len(text) for text in texts.values())
    for name, text in texts.items():
        print(f"{name:22} {text:{width}}  {sources[name]}")
    return 0


def render_reference() -> str:
    """One row for each setting: name (its flag and variable follow from it), default, meaning."""
    rows = [f"| `{name}` | {_default(name)} | {description_of(name)} |" for name in HINTS]
    return "\n".join(["| setting | default | meaning |", "|--|--|--|", *rows])


def _default(name: str) -> str:
    field = next(field for field in msgspec.structs.fields(Settings) if field.name == name)
    if field.default_factory is dict:
        return "`{}`"
    if field.default is msgspec.NODEFAULT:
        return "`recap/recap.db` in the user's data directory"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(value)}`"


def _shown(settings: Settings, name: str) -> object:
    value: object = getattr(settings, name)
    return "(hidden)" if name in SECRETS and value else msgspec.to_builtins(value)
