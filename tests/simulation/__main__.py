"""python -m tests.simulation SEED...: play histories again, and tell what happened in them."""

import os
import sys

from tests.simulation.histories import HASH_SEED, play

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], environment)
    outcomes = [play(int(seed)) for seed in sys.argv[1:]]
    for outcome in outcomes:
        print(
            outcome.story, "", "every promise held" if outcome.broken is None else f"broken: {outcome.broken}", sep="\n"
        )
    sys.exit(any(outcome.broken for outcome in outcomes))
