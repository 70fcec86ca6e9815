"""recap config: every setting, its value and where it comes from, as `serve` would see them now; facts of providers."""

import argparse
import json
import os

import msgspec

from graphstore.store.archive import open_reader
from graphstore.store.engine import ArchiveUnavailable
from proxy.commands.text import duration, number, table
from proxy.conversations import read_book
from proxy.economics.profiles import profile_of
from proxy.economics.warmth import WarmthBook
from proxy.settings import HINTS, SECRETS, Settings, description_of, load_settings, profiles_of


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("config", help="print every setting, its value and where it comes from")
    parser.add_argument(
        "what",
        nargs="?",
        choices=["profiles"],
        help="profiles: facts of providers' caches, and what was learned of them",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as one JSON object")
    form.add_argument("--markdown", action="store_true", help="no values: the table of docs/configuration.md")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.markdown:
        print(render_reference())
        return 0
    if arguments.what == "profiles":
        print(_profiles(settings))
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


def _profiles(settings: Settings) -> str:
    """Every profile in the order in which they count, and what the archive says of each upstream and model."""
    own = {row["name"] for row in settings.profiles}
    rows = [
        [
            profile.name + ("*" if profile.name in own else ""),
            f"{profile.warm_s:g}",
            f"{profile.cold_s:g}",
            profile.match,
            f"{profile.read:g}",
            f"{profile.write:g}",
            f"{profile.output:g}",
            number(profile.cliff_tokens) if profile.cliff_tokens else None,
            profile.reasoning,
            f"{' '.join(profile.hosts)}: {' '.join(profile.models)}",
        ]
        for profile in profiles_of(settings)
    ]
    header = ["profile", "warm s", "cold s", "match", "read", "write", "output", "cliff", "reasoning", "hosts: models"]
    shown = table(header, rows, right=("warm s", "cold s", "read", "write", "output", "cliff"))
    return f"{shown}\n\n{'* changed or added by your settings' if own else 'all as shipped'}\n\n{_learned(settings)}"


def _learned(settings: Settings) -> str:
    try:
        with open_reader(settings.db) as reader:
            book = read_book(reader)
    except ArchiveUnavailable:
        book = WarmthBook()
    rows = [
        [model, duration(bin.pause_s), f"{bin.hits} of {bin.seen}", profile.name, upstream]
        for (upstream, model), bins in book.known().items()
        for profile in [profile_of(profiles_of(settings), upstream, model)]
        for bin in bins
    ]
    if not rows:
        return "The archive holds no pause after which a provider said what it had cached."
    return table(["model", "pause of about", "still cached", "profile", "upstream"], rows, right=("pause of about",))


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
