"""One precedence for every setting, and an error that names value, source and remedy for every mistake."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.commands.config import render_reference
from proxy.errors import SettingsError
from proxy.ledger import Price
from proxy.settings import HINTS, Loaded, Settings, add_options, env_of, flag_of, load_settings

# For each setting, a value that is not its default: as text, and as it must arrive.
VALUES: dict[str, tuple[str, Any]] = {
    "upstream": ("http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1"),
    "host": ("localhost", "localhost"),
    "port": ("0", 0),
    "proxy_key": ("key", "key"),
    "allowed_hosts": ("Box, lan.name", ("box", "lan.name")),
    "db": ("/x/y.db", "/x/y.db"),
    "keep_days": ("30", 30),
    "keep_bytes": ("1000000", 1_000_000),
    "redact": ("true", True),
    "mode": ("off", "off"),
    "idle_after": ("1.5", 1.5),
    "min_history_tokens": ("1", 1),
    "context_window_tokens": ("128000", 128000),
    "pressure": ("false", False),
    "request_cap_chars": ("5", 5),
    "notice": ("false", False),
    "image_chars": ("7", 7),
    "beta": ("0.5", 0.5),
    "lam": ("2", 2.0),
    "eps": ("0", 0.0),
    "kappa": ("3", 3.0),
    "delta": ("0.2", 0.2),
    "attention": ("off", "off"),
    "attention_model": ("models/small.gguf", "models/small.gguf"),
    "attention_device": ("cuda", "cuda"),
    "attention_dtype": ("float32", "float32"),
    "attention_max_tokens": ("4096", 4096),
    "attention_threads": ("1", 1),
    "attention_offline": ("true", True),
    "attention_layers": ("5, 11", (5, 11)),
    "evidence": ("past-use", "past-use"),
    "selector": ("recency", "recency"),
    "tool_results_kept": ("5", 5),
    "holdout": ("0.1", 0.1),
    "prices": (
        '{"gpt-5*": {"input": 1.25, "output": 10, "cached": 0.125}, "*": {"input": 1}}',
        {"gpt-5*": Price(input=1.25, output=10, cached=0.125), "*": Price(input=1)},
    ),
    "upstreams": ('{"or": "https://openrouter.ai/api/v1"}', {"or": "https://openrouter.ai/api/v1"}),
    "profiles": ('[{"name": "openai", "warm_s": 5}]', ({"name": "openai", "warm_s": 5},)),
    "seed": ("-4", -4),
    "max_body_bytes": ("1000", 1000),
    "read_timeout": ("3.5", 3.5),
    "log_level": ("debug", "debug"),
}


@pytest.fixture(autouse=True)
def no_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platformdirs.user_config_path", lambda _: tmp_path / "user")


def load(flags: str | list[str] = (), environ: dict[str, str] | None = None) -> Loaded:  # type: ignore[assignment]
    parser = argparse.ArgumentParser()
    add_options(parser)
    return load_settings(parser.parse_args(flags.split() if isinstance(flags, str) else list(flags)), environ or {})


def file(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "given.toml"
    path.write_text(text)
    return ["--config", str(path)]


def in_toml(value: Any) -> str:
    """Tables become inline tables; what is None is left away."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(in_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}" = {in_toml(v)}' for k, v in value.items() if v is not None) + "}"
    return json.dumps(value)


def test_every_setting_is_tried() -> None:
    assert list(VALUES) == list(HINTS) == [field.name for field in msgspec.structs.fields(Settings)]


@pytest.mark.parametrize("name", VALUES)
def test_each_setting_by_flag_variable_and_file(name: str, tmp_path: Path) -> None:
    text, value = VALUES[name]
    flags = [f"{flag_of(name)}={text}"]
    if isinstance(value, bool):
        flags = [flag_of(name) if value else flag_of(name).replace("--", "--no-", 1)]
    toml = in_toml(msgspec.to_builtins(value))
    ways = {
        f"flag {flag_of(name)}": load(flags),
        f"env {env_of(name)}": load([], {env_of(name): text}),
        f"file {tmp_path / 'given.toml'}": load(file(tmp_path, f"{name} = {toml}")),
    }
    for source, loaded in ways.items():
        assert getattr(loaded.settings, name) == value
        assert loaded.sources[name] == source
        assert {s for n, s in loaded.sources.items() if n != name} == {"default"}
    assert getattr(Settings(), name) != value


def test_flags_win_over_variables_over_file_over_defaults(tmp_path: Path) -> None:
    config = file(tmp_path, "port = 1\nseed = 1\nbeta = 0.3")
    environ = {"RECAP_PORT": "2", "RECAP_SEED": "2"}
    loaded = load([*config, "--port", "3"], environ)
    assert (loaded.settings.port, loaded.settings.seed, loaded.settings.beta, loaded.settings.lam) == (3, 2, 0.3, 0.5)
    assert [loaded.sources[name].split()[0] for name in ("port", "seed", "beta", "lam")] == [
        "flag",
        "env",
        "file",
        "default",
    ]


def test_file_is_found_by_variable_and_in_the_users_directory(tmp_path: Path) -> None:
    named = file(tmp_path, "seed = 1")[1]
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "config.toml").write_text("seed = 2")
    assert load([], {"RECAP_CONFIG": named}).settings.seed == 1
    assert load().settings.seed == 2


def test_database_path_is_absolute_and_the_home_is_resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load(["--db", "~/a.db"]).settings.db == str(tmp_path / "a.db")
    assert load(["--db", "b.db"]).settings.db == str(tmp_path / "b.db")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--port=x", ["port", "'x'", "flag --port"]),
        ("--port=65536", ["port", "'65536'", "<= 65535"]),
        ("--mode=of", ["mode", "'of'", "always"]),
        ("--beta=0", ["beta", "'0'"]),
        ("--beta=nan", ["beta", "'nan'"]),
        ("--idle-after=-1", ["idle_after", "'-1'"]),
        ("--upstream=api.openai.com", ["upstream", "'api.openai.com'", "https://"]),
        ("--upstream=ftp://h/v1", ["upstream", "'ftp://h/v1'"]),
        ("--upstream=https:///v1", ["upstream"]),
        ("--upstream=https://h:port/v1", ["upstream"]),
        ("--upstream=https://h/v1?key=1", ["upstream", "query"]),
        ("--upstream=http://127.0.0.1:8787/v1", ["upstream", "this proxy itself"]),
        ("--upstream=http://localhost:8787", ["upstream", "this proxy itself"]),
        ("--upstream=http://[::1]:80/v1 --port=80", ["upstream", "this proxy itself"]),
        ("--upstream=http://localhost:8787 --host=0.0.0.0 --proxy-key=k", ["upstream", "this proxy itself"]),
        ("--host=0.0.0.0", ["host", "'0.0.0.0'", "proxy_key"]),
        ("--host=::", ["host", "proxy_key"]),
        ("--host=192.168.0.2", ["host", "proxy_key"]),
        ("--config=/does/not/exist.toml", ["/does/not/exist.toml", "--config"]),
    ],
)
def test_mistake_in_a_flag(flags: str, named: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags)
    assert [word for word in named if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot = 1", ["'prot'", "'port'", "given.toml"]),
        ("zzz = 1", ["'zzz'", "recap config"]),
        ('port = "1"', ["port", "'1'", "given.toml", "int"]),
        ('notice = "yes"', ["notice", "'yes'", "bool"]),
        ("port = ", ["given.toml", "cannot be read"]),
        ("port = [", ["given.toml", "cannot be read"]),
    ],
)
def test_mistake_in_the_file(text: str, named: list[str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(file(tmp_path, text))
    assert [word for word in named if word not in str(caught.value)] == []


def test_prices_are_a_table_in_the_file_and_keep_its_order(tmp_path: Path) -> None:
    """The first pattern that fits counts, so the order is part of the value."""
    table = """
        [prices."zeta-*"]
        input = 2
        [prices."*"]
        input = 1.5
        write = 0
    """
    prices = load(file(tmp_path, table)).settings.prices
    assert list(prices.items()) == [("zeta-*", Price(input=2)), ("*", Price(input=1.5, write=0))]
    given = json.dumps({"*": {"input": 1}, "a": {"input": 2}})
    for loaded in (load(["--prices", given]), load([], {"RECAP_PRICES": given})):
        assert list(loaded.settings.prices) == ["*", "a"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("cheap", ["'cheap'", "object"]),
        ('{"gpt": ', ["object", "JSON elsewhere"]),
        ("[1]", ["object", "array"]),
        ('{"gpt": 1}', ["object", "int", "$[...]"]),
        ('{"gpt": {"output": 1}}', ["input"]),
        ('{"gpt": {"input": -1}}', [">= 0"]),
        ('{"gpt": {"input": 1, "chached": 1}}', ["chached"]),
        ('{"gpt": {"input": "dear"}}', ["dear"]),
        ('{"gpt": {"input": NaN}}', ["NaN"]),
    ],
)
def test_mistake_in_prices_by_flag_and_variable(given: str, named: list[str]) -> None:
    ways = {"flag --prices": ([f"--prices={given}"], {}), "env RECAP_PRICES": ([], {"RECAP_PRICES": given})}
    for source, (flags, environ) in ways.items():
        with pytest.raises(SettingsError) as caught:
            load(flags, environ)
        assert [word for word in ["prices", source, *named] if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prices = 3", ["3", "object"]),
        ('prices = \'{"gpt": {"input": 1}}\'', ["object", "str"]),
        ("[prices.gpt]\noutput = 1", ["input"]),
        ("[prices.gpt]\ninput = -0.5", ["-0.5", ">= 0"]),
        ('[prices.gpt]\ninput = "1"', ["'1'", "float"]),
        ("[prices.gpt]\ninput = 1\nchached = 1", ["chached"]),
        ("[prices.gpt]\ninput = nan", ["nan", ">= 0"]),
        ("[prices.gpt]\ninput = inf", ["inf", "<= 1000000000"]),
    ],
)
def test_mistake_in_prices_of_the_file(text: str, named: list[str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(file(tmp_path, text))
    assert [word for word in ["prices", "given.toml", *named] if word not in str(caught.value)] == []


def test_mistake_in_a_variable() -> None:
    """A misspelt variable would otherwise be a setting that silently does nothing."""
    with pytest.raises(SettingsError, match=r"'RECAP_PROT' .*'RECAP_PORT'"):
        load([], {"RECAP_PROT": "1"})
    with pytest.raises(SettingsError, match=r"notice .*'maybe' .*env RECAP_NOTICE"):
        load([], {"RECAP_NOTICE": "maybe"})


def test_secrets_are_not_shown_in_errors() -> None:
    with pytest.raises(SettingsError) as caught:
        load(["--proxy-key", "schlüssel"])
    assert "schl" not in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        load(["--upstream", "https://user:canary@h/v1"])
    assert "canary" not in str(caught.value)


def test_loopback_needs_no_key_and_another_host_takes_one() -> None:
    assert load("--host=::1").settings.host == "::1"
    assert load("--host=0.0.0.0 --proxy-key=k").settings.proxy_key == "k"


def test_reference_in_the_docs_is_up_to_date() -> None:
    """To mend it: replace the table by the output of `recap config --markdown`."""
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")
    assert page.rstrip().endswith(render_reference())
