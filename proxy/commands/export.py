"""recap export: a session as JSONL, one message a line.

In chat form for people and tools; with --raw the client's own bytes. Sealed reasoning has no chat form and stands only
in the latter.
"""

import argparse
import json
import sys

from graphstore.store.archive import open_reader
from graphstore.store.report import find_session, latest_answer
from proxy.dialects import DIALECTS
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("export", help="write a session's history as JSONL in chat form")
    parser.add_argument("session", help="name of the session, or the beginning of it")
    parser.add_argument("--raw", action="store_true", help="the client's own messages or items, byte for byte")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        session = find_session(reader, arguments.session)
        contents = reader.path_contents(session.head_node_id) if session.head_node_id is not None else []
        messages = [*contents, *latest_answer(reader, session)]
    out = sys.stdout.buffer
    for raw in messages:
        line = raw if arguments.raw else chat_form(session.dialect, raw)
        if line is not None:
            out.write(line + b"\n")
    out.flush()
    return 0


def chat_form(dialect: str, raw: bytes) -> bytes | None:
    """A message for people and for chat tools, if it has that form. Chat messages stay as they are."""
    if dialect == "chat":
        return raw
    known = DIALECTS["responses"]
    message = known.parse_message(raw)
    if message.role == "reasoning":
        return None
    role = {"call": "assistant", "output": "tool", "instruction": "system"}.get(message.role, message.role)
    form: dict[str, object] = {"role": role, "content": known.message_text(raw)}
    if message.role == "call":
        item = json.loads(raw)
        form["tool_calls"] = [
            {
                "id": message.calls[0] if message.calls else "",
                "type": "function",
                "function": {
                    "name": item.get("name") or item.get("type"),
                    "arguments": item.get("arguments") or item.get("input") or "",
                },
            }
        ]
    if message.role == "output" and message.answers:
        form["tool_call_id"] = message.answers[0]
    return json.dumps(form, ensure_ascii=False).encode("utf-8", "replace")
