"""May the context be selected anew at this request, and why: a pure function of facts and settings.

It reads no clock and no archive. The order of the rules is the policy: what forbids a rewrite first, then what makes
the provider's cache cold, then warm.

Pressure is another matter: a request that the model's window hardly holds would fail, so neither the cache nor the turn
counts. It presses below the window, to leave room for the answer and for what an estimate is wrong by, and what is then
selected is to be far below, so that it does not press again at once.
"""

from dataclasses import dataclass, field
from typing import Literal

from graphstore.records import BoundaryKind
from proxy.holdout import HELD_OUT

Mode = Literal["auto", "idle", "always", "off"]

PRESSED_FROM = 0.9  # of the window
RELIEVED_TO = 0.5  # ... so that the turn can go on for some time


@dataclass(frozen=True, slots=True)
class Policy:
    mode: Mode
    idle_after_s: float
    min_history_tokens: int
    context_window_tokens: int  # 0: unknown, pressed only by a refusal
    pressure: bool = True

    @property
    def limit_tokens(self) -> int:
        """Above this a request is pressed; 0: none is."""
        return int(self.context_window_tokens * PRESSED_FROM) if self.pressure else 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known when a request arrives. Token figures are estimates (characters / 4)."""

    opaque: str | None = None
    side: bool = False
    held_out: bool = False  # this session stays untouched, so that there is something to compare with
    passing_through: str | None = None  # why this session is left alone
    open_calls: bool = False
    retry: bool = False
    at_user_request: bool = False  # the newest messages are the user's
    mid_turn: bool = False  # the user wrote while the agent was still calling tools
    history_blocks: int = 0
    history_tokens: int = 0
    served_tokens: int = 0  # what would go out with the present selection
    least_tokens: int = 0  # ... and with one that leaves out all that may be left out under pressure
    unrelieved: bool = False  # the last selection under pressure did not help, and there is no more to leave out now
    first_seen: bool = False  # no earlier request of this history: nothing is known of the cache
    in_flight: bool = False
    idle_s: float | None = None
    client_compacted: bool = False
    changed: tuple[str, ...] = field(default=())  # of "model", "tools", "instructions"
    archive_trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """`select` asks for a new selection; mode `off` records it without sending it.

    `weigh`: it is sent only if it pays, which is known when it has been made. `pressed`: it is made because the
    window is too small, and may leave out older steps of the current turn.
    """

    boundary: BoundaryKind
    reason: str
    select: bool = False
    weigh: bool = False
    pressed: bool = False


def decide(facts: Facts, policy: Policy) -> Decision:
    if forbidden := _why_not(facts):
        return Decision("none", forbidden)
    if facts.retry:
        return Decision("warm", "retry of the same request")
    if not facts.at_user_request:
        return _at_step(facts, policy)
    if facts.history_blocks == 0:
        return Decision("none", "no history yet")
    pressed = _is_pressed(facts, policy)
    if facts.first_seen and policy.mode != "always" and not pressed:
        return Decision("none", "first seen: nothing is known of the provider's cache")
    if facts.in_flight:
        return Decision("warm", "another request of this session is still running")

    cold = _why_cold(facts, policy)
    weigh = cold is None and policy.mode == "auto" and (is_idle(facts, policy) or not facts.mid_turn)
    if weigh:
        cold = f"idle for {facts.idle_s or 0:.0f} s"
    if cold is None:
        idle = f"idle for {facts.idle_s or 0:.0f} s, cold after {policy.idle_after_s:.0f} s"
        # A trigger that stays true after a selection would break the cache at every request, for nothing.
        return Decision(
            "warm", f"{idle}; {_pressure(facts, policy)}, and a selection did not help" if pressed else idle
        )
    if facts.archive_trouble:
        return Decision("warm" if weigh else "cold", f"{cold}; left alone: {facts.archive_trouble}")
    if facts.history_tokens < policy.min_history_tokens and not pressed:
        small = f"history of {facts.history_tokens} tokens is below {policy.min_history_tokens}"
        return Decision("warm" if weigh else "cold", f"{cold}; left alone: {small}")
    return Decision("warm" if weigh else "cold", cold, select=True, weigh=weigh, pressed=pressed)


def decide_again(facts: Facts, policy: Policy, refusal: str) -> Decision:
    """May a request that was refused for its length be selected anew, whatever was decided before."""
    forbidden = _why_not(facts) or ("mode off" if policy.mode == "off" else None)
    if not policy.pressure:
        forbidden = "pressure is off"
    if forbidden or facts.archive_trouble:
        return Decision("none", f"{refusal}; left alone: {forbidden or facts.archive_trouble}")
    return Decision("cold", refusal, select=True, pressed=True)


def _why_not(facts: Facts) -> str | None:
    """What forbids any rewrite."""
    if facts.opaque:
        return f"opaque: {facts.opaque}"
    if facts.side:
        return "side request"
    if facts.held_out:
        return HELD_OUT
    if facts.passing_through:
        return f"pass-through: {facts.passing_through}"
    return "a tool call has no result yet" if facts.open_calls else None


def _at_step(facts: Facts, policy: Policy) -> Decision:
    """The cache is warm and the agent at work: only a window that is nearly full is a reason, and only if it helps."""
    step = "step inside the turn"
    if not _is_pressed(facts, policy) or policy.mode == "off" or facts.in_flight:
        return Decision("step", step)
    pressure = f"{step}; {_pressure(facts, policy)}"
    if facts.unrelieved or facts.least_tokens > policy.limit_tokens:
        return Decision("step", f"{pressure}, and no selection would help")
    if facts.archive_trouble:
        return Decision("step", f"{pressure}; left alone: {facts.archive_trouble}")
    return Decision("cold", pressure, select=True, pressed=True)


def is_idle(facts: Facts, policy: Policy) -> bool:
    """Whether nothing was asked for so long that the cache is believed cold."""
    return facts.idle_s is not None and facts.idle_s >= policy.idle_after_s


def _why_cold(facts: Facts, policy: Policy) -> str | None:
    idle = is_idle(facts, policy)
    pressed = _is_pressed(facts, policy) and not facts.unrelieved
    if facts.mid_turn and not idle:
        return _pressure(facts, policy) if pressed else None
    if facts.client_compacted:
        return "the client compacted its history"
    if facts.changed:
        return f"{' and '.join(facts.changed)} changed"
    if idle and policy.mode != "auto":
        return f"idle for {facts.idle_s:.0f} s"
    if pressed:
        return _pressure(facts, policy)
    if policy.mode == "always":
        return "mode always"
    return None


def _is_pressed(facts: Facts, policy: Policy) -> bool:
    return 0 < policy.limit_tokens < facts.served_tokens


def _pressure(facts: Facts, policy: Policy) -> str:
    return f"pressure: {facts.served_tokens} tokens for a window of {policy.context_window_tokens}"
