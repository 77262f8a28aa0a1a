"""Arguments that a model writes as bare text, as JSON values of the types that the function's schema declares.

A text stays a text where the schema says `string`. Elsewhere it is read as JSON, then as one of Python's literals, which some
chat templates write. What is neither is a text. Where the schema allows a text among others, a text in quotes keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.grammar.schema_references import References
from ridgeline.sampling_params import is_unicode
from ridgeline.server.parse.incremental import Malformed
from ridgeline.server.parse.python_literals import literal

ANY = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
TEXT = frozenset({"string"})
_MOST_STEPS = 16                     # down a schema, references included
_NAMES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}


class ArgumentTypes:
    """The types that a function's schema allows for each of its arguments.

    Each part of the schema is read once, however many references lead to it: a small schema that refers to itself in several
    places has an exponential number of paths.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.references = References(schema)
        self._found: dict[int, frozenset[str]] = {}      # by the identity of a part of the schema
        self._further: Any = None                        # the schema of arguments that it does not name
        self._seen: set[int] = set()
        self._named = self._properties(schema, 0)
        self.names = frozenset(self._named)              # of the arguments that the schema has

    def of(self, name: str) -> frozenset[str]:
        """The types of the argument `name`; an argument that the schema does not know is a text."""
        if name in self._named:
            return self._named[name]
        return self._types(self._further, 0) if isinstance(self._further, Mapping) else TEXT

    def _properties(self, schema: Any, steps: int) -> dict[str, frozenset[str]]:
        """The types of the arguments that this part of the schema names."""
        if not isinstance(schema, Mapping) or id(schema) in self._seen or steps > _MOST_STEPS:
            return {}
        self._seen.add(id(schema))
        if self._further is None:
            self._further = schema.get("additionalProperties")
        properties = schema.get("properties")
        made = {name: self._types(each, 0) for name, each in properties.items()} if isinstance(properties, Mapping) else {}
        for branches, all_hold in self._branches(schema):
            joined: dict[str, frozenset[str]] = {}
            for branch in branches:
                for name, types in self._properties(branch, steps + 1).items():
                    before = joined.get(name, types)
                    joined[name] = before & types if all_hold else before | types
            for name, types in joined.items():
                made[name] = made.get(name, ANY) & types or ANY
        return made

    def _types(self, schema: Any, steps: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or steps > _MOST_STEPS:
            return ANY
        if id(schema) in self._found:
            return self._found[id(schema)]
        self._found[id(schema)] = ANY                    # what a reference to this very part says meanwhile
        given = schema.get("type")
        found = set(ANY)
        if isinstance(given, str | list):
            found &= {each for each in ([given] if isinstance(given, str) else given) if isinstance(each, str)}
        if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
            found &= _widened(frozenset(_NAMES.get(type(value), "string") for value in values))
        for branches, all_hold in self._branches(schema):
            types = [self._types(branch, steps + 1) for branch in branches]
            found &= frozenset.intersection(*types) if all_hold else frozenset.union(*types)
        self._found[id(schema)] = frozenset(found) or ANY
        return self._found[id(schema)]

    def _branches(self, schema: Mapping[str, Any]) -> Iterator[tuple[list[Any], bool]]:
        """Further schemas for the same value, and whether all of them hold or one of them."""
        path = schema.get("$ref")
        if isinstance(path, str) and path.startswith("#"):
            yield [self.references.target(path)], True
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(key), list) and branches:
                yield branches, key == "allOf"


def as_json(text: str, types: frozenset[str]) -> str:
    """The value of `text` as JSON."""
    solid, found = text.strip(), None
    if types != TEXT:
        found = _read(solid, types)
        if found is not None and isinstance(found[0], str):
            # Quotes around a value that cannot be a text are not part of it. Those around a text were meant.
            found = None if "string" in types else _read(found[0].strip(), types) or found
    if found is None or ("string" in types and _NAMES[type(found[0])] not in _widened(types)):
        return json.dumps(text, ensure_ascii=False)
    return found[1]


def _read(text: str, types: frozenset[str]) -> tuple[Any, str] | None:
    """The value that a text writes, and that value as JSON; None if it is a text only."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)               # 1e999 is a number in JSON, and none in Python
        return (value, text) if is_unicode(text) else None
    except (ValueError, RecursionError):
        pass
    try:
        value = literal(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (Malformed, ValueError, RecursionError):
        return None
    # Where a text is allowed, +39 and (555) are more likely texts than Python's numbers and tuples.
    if "string" in types and ((isinstance(value, int | float | str) and not isinstance(value, bool)) or text.startswith("(")):
        return None
    return value, written


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _widened(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types
