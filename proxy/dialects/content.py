"""The text, the size and a one-line label of message content, shared by both wire formats.

Total: whatever a client puts where content should stand has some text, perhaps none, and some size.
"""

from collections.abc import Iterable
from typing import Any

from proxy.dialects.scan import Malformed, read_value, render_value

PART_CHARS = 4_000  # what an image, sound or file counts; its base64 length says nothing of its worth
LABEL_CHARS = 80
CALLS_CHARS = 160  # of several calls

NOTICE = (
    "Earlier messages of this conversation are not shown here. "
    "The files of the workspace and their contents are unchanged by this."
)

_SOUGHT = ("pattern", "query", "regex")
_PLACES = ("file_path", "filePath", "path", "notebook_path", "target_file", "filename", "file")
_TELLING = ("command", "cmd", "url", "description", "prompt")


def content_texts(content: Any) -> list[str]:
    """Text of `content`, part by part: a string, or a list of parts with `text` or `refusal`."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return []
    return [text for text in map(_part_text, content) if text is not None]


def content_chars(content: Any, part_chars: int) -> int:
    """Characters of the text, and `part_chars` for every part that is not text."""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return len(content) if isinstance(content, str) else 0
    texts = [_part_text(part) for part in content]
    return sum(part_chars if text is None else len(text) for text in texts)


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            text = part.get(key)
            if isinstance(text, str):
                return text
    return None


def text_or_empty(value: Any) -> str:
    """`value` when it is a string: names and roles may hold anything."""
    return value if isinstance(value, str) else ""


def join_texts(texts: list[str]) -> str:
    return "\n".join(text for text in texts if text)


def argument_text(arguments: Any) -> str:
    """Arguments as sent: mostly JSON in a string, sometimes an object."""
    return arguments if isinstance(arguments, str) else render_value(arguments).decode()


def call_line(name: str, arguments: Any) -> str:
    """A call for people: the tool with what it seeks and where, or the command or first text of its arguments."""
    return one_line(f"{name} {_telling(arguments)}")


def calls_line(lines: Iterable[str]) -> str:
    """Calls of one or several messages, each once."""
    return one_line(", ".join(dict.fromkeys(lines)), CALLS_CHARS)


def _telling(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            decoded = read_value(arguments.encode())
        except Malformed:
            return arguments
        return _telling(decoded) if isinstance(decoded, dict) else arguments
    if not isinstance(arguments, dict):
        return "" if arguments is None else argument_text(arguments)
    sought, place = (_first_text(map(arguments.get, keys)) for keys in (_SOUGHT, _PLACES))
    found = f"{sought} {place}".strip()
    return found or _first_text([*map(arguments.get, _TELLING), *arguments.values()])


def _first_text(values: Iterable[Any]) -> str:
    for value in values:
        if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            return " ".join(value)
        if isinstance(value, str) and value:
            return value
    return ""


def one_line(text: str, chars: int = LABEL_CHARS) -> str:
    """`text` with every run of white space as one space, cut to so many characters."""
    line = " ".join(text[: 20 * chars].split())
    return line if len(line) <= chars else line[: chars - 1] + "…"
