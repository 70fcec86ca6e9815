"""The proxy's own failures, and how a client sees them.

    RecapError                 a command stops: message for people, exit code
    ├── SettingsError          a setting is wrong (2)
    └── StartError             the machine does not let us start (1)
    UpstreamError              the upstream gave no complete answer
    ├── UpstreamUnreachable    no connection, or it broke before the answer began (502)
    ├── UpstreamTimeout        no connection or no byte in time (504)
    └── UpstreamBroken         the answer stopped in the middle: the client's connection breaks too
    ClientGone                 the client closed its connection

A 4xx or 5xx of the upstream is an answer, not an error of ours, and never comes here.
"""

from typing import ClassVar

import msgspec


class RecapError(Exception):
    exit_code: ClassVar[int] = 1


class SettingsError(RecapError):
    exit_code = 2


class StartError(RecapError):
    pass


class UpstreamError(Exception):
    """The text is one sentence that names the cause; it holds no header, query or credential."""

    status: ClassVar[int] = 502
    code: ClassVar[str] = "upstream_error"


class UpstreamUnreachable(UpstreamError):
    code = "upstream_unreachable"


class UpstreamTimeout(UpstreamError):
    status = 504
    code = "upstream_timeout"


class UpstreamBroken(UpstreamError):
    code = "upstream_broken"


class ClientGone(Exception):
    pass


def render_error(message: str, *, code: str, kind: str = "recap_proxy_error") -> bytes:
    """The error body that OpenAI clients know how to show."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
