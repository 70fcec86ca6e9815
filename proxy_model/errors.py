"""Why a replay cannot be made. Each error is a sentence for people: what failed, then what to do.

ReplayError             this replay failed; another may succeed
  ModelUnavailable      no replay can be made: no torch, no weights, corrupt or unsuitable weights
"""

INSTALL = "run `make attention`, or pip install '.[attention]', where the source lies"
ANOTHER = "choose another model with the setting attention_model"
REASON_CHARS = 200  # of what a library says, which may go on for pages


class ReplayError(Exception):
    """This replay failed. `problem` names the value, `remedy` the next step."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy


class ModelUnavailable(ReplayError):
    """No replay can be made with this model on this machine."""


def reason_of(exc: BaseException) -> str:
    """The first line of what a library says that says something: one that ends in a colon announces the next."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
    count = next((n for n, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count])[:REASON_CHARS]
