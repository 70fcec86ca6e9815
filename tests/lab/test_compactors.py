"""What compactors make of a conversation, and whole runs of them with a model that is scripted."""

import asyncio
import sys
from pathlib import Path

import pytest

from graphstore.parameters import Parameters
from proxy.cli import main
from proxy.lab.chat_model import Answer
from proxy.lab.compactors import HANDOVER, SUMMARY_PROMPT, Compacted, Message, Summariser, UnitSelector
from proxy.lab.lingua import EARLIER, Squeezer
from proxy.lab.units import Granularity
from tests.lab.test_lic import Programmer, Record, arguments, guesses, record, rows_of, write

HISTORY = [
    {"role": "system", "content": "code"},
    {"role": "user", "content": "write it"},
    {
        "role": "assistant",
        "content": f"{'Much talk. ' * 30}\n\nUse alpha_index here.\nAnd beta_index.\n\n{'More. ' * 30}",
    },
]


def cut(granularity: Granularity, request: str, beta: float = 0.2, *, notice: bool = True) -> Compacted:
    parameters = Parameters(beta=beta, eps=0.0)
    selector = UnitSelector(granularity, parameters, "s", notice=notice)
    return asyncio.run(selector.compact(HISTORY, request))


@pytest.mark.parametrize(
    ("granularity", "kept"),
    [("paragraph", "Use alpha_index here.\nAnd beta_index.\n\n"), ("line", "And beta_index.\n\n")],
)
def test_the_pieces_that_the_request_names_are_sent_verbatim(granularity: Granularity, kept: str) -> None:
    beta = 0.11 if granularity == "paragraph" else 0.05
    found = cut(granularity, "what of beta_index", beta)
    system, notice, user, answer = found.messages
    assert (system, user) == (HISTORY[0], HISTORY[1]) and notice["role"] == "system"
    assert answer == {"role": "assistant", "content": kept} and found.shortened
    assert cut(granularity, "what of beta_index", beta, notice=False).messages == (system, user, answer)


def test_a_budget_for_everything_leaves_the_history_as_it_was() -> None:
    found = cut("line", "x", 1.0)
    assert found.messages == tuple(HISTORY) and not found.shortened


class Writer:
    """Stands for the model: gives the handovers one after the other, and keeps what it was shown."""

    def __init__(self, *handovers: str) -> None:
        self._handovers = iter(handovers)
        self.shown: list[list[Message]] = []

    async def ask(self, messages: list[Message], session: str) -> Answer:
        self.shown.append(messages)
        return Answer(next(self._handovers), 10, 5)


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def test_a_handover_follows_the_last_one_and_what_came_since() -> None:
    writer = Writer("first", " ", "third")
    summariser = Summariser(writer, "s")  # type: ignore[arg-type]
    history = [said("system", "code"), said("user", "a"), said("assistant", "b")]
    one = asyncio.run(summariser.compact(history, "c"))
    handed = said("user", f"{HANDOVER}\nfirst")
    assert writer.shown[0] == [*history, said("user", SUMMARY_PROMPT)]
    assert one == Compacted((*history[:2], handed), True, 1, 10, 5, one.seconds)
    assert asyncio.run(summariser.compact(history, "c")).calls == 0, "nothing was said since"
    longer = [*history, said("user", "c"), said("assistant", "d")]
    since = [*history[:2], handed, *longer[3:]]
    two = asyncio.run(summariser.compact(longer, "e"))
    assert writer.shown[1] == [*since, said("user", SUMMARY_PROMPT)]
    assert two.messages == tuple(since) and two.shortened, "an empty handover is none"
    three = asyncio.run(summariser.compact([*longer, said("user", "e"), said("assistant", "f")], "g"))
    users = [said("system", "code"), said("user", "a"), said("user", "c"), said("user", "e")]
    assert three.messages == (*users, said("user", f"{HANDOVER}\nthird"))


def test_a_compressor_gets_a_text_a_message_and_its_text_is_sent() -> None:
    def squeeze(texts: list[str], request: str) -> str:
        return f"{request}|{'|'.join(texts)}"

    found = asyncio.run(
        Squeezer(squeeze).compact([said("system", "code"), said("user", "a"), said("assistant", "b")], "c")
    )
    assert found.messages == (said("system", "code"), said("user", f"{EARLIER}\nc|user: a|assistant: b"))


# -- whole runs --------------------------------------------------------------------------------------------------------


def hands_over(messages: list[Record]) -> str:
    return "guessed so far" if messages[-1]["content"] == SUMMARY_PROMPT else guesses(messages)


def test_compactors_are_rows_of_lost_in_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "tasks.jsonl", record(shards=3))
    names = ("paragraph-blocks", "line-blocks", "summary")
    with Programmer(hands_over) as model:
        command = arguments(model, tmp_path, "--selectors", ",".join(names), "--conversations", "1")
        assert main([*command, "--parallel", "1"]) == 0
        asked = model.conversations
    rows = {row["selector"]: row for row in rows_of(tmp_path)}
    assert tuple(rows) == names
    assert all(row["solved"] and row["answers"] == 3 and row["shortened"] == 2 for row in rows.values())
    assert [rows[name]["compaction"]["calls"] for name in names] == [0, 0, 2] and len(asked) == 3 + 3 + 5
    last = asked[-1].messages
    assert [message["role"] for message in last] == ["system", "user", "user", "user", "user"]
    assert last[3]["content"] == f"{HANDOVER}\nguessed so far" and last[4]["content"] == "it returns x * 2"
    page = capsys.readouterr().out
    assert "| summary | 2 | 2 |" in page and "83.2 ± 1.92 (152)" in page
    taken = rows["summary"]["compaction"]
    assert taken["prompt_tokens"] > 0 and taken["completion_tokens"] > 0 and taken["seconds"] > 0


def test_kv_eviction_answers_by_itself(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two conversations at a time; the provider is not asked."""
    write(tmp_path / "tasks.jsonl", record(shards=3))
    with Programmer(guesses) as model:
        command = arguments(model, tmp_path, "--selectors", "kv-eviction", "--kv-model", str(smollm2))
        limits = ("--conversations", "2", "--max-tokens", "8", "--temperature", "0", "--parallel", "2")
        assert main([*command, *limits]) == 0
        assert model.conversations == []
    first, second = rows_of(tmp_path)
    assert first["prompt_tokens"] == second["prompt_tokens"], "neither has seen the other"
    whole, *left = first["prompt_tokens"]
    assert first["answers"] == 3 and first["shortened"] == 2 and max(left) < whole
    page = capsys.readouterr().out
    assert "70.0 ± 3.58 (146)" in page and f"--kv-model {smollm2}" in page


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("kv-eviction",), "the row kv-eviction and --kv-model go together"),
        (("full", "--kv-model", "m"), "the row kv-eviction and --kv-model go together"),
        (("kv-eviction", "--kv-model", "/home/user/none"), "--kv-model '/home/user/none': "),
        (("longllmlingua",), "longllmlingua needs the library llmlingua"),
        (("full", "--lingua-model", "m"), "--lingua-model is of one row: --selectors names none of them"),
    ],
)
def test_a_row_that_cannot_be_is_named_before_the_model_is_asked(
    more: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llmlingua", None)
    write(tmp_path / "tasks.jsonl", record())
    with Programmer(guesses) as model:
        assert main(arguments(model, tmp_path, "--selectors", *more)) == 1
        assert model.conversations == []
    assert says in capsys.readouterr().err
