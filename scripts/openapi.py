"""docs/api.md as OpenAPI: the page is written for people and checked against real answers, this reads its tables.

    python scripts/openapi.py > docs/openapi.json

Types are as exact as the page is. It does not say which fields are always there, so none is required.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from proxy.inspector.routes import NUMBER_DIGITS, MarkRequest, WhatIfRequest

ROOT = Path(__file__).resolve().parents[1]
PAGE, FILE = ROOT / "docs" / "api.md", ROOT / "docs" / "openapi.json"
NUMBERS = ("number", "time", "seconds", "characters", "bytes", "tokens", "provider's tokens", "money")
BODIES: dict[str, type[msgspec.Struct]] = {"what-if": WhatIfRequest, "mark": MarkRequest}
COUNT = {"type": "integer", "minimum": 0, "maximum": 10**NUMBER_DIGITS - 1}
RUN = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
Fields = dict[str, str]  # dotted name -> type, as the page says it
Json = dict[str, Any]


def anchor(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def tables(page: str, *, parameters: bool = False) -> dict[str, Fields]:
    """Heading -> the fields of the table below it, or the parameters, which begin with a question mark."""
    found: dict[str, Fields] = {}
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| [^|]*\|$", text, re.MULTILINE)
        rows = [(name, kind) for name, kind in rows if name.startswith("?") == parameters]
        assert len({name for name, _ in rows}) == len(rows), f"{heading}: a field twice"
        found[heading] = {name.removeprefix("?"): kind.strip() for name, kind in rows}
    return found


def errors(page: str) -> list[tuple[int, str]]:
    """Status and code of each error."""
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", page, re.MULTILINE)
    return [(int(status), code) for status, code in rows]


def linked(kind: str) -> str | None:
    """Anchor of the heading that a type points to."""
    link = re.fullmatch(r"\[[^]]+\]\(#([^)]+)\)( or null)?", kind)
    return link[1] if link is not None else None


def describe(page: str) -> Json:
    headings = tables(page)
    schemas = {anchor(heading): schema_of(fields) for heading, fields in headings.items() if fields}
    paths: Json = {}
    for heading in headings:
        method, _, path = heading.partition(" ")
        if method in ("GET", "POST"):
            given = tables(page, parameters=True)[heading]
            paths.setdefault(path, {})[method.lower()] = operation(method, path, given, schemas)
    codes = sorted({code for _, code in errors(page)})
    said: Json = {"message": {"type": "string"}, "type": {"const": "recap_proxy_error"}, "param": {"type": "null"}}
    error = _object({"error": _object(said | {"code": {"enum": codes}}, required=True)}, required=True)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ReCAP proxy: the inspector's API", "version": "0.1", "description": "See docs/api.md."},
        "servers": [{"url": "http://127.0.0.1:8787"}],
        "paths": paths,
        "components": {
            "schemas": schemas | {"error": error},
            "responses": {"error": {"description": "What is wrong, and the remedy", "content": _json(_ref("error"))}},
        },
    }


def operation(method: str, path: str, given: Fields, schemas: Json) -> Json:
    name = anchor(f"{method} {path}")
    content = _json(_ref(name)) if name in schemas else {"text/event-stream": {"schema": {"type": "string"}}}
    parameters: list[Json] = [
        {"name": part, "in": "path", "required": True, "schema": _path_part(part)}
        for part in re.findall(r"{(\w+)}", path)
    ]
    kinds = {part: COUNT if kind == "number" else _type(kind) for part, kind in given.items()}
    parameters += [{"name": part, "in": "query", "schema": schema} for part, schema in kinds.items()]
    found: Json = {"responses": {"200": {"description": "As docs/api.md says", "content": content}}}
    if method == "POST":
        parameters.append({"name": "x-recap-token", "in": "header", "required": True, "schema": {"type": "string"}})
        found["requestBody"] = {"required": True, "content": _json(_body(BODIES[path.rpartition("/")[2]]))}
    found["responses"]["default"] = {"$ref": "#/components/responses/error"}
    return {"parameters": parameters} | found if parameters else found


def schema_of(fields: Fields) -> Json:
    """Dotted names as nested objects."""
    whole: Json = {"type": "object", "properties": {}}
    for name, kind in fields.items():
        place = whole
        *parents, last = name.split(".")
        for parent in parents:
            place = _step(place, parent)
        key, is_list = last.removesuffix("[]"), last.endswith("[]")
        inner = _type(kind)
        place["properties"][key] = {"type": "array", "items": inner} if is_list else inner
    return whole


def _step(place: Json, name: str) -> Json:
    """Where the fields of `name` go: an object, maybe null (the page says so in words only), or besides a link."""
    key, members = name.removesuffix("[]"), place["properties"]
    made: Json = {"type": ["object", "null"], "properties": {}}
    found: Json = members.setdefault(key, {"type": "array", "items": made} if name != key else made)
    if name != key:
        members, key, found = found, "items", found["items"]
    if "allOf" not in found and "properties" not in found:
        found = members[key] = {"allOf": [found, {"properties": {}}]}
    return found if "properties" in found else found["allOf"][1]


def _type(kind: str) -> Json:
    plain = kind.removesuffix(" or null")
    if target := linked(kind):
        return _or_null(_ref(target), kind)
    match plain:
        case "text" | "boolean":
            return _or_null({"type": "string" if plain == "text" else "boolean"}, kind)
        case "list of text" if plain != kind:  # the entries may be null, not the list
            return {"type": "array", "items": {"type": ["string", "null"]}}
        case "list of text":
            return {"type": "array", "items": {"type": "string"}}
        case "list of numbers" | "list of tokens":
            return {"type": "array", "items": {"type": "number"}}
        case "list of objects":
            return {"type": "array", "items": {"type": "object"}}
        case "blocks as runs" | "turns as runs":
            return {"type": "array", "items": RUN}
        case "object of numbers" | "object of text":
            return {"type": "object", "additionalProperties": _type(plain.removeprefix("object of ").removesuffix("s"))}
        case _ if plain in NUMBERS:
            return _or_null({"type": "number"}, kind)
        case _:
            assert plain.startswith(("list of", "blocks as runs")), f"unknown type {plain!r}"
            return {"type": "array"}


def _or_null(schema: Json, kind: str) -> Json:
    return {"anyOf": [schema, {"type": "null"}]} if kind.endswith(" or null") else schema


def _object(properties: Json, *, required: bool) -> Json:
    return {"type": "object", "properties": properties} | ({"required": list(properties)} if required else {})


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _path_part(name: str) -> Json:
    return {"type": "string"} if name == "session" else COUNT


def _body(wanted: type[msgspec.Struct]) -> Json:
    (_,), defined = msgspec.json.schema_components([wanted])
    return dict(defined[wanted.__name__])


def render(page: str) -> str:
    return json.dumps(describe(page), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render(PAGE.read_text("utf-8")))
