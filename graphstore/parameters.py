"""The constants of selection and graph update (paper, Table 5), as one value."""

import json
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class Parameters:
    """Defaults are the paper's. Every field is a finite number; `check` says which is out of range."""

    beta: float = 0.1  # share of the history's cost that is the nominal budget B
    lam: float = 0.5  # weight of the lexical cue beside importance
    eps: float = 0.1  # weight of the exploration draw for blocks that were never observed
    kappa: float = 2.0  # penalty of a stale block
    delta: float = 0.1  # what expansion may exceed B by, as a share of B
    theta: float = 0.02  # least attention mass that makes an edge
    alpha: float = 0.6  # weight of the newest observation in importance
    stale_jaccard: float = 0.5  # identifier overlap above which a later block may replace an earlier one
    stale_ratio: float = 2.0  # attention ratio by which it must dominate ...
    stale_floor: float = 0.05  # ... plus this share of the largest attention
    stale_chars: int = 4_000  # the overlap is measured over the beginning of a text: so many characters
    stale_matches: int = 400  # ... and so many identifier matches
    request_cap_chars: int = 360_000  # longest request that a selection may make
    seed: int = 0  # of the exploration draw

    def check(self) -> None:
        """Raise ValueError naming the first field that is out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} must be a finite number of at least 0, not {value!r}")
        for name in ("beta", "alpha", "stale_jaccard"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share and must not exceed 1, not {getattr(self, name)!r}")

    def to_json(self, **more: object) -> str:
        return json.dumps(asdict(self) | more)
