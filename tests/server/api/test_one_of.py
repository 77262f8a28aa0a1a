"""How long it takes to find out whether the branches of a oneOf exclude each other, and that the answer is that of all pairs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from ridgeline.server.parse.closed_schema import closed
from ridgeline.server.parse.tools import calls_schema


class Counted(int):
    """A value that counts how often it is compared or hashed."""

    looks: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return int(self) == other

    def __hash__(self) -> int:
        Counted.looks += 1
        return int.__hash__(self)


def one_of(kind: str, count: int) -> list[Any]:
    values = [Counted(n) for n in range(count)]
    tags = {"constants": lambda n: {"const": n}, "lists of two": lambda n: {"enum": [n, Counted(-n - 1)]}}
    if kind == "two long lists":
        return [{"enum": values[::2]}, {"enum": values[1::2]}]
    if kind == "objects":
        return [{"type": "object", "properties": {"kind": {"const": n}}, "required": ["kind"]} for n in values]
    return [tags[kind](n) for n in values]


@pytest.mark.reliability("S-09")
@pytest.mark.parametrize("kind", ["constants", "lists of two", "two long lists", "objects"])
def test_the_work_on_a_one_of_grows_with_its_length(kind: str) -> None:
    """5,000 constants fit into a schema: to compare all pairs took half a minute of the event loop."""
    Counted.looks = 0
    made = closed({"oneOf": one_of(kind, 300)})
    assert "anyOf" in made and Counted.looks < 20 * 300


@pytest.mark.reliability("S-09")
def test_one_of_branches_without_a_common_mark_is_bounded() -> None:
    """Objects that only their own properties tell apart have to be compared in pairs: a few hundred are, not thousands."""
    def branches(count: int) -> list[Any]:
        return [{"type": "object", "properties": {f"p{n}": {}}, "required": [f"p{n}"]} for n in range(count)]

    assert "anyOf" in closed({"oneOf": branches(200)})
    schema = {"oneOf": branches(800)}
    assert closed(schema) == schema


@pytest.mark.reliability("S-09")
def test_the_tools_of_a_request_share_one_bound() -> None:
    """Each schema had a bound of its own: 57 KB of tools took a second of the event loop."""
    def tool(number: int, branches: int) -> dict[str, Any]:
        objects = [{"type": "object", "properties": {f"p{n}": {}}, "required": [f"p{n}"]} for n in range(branches)]
        return {"function": {"name": f"f{number}", "parameters": {"type": "object", "properties": {"x": {"oneOf": objects}}}}}

    def closed_ones(branches: int) -> int:
        made = calls_schema([tool(n, branches) for n in range(8)])["$defs"].values()
        return sum("anyOf" in each["properties"]["x"] for each in made)

    assert closed_ones(20) == 8 and 1 <= closed_ones(150) <= 3


def test_a_one_of_with_a_malformed_list_of_required_names_is_no_fault_of_the_server() -> None:
    for required in (5, [[1]], [{}]):
        broken = {"type": "object", "properties": {"a": {"const": 1}}, "required": required}
        schema = {"oneOf": [broken, {"type": "object", "properties": {"a": {"const": 2}}, "required": ["a"]}]}
        assert closed(schema) == schema
