"""A proxy's session logic that is killed at its Nth commit.

`python -m tests.proxy.killed_writer FOLDER N before|after`. Prints a line when a request may go out, as the shell would
send it then. Ends with `done` when nothing killed it.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from sqlalchemy import Engine, event

from graphstore.store.forget import Forget
from proxy.conversations import ArchivedConversations
from tests.proxy.dialogue import LUNCH_S, Dialogue, Message, said, turn, user

HISTORY: list[Message] = [m for name in ("alpha", "beta", "gamma") for m in turn(name, name)]
ID = {"x-session-id": "one"}
OTHER = {"x-session-id": "two"}


def arm(engine: Engine, at: int, moment: str) -> None:
    commits = 0

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def committing(connection: object) -> None:
        nonlocal commits
        commits += 1
        if commits == at and moment == "before":
            kill()

    def executed(connection: object, cursor: object, statement: str, *_: object) -> None:
        if commits == at and statement.startswith("BEGIN"):  # the next transaction: the last commit has happened
            kill()

    event.listen(engine, "commit", committing)
    if moment == "after":
        event.listen(engine, "before_cursor_execute", executed)


async def main(folder: Path, at: int, moment: str) -> None:
    dialogue = Dialogue(folder, changes={"beta": 0.05})
    live = dialogue.conversations
    assert isinstance(live, ArchivedConversations)
    arm(live._archive.writer._engine, at, moment)
    for headers in (ID, OTHER):
        for end in (1, 9):
            await dialogue.send(HISTORY[:end], headers=headers)
            await live.flush()
        reply = await dialogue.send([*HISTORY, user("delta")], headers=headers, after_s=LUNCH_S)
        print(headers["x-session-id"], "rewritten" if reply.rewritten else "whole", flush=True)
        await live.flush()
    await dialogue.send([*HISTORY[:9], user("another way")], headers={"x-session-id": "three"})
    await live.flush()
    await live.forget(Forget(frozenset([2]), thorough=True))
    print("forgotten", flush=True)
    await dialogue.send([*HISTORY, user("delta"), said("ok"), user("more")], headers=OTHER)
    await dialogue.close()
    print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
