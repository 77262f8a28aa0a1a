"""Schemas as zod and pydantic write them: what llguidance does not know is rewritten, and means the same."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from served_model import write_model

from ridgeline.engine.client.grammar_check import vocabulary_of
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.grammar.llguidance_backend import LLGuidance
from ridgeline.grammar.llguidance_schema import PATTERNS, known_to_llguidance, rewritten
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.server.parse.reasoning import Thought
from ridgeline.server.parse.tools import after_reasoning
from ridgeline.text.tokenizer import Tokenizer

RECORD: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    tokenizer = Tokenizer.load(write_model(tmp_path_factory.mktemp("schemas") / "tiny"))
    return vocabulary_of(tokenizer, 300, tokenizer.eos_token_ids)


@pytest.mark.parametrize(("schema", "good", "bad"), [
    (RECORD | {"propertyNames": {"type": "string"}}, '{"x": 1}', '{"x": "1"'),                       # z.record(z.string(), …)
    (RECORD | {"propertyNames": {"enum": ["a", "b"]}, "required": ["a"]}, '{"a": 1}', '{"c"'),     # Dict[Literal["a", "b"], int]
    (RECORD | {"propertyNames": {"$ref": "#/$defs/C"}, "$defs": {"C": {"enum": ["a"], "title": "C", "type": "string"}}},
     '{"a": 1}', '{"b"'),                                                                           # Dict[C, int]
    (RECORD | {"propertyNames": {"type": "string", "pattern": "^[a-z]{2}$"}}, '{"ab": 1}', '{"a1"'),
    (RECORD | {"$id": "Output Format"}, '{"x": 1}', '{"x": "1"'),                                     # griptape
    ({"anyOf": [RECORD | {"$id": "a b"}]}, '{"x": 1}', '{"x": "1"'),
    ({"type": "string", "format": "path"}, '"/tmp/x"', "1"),                                        # pathlib.Path
    ({"type": "string", "format": "nanoid", "pattern": "^[a-z]{3}$"}, '"abc"', '"abcd"'),              # the pattern still holds
    ({"type": "string", "format": "uuid4"}, '"01234567-89ab-4def-8123-456789abcdef"', '"01234567-89ab-1'),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}, '"-1.5"', '"-"'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"not": {}}}, '{"a": 1}', '{"b"'),
    ({"type": "array", "items": {"format": "color", "type": "string"}}, '["red"]', "[1"),
    ({"type": "object", "properties": {"format": {"const": "png"}, "pattern": {"type": "string", "format": "regex"}},
      "required": ["format", "pattern"]}, '{"format": "png", "pattern": "a"}', '{"format": "jpg"'),      # names, not keywords
    ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, "[1, 1]", '["'),
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}, "maxItems": 1}, "[1]", "[1,"),
    ({"$defs": {"C": {"enum": ["a", "b"], "title": "C", "type": "string"}}, "type": "object", "required": ["x"], "properties": {
        "x": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/C"}, "title": "X", "default": []}}},
     '{"x": ["b", "a"]}', '{"x": ["b", "b'),                                                           # set[C]
    ({"type": "array", "uniqueItems": True, "items": {"enum": list(range(8))}, "minItems": 1, "maxItems": 2}, "[7, 0]", "[7, 7"),
    ({"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 2}, "[true, false]", "[true, t"),
])
def test_what_libraries_write_can_be_used(vocabulary: GrammarVocabulary, schema: dict[str, Any], good: str, bad: str) -> None:
    def fits(text: str) -> bool:
        at: Any = LLGuidance(vocabulary).compile(StructuredOutputs(json=schema))
        assert not at.is_error(), at.get_error()
        return all(at.consume_token(vocabulary.pieces.index(bytes([byte]))) for byte in text.encode())

    assert fits(good) and not fits(bad)


def test_a_structure_of_a_tag_is_rewritten_too(vocabulary: GrammarVocabulary) -> None:
    structure = {"begin": "<f>", "schema": RECORD | {"propertyNames": {"type": "string"}}, "end": "</f>"}
    at: Any = LLGuidance(vocabulary).compile(StructuredOutputs(structural_tag={"triggers": ["<f>"], "structures": [structure]}))
    assert not at.is_error(), at.get_error()


def test_a_schema_behind_reasoning_is_rewritten_too(vocabulary: GrammarVocabulary) -> None:
    """A model that reasons first gets its schema inside another grammar."""
    schema = StructuredOutputs(json=RECORD | {"propertyNames": {"type": "string"}})
    asked = after_reasoning(schema, inside=False, thought=Thought())
    at: Any = LLGuidance(vocabulary).compile(asked)
    assert not at.is_error(), at.get_error()
    for text, fits in (('<think>so</think>{"x": 1}', True), ('{"x": "', False)):
        said: Any = at.deep_copy()
        assert all(said.consume_token(vocabulary.pieces.index(bytes([byte]))) for byte in text.encode()) == fits


@pytest.mark.parametrize(("old", "new"), PATTERNS.items())
def test_a_pattern_without_look_around_fits_the_same_texts(old: str, new: str) -> None:
    assert "(?=" not in new and "(?!" not in new
    rng, found = random.Random(7), set()
    parts = [*"aZ09.-+'_@PTWYMDHS,1x", "..", "@x.de", "a.b@c.org", "P1Y", "T2H", "3S"]
    for _ in range(60_000):
        text = rng.choice(["", "P", "P1Y", "PT", "a", "+", "-"]) + "".join(rng.choices(parts, k=rng.randint(0, 5)))
        fits = re.search(old, text) is not None
        assert fits == (re.search(new, text) is not None), text
        found.add(fits)
    assert found == {True, False}


@pytest.mark.parametrize("schema", [
    {"type": "string", "format": "date-time"}, {"type": "array", "uniqueItems": True}, {"not": {"type": "null"}},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c", "d", "e"]}},                # too many lists
    {"type": "array", "uniqueItems": True, "items": {"enum": [f"v{n}" for n in range(100_000)]}},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 1.0, 2]}}, {"uniqueItems": True, "items": {"enum": ["a"]}},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a", 1], "type": "string"}},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a"]}, "contains": {"const": "a"}},
    {"type": "array", "uniqueItems": "yes", "items": {"enum": ["a", "b"]}, "minItems": -1},
    RECORD | {"propertyNames": {"minLength": 2}}, RECORD | {"propertyNames": {"$ref": "#/$defs/none"}},
    RECORD | {"propertyNames": {"enum": ["a"]}, "properties": {"b": {}}}, {"const": {"format": "color", "not": {}}},
    {"enum": [{"propertyNames": {}}]}, {"default": {"format": "x"}}, {"$ref": "#"}, {"not": {}},
    RECORD | {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
])
def test_what_is_known_or_has_no_other_form_stays(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    assert rewritten(schema) == schema and known_to_llguidance(text) is text


def test_lists_of_different_values_are_those_that_the_schema_allows() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "a", 1]}, "minItems": 1, "maxItems": 2}
    for length in range(4):
        for values in itertools.product(["a", "b", 1, 2], repeat=length):
            judges = [jsonschema.Draft202012Validator(each) for each in (schema, rewritten(schema))]
            assert judges[0].is_valid(list(values)) == judges[1].is_valid(list(values)), values


def test_many_arrays_do_not_grow_by_lists_together() -> None:
    array = {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c", "d"]}}
    schema = {"type": "object", "properties": {f"p{n}": dict(array) for n in range(600)}}
    assert len(known_to_llguidance(json.dumps(schema))) < 3 * len(json.dumps(schema))


def test_a_schema_does_not_grow_by_names() -> None:
    """1,000 names in 1,000 names in …: a schema of some kilobytes must not become one of gigabytes."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        schema = {"additionalProperties": schema, "propertyNames": {"enum": [f"n{n}" for n in range(100)]}}
    assert len(known_to_llguidance(json.dumps(schema))) < 4 * len(json.dumps(schema))


def test_many_objects_do_not_grow_by_names_together() -> None:
    """The limit is the schema's, not an object's: many small objects must not become megabytes either."""
    schema: dict[str, Any] = {"properties": {f"p{n}": {
        "additionalProperties": {"description": "x" * 200}, "propertyNames": {"enum": [f"n{m}" for m in range(80)]},
    } for n in range(60)}}
    referring = {"properties": {f"p{n}": {"propertyNames": {"$ref": "#/$defs/names"}} for n in range(600)}}
    listed, matched = {"enum": [f"n{n}" for n in range(900)]}, {"pattern": "x" * 9_000}
    for each in (schema, referring | {"$defs": {"names": listed}}, referring | {"$defs": {"names": matched}}):
        text = json.dumps(each)
        made = known_to_llguidance(text)
        assert made != text and len(made) < 4 * len(text)


def test_what_is_no_json_is_left_to_the_library() -> None:
    for text in ("{", "[" * 100_000, "null", "3"):
        assert known_to_llguidance(text) == text
