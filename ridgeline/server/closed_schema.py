"""A JSON schema without what it only forgot to forbid: an object that lists its properties has no others.

JSON Schema lets every object have more properties than it lists unless it says `additionalProperties: false`. Who writes the
schema of an answer or of a function's arguments seldom means that; a small model adds properties until its tokens are used
up, and callers do not know what to do with them. All that a closed schema lets through the given one lets through too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same where objects that list their properties and do not speak of others have no others. A schema in which one
    part could say what another leaves open stays as it is."""
    try:
        return dict(_closed(schema))
    except (_Mixed, RecursionError):
        return dict(schema)


class _Mixed(Exception):
    """A schema in which one part says what another leaves open: none of its objects can be closed by itself."""


_MIXING = frozenset({
    "allOf", "if", "not", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties", "patternProperties",
    "minProperties",
})  # fmt: skip
_BESIDE = frozenset({"anyOf", "oneOf", "$ref", "const", "enum"})     # that mix where properties stand beside them


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    listed = schema.get("properties")
    if _MIXING & schema.keys() or (_BESIDE & schema.keys() and {"properties", "required"} & schema.keys()):
        raise _Mixed
    if "oneOf" in schema and "discriminator" not in schema:
        raise _Mixed                                     # what fits one closed branch may fit two open ones, and so none
    made = dict(schema)
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            made[key] = {name: _closed(each) for name, each in value.items()}
        elif key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            made[key] = [_closed(each) for each in value]
        elif key in ("items", "additionalProperties"):
            made[key] = _closed(value)
    needed = schema.get("required") or []
    if isinstance(listed, Mapping) and "additionalProperties" not in schema and isinstance(needed, list):
        if all(isinstance(name, str) and name in listed for name in needed):
            made["additionalProperties"] = False
    return made
