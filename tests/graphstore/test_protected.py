"""Edit tools and their files, in every shape that agents send."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstore.protected import EDIT_TOOLS, edited_files

PATCH = (
    "*** Begin Patch\n*** Update File: src/a.py\r\n@@\n-*** Delete File: no.py\n"
    "*** Add File: new dir/b.txt\n*** End Patch"
)


@pytest.mark.parametrize(
    "name", ["edit", "Edit", "MultiEdit", "str_replace_based_edit_tool", "write_file", "NotebookEdit"]
)
def test_edit_tools_go_by_lower_cased_name(name: str) -> None:
    assert edited_files(name, '{"filePath": "src/a.py", "oldString": ""}') == ("src/a.py",)


@pytest.mark.parametrize("name", ["read", "bash", "editor", "", "edits", None, 3])
def test_other_tools_edit_nothing(name: Any) -> None:
    assert edited_files(name, {"path": "src/a.py"}) == ()


def test_the_first_file_argument_in_the_list_counts_whatever_its_place() -> None:
    assert edited_files("edit", {"file": "z", "path": "y", "file_path": "x"}) == ("x",)
    assert edited_files("edit", {"file": "z", "path": ["y"], "file_path": ""}) == ("z",)


@pytest.mark.parametrize("command", ["view", "undo_edit"])
def test_a_reading_command_edits_nothing(command: str) -> None:
    assert edited_files("str_replace_editor", {"command": command, "path": "a"}) == ()
    assert edited_files("str_replace_editor", {"command": "create", "path": "a"}) == ("a",)


def test_a_patch_names_its_files_as_free_text_as_json_and_inside_any_string_argument() -> None:
    expected = ("src/a.py", "new dir/b.txt")
    assert edited_files("apply_patch", PATCH) == expected
    assert edited_files("apply_patch", json.dumps(PATCH)) == expected
    assert edited_files("apply_patch", json.dumps({"input": PATCH})) == expected
    assert edited_files("patch", {"path": "c", "a": 1, "patchText": PATCH}) == ("c", *expected)


def test_a_file_is_named_once() -> None:
    assert edited_files("apply_patch", PATCH + "\n*** Delete File: src/a.py") == ("src/a.py", "new dir/b.txt")


def test_a_path_that_no_database_could_store_is_escaped() -> None:
    assert edited_files("write", '{"path": "a\\ud83d"}') == ("a\\ud83d",)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["path", "command", "file"]), inner),
)


@given(st.sampled_from(sorted(EDIT_TOOLS)), json_values | json_values.map(json.dumps) | st.text() | st.binary())
def test_any_argument_gets_an_answer_that_can_be_stored(name: str, arguments: object) -> None:
    files = edited_files(name, arguments)
    assert len(set(files)) == len(files)
    assert all(file and file.encode() for file in files)


@pytest.mark.parametrize("arguments", ['{"path": "a', "[" * 100_000, '{"path": ' + "9" * 5_000 + "}"])
def test_broken_json_edits_nothing(arguments: str) -> None:
    assert edited_files("edit", arguments) == ()
