"""Long horizon (10.20.5): hundreds of turns, many compactions, one after the other, with restarts in between.

Promises after every request: verbatim, pairs complete, every constraint there, the budget kept at a boundary, the warm
prefix kept between two, the same bytes on a retry; at the end everything can be had back. A result: does a fact of the
first turns come back when the user names it, however many compactions have passed?
"""

import os
import random
from functools import partial

from graphstore.selectors import Selector
from proxy.conversations import parameters_of
from proxy.dialects.chat import ChatDialect
from proxy.lab.compaction import checks
from proxy.lab.compaction.bench import Bench, Lab, Served
from proxy.lab.compaction.cases import Case, Tally
from proxy.lab.compaction.histories import made_turn, step, user
from proxy.lab.compaction.recovery import archive_faults

FAMILY = "horizon"
TURNS = 200
COLD_EVERY = 3  # turns
ASKED_EVERY = 12  # turns: the fact of the beginning
RESTART_EVERY = 50  # turns: the proxy
CHECKED_EVERY = 20  # requests whose history is rebuilt at the end
STEPS = 2  # a turn
FACT = "build_flag_zeta = 4711"
REQUEST = "Which number does build_flag_zeta have?"


def cases(turns: int) -> list[Case]:
    return [Case(FAMILY, f"{turns} turns", partial(run, turns=turns))]


async def run(lab: Lab, selector: Selector, *, turns: int) -> Tally:
    tally = Tally()
    with lab.place(selector.name) as settings:
        bench = Bench(settings)
        unique, compactions = await _drive(bench, selector, turns, tally, f"horizon {lab.seed}")
        for faults in archive_faults(settings.db, bench.log):
            tally.promise(faults, "at the end")
        ratio = round(os.stat(settings.db).st_size / unique, 2)
    tally.values = {"compactions": compactions, "archive_ratio": ratio}
    return tally


async def _drive(bench: Bench, selector: Selector, turns: int, tally: Tally, seed: str) -> tuple[int, int]:
    """Bytes of the client's messages, each counted once, and the number of compactions."""
    draw = random.Random(seed)
    settings = bench.settings
    parameters, dialect = parameters_of(settings), ChatDialect(part_chars=settings.image_chars)
    fact = step("chat", "read", {"filePath": "build.cfg"}, f"{FACT}\n" + "# unused\n" * 30, "call-fact")
    history: list[bytes] = []
    before: Served | None = None
    cold = 0
    for turn in range(turns):
        request, *body = made_turn(draw, "chat", f"t{turn}", steps=STEPS, edits=turn % 5 == 2)
        is_asked = turn > 1 and turn % ASKED_EVERY == 0
        history.append(user("chat", REQUEST) if is_asked else request)
        pause = bench.gap_s if turn and turn % COLD_EVERY == 0 else 5.0
        served = await bench.send(history, after_s=pause)
        where = f"turn {turn + 1}"
        if before is not None and not served.is_cold:
            tally.promise(checks.extends(before, served), where)
        if served.is_cold:
            tally.promise(checks.over_budget(served, selector, parameters, dialect), where)
            cold += served.is_rewritten
            again = await bench.send(history)
            tally.promise([] if again.sent == served.sent else ["a retry was sent as something else"], where)
            bench.log[-1] = None
        if is_asked:
            tally.result(fact[1] in served.upstream, f"after {cold} compactions {FACT!r} did not come back")
        tally.watch(served, where)
        _let_go(bench)
        history += [*(fact if turn == 1 else ()), *body[:2]]
        before = await bench.send(history)
        tally.promise(checks.extends(served, before), f"{where}, step")
        tally.watch(before, f"{where}, step")
        _let_go(bench)
        history += body[2:]
        if turn % RESTART_EVERY == RESTART_EVERY - 1:
            await bench.restart()
    await bench.close()
    return sum(map(len, set(history))), cold


def _let_go(bench: Bench) -> None:
    """Bodies of a long session fill the memory; some are kept for the end."""
    if len(bench.log) % CHECKED_EVERY:
        bench.log[-1] = None
