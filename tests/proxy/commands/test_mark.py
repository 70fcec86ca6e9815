"""recap pin, mute, unpin: a person's word is obeyed at the next cold boundary, and not before."""

from pathlib import Path

import pytest

from graphstore.store.archive import open_reader
from proxy.cli import main
from tests.proxy.commands.conftest import newest_name
from tests.proxy.dialogue import LUNCH_S, Dialogue, Message, turn, user

ID = {"x-session-id": "one"}


class Session:
    """Four turns; the selection of a cold boundary has room for hardly one of the files that were read."""

    def __init__(self, folder: Path) -> None:
        self.dialogue = Dialogue(folder, changes={"beta": 0.01})
        self.history: list[Message] = [m for name in ("alpha", "beta", "gamma", "delta") for m in turn(name, name)]

    async def ask(self, text: str, *, after_s: float = LUNCH_S) -> str:
        reply = await self.dialogue.send([*self.history, user(text)], headers=ID, after_s=after_s)
        self.history += [user(text), {"role": "assistant", "content": "ok"}]
        return reply.text

    @property
    def name(self) -> str:
        return newest_name(self.dialogue.settings.db)

    def block_of(self, label: str) -> str:
        with open_reader(self.dialogue.settings.db) as reader:
            return str(next(b.ordinal for b, _ in reader.load_blocks(1) if label in b.label))

    def run(self, *arguments: str) -> int:
        return main([*arguments, "--db", self.dialogue.settings.db])


@pytest.fixture
async def session(tmp_path: Path) -> Session:
    session = Session(tmp_path)
    await session.dialogue.send([*session.history[:-4], user("delta")], headers=ID)
    await session.ask("now")
    await session.dialogue.conversations.flush()
    return session


async def test_a_pinned_block_comes_back_at_the_next_cold_boundary(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "unique_alpha" not in await session.ask("go on")
    alpha = session.block_of("read alpha.py")
    assert session.run("pin", session.name, alpha) == 0
    assert "is sent from the next cold boundary on: read alpha.py" in capsys.readouterr().out
    assert "unique_alpha" not in await session.ask("and on", after_s=5.0), "the cache is warm: nothing changes"
    assert "unique_alpha" in await session.ask("and on")
    await session.dialogue.conversations.flush()
    session.run("explain", session.name)
    assert "protected: pinned by hand" in capsys.readouterr().out
    assert session.run("unpin", session.name, alpha) == 0
    assert "unique_alpha" not in await session.ask("the end")
    await session.dialogue.close()


async def test_a_pin_says_what_it_takes_and_that_nothing_else_fits(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha = session.block_of("read alpha.py")
    with open_reader(session.dialogue.settings.db) as reader:
        costs = {block.ordinal: block.cost for block, _ in reader.load_blocks(1)}
    budget = sum(costs.values()) // 20
    assert session.run("pin", session.name, alpha, "--beta", "0.05") == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"it takes {costs[int(alpha)]:,} of the {budget:,} characters that a selection may keep; ")
    assert said.endswith(", so that no other block is chosen by its score")
    assert session.run("pin", session.name, alpha, "--beta", "0.9") == 0
    assert "no other block" not in capsys.readouterr().out
    await session.ask("go on")
    await session.dialogue.conversations.flush()
    session.run("explain", session.name)
    assert "your pins and protected blocks exceed the budget" in capsys.readouterr().out
    await session.dialogue.close()


async def test_a_mark_that_was_not_there_is_not_taken_away(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert session.run("unpin", session.name, "1") == 0
    assert "block 1" in (said := capsys.readouterr().out) and "had no mark" in said and "again" not in said
    await session.dialogue.close()


async def test_a_mark_that_nothing_heeds_promises_nothing(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    assert session.run("pin", session.name, "1", "--mode", "off") == 0
    assert "is pinned, without effect for now: the mode is off" in capsys.readouterr().out
    history = [*session.history, user("more")]
    await session.dialogue.send(history, headers=ID, after_s=LUNCH_S, reject=400)
    await session.dialogue.conversations.flush()
    assert session.run("unpin", session.name, "1") == 0
    assert "has no mark any more, without effect for now: the session is left alone" in capsys.readouterr().out
    await session.dialogue.close()


async def test_a_muted_block_stays_out_though_the_request_names_it(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    beta = session.block_of("read beta.py")
    assert session.run("mute", session.name, beta) == 0
    capsys.readouterr()
    session.run("explain", session.name, "--query", "unique_beta", "--beta", "0.9")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("read beta.py"))
    assert line.startswith("left out") and "muted by hand" in line
    session.run("unpin", session.name, beta)
    capsys.readouterr()
    session.run("explain", session.name, "--query", "unique_beta", "--beta", "0.9")
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.endswith("read beta.py")).startswith("kept")
    await session.dialogue.close()


async def test_what_is_protected_or_absent_is_refused_with_a_reason(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        (("mute", session.name, "0"), "block 0 cannot be muted: it is protected (user message)"),
        (("pin", session.name, "999"), "has no block 999: they go from 0 to"),
        (("pin", "nobody", "0"), "no session is called 'nobody'"),
    ):
        assert session.run(*arguments) == 1
        assert said in capsys.readouterr().err
    with open_reader(session.dialogue.settings.db) as reader:
        assert reader.marks(1) == {}
    await session.dialogue.close()
