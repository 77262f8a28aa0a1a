"""Closes a JSON schema: objects that list their properties get `additionalProperties: false`, unless they say otherwise.

JSON Schema allows more properties than an object lists. The author of a schema for an answer or a function's arguments seldom
means that: a small model then adds properties until its tokens are used up, and callers cannot use them. Whatever a closed schema
accepts, the given one accepts too.

Except with `oneOf`: a value that fits one closed branch may fit two open ones, and so be invalid. Where that is impossible
(server/parse/one_of), oneOf equals `anyOf`, which grammars support, and is replaced by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.server.parse.one_of import Budget, Choices


def closed(schema: Mapping[str, Any], budget: Budget | None = None) -> dict[str, Any]:
    """The schema, closed. A schema in which one part may define properties for another stays as it is. `budget`: that it shares
    with others of its request."""
    try:
        return dict(_closed(schema, Choices(schema, is_closed, budget or Budget())))
    except (_Mixed, RecursionError):
        return dict(schema)


class _Mixed(Exception):
    """One part of the schema may define properties for another: none of its objects can be closed by itself."""


_MIXING = frozenset({
    "allOf", "if", "not", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties", "patternProperties",
    "minProperties",
})
_BESIDE = frozenset({"anyOf", "oneOf", "$ref", "const", "enum"})     # that mix if properties are beside them


def _closed(schema: Any, choices: Choices) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    listed = schema.get("properties")
    if _MIXING & schema.keys() or (_BESIDE & schema.keys() and {"properties", "required"} & schema.keys()):
        raise _Mixed
    made = dict(schema)
    if isinstance(schema.get("oneOf"), list):
        branches = made.pop("oneOf")
        if "anyOf" in schema or not choices.are_apart(schema, branches):
            if _refers(branches):
                raise _Mixed                             # their targets would be closed for them, too
            return schema
        made["anyOf"] = [_closed(each, choices) for each in branches]
        made.pop("discriminator", None)
        schema = {name: value for name, value in schema.items() if name != "oneOf"}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            made[key] = {name: _closed(each, choices) for name, each in value.items()}
        elif key in ("anyOf", "prefixItems") and isinstance(value, list):
            made[key] = [_closed(each, choices) for each in value]
        elif key in ("items", "additionalProperties"):
            made[key] = _closed(value, choices)
    if isinstance(listed, Mapping) and _gets_closed(schema):
        made["additionalProperties"] = False
    return made


def is_closed(schema: Mapping[str, Any]) -> bool:
    """Whether it has no other properties, once it is closed."""
    return schema.get("additionalProperties") is False or _gets_closed(schema)


def _gets_closed(schema: Mapping[str, Any]) -> bool:
    listed, needed = schema.get("properties"), schema.get("required") or []
    if not isinstance(listed, Mapping) or "additionalProperties" in schema or not isinstance(needed, list):
        return False
    return all(isinstance(name, str) and name in listed for name in needed)


def _refers(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))
