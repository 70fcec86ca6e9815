"""Which sessions are left untouched, so that what rewriting does to the others can be measured and not only estimated.

A session's arm is drawn when it begins and never changes. Its sub-agents, side requests and branches share it; what has
no more in common with another session than the user's opening words is drawn anew. Pure.
"""

import hmac

from graphstore.records import Arm

HELD_OUT = "held out: left untouched, to compare the others with"


def draw(secret: bytes, name: str, share: float) -> Arm | None:
    """The arm of a session that begins, by a keyed hash of its name. None: no share is held out, nothing is drawn."""
    if not share:
        return None
    mixed = hmac.digest(secret, b"holdout\0" + name.encode(), "sha256")
    return "held out" if int.from_bytes(mixed[:8], "big") < share * 2**64 else "treated"
