"""May the context be selected anew at this request, and why: a pure function of facts and settings.

It reads no clock and no archive. The order of the rules is the policy: what forbids a rewrite first, then what makes
the provider's cache cold, then warm.
"""

from dataclasses import dataclass, field
from typing import Literal

from graphstore.records import BoundaryKind
from proxy.holdout import HELD_OUT

Mode = Literal["auto", "idle", "always", "off"]


@dataclass(frozen=True, slots=True)
class Policy:
    mode: Mode
    idle_after_s: float
    min_history_tokens: int
    context_window_tokens: int  # 0: unknown, never pressed


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
    unrelieved: bool = False  # ... which was all that a selection could do against a window that is too small
    first_seen: bool = False  # no earlier request of this history: nothing is known of the cache
    in_flight: bool = False
    idle_s: float | None = None
    client_compacted: bool = False
    changed: tuple[str, ...] = field(default=())  # of "model", "tools", "instructions"
    archive_trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """`select` asks for a new selection; mode `off` records it without sending it.

    `weigh`: it is sent only if it pays, which is known when it has been made.
    """

    boundary: BoundaryKind
    reason: str
    select: bool = False
    weigh: bool = False


def decide(facts: Facts, policy: Policy) -> Decision:
    if facts.opaque:
        return Decision("none", f"opaque: {facts.opaque}")
    if facts.side:
        return Decision("none", "side request")
    if facts.held_out:
        return Decision("none", HELD_OUT)
    if facts.passing_through:
        return Decision("none", f"pass-through: {facts.passing_through}")
    if facts.open_calls:
        return Decision("none", "a tool call has no result yet")
    if facts.retry:
        return Decision("warm", "retry of the same request")
    if not facts.at_user_request:
        return Decision("step", "step inside the turn")
    if facts.history_blocks == 0:
        return Decision("none", "no history yet")
    if facts.first_seen and policy.mode != "always":
        return Decision("none", "first seen: nothing is known of the provider's cache")
    if facts.in_flight:
        return Decision("warm", "another request of this session is still running")

    cold = _why_cold(facts, policy)
    idle_enough = facts.idle_s is not None and facts.idle_s >= policy.idle_after_s
    weigh = cold is None and policy.mode == "auto" and (idle_enough or not facts.mid_turn)
    if weigh:
        cold = f"idle for {facts.idle_s or 0:.0f} s"
    if cold is None:
        idle = f"idle for {facts.idle_s or 0:.0f} s, cold after {policy.idle_after_s:.0f} s"
        # A trigger that stays true after a selection would break the cache at every request, for nothing.
        helpless = _is_pressed(facts, policy) and facts.unrelieved
        return Decision(
            "warm", f"{idle}; {_pressure(facts, policy)}, and a selection did not help" if helpless else idle
        )
    if facts.archive_trouble:
        return Decision("warm" if weigh else "cold", f"{cold}; left alone: {facts.archive_trouble}")
    if facts.history_tokens < policy.min_history_tokens:
        small = f"history of {facts.history_tokens} tokens is below {policy.min_history_tokens}"
        return Decision("warm" if weigh else "cold", f"{cold}; left alone: {small}")
    return Decision("warm" if weigh else "cold", cold, select=True, weigh=weigh)


def _why_cold(facts: Facts, policy: Policy) -> str | None:
    idle = facts.idle_s is not None and facts.idle_s >= policy.idle_after_s
    if facts.mid_turn and not idle:
        return None
    if facts.client_compacted:
        return "the client compacted its history"
    if facts.changed:
        return f"{' and '.join(facts.changed)} changed"
    if idle and policy.mode != "auto":
        return f"idle for {facts.idle_s:.0f} s"
    if _is_pressed(facts, policy) and not facts.unrelieved:
        return _pressure(facts, policy)
    if policy.mode == "always":
        return "mode always"
    return None


def _is_pressed(facts: Facts, policy: Policy) -> bool:
    return 0 < policy.context_window_tokens < facts.served_tokens


def _pressure(facts: Facts, policy: Policy) -> str:
    return f"{facts.served_tokens} tokens would exceed the window of {policy.context_window_tokens}"
