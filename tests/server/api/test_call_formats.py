"""The formats in which families write tool calls and reasoning, whole and in pieces; values typed by the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from counted_work import is_linear
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tools import Make, Message, Vocabulary, read, tool

from ridgeline.sampling_params import SamplingParams
from ridgeline.server.options import ServerOptions
from ridgeline.server.parse.formats.argument_types import ANY, ArgumentTypes, as_json
from ridgeline.server.parse.formats.element_calls import Heads, KnownHeads
from ridgeline.server.parse.formats.known_formats import FREE, THOUGHTS, tool_format
from ridgeline.server.parse.reasoning import MessageParser, ReasoningParser
from ridgeline.server.parse.tools import Reading, ToolUse, reading, tool_use

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "deg": {"type": "number"}, "dry": {"type": "boolean"},
        "where": {"type": "object"}, "list": {"type": "array"}, "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "kind": {"enum": ["a", "b"]}, "level": {"enum": [1, 2]},
        "far": {"$ref": "#/$defs/Far"}, "any": {},
    },
    "$defs": {"Far": {"allOf": [{"type": "array", "items": {}}]}},
}
SCHEMAS = {"f": SCHEMA, "g": {}}


def types_of(name: str, schema: dict[str, Any]) -> frozenset[str]:
    return ArgumentTypes(schema).of(name)


def maker(name: str) -> Make:
    return lambda: MessageParser(None, FREE[name].parser(SCHEMAS, None, SCHEMAS))


def qwen(*arguments: tuple[str, str], name: str = "f", around: str = "tool_call") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<{around}>\n<function={name}>\n{inner}</function>\n</{around}>"


CASES: list[tuple[str, str, str, Message]] = [
    ("qwen3_coder", "two and text", "Let me see.\n" + qwen(("city", "Rome\n"), ("days", "3")) + "\n" + qwen(name="g"),
     ("Let me see.", "", [("f", '{"city": "Rome\\n", "days": 3}'), ("g", "{}")])),
    ("qwen3_coder", "no mark before it", "So:\n<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
     ("So:", "", [("f", '{"city": "Rome"}')])),
    ("qwen3_coder", "an unknown function without a mark", "<function=h></function>", ("<function=h></function>", "", [])),
    ("qwen3_coder", "an element in a text", qwen(("city", "<b> </p> <\n\n<parameter=x>")),
     ("", "", [("f", '{"city": "<b> </p> <\\n\\n<parameter=x>"}')])),
    ("qwen3_coder", "no end of the function", "<tool_call><function=f><parameter=days>1</parameter></tool_call> ok",
     ("ok", "", [("f", '{"days": 1}')])),
    ("qwen3_coder", "as an object", '<tool_call>{"name": "f", "arguments": {"days": 1}}</tool_call>',
     ("", "", [("f", '{"days": 1}')])),
    ("qwen3_coder", "an unknown argument", qwen(("else", "1")), ("", "", [("f", '{"else": "1"}')])),
    ("qwen3_coder", "text", "1 < 2 <tool_call> x", ("1 < 2 <tool_call> x", "", [])),
    ("qwen3_coder", "broken off",
     "<tool_call><function=f><parameter=days>1</parameter> oops</function></tool_call> ok </tool_call>",
     ("oops ok </tool_call>", "", [("f", '{"days": 1}')])),
    ("qwen3_coder", "broken off by a mark", "<tool_call><function=f><parameter=days>1</parameter><p></function>\n</tool_call>"
     + qwen(name="g"), ("<p>", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("qwen3_coder", "no end at all", "<tool_call><function=f>\n<parameter=days>1</parameter>\n",
     ("", "", [("f", '{"days": 1}')])),
    ("qwen3_coder", "no key", "<tool_call><function=f><parameter=>1</parameter></function></tool_call>",
     ("<parameter=>1</parameter>", "", [("f", "{}")])),
    ("qwen3_coder", "no argument", "<tool_call><function=f>\n", ("", "", [("f", "{}")])),
    ("glm45", "no end", "<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value>", ("", "", [("f", '{"days": 3}')])),
    ("glm45", "two marks", "<tool_call>\n<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
     ("", "", [("f", '{"days": 3}')])),
    ("glm45", "no end between", "<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value>\n<tool_call>g</tool_call>",
     ("", "", [("f", '{"days": 3}'), ("g", "{}")])),
    ("qwen3_coder", "no end between", "<tool_call><function=f><tool_call><function=g></function></tool_call>",
     ("", "", [("f", "{}"), ("g", "{}")])),
    ("glm45", "a mark in a text", "The mark is <tool_call> and then", ("The mark is <tool_call> and then", "", [])),
    ("qwen3_coder", "two marks", "<tool_call>\n" + qwen(("days", "3")), ("", "", [("f", '{"days": 3}')])),
    ("olmo3", "in one line", "<function_calls>f(days=1), f(days=2)</function_calls>",
     ("", "", [("f", '{"days": 1}'), ("f", '{"days": 2}')])),
    ("functiongemma", "a mark in a text", "<start_function_call><start_function_call>call:g{}<end_function_call>",
     ("<start_function_call>", "", [("g", "{}")])),
    ("functiongemma", "text", "<start_function_call> cold<", ("<start_function_call> cold<", "", [])),
    ("functiongemma", "no end between", "<start_function_call>call:f{days:1}<start_function_call>call:g{}<end_function_call>",
     ("", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("qwen3_coder", "an argument twice", qwen(("days", "3"), ("city", "a"), ("days", "4"), ("city", "b")),
     ("", "", [("f", '{"days": 3, "city": "a"}')])),
    ("qwen3_coder", "Windows' line breaks", qwen(("city", "a\n\nb"), ("days", "3")).replace("\n", "\r\n"),
     ("", "", [("f", '{"city": "a\\r\\n\\r\\nb", "days": 3}')])),
    ("qwen3_coder", "a carriage return", "<tool_call><function=f><parameter=city>\rx\r</parameter></function></tool_call>"
     + qwen(("city", "\n\r\r\n\r")), ("", "", [("f", '{"city": "\\rx\\r"}'), ("f", '{"city": "\\n\\r\\r\\n\\r"}')])),
    ("qwen3_coder", "only a carriage return", "<tool_call><function=f><parameter=city>\r</parameter></function></tool_call>",
     ("", "", [("f", '{"city": "\\r"}')])),
    ("qwen3_coder", "no end of an argument",
     "<tool_call><function=f>\n<parameter=city>\nRome <parameter=x>\n<parameter=days>\n3\n"
     "<parameter=city>4</parameter></function></tool_call>",
     ("", "", [("f", '{"city": "Rome <parameter=x>", "days": "3\\n<parameter=city>4"}')])),
    ("minimax_m2", "no end of an argument",
     '<minimax:tool_call><invoke name="f"><parameter name="dry">true<parameter name="days">3'
     "</parameter></invoke></minimax:tool_call>", ("", "", [("f", '{"dry": true, "days": 3}')])),
    ("qwen3_coder", "an example", "So:\n```xml\n<function=f>\n</function>\n```",
     ("So:\n```xml\n<function=f>\n</function>\n```", "", [])),
    ("qwen3_coder", "behind code", "`x` ```y```\n<function=f>\n</function>\n</tool_call>", ("`x` ```y```", "", [("f", "{}")])),
    ("qwen3_coder", "a call in code", "```\n<tool_call><function=f></function></tool_call>\n```", ("``````", "", [("f", "{}")])),
    ("seed_oss", "one", "<seed:tool_call>\n<function=f>\n<parameter=city>Rome</parameter>\n<parameter=dry>True</parameter>\n"
     "<parameter=where>{'a': None}</parameter>\n</function>\n</seed:tool_call>",
     ("", "", [("f", '{"city": "Rome", "dry": true, "where": {"a": null}}')])),
    ("minimax_m2", "two in one", '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Rome "x"</parameter>\n'
     '<parameter name="list">[1, "2"]</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
     ("", "", [("f", '{"city": "Rome \\"x\\"", "list": [1, "2"]}'), ("g", "{}")])),
    ("dots", "one", "<dots_function_call><invoke name=f><parameter name='days'>2</parameter></invoke></dots_function_call>",
     ("", "", [("f", '{"days": 2}')])),
    ("glm45", "with lines", "Ok\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
     ("Ok", "", [("f", '{"city": "Rome", "days": 3}'), ("g", "{}")])),
    ("glm45", "in one line", "<tool_call>f<arg_key>city</arg_key><arg_value> <arg_value> </arg_value></tool_call>",
     ("", "", [("f", '{"city": " <arg_value> "}')])),
    ("glm45", "as an object", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ("", "", [("f", "{}")])),
    ("glm45", "no call", "<tool_call>two words<arg_key>", ("<tool_call>two words<arg_key>", "", [])),
    ("kimi_k2", "two", "Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"days\": 1}"
     "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
     ("Ok", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("granite", "a list", '<|tool_call|>[{"name": "f", "arguments": {"days": 1}}, {"name": "g", "arguments": {}}]',
     ("", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("granite", "two marks", '<|tool_call|>[{"name": "f"}]\n<|tool_call|>[{"name": "g"}]', ("", "", [("f", "{}"), ("g", "{}")])),
    ("phi4_mini_json", "a list", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', ("", "", [("f", "{}")])),
    ("phi4_mini_json", "functools", 'functools[{"name": "f", "arguments": {"days": 1}}]', ("", "", [("f", '{"days": 1}')])),
    ("phi4_mini_json", "text", "find functools in fun", ("find functools in fun", "", [])),
    ("hunyuan_a13b", "a list", '<tool_calls>[{"name": "f", "arguments": {"where": {"x": [1]}}}]</tool_calls>',
     ("", "", [("f", '{"where": {"x": [1]}}')])),
    ("nemotron_json", "a list", 'Ok.\n<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>', ("Ok.", "", [("f", "{}")])),
    ("cohere_command", "a list", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "f", "parameters": {"days": 1}}\n]'
     "<|END_ACTION|>", ("", "", [("f", '{"days": 1}')])),
    ("cohere_command", "an answer", "<|START_RESPONSE|>Hi <b>.<|END_RESPONSE|>", ("Hi <b>.", "", [])),
    ("granite", "marks in a text", "Write <response> and </tool_call> so: </response>",
     ("Write <response> and </tool_call> so: </response>", "", [])),
    ("granite", "an answer", " <response>\nThe mark </response> ends it.\n</response>\n",
     ("The mark </response> ends it.", "", [])),
    ("granite", "an answer and a call", '<response> Ok </response>\n<|tool_call|>[{"name": "f"}]', ("Ok", "", [("f", "{}")])),
    ("granite", "a closing mark behind a call", '<tool_call>[{"name": "f"}]</tool_call> so </tool_call>',
     ("so </tool_call>", "", [("f", "{}")])),
    ("granite", "blanks", " \n<b> \n", (" \n<b> \n", "", [])),
    ("hunyuan_a13b", "an answer", "<answer>\nThe <answer>\n\n</answer>", ("The <answer>", "", [])),
    ("hunyuan_a13b", "an answer without an end", "<answer>\nYes\n", ("Yes\n", "", [])),
    ("cohere_command", "the other pair", "<|START_TEXT|>Hi<|END_RESPONSE|><|END_TEXT|>", ("Hi<|END_RESPONSE|>", "", [])),
    ("apertus", "a list", '<|tools_prefix|>[{"f": {"days": 1}}, {"g": {}}]<|tools_suffix|>',
     ("", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("apertus", "no object", '<|tools_prefix|>[{"f": 1}]', ('<|tools_prefix|>[{"f": 1}]', "", [])),
    ("olmo3", "lines", 'Ok <function_calls>\nf(city="Rome", days=3)\ng()\n</function_calls>',
     ("Ok", "", [("f", '{"city": "Rome", "days": 3}'), ("g", "{}")])),
    ("functiongemma", "one", "<start_function_call>call:f{city:<escape>Rome, {it}<escape>,days:3,where:{a:[1,<escape>x<escape>]}}"
     "<end_function_call>", ("", "", [("f", '{"city": "Rome, {it}", "days": 3, "where": {"a": [1, "x"]}}')])),
    ("functiongemma", "none", "<start_function_call>call:g{}<end_function_call>", ("", "", [("g", "{}")])),
    ("xlam", "a list", '[{"name": "f", "arguments": {"days": 1}}]', ("", "", [("f", '{"days": 1}')])),
    ("xlam", "text", "[1] says so", ("[1] says so", "", [])),
    ("command_r", "two", 'Action: ```json\n[\n    {\n        "tool_name": "f",\n        "parameters": {"days": 1}\n    },\n'
     '    {"tool_name": "g", "parameters": {}}\n]\n```', ("", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("command_r", "an answer", 'Action:```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```', ("", "", [])),
    ("command_r", "no block", 'Plan: look.\nAction: [{"tool_name": "f", "parameters": {}}]', ("Plan: look.", "", [("f", "{}")])),
    ("command_r", "text", "Action: none. A", ("Action: none. A", "", [])),
    ("functionary_v3_1", "two and text", 'Ok <function=f>{"days": 1}</function><function=g>{}</function>',
     ("Ok", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("functionary_v3_1", "no end between", '<function=f>{"days": 1}<function=g>{}</function>',
     ("", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("functionary_v3_1", "text", "write <function=f> here", ("write <function=f> here", "", [])),
    ("functionary_v3_2", "an answer", "all\nHello >> you", ("Hello >> you", "", [])),
    ("functionary_v3_2", "an answer and calls", 'all\nLet me see.\n>>>f\n{"days": 1}>>>g\n{}',
     ("Let me see.", "", [("f", '{"days": 1}'), ("g", "{}")])),
    ("functionary_v3_2", "a call", 'f\n{"city": "a>>>b"}', ("", "", [("f", '{"city": "a>>>b"}')])),
    ("functionary_v3_2", "text", "Hello >>>x", ("Hello >>>x", "", [])),
    ("glm4", "one", 'f\n{"city": "Rome", "days": 3}', ("", "", [("f", '{"city": "Rome", "days": 3}')])),
    ("glm4", "text", "f is a function: {1}", ("f is a function: {1}", "", [])),
    ("glm4", "a name only", "g", ("g", "", [])),
    ("glm4", "a set", "g {x}", ("g {x}", "", [])),
    ("glm4", "on one line", 'g {"a": 1}', ('g {"a": 1}', "", [])),
    ("glm4", "a block of code", "g\n{ x = 1; }", ("g\n{ x = 1; }", "", [])),
    ("glm4", "over lines", 'f\n{\n  "a": 1\n}', ("", "", [("f", '{\n  "a": 1\n}')])),
    ("glm4", "no arguments", "f\n{ }", ("", "", [("f", "{ }")])),
    ("functionary_v3_2", "a block of code", "all\nSo:\n>>>f\n{x}", ("So:\n>>>f\n{x}", "", [])),
    ("llama4_pythonic", "a list", '[f(city="Rome", days=3), g()]', ("", "", [("f", '{"city": "Rome", "days": 3}'), ("g", "{}")])),
    ("llama4_pythonic", "marked", 'Ok <|python_start|>[f(days=1)]<|python_end|>', ("Ok", "", [("f", '{"days": 1}')])),
    ("llama4_pythonic", "an object", '<|python_start|>{"name": "f", "parameters": {"days": 1}}<|python_end|>',
     ("", "", [("f", '{"days": 1}')])),
    ("llama4_pythonic", "text", "[1] <|python_start|> no", ("[1] <|python_start|> no", "", [])),
    ("minicpm3", "two", 'Ok\n<|tool_call_start|>\n```python\nf(city="Rome")\ng()\n```\n<|tool_call_end|>',
     ("Ok", "", [("f", '{"city": "Rome"}'), ("g", "{}")])),
    ("minicpm3", "no block", "<|tool_call_start|>g()<|tool_call_end|>", ("", "", [("g", "{}")])),
]


@pytest.mark.parametrize(("form", "text", "message"), [(form, *rest) for form, _, *rest in CASES],
                         ids=[f"{form}-{name}" for form, name, *_ in CASES])
def test_a_text_becomes_calls(form: str, text: str, message: Message) -> None:
    make = maker(form)
    assert read(make, [text]) == message
    assert read(make, text) == message                   # a character at a time


PIECES = [mark for form in FREE.values() for mark in form.marks] + ["a" * 300, "7" * 300, " " * 300] + [
    "<function=f>", "</function>", "<parameter=days>", "<parameter=city>", "</parameter>", '<invoke name="f">', "</invoke>",
    "<arg_key>", "city", "</arg_key>", "<arg_value>", "</arg_value>", "functions.f:0", '{"name": "f"', ', "arguments": {', "}",
    "]", "[", "{", "call:f{", "f(", ")", "<", "\n", " ", "1", '"', "x",
]


@settings(max_examples=150, deadline=None)
@given(form=st.sampled_from(sorted(FREE)), cut=st.booleans(), data=st.data(),
       text=st.one_of(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), st.sampled_from([case[2] for case in CASES])))
def test_any_chunking_gives_the_same_message(form: str, cut: bool, data: Any, text: str) -> None:
    make = maker(form)
    whole = read(make, [text], cut)
    assert read(make, text, cut) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert read(make, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], cut) == whole


# What begins a call and may be a text: while there is no more of it, it is one.
BEGINNINGS = {"command_r": "Action: ", "glm4": "f\n", "functionary_v3_2": ">"}


def without_beginning(content: str, whole: str) -> str:
    found = max((length for length in range(len(whole) + 1) if content.endswith(whole[:length])), default=0)
    return content[: len(content) - found]


@pytest.mark.parametrize(("form", "text", "message"), [(form, *rest) for form, _, *rest in CASES if rest[1][2]],
                         ids=[f"{form}-{name}" for form, name, *rest in CASES if rest[1][2]])
def test_a_call_that_is_cut_anywhere_is_no_content(form: str, text: str, message: Message) -> None:
    said, _, whole = message
    for place in range(len(text)):
        content, _, calls = read(maker(form), [text[:place]], cut=True)
        letter = "functools"[: len(content)] if text.startswith("functools") else ""
        content = without_beginning(content, BEGINNINGS.get(form, ""))
        assert said.startswith(content.rstrip("<[ \n")) or content == letter, (text[:place], content)
        for got, expected in zip(calls, whole, strict=False):
            assert got[0] == expected[0] and expected[1].startswith(got[1]), (text[:place], calls)


@pytest.mark.parametrize(("form", "text"), [
    ("phi4_mini_json", "import functools"), ("phi4_mini_json", "import functools\n"),
    ("glm45", "The mark is <tool_call> and then"), ("glm45", "The mark is <tool_call> and"),
    ("granite", "a </respo"), ("qwen3_coder", "a </tool_c"), ("hunyuan_a13b", "Use <ans"),
])
def test_a_text_that_is_cut_keeps_all_of_it(form: str, text: str) -> None:
    assert read(maker(form), [text], cut=True) == read(maker(form), text, cut=True) == (text, "", [])


def test_a_text_is_told_while_it_is_written() -> None:
    parser = maker("seed_oss")()
    parser.feed("<seed:tool_call><function=f><parameter=city>")
    assert [event.text for event in parser.feed("Ro\"me</par") if hasattr(event, "text")] == ['Ro\\"me']


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "5", "5"), ("city", "true", "true"), ("city", '{"a": 1}', '{"a": 1}'), ("days", "5", 5),
        ("days", "five", "five"),
        ("deg", "1e3", 1000.0), ("deg", "7", 7), ("deg", "NaN", "NaN"), ("deg", "1e999", "1e999"), ("dry", "True", True),
        ("dry", " false ", False), ("where", '{"a": [1]}', {"a": [1]}), ("where", "{'a': True}", {"a": True}), ("list", "[]", []),
        ("maybe", "null", None), ("maybe", "None", None), ("maybe", "5", "5"), ("either", "5", 5), ("either", "007", "007"),
        ("either", "[1]", "[1]"), ("kind", "5", "5"), ("level", "2", 2), ("far", "[3]", [3]), ("any", "[3]", [3]),
        ("any", "x y", "x y"), ("unknown", "5", "5"),
        *((name, text, text) for name in ("maybe", "any")        # texts as they are written, quotes included
          for text in ('"foo" "bar"', '"exact phrase"', '"""doc"""', "'it'", "+39", "(555)", '"5"', "''")),
        ("any", "{'a': 1}", {"a": 1}), ("any", "True", True), ("any", "None", None), ("any", "5", 5),
        ("days", '"5"', 5), ("days", "'5'", 5), ("days", "+39", 39), ("dry", '"true"', True), ("list", '"[1]"', [1]),
        ("days", '"five"', "five"), ("list", '"[\\"\\ud800\\"]"', '["\ud800"]'),
    ],
)
def test_values_have_the_types_of_the_schema(name: str, text: str, value: Any) -> None:
    made = json.loads(as_json(text, types_of(name, SCHEMA)))
    assert made == value and type(made) is type(value)
    for make, written in (
        (maker("qwen3_coder"), qwen((name, text))),
        (maker("minimax_m2"), f'<minimax:tool_call><invoke name="f"><parameter name="{name}">{text}</parameter></invoke>'),
        (maker("glm45"), f"<tool_call>f<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>"),
    ):
        assert [json.loads(arguments) for _, arguments in read(make, [written])[2]] == [{name: value}]


def test_types_of_odd_schemas() -> None:
    odd: dict[str, Any] = {"a": {"$ref": "#/properties/a"}, "b": {"anyOf": [{"$ref": "#/properties/b"}]}, "c": {"type": "odd"}}
    endless = {"properties": odd}
    assert types_of("a", endless) == types_of("b", endless) == types_of("c", endless) == ANY
    assert types_of("a", {"$ref": "#/$defs/X", "$defs": {"X": {"properties": {"a": {"type": "integer"}}}}}) == {"integer"}
    assert types_of("a", {"additionalProperties": {"type": "number"}}) == {"number"}
    assert types_of("a", {}) == types_of("a", {"properties": []}) == {"string"}
    for wrong in ({"allOf": 5}, {"allOf": [5]}, {"type": [{}]}, {"type": []}, {"anyOf": {}}, {"enum": 5}, {"$ref": 5}, 5, True):
        assert types_of("a", {"properties": {"a": wrong}}) == ANY
    assert types_of("a", {"properties": {"a": {"type": [{}, "integer"]}}}) == {"integer"}
    assert types_of("a", {"allOf": 5, "anyOf": [5], "properties": {"a": {"type": "null"}}}) == {"null"}


def test_each_part_of_a_schema_is_read_once() -> None:
    """A schema that refers to itself twice has 2^n paths of n references."""
    class Counted(dict[str, Any]):
        reads = 0

        def get(self, key: str, default: Any = None) -> Any:
            Counted.reads += 1
            return super().get(key, default)

    loop = Counted({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]})
    tree = Counted({"type": "integer"})
    for _ in range(14):
        tree = Counted({"oneOf": [tree, tree]})
    schema = {"properties": {"q": {"$ref": "#/$defs/a"}, "r": tree}, "$defs": {"a": loop}}
    assert (types_of("q", schema), types_of("r", schema)) == (ANY, {"integer"})
    assert Counted.reads < 500
    Counted.reads = 0
    whole = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": loop}}
    assert types_of("q", whole) == {"string"} and Counted.reads < 500


@given(keys=st.sets(st.text("ab<>", max_size=3)), gone=st.sets(st.text("ab<>", max_size=3)), word=st.text("ab<>", max_size=5))
def test_heads_of_arguments_are_found_as_one_by_one(keys: set[str], gone: set[str], word: str) -> None:
    heads = Heads(KnownHeads({f"<{key}>": key for key in keys}))
    for key in gone:
        heads.leave_out(f"<{key}>")
    left = [f"<{key}>" for key in keys - gone]
    for each in (word, f"<{word}", f"<{word}>", *left):
        assert (each in heads) is (each in left)
        assert heads.begin_with(each) is any(head.startswith(each) for head in left)
        assert each not in left or f"<{heads.key_of(each)}>" == each


@pytest.mark.reliability("R-20")
@pytest.mark.parametrize("form", ["qwen3_coder", "minimax_m2"])
def test_work_is_linear_where_a_schema_has_many_arguments(form: str) -> None:
    """All of them were looked at for each that was written: with 16,000, one took 9 ms, in each of 128 answers."""
    def write(count: int) -> None:
        schemas = {"f": {"properties": {f"key{place:05}": {"type": "integer"} for place in range(count)}}}
        written = [(f"key{place:05}", "1") for place in range(count)]
        if form == "qwen3_coder":
            text = qwen(*written)
        else:
            inner = "".join(f'<parameter name="{key}">{value}</parameter>' for key, value in written)
            text = f'<minimax:tool_call><invoke name="f">{inner}</invoke></minimax:tool_call>'
        _, _, calls = read(lambda: MessageParser(None, FREE[form].parser(schemas, None, schemas)), [text])
        assert json.loads(calls[0][1]) == dict.fromkeys(schemas["f"]["properties"], 1)

    good, few, many = is_linear(write, 40)
    assert good, (few, many)


def test_the_answers_to_a_request_read_its_schemas_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a function with 16,000 arguments it takes 55 ms, and each of 128 answers did it when its call began."""
    made: list[Any] = []

    def noted(schema: Any) -> ArgumentTypes:
        made.append(schema)
        return ArgumentTypes(schema)

    monkeypatch.setattr("ridgeline.server.parse.formats.element_calls.ArgumentTypes", noted)
    answers = Reading(format="qwen3_coder", schemas=SCHEMAS)
    for _ in range(3):
        parser = answers.parser()
        assert parser is not None
        parser.feed(qwen(("days", "3")))
    assert made == [SCHEMA]


def test_arguments_that_a_branch_of_the_schema_names_have_its_types() -> None:
    integer, text = {"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"type": "string"}}}
    for key in ("allOf", "anyOf", "oneOf"):
        assert types_of("a", {"type": "object", key: [integer, {"properties": {"b": {}}}]}) == {"integer"}
    assert types_of("a", {"anyOf": [integer, {"$ref": "#/$defs/t"}], "$defs": {"t": text}}) == {"integer", "string"}
    assert types_of("a", integer | {"allOf": [{"properties": {"a": {"minimum": 3}}}]}) == {"integer"}


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }} <minimax:tool_call>", "minimax_m2"), ("{{ tools }} '<seed:tool_call>'", "seed_oss"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"), ("<tool_call>\n<function={{ n }}>\n<parameter={{ k }}>", "qwen3_coder"),
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"), ("<|start_of_role|>{{ tools }} write <|tool_call|>", "granite"),
        ("<|tool|>{{ message['tools'] }}<|/tool|>", "phi4_mini_json"), ("<tool_calls>[{}]</tool_calls>", "hunyuan_a13b"),
        ("<TOOLCALL>[{{ call }}]</TOOLCALL>", "nemotron_json"), ("{{ tools }}<|START_ACTION|>[", "cohere_command"),
        ("{{ '<|tools_prefix|>' }}", "apertus"), ("<function_calls>{{ calls }}</function_calls>", "olmo3"),
        ("<start_function_call>call:{{ name }}", "functiongemma"), ("<dots_function_call>", "dots"),
        ("<tool_call>{{ call | tojson }}</tool_call>", "hermes"), ("<|tool_call|>{{ calls }}<|/tool_call|>", "phi4_mini_json"),
        ("{{ '<|tool|>' }}{{ tools }}<tool_call>{{ call }}</tool_call>", "hermes"),      # EXAONE's mark of a tool's turn
        ("{{ '<|tool|>' }}{{ '<|/tool|>' }}{{ tools }}<tool_call>", "hermes"), ("{{ '<|tool|>' }}{{ tools }}", None),
        ("{{ tools }}<|tool_call|>", None),
        ("[gMASK]<sop>{{ tools }}<|observation|>", "glm4"), ("[gMASK]<tool_call>{{ name }}<arg_key><|observation|>", "glm45"),
        ("Write 'Action:' followed by a json-formatted list of actions {{ tools }}", "command_r"),
        ("{{ tools }} start_tag => `<function`", "functionary_v3_1"), ("{{ '>>>all\\n' }}{{ tools }}", "functionary_v3_2"),
        ("<|python_start|>{{ tools }}", "llama4_pythonic"), ("{{ tools }}<|tool_call_start|>", "minicpm3"),
    ],
)
def test_the_format_of_a_family_is_read_from_its_template(template: str, form: str | None) -> None:
    assert tool_format("auto", template) == form


def test_the_option_names_every_format() -> None:
    from dataclasses import fields

    choices = {field.name: set(field.metadata["choices"]) for field in fields(ServerOptions) if field.metadata.get("choices")}
    assert choices["tool_call_parser"] == {"auto", "none", *FREE}
    assert choices["reasoning_parser"] == {"auto", "none", *THOUGHTS}


def test_a_request_gives_its_schemas_to_the_formats_that_need_them() -> None:
    vocabulary: Any = Vocabulary("{{ tools }} <seed:tool_call> </seed:think>")
    use = tool_use([tool("f", parameters=SCHEMA)], None, True)
    made = reading(use, SamplingParams(), ServerOptions(), vocabulary)
    assert (made.format, made.reasoning) == ("seed_oss", "seed_oss")
    text = "<seed:think>Hm.</seed:think>\n" + qwen(("days", "3"), around="seed:tool_call")

    def make() -> MessageParser:
        parser = made.parser()
        assert parser is not None
        return parser

    assert read(make, [text]) == read(make, text) == ("", "Hm.", [("f", '{"days": 3}')])
    assert reading(use, SamplingParams(), ServerOptions(tool_call_parser="hermes"), vocabulary).schemas == {"f": {}}


@pytest.mark.parametrize("use", [tool_use(None, None, True), tool_use([tool("f")], "none", True)])
def test_an_answer_without_tools_does_not_show_who_it_is_for(use: ToolUse) -> None:
    vocabulary: Any = Vocabulary("{{ '>>>all\\n' }}{{ tools }}")
    made = reading(use, SamplingParams(), ServerOptions(), vocabulary)

    def make() -> MessageParser:
        parser = made.parser()
        assert parser is not None
        return parser

    assert read(make, ["all\nHello"]) == read(make, "all\nHello") == ("Hello", "", [])
    assert read(make, 'f\n{"days": 3}') == ('f\n{"days": 3}', "", [])


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_in_the_marks_of_a_family(name: str) -> None:
    thought = THOUGHTS[name]
    silent = thought.answer[:2] or ("", "")
    text = f"\n{thought.begin}\nHm [/T </x\n{thought.end}\n\n{silent[0]}Hi <b>{silent[1]}"
    make: Make = lambda: MessageParser(ReasoningParser(False, thought, thought.answer), None)  # noqa: E731
    assert read(make, [text]) == read(make, text) == ("Hi <b>", "Hm [/T </x", [])
    inside: Make = lambda: MessageParser(ReasoningParser(True, thought), None)  # noqa: E731
    assert read(inside, [f"so{thought.end}yes"]) == ("yes", "so", [])
    assert read(make, [f"{silent[0]}Hi{silent[1]}"]) == ("Hi", "", [])


@pytest.mark.parametrize(("text", "content"), [
    ("Hi <answer> x </answer>", "Hi <answer> x </answer>"), ("x</answer>", "x</answer>"), ("<answer>\n a \n</answer>\n", "a"),
    (" <answer>a</answer> b\n</answer>", "a</answer> b"), ("<answer> a \n", "a \n"), (" a ", " a "), ("<b>", "<b>"),
])
def test_marks_around_an_answer_are_no_part_of_it(text: str, content: str) -> None:
    thought = THOUGHTS["hunyuan_a13b"]
    for before, reasoning in (("", ""), ("<think>Hm</think>", "Hm")):
        make: Make = lambda: MessageParser(ReasoningParser(False, thought, thought.answer), None)  # noqa: E731
        said = content.lstrip() if before else content
        assert read(make, [before + text]) == read(make, before + text) == (said, reasoning, [])
