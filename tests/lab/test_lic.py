"""Lost in Conversation: its tasks and answers, and whole runs through the real proxy with a model that is scripted."""

import base64
import json
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.cli import main
from proxy.lab.chat_model import PAUSES_S, ChatModel, Sampling
from proxy.lab.errors import LabError
from proxy.lab.lic_page import SELECTORS, render, summary_of
from proxy.lab.lic_tasks import SYSTEM, code_of, read_tasks
from proxy.lab.results import Results, read_results
from proxy.lab.sandbox import run_tests
from tests.fakes.model_script import Step
from tests.fakes.provider_rules import Units
from tests.fakes.scripted_upstream import Fault, Received, ScriptedUpstream
from tests.fakes.wire_answers import Reply, ToolForm

Record = dict[str, Any]


def record(name: str = "double", *, value: str = "x * 2", shards: int = 3) -> Record:
    """A task whose last shard says what the others leave open."""
    texts = [f"write {name}", *(f"remark {i}" for i in range(2, shards)), f"it returns {value}"]
    return {
        "task_id": f"t/{name}",
        "task": "code",
        "shards": [{"shard_id": i, "shard": text} for i, text in enumerate(texts, 1)],
        "prompt": f"def {name}(x):\n    '''asked for'''\n",
        "entry_point": name,
        "test": f"def check(candidate):\n    for x in (3, 5):\n        assert candidate(x) == {value}\n",
        "canonical_solution": f"    return {value}\n",
    }


def write(path: Path, *records: Record) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


# -- tasks and answers -------------------------------------------------------------------------------------------------


def test_a_hundred_tasks_ship_with_the_lab() -> None:
    found = read_tasks()
    assert len(found.tasks) == 100 and found.digest == "f059998a8cedad1d"
    assert all(len(task.shards) >= 4 and task.solution for task in found.tasks)


@pytest.mark.slow
def test_every_canonical_solution_passes_and_an_empty_one_does_not() -> None:
    for task in read_tasks().tasks:
        found = code_of(f"Here you are:\n```python\n{task.solution}\n```\nAnything else?", task.function)
        assert found is not None
        assert run_tests(task.program(*found)).passed, task.id
    for task in read_tasks().tasks[:10]:
        assert not run_tests(task.program(f"def {task.function}(*a): pass", task.function)).passed, task.id


def test_the_functions_that_a_prompt_gives_are_there(tmp_path: Path) -> None:
    given = record()
    given["prompt"] = "import math\ndef half(x):\n    return x / 2\n" + given["prompt"]
    given["test"] = "def check(candidate):\n    assert half(candidate(3)) == 3\n"
    (task,) = read_tasks(write(tmp_path / "t.jsonl", given)).tasks
    assert run_tests(task.program("def double(x): return half(x) * 4", "double")).passed


def test_an_answer_may_begin_with_an_import_from_the_future(tmp_path: Path) -> None:
    (task,) = read_tasks(write(tmp_path / "t.jsonl", record())).tasks
    found = code_of(
        "```\nfrom __future__ import annotations\ndef double(x: Later) -> Later: return x * 2\n```", "double"
    )
    assert found is not None and run_tests(task.program(*found)).passed


def cases(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"input": given, "output": expected, "testtype": "functional"} for given, expected in pairs]


def test_inputs_and_outputs_are_tests_too(tmp_path: Path) -> None:
    """The benchmark's own file: an array, other tasks among them, private cases pickled."""
    own = record() | {"metadata": {"func_name": "pair"}, "public_test_cases": json.dumps(cases(("1\n2", "[1, 2]")))}
    del own["test"], own["entry_point"], own["prompt"]
    hidden = zlib.compress(pickle.dumps(json.dumps(cases(("3\n[4]", "[3, [4]]")))))
    own["private_test_cases"] = base64.b64encode(hidden).decode()
    path = tmp_path / "all.json"
    path.write_text(json.dumps([{"task": "math", "task_id": "m"}, own]))
    (task,) = read_tasks(path).tasks
    assert run_tests(task.program("def pair(a, b): return a, b", "pair")).passed, "a tuple counts as a list"
    assert not run_tests(task.program("def pair(a, b): return [a, 2]", "pair")).passed, "only the public case holds"


class Hostile:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return print, ("owned",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shards": []}, "no task with shards"),
        ({"shards": [{"shard_id": 1}]}, "no task with shards"),
        ({"shards": 7}, "no task with shards"),
        ({"task_id": 7}, "no task with shards"),
        ({"entry_point": "1 + 1"}, "no name of a function"),
        ({"test": None}, "no tests that can be read"),
        ({"test": None, "public_test_cases": "[]", "private_test_cases": base64.b64encode(b"x").decode()}, "no tests"),
        (
            {
                "test": None,
                "public_test_cases": "[]",
                "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode(),
            },
            "is refused",
        ),
    ],
)
def test_a_record_that_is_none_is_named(changes: Record, says: str, tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "t.jsonl", record(), record("other") | changes)
    with pytest.raises(LabError, match=says) as caught:
        read_tasks(path)
    assert "t.jsonl record 2" in str(caught.value) and capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["", '{"task": "math"}', "[1]", "[", "{", "7"])
def test_a_file_without_tasks_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(LabError, match=r"bad\.jsonl"):
        read_tasks(tmp_path / "bad.jsonl")
    with pytest.raises(LabError, match="occurs twice"):
        read_tasks(write(tmp_path / "two.jsonl", record(), record()))


@pytest.mark.parametrize(
    ("answer", "function", "contains"),
    [
        ("```python\ndef f(x):\n    return 1\n```", "f", "return 1"),
        ("One\n```py\ndef f(): return 1\n```\nor\n```\ndef f(): return 2\n```\nand\n```sh\nls\n```", "f", "return 2"),
        ("```python\ndef g(x):\n    return 1\n```", "g", "def g"),
        ("```python\ndef f(x): return h(x)\ndef h(x): return 1\n```", "f", "def h"),
        ("```python\nimport math\nN = 3\ndef f(): return N\nprint(f())\nassert 0\ninput()\n```", "f", "N = 3"),
        ("def f(x):\n    return 1\n\nThis adds nothing.", "f", "return 1"),
        ("Sure, here:\n\nfrom typing import List\ndef f(x):\n    return 1", "f", "import List"),
        ("  ```python\ndef f(): return 1\n", "f", "return 1"),
        ("```\ndef f(): return 1\n```\n```\ndef f(): return " + "-" * 900 + "2\n```", "f", "return 1"),
    ],
)  # fmt: skip
def test_code_is_found_in_answers(answer: str, function: str, contains: str) -> None:
    found = code_of(answer, "f")
    assert found is not None and found[1] == function and contains in found[0]
    assert not any(word in found[0] for word in ("print", "assert", "input", "This"))


@pytest.mark.parametrize(
    "answer", ["", "What do you mean?", "```python\nx = 1\n```", "```python\ndef f(:\n```", "```\n```", "def f(", "\0"]
)
def test_an_answer_without_a_function_has_no_code(answer: str) -> None:
    assert code_of(answer, "f") is None


# -- whole runs --------------------------------------------------------------------------------------------------------

Writer = Callable[[list[Record]], str]


class Programmer(ScriptedUpstream):
    """A model that answers with code. `write` sees the messages as they arrived."""

    def __init__(self, write: Writer) -> None:
        super().__init__()
        self._writer = write

    def _reply(self, received: Received, step: Step, tools: dict[str, ToolForm], units: Units) -> Reply:
        return super()._reply(received, Step(text=self._writer(received.messages)), tools, units)


def guesses(messages: list[Record]) -> str:
    """Wrong, and at length, until a user has said what the function returns."""
    users = [message["content"] for message in messages if message["role"] == "user"]
    name = next(text for text in users if text.startswith("write ")).removeprefix("write ")
    value = next((text.removeprefix("it returns ") for text in users if text.startswith("it returns")), "None")
    return f"{'So be it. ' * 40}\n```python\ndef {name}(x):\n    return {value}\n```"


@pytest.fixture
def model() -> Iterator[Programmer]:
    with Programmer(guesses) as upstream:
        yield upstream


def arguments(model: Programmer, folder: Path, *more: str) -> list[str]:
    return [
        "eval", "lic", "--base-url", model.base_url, "--model", "m", "--out", str(folder / "eval"),
        "--tasks", str(folder / "tasks.jsonl"), *more,
    ]  # fmt: skip


def rows_of(folder: Path) -> list[Record]:
    return read_results(folder / "eval" / "lic.jsonl").rows


def roles(request: Received) -> str:
    """What came, a letter a message; N is the notice that something is not shown."""
    letters = {"system": "s", "user": "u", "assistant": "a"}
    return "".join(
        "N" if m["role"] == "system" and m["content"] != SYSTEM else letters[m["role"]] for m in request.messages
    )


def wordy_at_first(messages: list[Record]) -> str:
    """Of its answers all but the first fit into a tenth of the history."""
    users = [message["content"] for message in messages if message["role"] == "user"]
    value = users[-1].removeprefix("it returns ") if users[-1].startswith("it returns") else "None"
    return f"{'So be it. ' * (400 if len(users) == 1 else 1)}\n```\ndef double(x):\n    return {value}\n```"


def test_every_selector_sends_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the user said always comes; of the answers all, those that fit, or none."""
    write(tmp_path / "tasks.jsonl", record(shards=4))
    fitting = ["su", "sNuu", "sNuuau", "sNuuauau"]
    expected = dict.fromkeys(SELECTORS, fitting)
    expected |= {"full": ["su", "suau", "suauau", "suauauau"], "user-messages": ["su", "sNuu", "sNuuu", "sNuuuu"]}
    with Programmer(wordy_at_first) as model:
        for selector in SELECTORS:
            before = len(model.conversations)
            assert main(arguments(model, tmp_path, "--selectors", selector, "--conversations", "1")) == 0
            assert [roles(request) for request in model.conversations[before:]] == expected[selector], selector
        assert {request.json["temperature"] for request in model.conversations} == {1.0}
    rows = rows_of(tmp_path)
    assert [row["selector"] for row in rows] == list(SELECTORS)
    assert all(row["solved"] and row["answers"] == 4 and row["fell_back"] == 0 for row in rows)
    assert [row["shortened"] for row in rows] == [0, 3, 3, 3, 3, 3]
    assert all(len(set(row["prompt_tokens"])) == 4 for row in rows), "as the provider counts them"
    page = capsys.readouterr().out
    assert "| user-messages | 100.0 | +0.0 |" in page and "65.6 ± 1.82 (1,121)" in page


def test_a_conversation_ends_at_the_first_answer_that_passes(model: Programmer, tmp_path: Path) -> None:
    early = record("double", shards=5)
    early["shards"][1]["shard"] = "it returns x * 2"
    never = record("never", value="x + 1", shards=3)
    never["shards"][2]["shard"] = "that is all"
    write(tmp_path / "tasks.jsonl", early, never)
    assert main(arguments(model, tmp_path, "--selectors", "full", "--conversations", "2")) == 0
    found = {(row["task"], row["repeat"]): (row["solved"], row["answers"]) for row in rows_of(tmp_path)}
    assert found == {("t/double", k): (True, 2) for k in (1, 2)} | {("t/never", k): (False, 3) for k in (1, 2)}
    assert rows_of(tmp_path)[-1]["detail"].startswith("AssertionError")


def test_equal_conversations_do_not_mix(model: Programmer, tmp_path: Path) -> None:
    """Five conversations of a task begin with the same bytes: each is a session of its own."""
    write(tmp_path / "tasks.jsonl", record())
    assert main(arguments(model, tmp_path, "--selectors", "recap", "--parallel", "5")) == 0
    rows = rows_of(tmp_path)
    assert sorted(row["repeat"] for row in rows) == [1, 2, 3, 4, 5]
    assert [(row["answers"], row["shortened"]) for row in rows] == [(3, 2)] * 5


def test_what_makes_no_sense_is_a_wrong_answer(tmp_path: Path) -> None:
    said = iter(["I do not know.", "```python\nimport os\ndef double(x):\n    os._exit(0)\n```"])
    write(tmp_path / "tasks.jsonl", record())
    with Programmer(lambda messages: next(said)) as model:
        body = json.dumps({"id": "x", "object": "chat.completion", "choices": []}).encode()
        model.inject(Fault(body=body), when=lambda received: len(received.messages) == 2)
        assert main(arguments(model, tmp_path, "--selectors", "full", "--conversations", "1")) == 0
    (row,) = rows_of(tmp_path)
    assert (row["solved"], row["answers"], row["detail"]) == (False, 3, "the code ended its process")
    assert row["prompt_tokens"][0] is None and row["prompt_tokens"][1] > 0


def test_a_run_that_the_model_ends_goes_on_where_it_was(
    model: Programmer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "tasks.jsonl", record("one"), record("two"), record("three"))
    command = arguments(model, tmp_path, "--selectors", "recap", "--conversations", "1", "--parallel", "1")
    model.inject(Fault(status=401), when=lambda received: "write two" in json.dumps(received.messages))
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "answered 401" in said and "'m'" in said and "What is finished is kept" in said
    assert [row["task"] for row in rows_of(tmp_path)] == ["t/one"]
    before = len(model.conversations)
    assert main(command) == 0
    assert [row["task"] for row in rows_of(tmp_path)] == ["t/one", "t/two", "t/three"]
    assert not any("write one" in json.dumps(request.messages) for request in model.conversations[before:])
    before = len(model.conversations)
    assert main(command) == 0 and len(model.conversations) == before, "a finished run asks nothing"
    assert main([*command, "--temperature", "0"]) == 1
    assert "it differs in temperature" in capsys.readouterr().err


def test_a_provider_that_refuses_what_was_shortened_is_shown(model: Programmer, tmp_path: Path, capsys: Any) -> None:
    """Its row is no longer the selector's: the page says so."""
    write(tmp_path / "tasks.jsonl", record(shards=4))
    model.inject(Fault(status=400), when=lambda received: roles(received).startswith("sN"))
    assert main(arguments(model, tmp_path, "--selectors", "recency", "--conversations", "1")) == 0
    (row,) = rows_of(tmp_path)
    assert row["solved"] and row["fell_back"] == 1 and row["shortened"] == 0
    assert "recency: 1 requests were refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--selectors", "best"), "unknown selector 'best'"),
        (("--selectors", ","), "names none"),
        (("--conversations", "0"), "--conversations is 0"),
        (("--temperature", "nan"), "--temperature is nan"),
        (("--base-url", "api.example"), "is no base URL"),
        (("--base-url", "http://[::1"), "is no base URL"),
        (("--base-url", "http://localhost:99999"), "is no base URL"),
        (("--base-url", "http://me:sk-1@localhost/v1"), "takes no user"),
        (("--base-url", "http://models.example/v1", "--key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY is empty"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    more: tuple[str, ...], says: str, model: Programmer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "tasks.jsonl", record())
    assert main(arguments(model, tmp_path, *more)) == 1
    assert says in capsys.readouterr().err and not model.log


def test_the_key_comes_from_the_variable_and_is_written_nowhere(
    model: Programmer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-hidden")
    write(tmp_path / "tasks.jsonl", record())
    command = arguments(model, tmp_path, "--selectors", "full,recap", "--conversations", "1", "--key-env", "MY_KEY")
    assert main(command) == 0
    assert {request.header("authorization") for request in model.conversations} == {"Bearer sk-hidden"}
    assert all(b"sk-hidden" not in path.read_bytes() for path in (tmp_path / "eval").iterdir())


@pytest.mark.slow
def test_turns_are_replayed_through_the_local_model_before_the_next(
    smollm2: Path, model: Programmer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table 3: with attention of a small model."""
    monkeypatch.setenv("RECAP_ATTENTION_MODEL", str(smollm2))
    write(tmp_path / "tasks.jsonl", record())
    assert main(arguments(model, tmp_path, "--selectors", "recap", "--conversations", "1", "--replay")) == 0
    (row,) = rows_of(tmp_path)
    assert row["solved"] and row["shortened"] == 2
    assert read_results(tmp_path / "eval" / "lic.jsonl").about["replay"] == str(smollm2)


def test_a_replay_that_nobody_can_make_is_said(
    model: Programmer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECAP_ATTENTION", "off")
    write(tmp_path / "tasks.jsonl", record())
    assert main(arguments(model, tmp_path, "--selectors", "recap", "--replay")) == 1
    assert "turns cannot be replayed: the setting attention is off" in capsys.readouterr().err


def test_an_answer_without_end_is_no_code() -> None:
    """Reading megabytes as Python would take minutes."""
    assert code_of("```python\ndef f(x): return 1\n" + "x = 1\n" * 30_000 + "```", "f") is None


def test_what_the_code_says_is_written_whatever_it_is(tmp_path: Path) -> None:
    write(tmp_path / "tasks.jsonl", record())
    code = "```python\ndef double(x): raise ValueError('\\ud800')\n```"
    with Programmer(lambda messages: code) as model:
        assert main(arguments(model, tmp_path, "--selectors", "full", "--conversations", "1")) == 0
    assert rows_of(tmp_path)[0]["detail"] == "RuntimeError: ValueError: ?"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "{"])
def test_a_file_of_tasks_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(LabError, match=r"t.json.*no JSON.*a record has task_id"):
        read_tasks(tmp_path / "t.json")


# -- asking, counting --------------------------------------------------------------------------------------------------

DONE = {"choices": [{"message": {"role": "assistant", "content": "yes"}}], "usage": {"prompt_tokens": 9}}


async def ask(answers: Iterator[httpx.Response | Exception], waited: list[float]) -> str:
    def handle(request: httpx.Request) -> httpx.Response:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
        model = ChatModel(client, "http://m/v1/chat/completions", Sampling("m", 1.0, None), sleep=sleep)
        return (await model.ask([{"role": "user", "content": "?"}], "s")).text


async def test_errors_that_pass_are_waited_for() -> None:
    waited: list[float] = []
    slow = httpx.Response(429, headers={"retry-after": "7"})
    for_ever = httpx.Response(503, headers={"retry-after": "86400"})
    assert await ask(
        iter([httpx.Response(429, headers={"retry-after": "nan"}), httpx.Response(200, json=DONE)]), waited
    )
    assert waited.pop() == PAUSES_S[0]
    assert await ask(iter([slow, httpx.ReadTimeout("slow"), for_ever, httpx.Response(200, json=DONE)]), waited) == "yes"
    assert waited == [7.0, PAUSES_S[1], 120.0]


@pytest.mark.parametrize("choices", [[], {}, ["yes"], [None], [{"message": "yes"}], [{"message": {"content": [1]}}]])
async def test_an_answer_that_says_nothing_is_empty(choices: Any) -> None:
    assert await ask(iter([httpx.Response(200, json={"choices": choices})]), []) == ""


async def test_an_answer_is_read_as_the_proxy_reads_it() -> None:
    """Parts of text, and halves of surrogate pairs, which could never be sent back."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, text in ((parts, "a\nb"), ("\ud800!", "\ufffd!")):
        answer = httpx.Response(200, text=json.dumps({"choices": [{"message": {"content": content}}]}))
        assert await ask(iter([answer]), []) == text


@pytest.mark.parametrize("count", [-1, True, "9", 10**40, 1.5, None])
async def test_what_is_no_count_of_tokens_is_none(count: Any) -> None:
    answer = httpx.Response(200, json={**DONE, "usage": {"prompt_tokens": count}})
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda request: answer)) as client:
        model = ChatModel(client, "http://m/v1/chat/completions", Sampling("m", 1.0, None))
        assert (await model.ask([], "s")).prompt_tokens is None


async def test_errors_that_stay_end_the_run() -> None:
    waited: list[float] = []
    with pytest.raises(LabError, match="did not answer"):
        await ask(iter([httpx.ConnectError("refused")] * 4), waited)
    assert waited == list(PAUSES_S)
    with pytest.raises(LabError, match="answered 404: 'no such model'"):
        await ask(iter([httpx.Response(404, text="no such model")]), [])
    with pytest.raises(LabError, match="no chat completion.*--base-url"):
        await ask(iter([httpx.Response(200, text="<html>")]), [])
    with pytest.raises(LabError, match="no chat completion.*same command again"):
        await ask(iter([httpx.Response(200, text='{"choices":' + "[" * 10_000)]), [])


def row(repeat: int, solved: bool, tokens: list[int | None], task: str = "a") -> Record:
    sent = {"prompt_tokens": tokens, "shortened": 1, "fell_back": 0}
    return {"selector": "recap", "repeat": repeat, "task": task, "solved": solved} | sent


def test_the_table_is_the_mean_and_deviation_of_the_repeats(tmp_path: Path) -> None:
    """Two repeats of two tasks, 50 % and 100 %: their sample deviation is 35.36."""
    rows = [row(1, True, [110, None]), row(1, False, [130], "b"), row(2, True, [120]), row(2, True, [120])]
    found = summary_of(rows, 20)
    assert found.shown == "75.0 ± 35.36" and found.context_tokens == 100 and found.requests == 5
    about = {"tasks": {"f": "d"}, "endpoint": "http://u", "model": "m", "replay": None, "seed": 0}
    about |= {"temperature": 1.0, "max_tokens": 9}
    page = render(Results(tmp_path, about, [row | {"item": str(i)} for i, row in enumerate(rows)]), tmp_path)
    assert (
        "`recap eval lic --base-url http://u --model m --selectors recap --tasks f --instances 2 --conversations 2 "
        in page
    )
    assert "| recap | 75.0 ± 35.36 |" in page and "85.4 ± 1.95 (94)" in page
    assert summary_of([row(1, True, [None])], 20).context_tokens is None
