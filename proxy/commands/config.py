"""recap config: every setting, its value and where it comes from, as `serve` would see them now."""

import argparse
import json
import os

from proxy.settings import HINTS, SECRETS, Settings, load_settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("config", help="print every setting, its value and where it comes from")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
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


def _shown(settings: Settings, name: str) -> object:
    value: object = getattr(settings, name)
    return "(hidden)" if name in SECRETS and value else value
