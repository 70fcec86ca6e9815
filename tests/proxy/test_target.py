"""The base URL and the client's path make one URL: nothing doubled, nothing lost."""

import pytest

from proxy.upstream.target import is_loopback, join_target

OPENAI = "https://api.openai.com/v1"
AZURE = "https://x.openai.azure.com/openai/v1"


@pytest.mark.parametrize(
    ("base", "path", "expected"),
    [
        (OPENAI, "/v1/responses", "https://api.openai.com/v1/responses"),
        (OPENAI, "/responses", "https://api.openai.com/v1/responses"),
        (OPENAI + "/", "/v1/models", "https://api.openai.com/v1/models"),
        (OPENAI, "/v1", "https://api.openai.com/v1"),
        (OPENAI, "/", "https://api.openai.com/v1/"),
        (OPENAI, "/v1beta/x", "https://api.openai.com/v1/v1beta/x"),
        ("http://localhost:11434", "/v1/chat/completions", "http://localhost:11434/v1/chat/completions"),
        ("http://localhost:11434/", "/chat/completions", "http://localhost:11434/chat/completions"),
        ("https://openrouter.ai/api/v1", "/v1/chat/completions", "https://openrouter.ai/api/v1/chat/completions"),
        ("https://openrouter.ai/api/v1", "/api/v1/models", "https://openrouter.ai/api/v1/models"),
        ("https://api.z.ai/api/paas/v4", "/v1/chat/completions", "https://api.z.ai/api/paas/v4/chat/completions"),
        ("https://h/v1beta/openai", "/v1/chat/completions", "https://h/v1beta/openai/chat/completions"),
        (AZURE, "/v1/responses", "https://x.openai.azure.com/openai/v1/responses"),
        (AZURE, "/openai/v1/responses", "https://x.openai.azure.com/openai/v1/responses"),
        (AZURE, "/openai/deployments/d/chat/completions", "https://x.openai.azure.com/openai/deployments/d/chat/completions"),
        ("https://x.openai.azure.com", "/openai/responses", "https://x.openai.azure.com/openai/responses"),
        ("http://[::1]:9/v1", "/v1/%2F//a", "http://[::1]:9/v1/%2F//a"),
    ],
)  # fmt: skip
def test_join(base: str, path: str, expected: str) -> None:
    assert join_target(base, path, "") == expected
    assert join_target(base, path, "api-version=2025&x=%2f") == expected + "?api-version=2025&x=%2f"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "a.localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.evil.com", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
