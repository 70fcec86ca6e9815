"""Which profile counts where, and what a user may change."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from proxy.economics.profiles import profile_of, shipped, with_own
from proxy.errors import SettingsError
from proxy.settings import add_options, load_settings, profiles_of


@pytest.mark.parametrize(
    ("upstream", "model", "name"),
    [
        ("https://api.openai.com/v1", "gpt-4o-mini", "openai-4"),
        ("https://api.openai.com/v1", "o1", "openai-4"),
        ("https://api.openai.com/v1", "gpt-4.1-nano", "openai-4.1"),
        ("https://api.openai.com/v1", "o3", "openai-4.1"),
        ("https://api.openai.com/v1", "gpt-5", "openai-5"),
        ("https://api.openai.com/v1", "gpt-5-mini", "openai-5"),
        ("https://api.openai.com/v1", "gpt-5.1-codex", "openai-5"),
        ("https://api.openai.com/v1", "gpt-5.5", "openai-5.4"),
        ("https://api.openai.com/v1", "gpt-5.6-sol", "openai"),
        ("https://api.openai.com/v1", "gpt-6.1", "openai"),
        ("https://me.openai.azure.com/openai", "GPT-4o", "openai-4"),
        ("https://API.DeepSeek.com", "deepseek-chat", "deepseek"),
        ("https://openrouter.ai/api/v1", "openai/gpt-5", "openrouter"),
        ("http://127.0.0.1:8000/v1", "qwen3", "local"),
        ("http://[::1]:8000/v1", "qwen3", "local"),
        ("https://example.org/v1", "anything", "unknown"),
    ],
)
def test_host_and_model_decide(upstream: str, model: str, name: str) -> None:
    assert profile_of(shipped(), upstream, model).name == name


def test_shipped_profiles_make_sense() -> None:
    names = [profile.name for profile in shipped()]
    assert len(set(names)) == len(names) and names[-1] == "unknown"
    for profile in shipped():
        assert 0 < profile.warm_s <= profile.cold_s and profile.read < 1 <= profile.write
        assert profile.cliff_factor > 1 if profile.cliff_tokens else profile.cliff_factor == 1


def test_a_row_of_a_shipped_name_changes_what_it_says_and_comes_first() -> None:
    own = with_own([{"name": "groq", "warm_s": 5, "hosts": ["*"]}])
    assert own[0].name == "groq" and own[0].warm_s == 5 and own[0].read == 0.5
    assert len(own) == len(shipped())
    assert profile_of(own, "https://api.openai.com/v1", "gpt-5").name == "groq"


def test_a_new_row_begins_as_unknown_and_may_name_host_and_port() -> None:
    own = with_own([{"name": "mine", "hosts": ["127.0.0.1:4000"], "read": 0.25}])
    assert profile_of(own, "http://127.0.0.1:4000/v1", "m").name == "mine"
    assert profile_of(own, "http://127.0.0.1:4001/v1", "m").name == "local"
    unknown = shipped()[-1]
    assert (own[0].warm_s, own[0].cold_s, own[0].read) == (unknown.warm_s, unknown.cold_s, 0.25)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"warm_s": 3}, ["no name", "warm_s"]),
        ({"name": "mine", "warm": 3}, ["'mine'", "warm"]),
        ({"name": "mine", "read": -1}, ["'mine'", ">= 0"]),
        ({"name": "mine", "match": "luck"}, ["'mine'", "luck"]),
        ({"name": "mine", "hosts": []}, ["'mine'", "hosts", "length >= 1"]),
        ({"name": "mine", "cliff_factor": 0}, ["'mine'", "cliff_factor", "> 0"]),
        ({"name": "openai", "cold_s": 60}, ["'openai'", "cold_s 60", "warm_s 1800"]),
    ],
)
def test_a_wrong_row_is_named_with_its_source(row: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "given.toml"
    quoted = {k: f'"{v}"' if isinstance(v, str) else v for k, v in row.items()}
    path.write_text("[[profiles]]\n" + "\n".join(f"{k} = {v}" for k, v in quoted.items()))
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(SettingsError) as caught:
        load_settings(parser.parse_args(["--config", str(path)]), {})
    assert [word for word in ["profiles", "given.toml", *words] if word not in str(caught.value)] == []


def test_a_name_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'mine' is there twice"):
        with_own([{"name": "mine", "warm_s": 5}, {"name": "mine", "warm_s": 6}])


def test_profiles_of_the_file_count(tmp_path: Path) -> None:
    path = tmp_path / "given.toml"
    path.write_text('[[profiles]]\nname = "openai"\nwarm_s = 43200\n')
    parser = argparse.ArgumentParser()
    add_options(parser)
    settings = load_settings(parser.parse_args(["--config", str(path)]), {}).settings
    assert profile_of(profiles_of(settings), "https://api.openai.com/v1", "gpt-6").warm_s == 43200
