"""Refuses JSON Schemas with parts that xgrammar (0.2.8) silently ignores: answers would violate the schema.

A reference, a combination (anyOf …) or a list of values must stand alone in its schema; constraints on numbers, strings, arrays
or objects need the matching `type` beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from ridgeline.grammar.schema_references import References

_NEVER = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "unevaluatedProperties", "additionalItems", "$dynamicRef", "$recursiveRef",
)
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
_OF_TYPES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("integer", "number"): (*_BOUNDS, "multipleOf"),
    ("string",): (*_LENGTHS, "pattern", "format"),
    ("array",): ("minItems", "maxItems"),
    ("object",): ("minProperties", "maxProperties", "propertyNames", "patternProperties"),
}
_CONSTRAIN = frozenset(_NEVER + _ALONE + ("type", "properties", "required", "additionalProperties", "items", "prefixItems",
                                          "uniqueItems", "unevaluatedItems")).union(*_OF_TYPES.values())
_ADVICE = "xgrammar does not keep to; start the server with the default backend (llguidance) for it"


def require_what_is_kept(schema: Any) -> None:
    """ValueError names what xgrammar would ignore."""
    seen: set[int] = set()
    references = References(schema)
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))
            if broken := _broken(each, references):
                raise ValueError(f"the schema has {broken}, which {_ADVICE}")
            waiting += _inside(each, references)


def _broken(schema: Mapping[str, Any], references: References) -> str:
    """What of this schema, without those inside it, the library ignores; empty: nothing."""
    return (
        next((name for name in _NEVER if name in schema and schema[name] is not True), "")
        or ("uniqueItems" if schema.get("uniqueItems") else "")
        or _broken_combination(schema, references) or _broken_by_type(schema) or _broken_properties(schema)
    )


def _broken_combination(schema: Mapping[str, Any], references: References) -> str:
    """References, combinations and lists of values: each must stand alone."""
    for name in (name for name in _ALONE if name in schema):
        if others := _others(schema, name):
            return f"{others[0]} beside {name}"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return "an allOf of several"
    if isinstance(schema.get("oneOf"), list):
        if not all(_are_apart(one, other, references) for one, other in combinations(schema["oneOf"], 2)):
            return "a oneOf of which an answer could fit two branches (anyOf is kept to)"
    return ""


def _others(schema: Mapping[str, Any], name: str) -> list[str]:
    """What else constrains its values; a type may stand beside values that have it."""
    others = sorted(other for other in _CONSTRAIN if other in schema and other != name)
    if others == ["type"] and name in ("const", "enum"):
        values = schema["enum"] if name == "enum" else [schema["const"]]
        return [] if isinstance(values, list) and all(_type(value) & _types(schema) for value in values) else others
    return others


def _broken_by_type(schema: Mapping[str, Any]) -> str:
    """What a schema says of numbers, texts, arrays or objects needs their type beside it."""
    types = _given_types(schema)
    for needed, names in _OF_TYPES.items():
        if (name := next((name for name in names if name in schema), "")) and not types.intersection(needed):
            return f"{name} without type {needed[-1]!r}"
    return ""


def _broken_properties(schema: Mapping[str, Any]) -> str:
    """Names, multiples and texts, each in a combination that the library ignores."""
    required, listed = schema.get("required"), schema.get("properties")
    if isinstance(required, list):
        missing = [name for name in required if not (isinstance(listed, Mapping) and name in listed)]
        if missing:
            return f"a required property that properties does not list, {json.dumps(missing[0])}"
    if "patternProperties" in schema and "properties" in schema:
        return "patternProperties beside properties"
    if "multipleOf" in schema and ("number" in _given_types(schema) or any(name in schema for name in _BOUNDS)):
        return "multipleOf for numbers or beside bounds"
    texts = [name for name in ("pattern", "format") if name in schema] + [name for name in _LENGTHS if name in schema][:1]
    return f"{texts[1]} beside {texts[0]}" if len(texts) > 1 else ""


def _given_types(schema: Mapping[str, Any]) -> frozenset[str]:
    return _types(schema) if "type" in schema else frozenset()


def _inside(schema: Mapping[str, Any], references: References) -> Iterator[Any]:
    for name in ("properties", "patternProperties"):
        if isinstance(schema.get(name), Mapping):
            yield from schema[name].values()
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(name), list):
            yield from schema[name]
    for name in ("items", "additionalProperties", "propertyNames", "unevaluatedItems"):
        yield schema.get(name)
    yield _target(schema, references)


def _target(schema: Any, references: References) -> Any:
    """What a reference inside the same schema refers to; the schema itself if it is no reference. The library refuses others."""
    met = 0
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#") and met < 64:
        schema, met = references.target(schema["$ref"]), met + 1
    return schema


def _are_apart(one: Any, other: Any, references: References, depth: int = 0) -> bool:
    """No value fits both: their types, their values, or those of a property that both require exclude each other."""
    one, other = _target(one, references), _target(other, references)
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return one is False or other is False
    if not _types(one) & _types(other):
        return True
    values = [_values(each) for each in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    required = [set(each["required"]) if isinstance(each.get("required"), list) else set() for each in (one, other)]
    listed = [each.get("properties") for each in (one, other)]
    if depth or not isinstance(listed[0], Mapping) or not isinstance(listed[1], Mapping):
        return False
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return False
    both = required[0] & required[1] & listed[0].keys() & listed[1].keys()
    return any(_are_apart(listed[0][name], listed[1][name], references, depth + 1) for name in both)


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    if "const" in schema:
        return frozenset([json.dumps(schema["const"], sort_keys=True)])
    if isinstance(schema.get("enum"), list):
        return frozenset(json.dumps(value, sort_keys=True) for value in schema["enum"])
    return None


_ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Types that its values may have; an integer is also a number."""
    given = schema.get("type")
    if given is None:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return frozenset[str]().union(*map(_type, values))
        return _ALL_TYPES
    listed = given if isinstance(given, list) else [given]
    types = frozenset(each for each in listed if isinstance(each, str))
    return types | {"integer"} if "number" in types else types


def _type(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return frozenset({"string"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})
