"""Calls that are required, in the model's own format: the grammar takes what the parser reads, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_tools import Vocabulary, read, tool

from ridgeline.grammar.compiler import compile_grammar, make_backend
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.sampling_params import SamplingParams, StructuredOutputs
from ridgeline.server.options import ServerOptions
from ridgeline.server.parse.formats.element_grammar import FORMS
from ridgeline.server.parse.formats.known_formats import FREE
from ridgeline.server.parse.reasoning import MessageParser
from ridgeline.server.parse.tools import Reading, reading, tool_use

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/Where"}, "maybe": {"type": ["string", "null"]},
    },
    "required": ["city", "days"],
    "$defs": {"Where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}
TOOLS = [tool("get_weather", parameters=WEATHER), tool("stop", parameters={"type": "object", "properties": {}})]
# Marks that are special tokens in some vocabularies; as ids behind all bytes.
SPECIAL = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</think>")


class Marks(Vocabulary):
    """A vocabulary of bytes, with some marks as special tokens."""

    def __init__(self, template: str, special: tuple[str, ...] = ()) -> None:
        super().__init__(template)
        self.marks = {mark: 257 + place for place, mark in enumerate(special)}
        self.special_ids = frozenset({256, *self.marks.values()})

    def token_id(self, text: str) -> int | None:
        return self.marks.get(text)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            mark = next((mark for mark in self.marks if text.startswith(mark)), None)
            tokens += list(text[0].encode()) if mark is None else [self.marks[mark]]
            text = text[1:] if mark is None else text.removeprefix(mark)
        return tokens


def template_of(form: str) -> str:
    return "\n".join(FREE[form].signs[0])


def asked_for(form: str, choice: Any = "required", parallel: bool = True, special: tuple[str, ...] = (),
              tools: Any = TOOLS, more: str = "") -> tuple[Reading, SamplingParams, Marks]:
    use = tool_use(tools, choice, parallel)
    params, vocabulary = SamplingParams(structured_outputs=StructuredOutputs(json=use.schema())), Marks(
        template_of(form) + more, special)
    made = reading(use, params, ServerOptions(), vocabulary)  # type: ignore[arg-type]
    return made, params, vocabulary


def fits(params: SamplingParams, vocabulary: Marks, text: str) -> bool:
    pieces = [bytes([byte]) for byte in range(256)] + [b"</s>", *(mark.encode() for mark in vocabulary.marks)]
    known = GrammarVocabulary.of(pieces, vocabulary.special_ids, frozenset({256}), len(pieces))
    assert params.structured_outputs is not None
    matcher = compile_grammar(make_backend("llguidance", known), params.structured_outputs).deep_copy()
    tokens = vocabulary.encode(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def written(form: str, *calls: tuple[str, dict[str, str]]) -> str:
    """As the chat templates of the models write calls."""
    texts, inside = FORMS[form], []
    for name, arguments in calls:
        values = "".join(texts.key.format(key) + value + texts.end + "\n" for key, value in arguments.items())
        inside.append(texts.call.format(name) + values + texts.close_call)
    if texts.together:
        return texts.open + "".join(inside) + texts.close
    return "\n".join(texts.open + each + texts.close for each in inside)


ARGUMENTS = {"city": "Zürich </p>\n\nx", "days": "3", "unit": "C", "where": '{"lat":4.5}', "maybe": "null"}
AS_JSON = '{"city": "Zürich </p>\\n\\nx", "days": 3, "unit": "C", "where": {"lat":4.5}, "maybe": null}'


@pytest.mark.parametrize("special", [(), SPECIAL[:2], SPECIAL], ids=["text", "two special", "all special"])
@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_takes_what_the_parser_reads(form: str, special: tuple[str, ...]) -> None:
    pytest.importorskip("llguidance")
    made, params, vocabulary = asked_for(form, special=special)
    assert made.format == form and made.schemas["get_weather"] == WEATHER
    text = written(form, ("get_weather", ARGUMENTS), ("stop", {}))
    assert fits(params, vocabulary, text)
    call = FREE[form].parser
    for size in (1, 7, len(text)):
        got = read(lambda: MessageParser(None, call(made.schemas, None, made.schemas)),
                   [text[place : place + size] for place in range(0, len(text), size)])
        assert got[0] == "" and [(name, json.loads(given)) for name, given in got[2]] == [
            ("get_weather", json.loads(AS_JSON)), ("stop", {})]


@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_takes_nothing_else(form: str) -> None:
    pytest.importorskip("llguidance")
    _, params, vocabulary = asked_for(form)
    few = {"city": "x", "days": "3"}
    assert fits(params, vocabulary, written(form, ("get_weather", few)))
    for wrong in ({"city": "x"}, few | {"days": "three"}, few | {"unit": "K"}, few | {"where": "{}"}, few | {"other": "1"}):
        assert not fits(params, vocabulary, written(form, ("get_weather", wrong))), wrong
    for text in ("", "Hello", written(form, ("unknown", {})), "Hm. " + written(form, ("stop", {}))):
        assert not fits(params, vocabulary, text), text
    _, once, vocabulary = asked_for(form, parallel=False)
    assert fits(once, vocabulary, written(form, ("stop", {})))
    assert not fits(once, vocabulary, written(form, ("stop", {}), ("stop", {})))
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    _, one, vocabulary = asked_for(form, named)
    assert fits(one, vocabulary, written(form, ("get_weather", few))) and not fits(one, vocabulary, written(form, ("stop", {})))


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "special"])
def test_required_calls_come_after_the_reasoning(special: tuple[str, ...]) -> None:
    pytest.importorskip("llguidance")
    call = written("qwen3_coder", ("stop", {}))
    made, params, vocabulary = asked_for("qwen3_coder", special=special, more="<think></think>")
    assert made.reasoning == "think"
    made.follow([*b"assistant:"], params, vocabulary)  # type: ignore[arg-type]
    assert fits(params, vocabulary, f"<think>So. {call}?</think>\n\n{call}") and fits(params, vocabulary, call)
    assert not fits(params, vocabulary, "<think>So.</think>Hello")


KIND = {"type": "string", "enum": ["a", "b"]}
DEFINED = {"Kind": KIND, "Loop": {"$ref": "#/$defs/Loop"}}
# Texts that are not free, which no literals are.
LIMITED: list[Any] = [
    {"type": "string", "pattern": "^a+$"}, {"type": "string", "format": "date"}, {"type": "string", "maxLength": 3},
    {"type": "string", "enum": ["a", ""]}, {"type": "string", "const": ""}, {"enum": ["a", 1]}, {"enum": 5},
    {"enum": ["a", "b"], "const": "a"},
    {"type": ["string", "null"], "enum": ["a", None]}, {"type": ["string", "null"], "maxLength": 3},
    {"anyOf": [{"$ref": "#/$defs/Kind"}, {"type": "null"}], "default": None}, {"anyOf": [KIND, {"type": "null"}]},
    {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, {"anyOf": [{"type": "string"}], "maxLength": 3},
    {"allOf": [{"$ref": "#/$defs/Kind"}]}, {"$ref": "#/$defs/Kind", "maxLength": 3}, {"not": {"const": "a"}},
    {"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/None"}, {"$ref": 5}, False,
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schema", [
    {"$ref": "#/$defs/Kind"}, {"$ref": "#/$defs/Kind", "default": "a"}, {"$ref": "#/$defs/Same"}, {"enum": ["a", "b"]},
])
def test_a_choice_of_texts_is_a_choice_behind_a_reference_too(schema: dict[str, Any], form: str) -> None:
    pytest.importorskip("llguidance")
    whole = {"type": "object", "properties": {"a": schema}, "$defs": {"Kind": KIND, "Same": {"$ref": "#/$defs/Kind"}}}
    made, params, vocabulary = asked_for(form, tools=[tool("f", parameters=whole)])
    assert made.format == form
    assert fits(params, vocabulary, written(form, ("f", {"a": "b"})))
    assert not fits(params, vocabulary, written(form, ("f", {"a": "c"})))


@pytest.mark.parametrize("form", FORMS)
def test_a_choice_that_has_a_mark_of_the_format_stays_json(form: str) -> None:
    """A reader would take the mark for the end of the value."""
    for mark in (FORMS[form].end.strip(), FORMS[form].key.format("b")):
        schema = {"type": "object", "properties": {"a": {"enum": ["x", f"say {mark}."]}, "b": {"type": "integer"}}}
        assert asked_for(form, tools=[tool("f", parameters=schema)])[0].format == "required"


@pytest.mark.parametrize("schema", [
    {}, True, {"type": "string", "title": "A", "description": "Any.", "default": "x", "examples": ["y"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"$ref": "#/$defs/Text"},
])
def test_a_free_text_is_an_element(schema: Any) -> None:
    pytest.importorskip("llguidance")
    whole = {"type": "object", "properties": {"a": schema}, "$defs": {"Text": {"type": "string"}}}
    made, params, vocabulary = asked_for("qwen3_coder", tools=[tool("f", parameters=whole)])
    assert made.format == "qwen3_coder"
    assert fits(params, vocabulary, written("qwen3_coder", ("f", {"a": 'so "it" is'})))


@pytest.mark.parametrize("schema", [
    {"type": "object"},                                                                  # any arguments
    {"anyOf": [{"type": "object", "properties": {"a": {"type": "string"}}}]},
    {"type": "object", "properties": {"a b": {"type": "string"}}},                       # no name of an element
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1},
    *({"type": "object", "properties": {"a": each}, "$defs": DEFINED} for each in LIMITED),
    {"type": "object", "properties": {f"p{place}": {"type": "integer", "enum": list(range(90))} for place in range(190)}},
])
def test_schemas_that_elements_cannot_say_stay_json(schema: dict[str, Any]) -> None:
    made, params, _ = asked_for("qwen3_coder", tools=[tool("f", parameters=schema)])
    assert made.format == "required" and params.structured_outputs is not None and params.structured_outputs.kind == "json"
