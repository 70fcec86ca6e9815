"""Secrets become asterisks; nothing else changes, not even a length."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.redaction import redact, redact_text

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEAcanary\ncanarycanary+/==\n-----END RSA PRIVATE KEY-----"
SECRETS = {
    "sk-proj-canary0123456789abcdef": "sk-proj",
    "AKIACANARY0123456789": "AKIA",
    "ghp_canary0123456789abcdefghij": "ghp_",
    "github_pat_canary0123456789abcdefghij": "github_pat",
    "xoxb-canary-0123456789": "xoxb",
    "eyJhbGciOiJIcanary.eyJzdWIiOiIxcanary.c2lnbmF0dXJlcanary": "eyJ",
    PEM: "MIIE",
    PEM.replace("RSA PRIVATE KEY", "PGP PRIVATE KEY BLOCK"): "MIIE",
    PEM.partition("+/==")[0].replace("canary", "canary0123456789"): "MIIE",
    "glpat-canary0123456789": "glpat",
    "hf_canary0123456789abcdefghij": "hf_",
    "sk_live_canary0123456789": "sk_live",
    "Authorization: Bearer canary.0123456789-": "canary",
    "postgres://user:canary.horse@host/db": "canary",
    "password=canary-horse": "canary",
    "API_KEY: canary+horse/battery": "canary",
    '{"db_password": "canary.horse"}': "canary",
}


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("nested", [0, 1, 2])
def test_a_secret_is_masked_at_every_depth_of_json(secret: str, nested: int) -> None:
    text = f"before {secret} after"
    raw = text
    for _ in range(nested):
        raw = json.dumps({"content": raw})
    clean = redact(raw.encode())
    assert SECRETS[secret].encode() not in clean and b"canary" not in clean
    assert len(clean) == len(raw.encode()) and redact(clean) == clean
    value = clean.decode()
    for _ in range(nested):
        value = json.loads(value)["content"]
    assert value.startswith("before ") and value.endswith(" after") and len(value) == len(text)


@pytest.mark.parametrize("secret", [secret for secret in SECRETS if " " not in secret])
@pytest.mark.parametrize("before", ["\n", "\t", "\r\n", "\u2028", "(", "日"])
@pytest.mark.parametrize("nested", [1, 2, 3])
def test_a_secret_is_masked_wherever_a_line_begins(secret: str, before: str, nested: int) -> None:
    """In JSON a line break is an escape, whose letter is no part of the word behind it."""
    raw = f"x{before}{secret}{before}x"
    for _ in range(nested):
        raw = json.dumps(raw)
    assert b"canary" not in redact(raw.encode())


@pytest.mark.parametrize(
    "text", ["PRIVATE KEY-----", "PRIVATE KEY-----\n" + 20 * "A", "://a:b", "eyJaaaaaaaa.", "password=", "Bearer "]
)
def test_what_repeats_costs_no_more_than_its_length(text: str) -> None:
    """A search that began anew at each repetition would not come to an end."""
    redact(text.encode() * 100_000)


@pytest.mark.parametrize(
    "text",
    ['{"max_token": 4096, "token": null, "secret": true}', "the password is asked for", "sk-short", "a tokenizer: x"],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text


KEYS = st.text() | st.sampled_from(["password", "token"])
LEAVES = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(LEAVES, lambda value: st.lists(value) | st.dictionaries(KEYS, value))


@given(JSON)
def test_json_keeps_its_form(value: object) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    clean = redact(raw)
    assert len(clean) == len(raw)
    json.loads(clean.decode("utf-8", "surrogatepass"))
