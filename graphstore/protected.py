"""Which files a tool call edits: the facts behind protecting the latest edit of each file.

Knows the names and argument shapes of the edit tools that coding agents use; knows no wire format and never opens a
file. Whatever an agent sends as arguments gets an answer: a call that is not understood edits nothing.
"""

import json
import re
from collections.abc import Iterator, Mapping

EDIT_TOOLS = frozenset(
    """edit multiedit write notebookedit notebook_edit patch apply_patch applypatch str_replace_editor
    str_replace_based_edit_tool str_replace replace search_replace write_file create_file edit_file update_file insert
    create replace_in_file write_to_file insert_edit_into_file""".split()
)
READING_COMMANDS = frozenset({"view", "undo_edit"})  # str_replace_editor multiplexes by `command`
FILE_ARGUMENTS = ("file_path", "filePath", "path", "notebook_path", "target_file", "filename", "file")

_PATCH_HEADER = re.compile(r"^\*\*\* (?:Add|Update|Delete) File: *(\S[^\r\n]*?)\s*$", re.MULTILINE)


def edited_files(name: object, arguments: object) -> tuple[str, ...]:
    """Files that a call of tool `name` edits or writes, without repeats, in order of mention; () for other tools.

    `arguments` is the decoded object, its JSON text, or free text such as a patch. Never raises. A path that holds lone
    surrogates comes back with them escaped, because no database could store it.
    """
    if not isinstance(name, str) or name.lower() not in EDIT_TOOLS:
        return ()
    decoded = _decoded(arguments)
    if isinstance(decoded, str):
        return _unique(_patched(decoded))
    if not isinstance(decoded, Mapping):
        return ()
    command = decoded.get("command")
    if isinstance(command, str) and command in READING_COMMANDS:
        return ()
    return _unique(_named(decoded))


def _decoded(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # free text: a patch, or JSON cut short


def _named(arguments: Mapping[object, object]) -> Iterator[str]:
    for key in FILE_ARGUMENTS:
        path = arguments.get(key)
        if isinstance(path, str) and path:
            yield path
            break
    for value in arguments.values():
        if isinstance(value, str):
            yield from _patched(value)


def _patched(text: str) -> Iterator[str]:
    if "*** " in text:
        yield from _PATCH_HEADER.findall(text)


def _unique(paths: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path.encode("utf-8", "backslashreplace").decode() for path in paths))
