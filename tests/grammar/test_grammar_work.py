"""The work on a schema or a grammar grows with its length, whatever is in it. Counted, not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ridgeline.grammar import llguidance_backend, llguidance_schema
from ridgeline.grammar.llguidance_schema import rewritten
from ridgeline.grammar.schema_references import References
from ridgeline.grammar.xgrammar_schema import require_what_is_kept
from ridgeline.server.parse.closed_schema import closed
from ridgeline.server.parse.formats import element_grammar
from ridgeline.server.parse.formats.argument_types import ArgumentTypes
from ridgeline.server.parse.formats.element_grammar import FORMS, MOST_BYTES, calls_rules

LINK = {"$ref": "#/$defs/a"}
LONG = {"a": {"$ref": "#/$defs/" + "/" * 5000}}          # leads nowhere, in 5,000 parts


def required_calls(schema: dict[str, Any]) -> str | None:
    return calls_rules("qwen3_coder", {"f": closed(schema)}, True, lambda mark: None)


def kept_by_xgrammar(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="two branches"):
        require_what_is_kept(schema)


READERS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "oneOf": (closed, {"oneOf": [LINK] * 100}),
    "oneOf for xgrammar": (kept_by_xgrammar, {"oneOf": [LINK] * 20}),
    "names": (rewritten, {"properties": {f"p{n}": {"propertyNames": LINK} for n in range(100)}}),
    "items": (rewritten, {"anyOf": [{"type": "array", "uniqueItems": True, "items": LINK}] * 100}),
    "types": (ArgumentTypes, {"properties": {f"p{n}": {"$ref": "#/$defs/a"} for n in range(100)}}),
    "elements": (required_calls, {"type": "object", "properties": {f"p{n}": LINK for n in range(100)}}),
}


@pytest.mark.reliability("S-09")
@pytest.mark.parametrize("name", READERS)
def test_a_long_path_is_followed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 references to a reference of 30,000 parts fit into a schema: to follow it for each took 14 s of the event loop."""
    followed: list[str] = []
    follow = References._follow

    def counted(self: References, path: str) -> Any:
        followed.append(path)
        return follow(self, path)

    monkeypatch.setattr(References, "_follow", counted)
    read, schema = READERS[name]
    read({**schema, "$defs": LONG})
    # A reader may begin again for a copy of the schema.
    assert 1 <= followed.count(str(LONG["a"]["$ref"])) <= 4


def test_a_reference_leads_to_a_part_the_whole_or_nothing() -> None:
    root = {"$defs": {"a/b": {"~": 1}, "": 2}, "list": [{}]}
    references = References(root)
    found = {path: references.target(path) for path in ("#/$defs/a~1b/~0", "#/$defs/", "#", "#name", "x", "#/list/0", "#/no/no")}
    assert list(found.values()) == [1, 2, root, None, None, None, None]
    assert references.target(5) is None


@pytest.mark.reliability("S-09")
@pytest.mark.parametrize("shared", [True, False])
def test_lists_of_different_values_are_written_within_one_budget(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """65 lists of 7,000 letters for each of 400 arrays took 1.6 s; of short values too much is not even made."""
    made = 0
    exactly = llguidance_schema._exactly

    def counted(values: tuple[Any, ...]) -> dict[str, Any]:
        nonlocal made
        made += 1 + sum(len(str(each)) for each in values)
        return exactly(values)

    monkeypatch.setattr(llguidance_schema, "_exactly", counted)
    listed = {"enum": [letter * (2000 if shared else 1) for letter in "abcd"]}
    arrays = [{"type": "array", "uniqueItems": True, "items": LINK if shared else {**listed}} for _ in range(100)]
    written = rewritten({"anyOf": arrays, "$defs": {"a": listed}})
    assert made < 6_000 and len(json.dumps(written)) < 60_000


def test_the_room_for_lists_of_different_values_is_known_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a schema grows by is what was counted: with a character less to spend, the array stays as it is."""
    cases: list[dict[str, Any]] = [
        {"items": {"enum": ["a", "bc", 3, True]}}, {"items": {"enum": ["é", 1]}, "minItems": 1}, {"items": {"const": 1}},
        {"items": {"enum": [1, 2, 3, 4, 5]}, "maxItems": 2},
    ]
    for case in cases:
        array = {"type": "array", "uniqueItems": True, **case}
        size = len(json.dumps(rewritten(array)["anyOf"]))
        for room in (size, size - 1):
            monkeypatch.setattr(llguidance_schema, "_MOST_COPIED", room)
            assert ("anyOf" in rewritten(array)) == (room == size)
        monkeypatch.undo()


@pytest.mark.reliability("S-09")
def test_rules_of_required_calls_are_not_made_beyond_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument's rule has all definitions of its schema: 800 of 30 KB took 2.7 s of the event loop, and were too long."""
    read = 0

    def counted(schema: Any) -> Any:
        nonlocal read
        read += 1
        return rewritten(schema)

    monkeypatch.setattr(element_grammar, "rewritten", counted)
    definitions = {f"d{n}": {"type": "integer"} for n in range(500)}
    properties = {f"p{n}": {"type": "integer"} for n in range(300)}
    assert required_calls({"type": "object", "properties": properties, "$defs": definitions}) is None
    assert 1 <= read <= 1 + MOST_BYTES // len(json.dumps(definitions))


class Listed(str):
    """A choice that counts how often a mark is looked for in it."""

    looks = 0

    def __contains__(self, mark: object) -> bool:
        Listed.looks += 1
        return str.__contains__(self, str(mark))


class Branches(list[Any]):
    """Counts how often all of it is read."""

    reads = 0

    def __iter__(self) -> Any:
        Branches.reads += 1
        return super().__iter__()


@pytest.mark.reliability("S-09")
def test_what_many_arguments_refer_to_is_read_once() -> None:
    Listed.looks = Branches.reads = 0
    types = {"choice": {"type": "string", "enum": [Listed(f"v{n}") for n in range(50)]},
             "text": {"anyOf": Branches([{"type": "string"}, {"type": "null"}])}}
    properties = {f"{kind}{n}": {"$ref": f"#/$defs/{kind}"} for kind in types for n in range(20)}
    arguments = element_grammar._Arguments({"properties": properties, "$defs": types}, FORMS["qwen3_coder"])
    assert arguments.can_be_elements()
    assert Listed.looks == 2 * 50 and Branches.reads <= 2 * 2


@pytest.mark.parametrize("required", [5, [[1]], [{}], "a", True, ["b"]])
def test_a_malformed_list_of_required_arguments_is_left_to_the_grammar(required: Any) -> None:
    """It was a TypeError: a 500 for the client's mistake."""
    assert required_calls({"type": "object", "properties": {"a": {"type": "integer"}}, "required": required}) is None


def test_no_required_arguments_may_be_written_as_null() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert required_calls({**schema, "required": None}) == required_calls({**schema, "required": []}) is not None


@pytest.mark.reliability("S-09")
def test_the_first_rule_of_lark_is_found_line_by_line() -> None:
    """10,000 blank lines before it were read from each of them: a second in which the engine's other threads did not run."""
    found = llguidance_backend._OF_LARK.search("\n" * 9 + " start: x")
    assert found is not None and found.start() == 9


@pytest.mark.parametrize("text", [
    "start: x", " \t start : x", "\n\r\n\x0b start\n: x", "x: y\n\tstart: x", "%llguidance {}", "\n %llguidance\n",
    "%llguidances", "restart: x", "start", "root ::= start", 'root ::= "a"', "", "\n", 'x ::= "start: "',
    "x\u2028start: y", "x\rstart: y",
])
def test_lark_is_what_the_library_takes_for_it(text: str) -> None:
    from llguidance.gbnf_to_lark import is_lark_syntax

    assert llguidance_backend._is_lark(text) == is_lark_syntax(text)
