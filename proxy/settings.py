"""Every setting, parsed once: flags over environment over a TOML file over defaults.

`Settings` is the only list of settings: the flags, the variables, the file's keys and `docs/configuration.md` are all
made from it. Bad input never falls back in silence: a SettingsError names the value, where it came from and the remedy.
"""

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
import platformdirs

from graphstore.selectors import TOOL_RESULTS_KEPT, SelectorName
from proxy.economics.profiles import Profile, profile_of, with_own
from proxy.economics.warmth import probably_cold_after
from proxy.errors import SettingsError
from proxy.ledger import Price
from proxy.upstream.target import is_loopback

SECRETS = frozenset({"proxy_key"})
ENV_PREFIX = "RECAP_"
UPSTREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CONFIG_ENV = "RECAP_CONFIG"


def _doc(text: str, **bounds: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **bounds)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    upstream: Annotated[
        str,
        _doc(
            "Base URL of the provider, as you would give it to an SDK. A client's leading `/v1` stands for its path. "
            "HTTPS_PROXY, HTTP_PROXY and NO_PROXY are respected."
        ),
    ] = "https://api.openai.com/v1"
    host: Annotated[
        str, _doc("Address to listen on. Anything that is not loopback, `0.0.0.0` too, also needs `proxy_key`.")
    ] = "127.0.0.1"
    port: Annotated[int, _doc("Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8787
    proxy_key: Annotated[
        str, _doc("When set, every request must carry it in the header `x-recap-key`. It is not sent upstream.")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        _doc(
            "More names by which clients may call the proxy (header Host, and Origin of pages), besides loopback and "
            "`host`. Separated by commas in a flag or variable."
        ),
    ] = ()
    db: Annotated[str, _doc("The archive, one SQLite file. Made with mode 0600 in a folder of mode 0700.")] = (
        msgspec.field(default_factory=lambda: str(platformdirs.user_data_path("recap") / "recap.db"))
    )
    keep_days: Annotated[
        int, _doc("Sessions that were inactive for more days are removed from the archive. 0: kept for ever.", ge=0)
    ] = 0
    keep_bytes: Annotated[
        int,
        _doc(
            "When the archive holds more bytes, the sessions that were inactive for longest are removed, none that was "
            "active within the last hour. 0: no limit.",
            ge=0,
        ),
    ] = 0
    redact: Annotated[
        bool,
        _doc(
            "Store what looks like a key or a password as asterisks. Nothing that is sent changes. See "
            "docs/database.md for what is recognised and what it costs."
        ),
    ] = False
    mode: Annotated[
        Literal["auto", "idle", "always", "off"],
        _doc(
            "`auto`: select anew when the provider's cache is probably gone, or when that is expected to cost less "
            "than going on, by what is known of the provider's cache and prices (docs/economics.md). `idle`: after "
            "`idle_after` alone. `always`: at every user request. `off`: send everything as it came, and record what "
            "would have been sent."
        ),
    ] = "auto"
    idle_after: Annotated[
        float,
        _doc(
            "In mode `idle`, seconds without a request after which the provider's cache is believed cold. Providers "
            "now keep prefixes for 30 minutes to a day: an hour errs on the safe side. `recap show` prints the "
            "provider's cached tokens: set this to what you see.",
            ge=0,
        ),
    ] = 3600.0
    min_history_tokens: Annotated[
        int, _doc("A history of fewer tokens is left alone: there is too little to save.", ge=0)
    ] = 4000
    context_window_tokens: Annotated[
        int,
        _doc(
            "The model's window. A request that comes near it is selected anew even when the cache is warm, see "
            "`pressure`. 0: unknown, until the provider tells.",
            ge=0,
        ),
    ] = 0
    pressure: Annotated[
        bool,
        _doc(
            "Compact a request that nears the model's window, also in the middle of a turn, and send one that the "
            "provider refused for its length once more, compacted. On, because it only acts where the request would "
            "fail otherwise. Without effect in mode `off`."
        ),
    ] = True
    request_cap_chars: Annotated[
        int, _doc("A selection never makes a request longer than this many characters.", ge=1)
    ] = 360_000
    notice: Annotated[bool, _doc("Tell the model, in one constant message, that earlier messages are not shown.")] = (
        True
    )
    image_chars: Annotated[
        int, _doc("What one image, audio or file part counts as, in characters, whatever its size.", ge=0)
    ] = 4000
    beta: Annotated[
        float, _doc("Share of the history's characters that a selection may keep (paper, Table 5).", gt=0, le=1)
    ] = 0.10
    lam: Annotated[float, _doc("Weight of the words that a block shares with the request (lambda, Eq. 3).", ge=0)] = 0.5
    eps: Annotated[float, _doc("Weight of exploration for blocks not yet observed (epsilon, Eq. 3).", ge=0)] = 0.1
    kappa: Annotated[float, _doc("What a stale block loses (kappa, Eq. 3).", ge=0)] = 2.0
    delta: Annotated[
        float, _doc("Room beyond the budget for blocks that kept ones depend on (delta, Algorithm 1).", ge=0)
    ] = 0.1
    attention: Annotated[
        Literal["auto", "off"],
        _doc(
            "Replay finished turns through a local model, in a process of its own. `auto`: where torch and "
            "transformers are installed. `off`: never."
        ),
    ] = "auto"
    attention_model: Annotated[
        str,
        _doc("The local model: a Hugging Face name, a folder, or a .gguf file. See docs/attention.md for small ones."),
    ] = "Qwen/Qwen3-0.6B"
    attention_device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"], _doc("Where it runs. `auto`: on a GPU where there is one.")
    ] = "auto"
    attention_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _doc("Precision of its weights. `auto`: 16 bits on a GPU and on processors that are fast with them."),
    ] = "auto"
    attention_max_tokens: Annotated[
        int, _doc("A longer context loses its oldest blocks in the replay, and `recap show` says so.", ge=64)
    ] = 32_768
    attention_threads: Annotated[
        int, _doc("Processor threads of the worker, at most one a processor. 0: as torch decides.", ge=0)
    ] = 0
    attention_offline: Annotated[
        bool, _doc("Never look for the model on the network (HF_HUB_OFFLINE does the same).")
    ] = False
    attention_layers: Annotated[
        tuple[int, ...],
        _doc(
            "Layers of the local model that are read, counted from 0; the second one's attention makes edges. Empty: "
            "by their depth. `recap model check` names those that find things. Separated by commas in a flag or "
            "variable."
        ),
    ] = ()
    evidence: Annotated[
        Literal["auto", "paper", "mass", "past-use", "hybrid"],
        _doc(
            "What speaks for a block beside the request's words. `past-use`: what the last turn named; needs no model. "
            "`paper`: attention a token (Eq. 1). `mass`: attention a block. `hybrid`: past use and mass. `auto`: "
            "`paper` where a model of the paper's size (Qwen3-0.6B) or larger has observed the session, `hybrid` where "
            "a smaller one has, `past-use` where none has."
        ),
    ] = "auto"
    selector: Annotated[
        SelectorName,
        _doc(
            "How blocks are chosen at a cold boundary. `recap`: as described. The others are what it is compared with: "
            "`recap-without-graph` (the request's words alone), `recency`, `random`, `user-messages` (nothing but what "
            "you wrote), `clear-tool-results` (old tool calls with their results go), `full`. Your messages and pinned "
            "blocks are always sent; by `recency` and `random` the latest edits are not protected."
        ),
    ] = "recap"
    tool_results_kept: Annotated[
        int,
        _doc(
            "Tool calls with their results, the newest, that the selector `clear-tool-results` keeps. Calls that were "
            "made at once count as one.",
            ge=0,
        ),
    ] = TOOL_RESULTS_KEPT
    holdout: Annotated[
        float,
        _doc(
            "Share of sessions that are left untouched, drawn when a session begins and kept for good, so that "
            "`recap savings --compare` can tell what rewriting does. 0: none; 0.1: one in ten.",
            ge=0,
            le=1,
        ),
    ] = 0.0
    prices: Annotated[
        dict[str, Price],
        _doc(
            "What a million tokens cost, by model (`*` stands for anything, the first that fits counts): `input`, "
            "`output`, `cached` (read from the cache) and `write` (written to it), in any currency. A table in the "
            "file, JSON elsewhere. Without prices, savings are shown in tokens alone."
        ),
    ] = msgspec.field(default_factory=dict)
    upstreams: Annotated[
        dict[str, str],
        _doc(
            "More upstreams by name, each with its base URL: a client whose base URL is "
            "`http://127.0.0.1:8787/to/NAME/v1` is served by the one of that name. A table in the file, JSON elsewhere."
        ),
    ] = msgspec.field(default_factory=dict)
    profiles: Annotated[
        tuple[dict[str, Any], ...],
        _doc(
            "Facts of providers' caches and prices that come before the shipped ones, by which mode `auto` weighs: "
            "`[[profiles]]` tables with `name` and what differs (docs/economics.md), JSON elsewhere."
        ),
    ] = ()
    seed: Annotated[int, _doc("Seed of the exploration term: the same seed, the same selections.")] = 0
    max_body_bytes: Annotated[
        int,
        _doc("A longer request body, as sent or when decoded, is streamed through and not read (64 MiB).", ge=1),
    ] = 64 << 20
    read_timeout: Annotated[
        float, _doc("Seconds that the upstream may be silent, before its answer and within it.", gt=0)
    ] = 900.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _doc("How much goes to stderr. Bodies and keys never do.")
    ] = "info"


SWITCHES = frozenset({"notice", "pressure", "redact", "attention_offline"})  # flags without a value
TABLES = frozenset({"prices", "profiles", "upstreams"})

HINTS: Mapping[str, Any] = {
    name: hint for name, hint in get_type_hints(Settings, include_extras=True).items() if name[0] != "_"
}


@dataclass(frozen=True, slots=True)
class Loaded:
    settings: Settings
    sources: Mapping[str, str]  # setting -> "flag --port", "env RECAP_PORT", "file PATH" or "default"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def environ_of(settings: Settings, names: Iterable[str]) -> dict[str, str]:
    """These settings as variables, for a process that is to have the same."""
    found = {}
    for name in names:
        value = getattr(settings, name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        found[env_of(name)] = text.lower() if isinstance(value, bool) else text
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting, and `--config`. Values stay text until `load_settings` checks them all alike."""
    group = parser.add_argument_group("settings", "also as RECAP_NAME in the environment, or name = value in the file")
    group.add_argument("--config", metavar="PATH", help="TOML file with settings")
    for name in HINTS:
        text = description_of(name).replace("%", "%%")
        if name in SWITCHES:
            group.add_argument(flag_of(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(flag_of(name), dest=name, metavar="VALUE", help=text)


def description_of(name: str) -> str:
    return next(str(meta.description) for meta in HINTS[name].__metadata__)


def load_settings(flags: argparse.Namespace, environ: Mapping[str, str]) -> Loaded:
    """All settings with their sources. Raises SettingsError."""
    given: dict[str, tuple[Any, str]] = {}
    path, is_required = _config_path(flags, environ)
    for name, value in _read_file(path, is_required).items():
        given[_known(name, f"file {path}", HINTS)] = (value, f"file {path}")
    variables = {env_of(name): name for name in HINTS}
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX) and variable != CONFIG_ENV:
            name = variables[_known(variable, "the environment", variables)]
            given[name] = (_from_text(name, value), f"env {variable}")
    for name in HINTS:
        if (value := getattr(flags, name, None)) is not None:
            given[name] = (_from_text(name, value), f"flag {flag_of(name)}")
    settings = Settings(**{name: _convert(name, value, source) for name, (value, source) in given.items()})
    sources = {name: given[name][1] if name in given else "default" for name in HINTS}
    _check(settings, sources)
    return Loaded(msgspec.structs.replace(settings, db=str(Path(settings.db).expanduser().absolute())), sources)


def _config_path(flags: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Path, bool]:
    named = getattr(flags, "config", None) or environ.get(CONFIG_ENV)
    if named:
        return Path(named).expanduser(), True
    return platformdirs.user_config_path("recap") / "config.toml", False


def _read_file(path: Path, is_required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if not is_required:
            return {}
        raise SettingsError(f"The settings file {str(path)!r} does not exist. Make it, or drop --config.") from None
    except (OSError, ValueError) as exc:
        raise SettingsError(f"The settings file {str(path)!r} cannot be read: {exc}.") from exc


def _known(name: str, source: str, names: Iterable[str]) -> str:
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else "`recap config` lists them all."
    raise SettingsError(f"Unknown setting {name!r} in {source}. {remedy}")


def _from_text(name: str, value: Any) -> Any:
    """Lists are written with commas, tables as JSON, where there is only text."""
    if name in TABLES and isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value  # no table: refused with the name of its source
    if name in ("allowed_hosts", "attention_layers") and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _convert(name: str, value: Any, source: str) -> Any:
    """Text from flags and variables is read leniently; a TOML value must have its setting's type."""
    try:
        converted = msgspec.convert(value, HINTS[name], strict=source.startswith("file "))
    except msgspec.ValidationError as exc:
        raise _wrong(name, value, source, f"{exc}. {_choices(name)}{description_of(name)}") from exc
    return tuple(host.lower() for host in converted) if name == "allowed_hosts" else converted


def _choices(name: str) -> str:
    kind = HINTS[name].__origin__
    return f"One of {', '.join(get_args(kind))}. " if get_origin(kind) is Literal else ""


def _wrong(name: str, value: Any, source: str, remedy: str) -> SettingsError:
    shown = "(hidden)" if name in SECRETS else repr(value)
    return SettingsError(f"The setting {name} is wrong: {shown} (from {source}). {remedy}")


def _check(settings: Settings, sources: Mapping[str, str]) -> None:
    """What single values cannot show: whether they make sense together."""
    if remedy := _fault_of_upstream(settings.upstream, settings):
        raise _wrong("upstream", _without_userinfo(settings.upstream), sources["upstream"], remedy)
    for name, url in settings.upstreams.items():
        if not UPSTREAM_NAME.fullmatch(name):
            remedy = "A name stands in paths: letters, digits, dots, dashes and underscores, such as openrouter."
            raise _wrong("upstreams", name, sources["upstreams"], remedy)
        if remedy := _fault_of_upstream(url, settings):
            raise _wrong(f"upstreams.{name}", _without_userinfo(url), sources["upstreams"], remedy)
    try:
        profiles_of(settings)
    except ValueError as exc:
        raise _wrong("profiles", settings.profiles, sources["profiles"], str(exc)) from exc
    if not is_loopback(settings.host) and not settings.proxy_key:
        remedy = "Other machines could use your provider account: set proxy_key too, or listen on 127.0.0.1."
        raise _wrong("host", settings.host, sources["host"], remedy)
    if not settings.proxy_key.isascii() or settings.proxy_key != settings.proxy_key.strip():
        raise _wrong("proxy_key", "", sources["proxy_key"], "A header value is ASCII, without spaces around it.")


def cold_after(settings: Settings, upstream: str, model: str) -> float:
    """Seconds of silence after which a cache is believed cold: `idle_after`, or in mode `auto` by its profile."""
    if settings.mode != "auto":
        return settings.idle_after
    return probably_cold_after(profile_of(profiles_of(settings), upstream, model))


def profiles_of(settings: Settings) -> tuple[Profile, ...]:
    """All profiles, the user's own first."""
    return with_own(settings.profiles)


def _fault_of_upstream(url: str, settings: Settings) -> str | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        return f"It is no URL: {exc}."
    if parts.scheme not in ("http", "https") or not host:
        return "It must be a whole URL such as https://api.openai.com/v1."
    if parts.username is not None or parts.query or parts.fragment:
        return "It takes no user, query or fragment: clients send their own credentials."
    is_here = host == settings.host or (is_loopback(host) and (is_loopback(settings.host) or _is_any(settings.host)))
    if is_here and settings.port and (port or {"http": 80, "https": 443}[parts.scheme]) == settings.port:
        return "That is this proxy itself: name the provider's URL, or another port."
    return None


def _without_userinfo(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return scheme + mark + rest.rpartition("@")[2]


def _is_any(host: str) -> bool:
    return host.strip("[]") in ("0.0.0.0", "::")
