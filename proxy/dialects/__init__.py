"""The wire formats that the proxy reads, by name."""

from proxy.dialects.base import Dialect, DialectName
from proxy.dialects.chat import ChatDialect
from proxy.dialects.responses import ResponsesDialect

DIALECTS: dict[DialectName, Dialect] = {"chat": ChatDialect(), "responses": ResponsesDialect()}


def stored_dialect(name: str) -> Dialect:
    """The dialect that a row of the archive names: it was written from a `DialectName`."""
    return DIALECTS[name]  # type: ignore[index]
