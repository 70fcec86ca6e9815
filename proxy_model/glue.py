"""What a chat template puts around messages, as token ids: before the first, between two, after the last."""

from collections.abc import Mapping
from dataclasses import dataclass

from proxy_model.context import Role


@dataclass(frozen=True, slots=True)
class Glue:
    """Defined for every sequence of roles, also for those that the template refuses."""

    before: Mapping[tuple[Role | None, Role], tuple[int, ...]]  # (role before or None at the start, role)
    after: Mapping[Role, tuple[int, ...]]  # when that role has the last word
