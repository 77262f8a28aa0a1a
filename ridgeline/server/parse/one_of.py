"""Whether the branches of a `oneOf` exclude each other: no value fits two of them.

Two branches do if their types, their listed values, or those of a property that both require have nothing in common; or if each,
closed, requires a property that the other does not have. To compare all pairs of the 5,000 constants of a long schema took half a
minute of the event loop. So the branches are sorted by what tells most of them apart, and only those that it does not tell apart
are compared. Of the schemas of one request there is a bound on all of that work; beyond it, branches are not taken to exclude
each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from ridgeline.grammar.schema_references import References

MOST_WORK = 100_000                  # values that are looked at and sets that are compared: 0.05 s
BRANCH_WORK = 50                     # to read one branch, in comparisons
_MOST_REFERENCES = 8                 # in a chain
_TYPE, _VALUE = "type", "value"      # traits besides those of properties

Trait = tuple[str, str]              # what has values: _TYPE or _VALUE with no name, or "property" with one


class Branch(NamedTuple):
    traits: dict[Trait, frozenset[Hashable]]             # what it allows
    required: frozenset[str]
    properties: frozenset[str]
    is_closed: bool                  # an object without other properties
    work: int                        # of a comparison, at most

    def excludes(self, other: Branch) -> bool:
        few, many = self.traits, other.traits
        if len(few) > len(many):
            few, many = many, few
        for trait, values in few.items():
            if trait in many and values.isdisjoint(many[trait]):
                return True
        # Each requires a property that the other does not have.
        both_closed = self.is_closed and other.is_closed
        return both_closed and not other.required <= self.properties and not self.required <= other.properties


class _TooMuch(Exception):
    """All the work that the schemas may take is done."""


class Budget:
    """Of schemas that are read one after the other."""

    def __init__(self) -> None:
        self.left = MOST_WORK

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise _TooMuch


class Choices:
    """All oneOf of one schema, `root`."""

    def __init__(self, root: Mapping[str, Any], is_closed: Callable[[Mapping[str, Any]], bool], budget: Budget) -> None:
        self._references = References(root)
        self._is_closed = is_closed
        self._spend = budget.spend
        self._branches: dict[int, Branch] = {}           # by the identity of their schemas: references may lead to one often

    def are_apart(self, schema: Mapping[str, Any], schemas: list[Any]) -> bool:
        """Those of the oneOf of `schema`."""
        if "discriminator" in schema:
            return True                                  # by its own declaration
        found = [self._resolved(schema) for schema in schemas]
        plain = {id(schema): schema for schema in found if schema is not None}
        if len(plain) < len(schemas):                    # not known, or the same one twice
            return False
        try:
            branches = [self._branch(schema) for schema in plain.values()]
            for one, other in self._close_pairs(branches):
                self._spend(min(one.work, other.work))
                if not one.excludes(other):
                    return False
        except _TooMuch:
            return False
        return True

    def _branch(self, schema: Mapping[str, Any]) -> Branch:
        if id(schema) not in self._branches:
            self._spend(BRANCH_WORK)
            self._branches[id(schema)] = made = _branch_of(schema, self._is_closed(schema))
            self._spend(made.work + len(made.properties))
        return self._branches[id(schema)]

    def _close_pairs(self, branches: list[Branch]) -> Iterator[tuple[Branch, Branch]]:
        """Those that the best trait does not tell apart; some twice."""
        trait = self._best_trait(branches)
        without = [branch for branch in branches if trait not in branch.traits]
        sharing: dict[Hashable, list[Branch]] = defaultdict(list)
        for branch in branches:
            values = branch.traits.get(trait, ())
            self._spend(len(values))
            for value in values:
                sharing[value].append(branch)
        yield from combinations(without, 2)
        for one in without:
            yield from ((one, other) for other in branches if trait in other.traits)
        for those in sharing.values():
            yield from combinations(those, 2)

    def _best_trait(self, branches: list[Branch]) -> Trait:
        """The one that leaves the fewest pairs to be compared."""
        having: Counter[Trait] = Counter()
        shared: dict[Trait, Counter[Hashable]] = defaultdict(Counter)
        for branch in branches:
            self._spend(branch.work)
            for trait, values in branch.traits.items():
                having[trait] += 1
                shared[trait].update(values)

        def left(trait: Trait) -> int:
            return (len(branches) - having[trait]) * len(branches) + sum(n * (n - 1) // 2 for n in shared[trait].values())

        return min(having, key=left, default=(_TYPE, ""))

    def _resolved(self, schema: Any) -> Mapping[str, Any] | None:
        """The target of a reference; None if it is unknown, or has more than a description beside it."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, Mapping):
                return None
            if "$ref" not in schema:
                return schema
            if schema.keys() - {"$ref", "description", "title"}:
                return None
            schema = self._references.target(schema["$ref"])
        return None


def _branch_of(schema: Mapping[str, Any], is_closed: bool) -> Branch:
    given, values, listed = schema.get("type"), _values(schema), schema.get("properties")
    properties: Mapping[str, Any] = listed if isinstance(listed, Mapping) else {}
    needed = schema.get("required")
    required = frozenset(name for name in needed if isinstance(name, str)) if isinstance(needed, list) else frozenset[str]()
    traits: dict[Trait, frozenset[Hashable]] = {}
    if values is not None:
        traits[_VALUE, ""] = values
    if isinstance(given, str | list):
        kinds = {given} if isinstance(given, str) else set(map(str, given))
        traits[_TYPE, ""] = frozenset(kinds | {"integer"} if "number" in kinds else kinds)
    if traits.get((_TYPE, "")) != {"object"}:
        return Branch(traits, frozenset(), frozenset(), False, _work(traits, 0))
    for name in required & properties.keys():
        if (values := _values(properties[name])) is not None:
            traits["property", name] = values
    return Branch(traits, required, frozenset(properties), is_closed, _work(traits, len(required)))


def _work(traits: Mapping[Trait, frozenset[Hashable]], required: int) -> int:
    return 1 + required + sum(map(len, traits.values()))


def _values(schema: Any) -> frozenset[Hashable] | None:
    """Those that it lists."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return frozenset([_hashable(schema["const"])])
    listed = schema.get("enum")
    return frozenset(map(_hashable, listed)) if isinstance(listed, list) else None


def _hashable(value: Any) -> Hashable:
    """Equal for equal values of JSON: 1 is 1.0, and not true."""
    match value:
        case bool():
            return "bool", value
        case list():
            return "list", *map(_hashable, value)
        case Mapping():
            return frozenset((name, _hashable(each)) for name, each in value.items())
    return value
