"""The archive's names for decisions, in words for people."""

from graphstore.records import VerdictRow
from proxy.commands.text import fitted, plain

WHY_CHARS = 72  # a reason may name many files; the table stays readable

# The first request of a turn may also be a step: its beginning came before the archive did.
BOUNDARIES: dict[str, str] = {"cold": "cold", "warm": "warm", "step": "left alone", "none": "left alone"}


def why(verdict: VerdictRow) -> str:
    """The rule and what it went by; of a block left out only the latter, because its verdict says the rest."""
    detail = plain(verdict.detail)
    if not detail or not verdict.kept:
        return fitted(detail or verdict.rule, WHY_CHARS)
    return fitted(f"{verdict.rule}: {detail}", WHY_CHARS)
