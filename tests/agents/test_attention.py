"""A real agent, a real small model: what the replay measured decides what is sent, exactly as the archive says."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from graphstore.evidence import Rule
from graphstore.graph import ContextGraph
from graphstore.parameters import Parameters
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from graphstore.store.report import latest_selection
from graphstore.store.verify import verify
from proxy.conversations import ArchivedConversations, open_conversations
from proxy.settings import Settings
from tests.agents.drivers import Driver, Workspace
from tests.clock import VirtualClock
from tests.fakes.scripted_upstream import ScriptedUpstream
from tests.observed import selected
from tests.support import running_proxy

IDLE_AFTER_S = 600.0
BETA = 0.55  # room for three of the six files: the first three if nothing is known of them
RULE: Rule = "paper"
MAX_TOKENS = 6000  # SmolLM2 takes 8,192; half of this are the agent's instructions
DEADLINE_S = 240.0
ONLY_ATTENTION = Parameters(beta=BETA, lam=0.0, eps=0.0)  # words and chance have no say


async def replayed(settings: Settings, turn: int) -> None:
    """Run the real worker until this turn has been replayed, then let it end with its standard input."""
    environ = os.environ | {
        "RECAP_DB": settings.db,
        "RECAP_EVIDENCE": settings.evidence,
        "RECAP_ATTENTION_MODEL": settings.attention_model,
        "RECAP_ATTENTION_MAX_TOKENS": str(MAX_TOKENS),
        "RECAP_ATTENTION_OFFLINE": "true",
    }
    command = (sys.executable, "-m", "proxy", "worker", "--supervised")
    worker = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, env=environ)
    assert worker.stdin is not None
    try:
        with open_reader(settings.db) as reader:
            async with asyncio.timeout(DEADLINE_S):
                while (state := state_of(reader, turn)) != "done":
                    assert state != "failed" and worker.returncode is None, reader.last_failed_job()
                    await asyncio.sleep(0.2)
    finally:
        worker.stdin.close()
        await worker.wait()
    assert worker.returncode == 0


def state_of(reader: Reader, turn: int) -> str | None:
    session = next(row for row in reader.list_sessions() if row.kind == "agent")
    return next((job.state for job in reader.load_jobs(session.id) if job.turn == turn), None)


@pytest.mark.agent
@pytest.mark.slow
async def test_a_session_is_selected_by_what_the_model_attended_to(
    tmp_path: Path, workspace: Workspace, start_agent: Callable[[str, str], Driver], smollm2: Path
) -> None:
    clock = VirtualClock()
    async with ScriptedUpstream(clock=clock, cache_ttl_seconds=IDLE_AFTER_S) as upstream:
        settings = Settings(
            upstream=upstream.base_url,
            db=str(tmp_path / "archive" / "recap.db"),
            mode="idle",
            idle_after=IDLE_AFTER_S,
            min_history_tokens=0,
            beta=BETA,
            lam=0.0,
            eps=0.0,
            evidence=RULE,
            attention_model=str(smollm2),
        )
        conversations = open_conversations(settings, clock)
        assert isinstance(conversations, ArchivedConversations)
        async with running_proxy(settings, conversations) as proxy:
            agent = start_agent("opencode-compatible", f"{proxy.url}/v1")
            files = [workspace.project / f"part{number}.txt" for number in range(6)]
            for number, file in enumerate(files):
                file.write_text("\n".join(f"shelf {number}.{n} holds thing_{number}_{n}" for n in range(25)))
            reads = [f"[[{agent.read(file)}]]" for file in files]
            await agent.turn(f"Turn 1: {' '.join(reads[:3])} [[= first done]]")
            await agent.turn(f"Turn 2: {' '.join(reads[3:])} [[= second done]]")
            await conversations.flush()
            await replayed(settings, turn=2)
            clock.advance(IDLE_AFTER_S + 1)
            assert "third done" in await agent.turn("Turn 3: go on [[= third done]]")
            await conversations.flush()

        with open_reader(settings.db) as reader:
            session = next(row for row in reader.list_sessions() if row.kind == "agent")
            made = latest_selection(reader, session.id)
            assert made is not None and made.applied
            ordinals = [verdict.ordinal for verdict in made.verdicts]
            by_attention = selected(
                reader,
                session.id,
                ordinals,
                reader.derived_graph(session.id, RULE, ONLY_ATTENTION),
                ONLY_ATTENTION,
                RULE,
            )
            assert [v.ordinal for v in made.verdicts if v.kept] == list(by_attention.chosen)
            assert [v.score for v in made.verdicts] == pytest.approx(by_attention.scores.total)
            without = selected(reader, session.id, ordinals, ContextGraph(), ONLY_ATTENTION, RULE)
            assert without.chosen != by_attention.chosen
            (observation,) = reader.load_observations(session.id)
            assert (observation.since_turn, observation.turn) == (1, 2)
            assert observation.replay.tokens <= MAX_TOKENS
            seen = {block.ordinal for block in observation.replay.blocks}
            assert len(seen) > 4 and seen.isdisjoint(observation.replay.unobserved)
            assert verify(reader) == []
