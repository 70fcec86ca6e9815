"""Recognising the client from its headers; samples as the agents send them."""

import json

import pytest

from proxy.clients import credential, recognise


def headers(**values: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in values.items()]


def test_codex_sub_agents_share_the_session_id_so_the_thread_id_counts() -> None:
    parent = recognise(headers(originator="codex_exec", session_id="S", thread_id="S"))
    child = recognise(headers(originator="codex_exec", session_id="S", thread_id="T", x_codex_parent_thread_id="S"))
    assert (parent.client, parent.client_id) == ("codex", "S")
    assert (child.client_id, child.parent_id) == ("T", "S")


def test_opencode_is_known_by_its_session_header() -> None:
    caller = recognise(headers(user_agent="opencode/1.18.33 ai-sdk", X_Session_Id="ses_1", x_parent_session_id="ses_0"))
    assert (caller.client, caller.client_id, caller.parent_id) == ("opencode", "ses_1", "ses_0")


def test_clients_without_an_id() -> None:
    assert recognise(headers(user_agent="QwenCode/0.15.10 (linux; x64)")).client == "qwen"
    caller = recognise(headers(user_agent="OpenAI/Python 3.57.0"))
    assert (caller.client, caller.client_id) == ("openai-sdk", None)
    assert recognise([]).client == "other"


def test_codex_says_when_it_compacts() -> None:
    metadata = json.dumps({"request_kind": "compaction", "compaction": {"trigger": "manual"}})
    assert recognise(headers(x_codex_turn_metadata=metadata)).compacting
    assert not recognise(headers(x_codex_turn_metadata=json.dumps({"request_kind": "turn"}))).compacting


@pytest.mark.parametrize("metadata", ["", "{", "[]", '"x"', '{"request_kind": 7}', "\xff"])
def test_odd_metadata_is_no_compaction(metadata: str) -> None:
    assert not recognise([(b"x-codex-turn-metadata", metadata.encode("latin-1"))]).compacting


def test_an_empty_id_is_no_id() -> None:
    assert recognise(headers(x_session_id="")).client_id is None


def test_credentials_tell_accounts_apart() -> None:
    one, two = headers(authorization="Bearer a"), headers(authorization="Bearer b")
    assert credential(one) != credential(two)
    assert credential(headers(Authorization="Bearer a")) == credential(one)
    for name in ("api_key", "x_api_key", "x_goog_api_key"):
        assert credential(headers(**{name: "k"})) != credential([])
