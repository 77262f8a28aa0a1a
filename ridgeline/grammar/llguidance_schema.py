"""Rewrites what schema libraries (zod, pydantic) emit and llguidance does not know, without a change of meaning.

- `format`: JSON Schema lets a reader ignore the ones it does not know. llguidance refuses them.
- `pattern` with look-around: a few that those libraries write, as expressions without it.
- `propertyNames`: what it says becomes `properties` or `patternProperties`.
- `$id`: a name that is no URI reference (griptape writes `Output Format`) is the base of no `$ref`. llguidance refuses it.
- `{"not": {}}`: allows nothing, which is `false`.
- `uniqueItems`: a grammar cannot remember what was said. Where it matters and the items are a few listed values, all lists of
  different ones are written out; where it does not matter it is left out.

What remains (`uniqueItems` of other items, another look-around …) llguidance refuses by name.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from ridgeline.grammar.schema_references import References

_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"})
_HEX = "[0-9a-fA-F]"
_UUIDS = {f"uuid{n}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$" for n in range(1, 9)}
_SECONDS = r"[0-9]+([.,][0-9]+)?S"
_TIME = rf"T([0-9]+H([0-9]+M)?({_SECONDS})?|[0-9]+M({_SECONDS})?|{_SECONDS})"
_DAYS = r"([0-9]+Y([0-9]+M)?([0-9]+D)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
# The same texts without look-around.
PATTERNS = {
    # zod's email: no dot at the start, none after another
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$":
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    # zod's duration
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$":
        rf"^P([0-9]+W|{_DAYS}({_TIME})?|{_TIME})$",
    # pydantic's Decimal: at least one digit
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+\-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
}
_URI = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]*")         # the characters of RFC 3986
_TYPES = {str: "string", int: "integer", bool: "boolean"}
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_ANYTHING: dict[str, Any] = {}       # the schema that `true` stands for
_MOST_REFERENCES = 8                 # in a chain
_MOST_VALUES = 8                     # of items, where more than one may come: pairs of nine are more lists than
_MOST_LISTS = 65                     # of different values that are written out: all of four, or up to two of eight
_MOST_COPIED = 20_000                # characters in all: a schema repeated for each name, level by level, has no bound


def known_to_llguidance(text: str) -> str:
    """The schema's text; the same one if nothing had to be rewritten."""
    try:
        given = json.loads(text)
        made = rewritten(given)
    except (ValueError, RecursionError):
        return text                                      # the library says what is wrong with it
    return text if made == given else json.dumps(made)


def rewritten(schema: Any) -> Any:
    """An object stays one: a schema that allows nothing at all is left to the library, which refuses it."""
    made = _Rewriter(schema).of(schema)
    return schema if made is False else made


class _Rewriter:
    """Of one schema, `root`."""

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._left = _MOST_COPIED                        # characters that may still be copied
        # Of parts that references lead to, by their identity:
        self._sizes: dict[int, int] = {}                 # in characters
        self._values: dict[int, _Values | None] = {}     # those that are listed

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        if schema.get("not") in ({}, True) and not schema.keys() - {"not"} - NOTES:
            return False
        made = dict(schema)
        if isinstance(made.get("$id"), str) and not _URI.fullmatch(made["$id"]):
            del made["$id"]
        for name in _MAPS:
            if isinstance(made.get(name), dict):
                made[name] = {key: self.of(each) for key, each in made[name].items()}
        for name in _LISTS:
            if isinstance(made.get(name), list):
                made[name] = [self.of(each) for each in made[name]]
        for name in _SINGLE:
            if isinstance(made.get(name), dict):
                made[name] = self.of(made[name])
        _rewrite_text(made)
        self._rewrite_names(made)
        return self._of_unique(made) if "uniqueItems" in made else made

    def _of_unique(self, made: dict[str, Any]) -> dict[str, Any]:
        """Itself if it can be neither left out nor written out."""
        rest = {name: value for name, value in made.items() if name != "uniqueItems"}
        fewest, most = made.get("minItems", 0), made.get("maxItems", math.inf)
        if made["uniqueItems"] is False or most in (0, 1):
            return rest
        if made.get("type") != "array" or rest.keys() - {"type", "items", "minItems", "maxItems"} - NOTES:
            return made
        if made["uniqueItems"] is not True or not (isinstance(fewest, int) and isinstance(most, (int, float))):
            return made
        values = self._listed(made.get("items"))
        if values is None:
            return made
        lengths = range(max(0, fewest), int(min(most, len(values.listed))) + 1)
        if not lengths or values.num_lists(lengths) > _MOST_LISTS or (copied := values.num_chars(lengths)) > self._left:
            return made
        self._left -= copied
        lists = [_exactly(each) for length in lengths for each in itertools.permutations(values.listed, length)]
        return {name: value for name, value in rest.items() if name in NOTES} | {"anyOf": lists}

    def _listed(self, items: Any) -> _Values | None:
        found = _resolved(items, self._references)
        if found is items:                               # read once, and it may be a copy that does not stay
            return _listed(items)
        if id(found) not in self._values:
            self._values[id(found)] = _listed(found)
        return self._values[id(found)]

    def _rewrite_names(self, made: dict[str, Any]) -> None:
        """Names may be any, listed, or match a pattern; what else `propertyNames` may say stays as it is."""
        names = _resolved(made.get("propertyNames"), self._references)
        if not isinstance(names, dict):
            return
        said = names.keys() - NOTES - {"type"}
        if names.get("type", "string") != "string" or said - {"enum", "pattern"} or len(said) > 1:
            return
        if said and {"properties", "patternProperties"} & made.keys():
            return
        listed, value = names.get("enum"), made.get("additionalProperties", True)
        copied = 0 if names is made["propertyNames"] or not said else self._size(names)
        if isinstance(listed, list):
            copied += len(listed) * len(json.dumps(value))
        if copied > self._left:
            return
        self._left -= copied
        if isinstance(listed, list):
            made["properties"] = {name: value for name in listed if isinstance(name, str)}
        elif "pattern" in said:
            made["patternProperties"] = {PATTERNS.get(str(names["pattern"]), names["pattern"]): value}
        if said:
            made["additionalProperties"] = False
        del made["propertyNames"]

    def _size(self, names: dict[str, Any]) -> int:
        if id(names) not in self._sizes:
            self._sizes[id(names)] = len(json.dumps(names))
        return self._sizes[id(names)]


@dataclass(slots=True, frozen=True)
class _Values:
    """The values that the items of an array may have."""

    listed: list[Any]
    chars: int                       # of all of them as JSON

    def num_lists(self, lengths: range) -> int:
        """Of different values."""
        return sum(math.perm(len(self.listed), length) for length in lengths)

    def num_chars(self, lengths: range) -> int:
        """Of the JSON of all lists of different values."""
        total = 0
        for length in lengths:
            lists = math.perm(len(self.listed), length)
            total += lists * (len(json.dumps(_exactly((None,) * length))) - 4 * length)      # all but the values: null has four
            total += lists * length * self.chars // max(1, len(self.listed))         # each value is in equally many
        return total + 2 * self.num_lists(lengths)       # commas and blanks between them


def _listed(items: Any) -> _Values | None:
    """The values that the items of an array may have, if these are listed. Not with 1.0 among them, which is 1."""
    if not isinstance(items, dict) or items.keys() - NOTES - {"type", "enum", "const"}:
        return None
    kind = items.get("type")
    values = items.get("enum", [items["const"]] if "const" in items else [False, True] if kind == "boolean" else None)
    if not isinstance(values, list) or len(values) > _MOST_VALUES or not {type(each) for each in values} <= {str, int, bool}:
        return None
    if kind is not None and any(_TYPES[type(each)] != kind for each in values):
        return None
    written = dict.fromkeys(map(json.dumps, values))
    return _Values([json.loads(each) for each in written], sum(map(len, written)))


def _exactly(values: tuple[Any, ...]) -> dict[str, Any]:
    """This array, and no other."""
    listed = {"prefixItems": [{"const": each} for each in values]} if values else {}
    return {"type": "array", **listed, "items": False, "minItems": len(values), "maxItems": len(values)}


def _rewrite_text(made: dict[str, Any]) -> None:
    wanted, pattern = made.get("format"), made.get("pattern")
    if isinstance(wanted, str) and wanted not in _FORMATS:
        del made["format"]
        if wanted in _UUIDS and pattern is None:
            made["pattern"] = _UUIDS[wanted]
    if isinstance(pattern, str):
        made["pattern"] = PATTERNS.get(pattern, pattern)


def _resolved(schema: Any, references: References) -> Any:
    """The target of a reference inside the schema."""
    for _ in range(_MOST_REFERENCES):
        if schema is True:
            return _ANYTHING
        path = schema.get("$ref") if isinstance(schema, dict) else None
        if path is None:
            return schema
        schema = references.target(path)
    return None
