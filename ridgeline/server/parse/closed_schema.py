"""Closes a JSON schema: objects that list their properties get `additionalProperties: false`, unless they say otherwise.

JSON Schema allows more properties than an object lists. The author of a schema for an answer or a function's arguments seldom
means that: a small model then adds properties until its tokens are used up, and callers cannot use them. Whatever a closed schema
accepts, the given one accepts too.

Except with `oneOf`: a value that fits one closed branch may fit two open ones, and so be invalid. Where that is impossible
(`_apart`), oneOf equals `anyOf`, which grammars support, and is replaced by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

_MOST_REFERENCES = 8                 # in a chain


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, closed. A schema in which one part may define properties for another stays as it is."""
    try:
        return dict(_closed(schema, schema))
    except (_Mixed, RecursionError):
        return dict(schema)


class _Mixed(Exception):
    """One part of the schema may define properties for another: none of its objects can be closed by itself."""


_MIXING = frozenset({
    "allOf", "if", "not", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties", "patternProperties",
    "minProperties",
})
_BESIDE = frozenset({"anyOf", "oneOf", "$ref", "const", "enum"})     # that mix if properties are beside them


def _closed(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    listed = schema.get("properties")
    if _MIXING & schema.keys() or (_BESIDE & schema.keys() and {"properties", "required"} & schema.keys()):
        raise _Mixed
    made = dict(schema)
    if isinstance(schema.get("oneOf"), list):
        branches = made.pop("oneOf")
        if "anyOf" in schema or not _is_choice(schema, branches, root):
            if _refers(branches):
                raise _Mixed                             # their targets would be closed for them, too
            return schema
        made["anyOf"] = [_closed(each, root) for each in branches]
        made.pop("discriminator", None)
        schema = {name: value for name, value in schema.items() if name != "oneOf"}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            made[key] = {name: _closed(each, root) for name, each in value.items()}
        elif key in ("anyOf", "prefixItems") and isinstance(value, list):
            made[key] = [_closed(each, root) for each in value]
        elif key in ("items", "additionalProperties"):
            made[key] = _closed(value, root)
    if isinstance(listed, Mapping) and _gets_closed(schema):
        made["additionalProperties"] = False
    return made


def _gets_closed(schema: Mapping[str, Any]) -> bool:
    listed, needed = schema.get("properties"), schema.get("required") or []
    if not isinstance(listed, Mapping) or "additionalProperties" in schema or not isinstance(needed, list):
        return False
    return all(isinstance(name, str) and name in listed for name in needed)


# -- oneOf -------------------------------------------------------------------------------------------------------------


def _is_choice(schema: Mapping[str, Any], branches: list[Any], root: Mapping[str, Any]) -> bool:
    """Whether no value fits two of the closed branches."""
    if "discriminator" in schema:
        return True                                      # by its own declaration
    found = [_resolved(branch, root) for branch in branches]
    plain = [branch for branch in found if branch is not None]
    return len(plain) == len(found) and all(_apart(one, other) for one, other in combinations(plain, 2))


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The target of a reference; None if it is unknown, or has more than a description beside it."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return None
        if "$ref" not in schema:
            return schema
        path = schema["$ref"]
        if schema.keys() - {"$ref", "description", "title"} or not isinstance(path, str) or not path.startswith("#/"):
            return None
        schema = root
        for name in path[2:].split("/"):
            schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return None


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if _kinds(one) is not None and _kinds(other) is not None and not _overlap(_kinds(one), _kinds(other)):
        return True
    if _differ(one, other):
        return True
    if _kinds(one) != {"object"} or _kinds(other) != {"object"}:
        return False
    first, second = _properties(one), _properties(other)
    needed, wanted = set(one.get("required") or []), set(other.get("required") or [])
    if any(_differ(first.get(name), second.get(name)) for name in needed & wanted):
        return True
    # Each requires a property that the other, closed, does not have.
    return _is_closed(one) and _is_closed(other) and not wanted <= first.keys() and not needed <= second.keys()


def _is_closed(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is False or _gets_closed(schema)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    listed = schema.get("properties")
    return listed if isinstance(listed, Mapping) else {}


def _kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """The types it allows, as far as it says so."""
    given = schema.get("type")
    return {given} if isinstance(given, str) else set(map(str, given)) if isinstance(given, list) else None


def _overlap(one: set[str] | None, other: set[str] | None) -> bool:
    whole, others = set(one or ()), set(other or ())
    for each in (whole, others):
        if "number" in each:
            each.add("integer")
    return bool(whole & others)


def _differ(one: Any, other: Any) -> bool:
    """Whether both list their values, and none is in both lists."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    first, second = _values(one), _values(other)
    if first is None or second is None:
        return False
    return not any(a == b and isinstance(a, bool) == isinstance(b, bool) for a in first for b in second)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _refers(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))
