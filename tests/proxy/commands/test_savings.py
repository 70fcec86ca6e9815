"""recap savings: the inspector's numbers, for the terminal and for programs."""

import json
from pathlib import Path

import httpx
import pytest

from proxy.commands.text import LINE_CHARS
from proxy.ledger import Price
from proxy.settings import Settings
from tests.proxy.commands.conftest import Recap
from tests.proxy.commands.test_reading import rows
from tests.support import running_proxy

PRICES = '{"gpt-*": {"input": 2.0, "cached": 0.5, "output": 8.0}}'


async def of_the_inspector(database: Path) -> dict[str, object]:
    settings = Settings(db=str(database), prices={"gpt-*": Price(input=2.0, cached=0.5, output=8.0)})
    async with running_proxy(settings) as proxy, httpx.AsyncClient(base_url=proxy.url) as client:
        answer: dict[str, object] = (await client.get("/recap/api/savings")).json()
        return answer


async def test_it_says_what_the_inspector_says(recap: Recap, archive: tuple[Path, str]) -> None:
    told = json.loads(recap("savings", "--json", "--prices", PRICES).out)
    assert told == await of_the_inspector(archive[0])
    assert told["total"]["rewritten"] == 1 and told["total"]["saved_tokens"] > 0 and told["total"]["cost"] > 0


def test_every_way_to_divide_comes_to_the_same_total(recap: Recap, name: str) -> None:
    totals = set()
    for by, first in (("session", name), ("day", "20"), ("model", "gpt-test")):
        shown = recap("savings", "--by", by)
        totals.add(" ".join(rows(shown.out)["total"]))
        assert shown.code == 0 and any(line.startswith(first) for line in shown.lines[2:])
        assert all(len(line) <= LINE_CHARS for line in shown.lines)
    assert len(totals) == 1


def test_one_session_alone_is_told_by_day_and_without_the_title_beside_it(recap: Recap, name: str) -> None:
    told = json.loads(recap("savings", name, "--json").out)
    assert [row["session"] for row in told["sessions"]] == [name]
    assert told["total"]["requests"] == 5 == json.loads(recap("savings", "--json").out)["total"]["requests"] - 1
    assert rows(recap("savings", name).out)["total"][1:3] == ["5", "1"]
    assert recap("savings", name).lines[0].startswith("day ")


def test_money_needs_prices_and_a_price_for_the_model(recap: Recap) -> None:
    without = recap("savings").out
    assert "the setting `prices` adds money" in without and "saved cost" not in without
    assert "saved cost" in recap("savings", "--prices", PRICES).out
    foreign = recap("savings", "--prices", '{"other": {"input": 1}}')
    assert "without a price, and not in the money: gpt-test" in foreign.out
    assert rows(foreign.out)["total"][-3:] == ["-", "-", "-"]


def test_saved_is_what_was_left_out_of_the_untouched_history(recap: Recap, name: str) -> None:
    total = json.loads(recap("savings", name, "--json").out)["total"]
    assert total["untouched_input_tokens"] - total["input_tokens"] == pytest.approx(total["saved_tokens"], abs=1)


def test_a_session_that_is_unknown_is_said_to_be(recap: Recap) -> None:
    done = recap("savings", "nobody")
    assert done.code == 1 and done.out == "" and "no session is called 'nobody'" in done.err
