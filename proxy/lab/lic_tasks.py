"""Instances of Lost in Conversation's code task, and the code in a model's answer. Pure but for reading the file.

An instance is a function that a user asks for in pieces (shards), and tests for it (Laban et al. 2026). Read are JSONL
and JSON arrays of records with `test` (HumanEval's `check(candidate)`) or with `public_test_cases` and
`private_test_cases` (LiveCodeBench's inputs and outputs, as in the benchmark's own file); other tasks are skipped.
"""

import ast
import base64
import hashlib
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.lab.errors import LabError
from proxy.lab.sandbox import Program

SHIPPED = Path(__file__).parent / "data" / "lic_style_code.jsonl"
NEEDED = "task_id, shards, test and entry_point (or public_test_cases and metadata.func_name)"
SYSTEM = (
    "You are a careful Python programmer. The user describes a function. Answer with one complete Python function at "
    "the top level, in one fenced code block, without a class around it and without examples of its use."
)
# What the benchmark's runner imports before an answer runs, so that a forgotten import is no wrong answer.
PRELUDE = "\n".join(
    [
        "import bisect, collections, copy, datetime, functools, heapq, itertools",
        "import json, math, operator, random, re, string",
        *(f"from {name} import *" for name in ("collections", "functools", "heapq", "itertools", "math", "typing")),
        "from builtins import *",
        "",
    ]
)


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    shards: tuple[str, ...]
    function: str  # the name that the tests call
    test: str  # defines check(candidate)
    helpers: str  # imports and other functions that came with the task
    solution: str | None  # the canonical one, where the record has it

    def program(self, code: str, function: str) -> Program:
        return Program(code=code, function=function, test=self.test, helpers=PRELUDE + self.helpers)


@dataclass(frozen=True, slots=True)
class Tasks:
    tasks: tuple[Task, ...]
    file: str
    digest: str  # SHA-256 of the file, first 16 digits


def read_tasks(path: Path | None = None) -> Tasks:
    """Those that ship with the lab, or a file's. Raises `LabError` naming file, record and what is wrong with it."""
    path = path or SHIPPED
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LabError(f"{str(path)!r} cannot be read: {error.strerror}; name a JSON or JSONL file of tasks") from error
    found: dict[str, Task] = {}
    for number, record in enumerate(_records(path, raw), 1):
        where = f"{path.name} record {number}"
        if not isinstance(record, dict):
            raise LabError(f"{where}: {type(record).__name__} instead of an object")
        if record.get("task", "code") != "code":
            continue
        task = _task(where, record)
        if task.id in found:
            raise LabError(f"{where}: the task_id {task.id!r} occurs twice")
        found[task.id] = task
    if not found:
        raise LabError(f"there is no code task in {str(path)!r}; a record has {NEEDED}")
    return Tasks(tuple(found.values()), path.name, hashlib.sha256(raw).hexdigest()[:16])


def _records(path: Path, raw: bytes) -> Iterator[Any]:
    if raw.lstrip()[:1] == b"[":
        try:
            yield from json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise LabError(f"{path.name}: no JSON ({error}); a record has {NEEDED}") from error
        return
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise LabError(f"{path.name} line {number}: no JSON ({error}); a record has {NEEDED}") from error


def _task(where: str, record: dict[str, Any]) -> Task:
    shards = record.get("shards")
    said = [s.get("shard") if isinstance(s, dict) else None for s in (shards if isinstance(shards, list) else ())]
    texts = [text for text in said if isinstance(text, str)]
    if not isinstance(record.get("task_id"), str) or not texts or len(texts) < len(said):
        raise LabError(f"{where}: no task with shards (keys: {', '.join(sorted(record)[:8])}); it has {NEEDED}")
    metadata = record.get("metadata")
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    function = record.get("entry_point") or named
    if not isinstance(function, str) or not function.isidentifier():
        raise LabError(f"{where}: {function!r} is no name of a function; a record has {NEEDED}")
    prompt = str(record.get("prompt") or "")
    test = record["test"] if isinstance(record.get("test"), str) else _test_of_cases(where, record)
    solution = record.get("canonical_solution")
    return Task(
        id=record["task_id"],
        shards=tuple(texts),
        function=function,
        test=test,
        helpers=_helpers(prompt, function),
        solution=f"{prompt}{solution}" if isinstance(solution, str) else None,
    )


def _helpers(prompt: str, function: str) -> str:
    """What a prompt gives beside the function that is asked for; "" when it is no Python."""
    try:
        nodes = ast.parse(prompt).body
    except (SyntaxError, ValueError):
        return ""
    return "\n".join(ast.unparse(n) for n in nodes if getattr(n, "name", None) != function)


# -- tests as inputs and outputs ---------------------------------------------------------------------------------------

CASES = """
CASES = {cases!r}
def check(candidate):
    for arguments, expected in CASES:
        value = candidate(*arguments)
        assert (list(value) if isinstance(value, tuple) else value) == expected, (arguments, value)
"""


UNREADABLE = (
    LookupError, TypeError, AttributeError, ValueError, EOFError, RecursionError, zlib.error, pickle.UnpicklingError
)  # fmt: skip


def _test_of_cases(where: str, record: dict[str, Any]) -> str:
    """Each input has a JSON value a line for every argument. A tuple counts as a list, as in the benchmark."""
    try:
        cases = json.loads(record["public_test_cases"])
        if record.get("private_test_cases"):
            cases += _private(record["private_test_cases"])
        pairs = [([json.loads(a) for a in case["input"].split("\n")], json.loads(case["output"])) for case in cases]
    except UNREADABLE as error:
        raise LabError(f"{where}: no tests that can be read ({error!r}); a record has {NEEDED}") from error
    return CASES.format(cases=pairs)


def _private(text: str) -> list[Any]:
    """JSON, or JSON pickled as one string, compressed and in base64."""
    try:
        found = json.loads(text)
    except ValueError:
        found = json.loads(_Plain(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())
    return list(found)


class _Plain(pickle.Unpickler):
    """A string needs no class, and nothing else is let in."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"a pickle of {module_name}.{global_name} is refused")


# -- answers -----------------------------------------------------------------------------------------------------------

FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
BEGINNING = re.compile(r"^(?:def |async def |class |import |from |@)", re.MULTILINE)
KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
CODE_CHARS_MAX = 1 << 17  # of a block: what is longer is a model that does not end
LINES_CUT_MAX = 100  # of what follows code that stands in no fence


def code_of(answer: str, function: str) -> tuple[str, str] | None:
    """(code, name of its function) of an answer; None: it has no code that defines a function.

    The last fenced block with a function, or code that stands in the text without a fence. Of the functions the one
    that is asked for, else the last, for not every user names it. Calls, prints and tests at the top level are left
    away.
    """
    for block in reversed(FENCE.findall(answer)) if "```" in answer else _unfenced(answer):
        if len(block) > CODE_CHARS_MAX:
            continue
        try:
            nodes = [node for node in ast.parse(block).body if isinstance(node, KEPT)]
            code = "\n".join(map(ast.unparse, nodes))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
        if names:
            return code, function if function in names else names[-1]
    return None


def _unfenced(text: str) -> Iterator[str]:
    """From the first line that looks like code, longest first."""
    start = BEGINNING.search(text)
    lines = text[start.start() :].splitlines() if start else []
    for end in range(len(lines), max(0, len(lines) - LINES_CUT_MAX), -1):
        yield "\n".join(lines[:end])
