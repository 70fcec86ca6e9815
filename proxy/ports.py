"""The seam between the HTTP shell and the session logic.

The shell (endpoints, relay) knows bytes and sockets; `Conversations` knows sessions, decisions and the archive. No
method here may raise or delay a request beyond its own deadline: whatever fails inside, the shell forwards the
client's bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graphstore.records import Ending, ExchangeRow
from proxy.dialects.base import DialectName

Headers = Sequence[tuple[bytes, bytes]]  # as on the wire: names in any case, duplicates kept


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to a conversation endpoint, its body decoded. `unreadable` says why the body could not be decoded.

    `upstream` is the base URL of the one it goes to; empty: the settings' own.
    """

    dialect: DialectName
    path: str
    headers: Headers
    body: bytes
    unreadable: str | None = None
    upstream: str = ""


@dataclass(frozen=True, slots=True)
class Shorter:
    """What to do about a context that is too long: send `body` (plain JSON); None: nothing, the refusal stands."""

    body: bytes | None


class Exchange(Protocol):
    """The life of one admitted request. Call `finish` exactly once, whatever happens."""

    def may_be_shortened(self) -> bool:
        """A shorter request could be sent: it pays to look at how an answer begins. Then call `begun` or `shorter`."""

    def may_be_too_long(self) -> bool:
        """The request is so large that a refusal may come: events that say nothing yet are worth holding back."""

    def begun(self) -> None:
        """The answer is one: it is no refusal for the request's length."""

    async def shorter(self, status: int, headers: Headers, body: bytes) -> Shorter | None:
        """The upstream refused the request, and the client knows nothing of it yet. None: not for its length.

        Ask once. `headers` and `body` are the refusal as it came; of a long body the beginning. Status 200: `body` is
        the error by which an answer began, as plain JSON.
        """

    def refused_again(self, why: str) -> None:
        """The shorter body had no success either: the client gets the first refusal."""

    def first_byte(self) -> None:
        """The first body byte of the response has arrived."""

    def fall_back(self, status: int, body: bytes) -> None:
        """The upstream rejected the rewritten request; the shell now sends the original."""

    def finish(
        self, ending: Ending, *, status: int | None, headers: Headers, body: bytes | None, error: str | None = None
    ) -> None:
        """The response has ended. `body` is what the upstream sent, still encoded; None when it was not recorded."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. `body` None: the client's own bytes exactly as they came, content encoding included.

    Otherwise `body` is plain JSON: the shell drops content-encoding and sets content-length.
    """

    body: bytes | None
    exchange: Exchange | None
    detach: bool = False  # keep the upstream running when the client leaves (responses, background: true)


class Observer(Protocol):
    """Hears what happens, to count it. What it raises is logged and goes no further."""

    def planned(self, seconds: float) -> None:
        """A request waited so long for its plan. Called on the event loop: must return at once."""

    def selected(self, seconds: float) -> None:
        """A new selection took so long, with its way to the disk. Called on the event loop."""

    def ended(self, row: ExchangeRow, upstream: str) -> None:
        """An exchange is over, its answer read. `upstream` is a base URL. Called in the recorder's thread."""


class Conversations(Protocol):
    async def admit(self, arrival: Arrival) -> Plan: ...

    def health(self) -> dict[str, object]:
        """Facts for /recap/health: `state` of the archive (`ok`: it is well), queue depth, last error, its remedy."""

    async def ready(self) -> None:
        """Wait until the archive is open, which this process then owns."""

    async def keep(self) -> None:
        """Remove from the archive what is to go, now and then, until cancelled."""

    async def close(self) -> None:
        """Write what is queued, then close the archive."""
