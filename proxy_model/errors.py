"""Why a replay cannot be made. Each error is a sentence for people: what failed, then what to do.

ReplayError             this replay failed; another may succeed
  ModelUnavailable      no replay can be made: no torch, no weights, corrupt or unsuitable weights
"""


class ReplayError(Exception):
    """This replay failed. `problem` names the value, `remedy` the next step."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy


class ModelUnavailable(ReplayError):
    """No replay can be made with this model on this machine."""
