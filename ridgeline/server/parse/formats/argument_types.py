"""Arguments that a model writes as bare text, as JSON values of the types that the function's schema declares.

A text stays a text where the schema says `string`. Elsewhere it is read as JSON, then as one of Python's literals, which some
chat templates write. What is neither is a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ridgeline.server.parse.incremental import Malformed
from ridgeline.server.parse.python_literals import literal

ANY = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
TEXT = frozenset({"string"})
_MOST_STEPS = 16                     # down a schema, references included
_NAMES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}


def types_of(name: str, schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a function's schema allows for its argument `name`; an argument that it does not know is a text."""
    whole = _resolved(schema, schema)
    properties = whole.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return _types(properties[name], schema, 0)
    further = whole.get("additionalProperties")
    return _types(further, schema, 0) if isinstance(further, Mapping) else TEXT


def as_json(text: str, types: frozenset[str]) -> str:
    """The value of `text` as JSON."""
    if types == TEXT:
        return json.dumps(text, ensure_ascii=False)
    solid = text.strip()
    try:
        value, written = json.loads(solid, parse_constant=_refuse), solid
        json.dumps(value, allow_nan=False)               # 1e999 is a number in JSON, and none in Python
    except (ValueError, RecursionError):
        try:
            value = literal(solid)
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (Malformed, ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
    return written if _NAMES[type(value)] in _widened(types) or "string" not in types else json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _widened(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a chain of references leads to; empty where that is no schema."""
    for _ in range(_MOST_STEPS):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str) or not path.startswith("#"):
            break
        schema = root
        for part in path[1:].split("/")[1:]:
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _types(schema: Any, root: Mapping[str, Any], steps: int) -> frozenset[str]:
    schema = _resolved(schema, root)
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set(ANY)
    if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
        found &= _widened(frozenset(_NAMES.get(type(value), "string") for value in values))
    if steps < _MOST_STEPS:
        for key in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list) and branches:
                found &= frozenset[str]().union(*(_types(branch, root, steps + 1) for branch in branches))
        for branch in schema.get("allOf") or ():
            found &= _types(branch, root, steps + 1)
    return frozenset(found) & ANY or ANY
