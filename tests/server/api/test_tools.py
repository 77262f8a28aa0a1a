"""Tool calls and reasoning in a model's text, and what a request says of tools. No server here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from counted_work import is_linear
from hypothesis import example, given, settings
from hypothesis import strategies as st
from served_model import write_model

from ridgeline.errors import BadRequest, Unsupported
from ridgeline.sampling_params import SamplingParams, StructuredOutputs
from ridgeline.server.options import ServerOptions
from ridgeline.server.parse import tool_calls as parsers
from ridgeline.server.parse.closed_schema import closed
from ridgeline.server.parse.deepseek_calls import DeepSeekParser
from ridgeline.server.parse.formats.known_formats import THOUGHTS, reasoning_format, tool_format
from ridgeline.server.parse.incremental import CallArguments, CallStart, Content, Reasoning
from ridgeline.server.parse.partial_json import completed
from ridgeline.server.parse.reasoning import MessageParser, ReasoningParser, Thought
from ridgeline.server.parse.tools import (
    after_reasoning,
    answer_or_calls_schema,
    calls_schema,
    moved,
    parameters,
    reading,
    tool_use,
)
from ridgeline.text.tokenizer import Tokenizer

NAMES = ("f", "get_weather")
Message = tuple[str, str, list[tuple[str, str]]]         # content, reasoning, calls
Make = Callable[[], MessageParser]


def read(make: Make, pieces: Iterable[str], cut: bool = False) -> Message:
    """The message as a client adds it up; every call begins once, with its name, in order."""
    parser, pieces = make(), list(pieces)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(cut)
    content, reasoning, calls = "", "", list[list[str]]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1           # a call is over when the next begins
                calls[index][1] += text
    text = "".join(pieces)
    assert "".join(text[start:end] for start, end in parser.content_spans) == content
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def maker(kind: type[parsers.CallParser], most: int | None = None) -> Make:
    return lambda: MessageParser(None, kind(NAMES, most))


HERMES, LLAMA, MISTRAL = maker(parsers.HermesParser), maker(parsers.LlamaParser), maker(parsers.MistralParser)
DEEPSEEK = maker(DeepSeekParser)
PYTHONIC, LIST = maker(parsers.PythonicParser), maker(parsers.ListParser)
THINKING: Make = lambda: MessageParser(ReasoningParser(False), parsers.HermesParser(NAMES))  # noqa: E731
INSIDE: Make = lambda: MessageParser(ReasoningParser(True), None)                            # noqa: E731

CASES: list[tuple[str, Make, str, Message]] = [
    ("text", HERMES, "Just <b>text</b>, 1 < 2 <tool_cal\n", ("Just <b>text</b>, 1 < 2 <tool_cal\n", "", [])),
    ("one", HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": null}]}}\n</tool_call>',
     ("", "", [("f", '{"a": [1, {"b": null}]}')])),
    ("two and text", HERMES,
     'Let me see.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
     '<tool_call>{"name": "g", "arguments": {"x": "</tool_call>"}}</tool_call>\n',
     ("Let me see.", "", [("f", "{}"), ("g", '{"x": "</tool_call>"}')])),
    ("arguments first", HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    ("arguments as text", HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
     ("", "", [("f", '{"a": 1}')])),
    ("no arguments", HERMES, '<tool_call>{"name": "f"}</tool_call> done', ("done", "", [("f", "{}")])),
    ("null arguments", HERMES, '<tool_call>{"name": "f", "arguments": null}', ("", "", [("f", "{}")])),
    ("no closing mark", HERMES, '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}</tool_call>',
     ("", "", [("f", "{}"), ("g", "{}")])),
    ("raw line break and needless escape", HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d\\\'"}}</tool_call>',
     ("", "", [("f", '{"a": "x\\ny\\\\d\'"}')])),
    ("no JSON", HERMES, "<tool_call>oops</tool_call>", ("<tool_call>oops</tool_call>", "", [])),
    ("no name", HERMES, '<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', "", [])),
    ("name is no text", HERMES, '<tool_call>{"name": 1}</tool_call>', ('<tool_call>{"name": 1}</tool_call>', "", [])),
    ("arguments are a list", HERMES, '<tool_call>{"name": "f", "arguments": [1]}',
     ('<tool_call>{"name": "f", "arguments": [1]}', "", [])),
    ("broken, then whole", HERMES, '<tool_call>{"x" <tool_call>{"name": "f"}</tool_call>',
     ('<tool_call>{"x"', "", [("f", "{}")])),
    ("cut in its head", HERMES, 'a <tool_call>{"name": "f", "argu', ('a <tool_call>{"name": "f", "argu', "", [])),
    ("cut in its arguments", HERMES, '<tool_call>{"name": "f", "arguments": {"a": "xy', ("", "", [("f", '{"a": "xy')])),
    ("cut in a word", HERMES, '<tool_call>{"name": "f", "arguments": {"a": tr', ("", "", [("f", '{"a": tr')])),
    ("broken in its arguments", HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1,,}}</tool_call>',
     (",}}</tool_call>", "", [("f", '{"a": 1,')])),
    ("llama", LLAMA, ' {"name": "f", "parameters": {"q": "}{"}}', ("", "", [("f", '{"q": "}{"}')])),
    ("llama, tagged", LLAMA,
     '<|python_tag|>{"type": "function", "name": "g", "parameters": {}}; {"name": "f", "parameters": {"a": 1}}',
     ("", "", [("g", "{}"), ("f", '{"a": 1}')])),
    ("llama, text before the tag", LLAMA, 'Hm. <|python_tag|>{"name": "f"}', ("Hm.", "", [("f", "{}")])),
    ("llama, an answer in JSON", LLAMA, '{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', "", [])),
    ("llama, an unknown key", LLAMA, '{"name": "f", "age": 3}', ('{"name": "f", "age": 3}', "", [])),
    ("llama, text after", LLAMA, '{"name": "f"}; and', ("; and", "", [("f", "{}")])),
    ("mistral", MISTRAL,
     'Ok[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "abcdefghi"}]',
     ("Ok", "", [("f", '{"a": 1}'), ("g", "{}")])),
    ("mistral, by name", MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
     ("", "", [("f", '{"a": 1}'), ("g", "{}")])),
    ("deepseek", DEEPSEEK,
     "One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": [1]}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     ("One moment.", "", [("f", '{"a": [1]}'), ("g", "{}")])),
    ("deepseek, of V3.1", DEEPSEEK,
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"<\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     ("", "", [("f", '{"a": "<"}')])),
    ("deepseek, no call", DEEPSEEK, "1 < 2 <｜tool▁calls▁begin｜> see", ("1 < 2 <｜tool▁calls▁begin｜> see", "", [])),
    ("deepseek, the second broken", DEEPSEEK,
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>and so on",
     ("and so on", "", [("f", "{}")])),
    ("mistral, no call", MISTRAL, "[TOOL_CALLS] see [1].", ("[TOOL_CALLS] see [1].", "", [])),
    ("mistral, the second broken", MISTRAL, '[TOOL_CALLS][{"name": "f"}, {"n": 1}]', (', {"n": 1}]', "", [("f", "{}")])),
    ("pythonic", PYTHONIC, """[f(a=1, b="x)\\n", c=[1.5, {'k': None}], d=(True, -2e3)), get_weather(city='Paris',)]""",
     ("", "", [("f", '{"a": 1, "b": "x)\\n", "c": [1.5, {"k": null}], "d": [true, -2000.0]}'),
               ("get_weather", '{"city": "Paris"}')])),
    ("pythonic, no list", PYTHONIC, "[1] says so", ("[1] says so", "", [])),
    ("pythonic, an unknown function", PYTHONIC, "[exit(a=1)]", ("[exit(a=1)]", "", [])),
    ("pythonic, an expression", PYTHONIC, "[f(a=1), f(a=__import__('os'))]",
     (", f(a=__import__('os'))]", "", [("f", '{"a": 1}')])),
    ("pythonic, by position", PYTHONIC, "[f(1)]", ("[f(1)]", "", [])),
    ("list", LIST, '[{"name": "f", "parameters": {"a": 1}}, {"name": "get_weather", "parameters": {}}]',
     ("", "", [("f", '{"a": 1}'), ("get_weather", "{}")])),
    ("list, an answer", LIST, '{"a": [1]}', ('{"a": [1]}', "", [])),
    ("list, another list", LIST, '[{"name": "Ann"}]', ('[{"name": "Ann"}]', "", [])),
    ("thinking", THINKING, "\n<think>\nHm <b> </thin\n\n</think>\n\nHi <think>", ("Hi <think>", "Hm <b> </thin", [])),
    ("thinking, then a call", THINKING, '<think>x</think>\n<tool_call>{"name": "f"}</tool_call>', ("", "x", [("f", "{}")])),
    ("thinking of a call", THINKING, '<think><tool_call>{"name": "f"}</think>no', ("no", '<tool_call>{"name": "f"}', [])),
    ("no thinking", THINKING, " Hi <think>x</think>", (" Hi <think>x</think>", "", [])),
    ("thinking without end", THINKING, "<think>\nso ", ("", "so", [])),
    ("thinking that the prompt began", INSIDE, "\nso\n</think>\n\nyes\n", ("yes\n", "so", [])),
]


@pytest.mark.parametrize(("make", "text", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_text_becomes_a_message(make: Make, text: str, message: Message) -> None:
    assert read(make, [text]) == message
    assert read(make, text) == message                   # a character at a time


ALPHABET = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", '{"name": "f"', '"', "\\",
    ', "arguments": {', '"parameters": ', "}", "{", "[", "]", "(", ")", "f(", "a=", "'", ",", ":", ";", " ", "\n", "1", "-", "e",
    "true", "null", "None", "u00e9", "x", "é", "<", '"k"', '{"name": "f", "arguments": {}}',
]


@pytest.mark.reliability("C-05")
@settings(max_examples=100, deadline=None)
@given(
    make=st.sampled_from([HERMES, LLAMA, MISTRAL, PYTHONIC, LIST, THINKING, INSIDE]),
    text=st.one_of(
        st.lists(st.sampled_from(ALPHABET), max_size=25).map("".join), st.sampled_from([case[2] for case in CASES])
    ),
    cut=st.booleans(),
    data=st.data(),
)
@example(make=HERMES, text='<tool_call>{"name": "f", "arguments": {"a": "\\u00', cut=False, data=None)
def test_any_chunking_gives_the_same_message(make: Make, text: str, cut: bool, data: Any) -> None:
    whole = read(make, [text], cut)
    assert read(make, text, cut) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        assert read(make, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], cut) == whole


REQUIRED = maker(parsers.RequiredParser)
WHOLE = {                                                # two calls, which may be cut anywhere
    "hermes": (HERMES, 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>\n'
               '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'),
    "llama": (LLAMA, '{"name": "f", "parameters": {"a": [1, "x"]}}; {"name": "get_weather", "parameters": {}}'),
    "llama, tagged": (LLAMA, 'Let me see. <|python_tag|>{"name": "f", "parameters": {"a": [1, "x"]}}; '
                      '{"name": "get_weather", "parameters": {}}'),
    "mistral": (MISTRAL, 'Let me see.[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1, "x"]}}, '
                '{"name": "get_weather", "arguments": {}}]'),
    "deepseek": (
        DEEPSEEK, "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        "```json\n{\"a\": [1, \"x\"]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "mistral, by name": (MISTRAL, 'Let me see.[TOOL_CALLS]f[ARGS]{"a": [1, "x"]}[TOOL_CALLS]get_weather[ARGS]{}'),
    "pythonic": (PYTHONIC, '[f(a=[1, "x"]), get_weather()]'),
    "list": (LIST, '[{"name": "f", "parameters": {"a": [1, "x"]}}, {"name": "get_weather", "parameters": {}}]'),
    "required": (REQUIRED, '[{"name": "f", "parameters": {"a": [1, "x"]}}, {"name": "get_weather", "parameters": {}}]'),
}


@pytest.mark.parametrize("form", WHOLE)
def test_a_call_that_is_cut_anywhere_is_no_content(form: str) -> None:
    """What there is of it is told as a call; the first character of a mark alone, or of a list, may be text."""
    make, text = WHOLE[form]
    said, _, whole = read(make, [text])
    assert len(whole) == 2
    some = 0
    for place in range(len(text)):
        content, _, calls = read(make, [text[:place]], cut=True)
        assert read(make, text[:place], cut=True) == (content, "", calls)
        assert said.startswith(content.rstrip("<[{ \n")), (text[:place], content)
        if form == "required":
            assert not content
        for got, expected in zip(calls, whole, strict=False):
            assert got[0] == expected[0] and expected[1].startswith(got[1]), (text[:place], calls)
        some += bool(calls)
    assert some > len(text) / 3


def test_what_is_cut_and_no_call_is_content() -> None:
    for make in (HERMES, LLAMA, MISTRAL, PYTHONIC, LIST):
        for text in ('{"name": "Ann", "age', "[1, 2", "if a <", "a [b", '{"title": "f", "par', "[get_out(", "<b> and [c]", "   "):
            assert read(make, [text], cut=True) == (text, "", []), (make, text)
    assert read(HERMES, ["Hm <tool_c"], cut=True) == ("Hm ", "", [])
    assert read(THINKING, ["<think>so </thi"], cut=True) == ("", "so", [])
    assert read(THINKING, ["<thi"], cut=True) == ("", "", [])
    assert read(REQUIRED, ["["], cut=True) == read(LIST, ['[{"name": "get_w'], cut=True) == ("", "", [])
    assert read(PYTHONIC, ["[get_weather(city='Par"], cut=True) == ("", "", [("get_weather", "")])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(calls=st.lists(st.dictionaries(st.text(st.sampled_from("abc_"), min_size=1), JSON, max_size=3), min_size=1, max_size=3),
       ascii=st.booleans())
def test_whatever_is_called_arrives(calls: list[dict[str, Any]], ascii: bool) -> None:
    def objects(key: str) -> list[str]:
        return [json.dumps({"name": "f", key: call}, ensure_ascii=ascii) for call in calls]

    texts = {
        HERMES: "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects("arguments")),
        LLAMA: "; ".join(objects("parameters")),
        MISTRAL: f"[TOOL_CALLS][{', '.join(objects('arguments'))}]",
        LIST: f"[{', '.join(objects('parameters'))}]",
        PYTHONIC: f"[{', '.join('f(' + ', '.join(f'{name}={value!r}' for name, value in call.items()) + ')' for call in calls)}]",
    }
    for make, text in texts.items():
        content, _, got = read(make, [text])
        assert content == "" and [json.loads(arguments) for _, arguments in got] == calls, text


@pytest.mark.parametrize("digits", [600, 4_200])
def test_a_long_number_is_a_number(digits: int) -> None:
    """It broke its call off, and the rest became content."""
    number = "7" * digits
    for make, text in (
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'), (PYTHONIC, f"[f(a={number})]"),
    ):
        content, _, ((_, arguments),) = read(make, [text])
        assert content == "" and json.loads(arguments) == {"a": int(number)}
        assert completed(arguments[:-1]) == {"a": int(number)}


def test_arguments_are_told_while_they_are_written() -> None:
    parser = HERMES()
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "on') == [
        CallStart(0, "f"), CallArguments(0, '{"a": "on'),
    ]
    assert parser.feed("e") == [CallArguments(0, "e")]


def test_no_more_calls_than_allowed() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 3
    assert read(maker(parsers.HermesParser, 1), [text]) == ("", "", [("f", '{"a": 1}')])


def test_one_named_function_is_the_whole_text() -> None:
    make: Make = lambda: MessageParser(None, parsers.NamedParser(["f"]))  # noqa: E731
    assert read(make, ['{"a"', ": 1}"]) == ("", "", [("f", '{"a": 1}')])
    assert read(make, []) == ("", "", [("f", "")])


@pytest.mark.reliability("R-20")
@pytest.mark.parametrize("make", [HERMES, PYTHONIC, MISTRAL], ids=["hermes", "pythonic", "mistral"])
def test_work_is_linear_and_depth_is_no_stack(make: Make) -> None:
    def parse(count: int) -> None:
        deep, wide = "[" * count, '"ab", ' * count
        texts = (
            f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}', f'[TOOL_CALLS][{{"name": "f", "arguments": {{"a": [{wide}',
            f"[f(a={deep}", f"[f(a=[{wide}", "<tool_call>" * count, "[TOOL_CALLS]" * count, "<" * count,
        )
        for text in texts:
            read(make, [text])

    good, few, many = is_linear(parse, 40)
    assert good, (few, many)
    parse(2_000)                                         # deeper than Python's stack


def test_reasoning_tokens_are_counted_by_where_they_begin() -> None:
    parser = INSIDE()
    text = "so\n</think>\nyes"
    for character in text:
        parser.feed(character)
    assert parser.reasoning_tokens(list(range(len(text)))) == len("so\n</think>")


def test_reasoning_tokens_are_not_counted_one_by_one() -> None:
    """With usage in every event they are counted for every token: 128 answers of 1,000 tokens took half a second a step."""
    class Offsets(Sequence[int]):
        num_read = 0

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, place: Any) -> Any:
            self.num_read += 1
            return place

    parser = INSIDE()
    parser.feed("so\n</think>\nyes")
    offsets = Offsets()
    assert parser.reasoning_tokens(offsets) == len("so\n</think>")
    assert offsets.num_read < 40


# -- requests ----------------------------------------------------------------------------------------------------------


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **function}}


def allowed_tools(**fields: Any) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": "f"}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]} | fields}


def test_the_choice_of_tools() -> None:
    both = [tool("f"), tool("g")]
    assert tool_use(both, None, True).mode == "auto" and tool_use(both, None, True).names == ["f", "g"]
    assert tool_use(both, "none", True).names == [] and tool_use(None, "auto", True).mode == "none"
    assert tool_use(both, "any", True).mode == "required"               # Mistral's word
    named = tool_use(both, {"type": "function", "function": {"name": "g"}}, True)
    assert (named.mode, named.names, named.schema()) == ("named", ["g"], {"type": "object"})
    assert tool_use(both, {"function": {"name": "g"}}, True).names == ["g"]      # huggingface_hub's
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
    some = tool_use(both, {"type": "allowed_tools", "allowed_tools": allowed}, False)
    assert (some.mode, some.names) == ("required", ["f"])
    schema = some.schema()
    assert schema is not None and schema["maxItems"] == 1


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([{"type": "function"}], None, "tools[0] must be an object"),
        ([tool(), tool()], None, "two functions with the name 'f'"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(strict=1)], None, "tools[0].function.strict"),
        ([tool(descripton="x")], None, "'descripton'"),
        ([tool()], "maybe", "tool_choice must be one of"),
        ([tool()], {"type": "custom", "function": {"name": "f"}}, "tool_choice must be one of"),
        ([tool()], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}}, "by their names"),
        ([tool()], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "at least one"),
        ([tool()], {"type": "function", "function": {"name": "h"}}, "not among the tools"),
        ([tool()], {"type": "function", "function": {"name": "f"}, "bogus": 1}, "tool_choice has the unknown field 'bogus'"),
        ([tool()], {"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice.function has the unknown field 'x'"),
        ([tool()], allowed_tools(bogus=1), "tool_choice.allowed_tools has the unknown field 'bogus'"),
        ([tool()], allowed_tools() | {"tools": []}, "tool_choice has the unknown field 'tools'"),
        ([tool()], allowed_tools(tools=[{"type": "function", "function": {"name": "f"}, "x": 1}]),
         "tool_choice.allowed_tools.tools[0] has the unknown field 'x'"),
        ([tool()], allowed_tools(tools=[{"type": "function", "function": {"name": "f", "strict": True}}]),
         "tool_choice.allowed_tools.tools[0].function has the unknown field 'strict'"),
        ([], "required", "tool_choice needs tools"),
        ([tool(f"f{number}") for number in range(129)], None, "at most 128"),
    ],
)
def test_what_is_wrong_with_tools_is_told(tools: Any, choice: Any, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        tool_use(tools, choice, True)
    assert says in str(caught.value)
    with pytest.raises(Unsupported, match=r"tools\[0\].type 'custom'"):
        tool_use([{"type": "custom", "custom": {"name": "x"}}], None, True)


def test_a_schema_without_bottom_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2_000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(BadRequest, match="nested more than 64"):
        calls_schema([tool(parameters=deep)])


def test_schemas_keep_their_references() -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}, "leaf": {"$ref": "#/$defs/Leaf"}},
            "$defs": {"Leaf": {"enum": [{"$ref": "#"}]}}}
    there = moved(tree, "#/$defs/tool0")
    assert there["properties"]["kids"]["items"]["$ref"] == "#/$defs/tool0"
    assert there["properties"]["leaf"]["$ref"] == "#/$defs/tool0/$defs/Leaf"
    assert there["$defs"]["Leaf"]["enum"] == [{"$ref": "#"}]                 # a value, no reference
    named = moved({"properties": {"default": {"$ref": "#"}}}, "#/$defs/tool0")               # a property's name
    assert named["properties"]["default"]["$ref"] == "#/$defs/tool0"
    schema = calls_schema([tool("f", parameters=tree), tool("g")])
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == ["f", "g"]
    either = answer_or_calls_schema({"type": "object"}, tool_use([tool()], None, True))
    assert len(either["anyOf"]) == 2 and either["$defs"].keys() == {"tool0", "answer"}


REFERRING = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string"}}}


@pytest.mark.parametrize("schema", [
    calls_schema([tool("f", parameters=REFERRING)]),
    answer_or_calls_schema({"type": "object", "properties": {"next": {"$ref": "#"}}}, tool_use([tool(), tool("g")], None, True)),
])
def test_the_grammar_compiler_takes_our_schemas(schema: dict[str, Any]) -> None:
    llguidance = pytest.importorskip("llguidance")
    made = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    assert llguidance.LLMatcher.validate_grammar(made) == ""


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ m }}", "hermes"),                        # told in plain text
        ("{% for t in tools %}{{ t }}{% endfor %}", None),
        ("… <tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}", "deepseek_v3"),
        ("<|start_header_id|> {{ '<|python_tag|>' }}", "llama3_json"),
        ('<|start_header_id|> Respond in the format {"name": function name, "parameters": dictionary}.', "llama3_json"),
        ("<|start_header_id|> in the format of [func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_the_format_is_read_from_the_template(template: str, form: str | None) -> None:
    assert tool_format("auto", template) == form
    assert tool_format("none", template) is None and tool_format("pythonic", template) == "pythonic"


def test_reasoning_is_read_from_the_template() -> None:
    assert reasoning_format("auto", "… </think>") == "think" and reasoning_format("auto", "…") is None
    assert reasoning_format("think", "") == "think" and reasoning_format("none", "</think>") is None
    for name, end in (("seed_oss", "</seed:think>"), ("mistral", "[/THINK]"), ("cohere_command", "<|END_THINKING|>")):
        assert reasoning_format("auto", end) == name


class Vocabulary:
    """As far as `reading` asks."""

    special_ids = frozenset({7})

    def __init__(self, template: str) -> None:
        self.chat_templates = {"default": template}

    def token_id(self, text: str) -> int | None:
        return 7 if text == "[TOOL_CALLS]" else None


def test_marks_that_are_special_tokens_are_shown_to_the_parser() -> None:
    params = SamplingParams()
    vocabulary: Any = Vocabulary("[TOOL_CALLS]")
    made = reading(tool_use([tool()], None, True), params, ServerOptions(), vocabulary)
    assert made.format == "mistral" and not params.skip_special_tokens and len(made.new_id()) == 9
    params = SamplingParams()
    reading(tool_use(None, None, True), params, ServerOptions(), vocabulary)
    assert params.skip_special_tokens


def test_strict_tools_are_kept_to_their_schemas_where_calls_are_free() -> None:
    params = SamplingParams()
    vocabulary: Any = Vocabulary("<tool_call> </think>")
    use = tool_use([tool("f", strict=True, parameters=REFERRING), tool("g")], None, True)
    made = reading(use, params, ServerOptions(), vocabulary)
    assert made.format == "hermes" and made.reasoning and params.structured_outputs is not None
    tag = json.loads(str(params.structured_outputs.structural_tag))
    assert [each["schema"] for each in tag["structures"]] == [REFERRING | {"additionalProperties": False}, {"type": "object"}]
    text = "Hm.\n" + "".join(each["begin"] + "{}" + each["end"] for each in tag["structures"])
    assert read(HERMES, [text]) == ("Hm.", "", [("f", "{}"), ("g", "{}")])   # what it may write is what is read
    pytest.importorskip("llguidance")
    from llguidance import LLMatcher

    from ridgeline.grammar.llguidance_backend import grammar_text

    assert LLMatcher.validate_grammar(grammar_text(params.structured_outputs)) == ""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize("asked", [{"json": REFERRING}, {"json_object": True}, {"choice": ["{}", "[]"]}],
                         ids=["json", "json_object", "choice"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("marks", ["think", "seed_oss", "mistral"])
def test_a_grammar_holds_after_the_reasoning(tokenizer: Tokenizer, asked: Any, inside: bool, marks: str) -> None:
    pytest.importorskip("llguidance")
    from ridgeline.grammar.compiler import compile_grammar, make_backend
    from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary

    vocabulary = GrammarVocabulary.of(
        tokenizer.token_pieces(), tokenizer.special_ids, tokenizer.eos_token_ids, tokenizer.vocab_size
    )
    thought = THOUGHTS[marks]
    grammar = after_reasoning(StructuredOutputs(**asked), inside, thought)
    compiled = compile_grammar(make_backend("llguidance", vocabulary), grammar)

    def fits(text: str) -> bool:
        matcher, tokens = compiled.deep_copy(), tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    begin, end = "" if inside else thought.begin, thought.end
    assert fits(f"{begin}Is {{it}}?\nYes. {end}\n\n{{}}") and not fits(f"{begin}x{end}y") and not fits(begin + "x {}")
    assert fits("{}") is not inside                      # where the prompt has not begun it, there may be none


@pytest.mark.parametrize("inside", [True, False])
def test_reasoning_may_end_with_a_special_token(inside: bool) -> None:
    pytest.importorskip("llguidance")
    from ridgeline.grammar.compiler import compile_grammar, make_backend
    from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary

    pieces = [bytes([byte]) for byte in range(256)] + [b"</s>", b"<think>", b"</think>"]
    end, think, thought = 256, 257, 258
    vocabulary = GrammarVocabulary.of(pieces, frozenset({end, think, thought}), frozenset({end}), len(pieces))
    grammar = after_reasoning(StructuredOutputs(json_object=True), inside, Thought(), (think, thought))
    compiled = compile_grammar(make_backend("llguidance", vocabulary), grammar)

    def fits(tokens: list[int]) -> bool:
        matcher = compiled.deep_copy()
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    begin = [] if inside else [think]
    assert fits([*begin, *b"Is {it}?", thought, *b"\n\n{}"]) and not fits([*begin, *b"x", thought, *b"y"])
    assert fits([*b"{}"]) is not inside


@pytest.mark.parametrize(
    ("given", "closed"),
    [
        ({"properties": {"a": {}}, "required": ["a"]}, True),
        ({"properties": {}}, True),
        ({"properties": {"a": {}}, "additionalProperties": True}, None),     # it says so itself
        ({}, None), ({"$ref": "#/$defs/X", "$defs": {"X": {"type": "string"}}}, None),
        ({"properties": {"a": {}}, "required": ["b"]}, None),                # else nothing would fit
        ({"properties": {"a": {}}, "anyOf": [{"required": ["b"]}]}, None),
        ({"properties": {"a": {"allOf": [{"properties": {"x": {}}}]}}}, None),
        ({"properties": {"a": {}}, "minProperties": 2}, None),
        ({"properties": {"a": {}}, "const": {"a": 1, "b": 2}}, None),
        ({"properties": {"a": {"$ref": "#/$defs/X", "required": ["b"]}}, "$defs": {"X": {"properties": {"c": {}}}}}, None),
        ({"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, None),
        ({"properties": {"a": {"oneOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}]}},
          "$defs": {"X": {"properties": {"x": {}}}, "Y": {"properties": {"y": {}}}}}, None),
        ({"properties": {"a": {"oneOf": [{"properties": {"x": {}}}, {"properties": {"y": {}}}]}}}, True),    # the outer one is
        ({"properties": {"a": {"not": {"properties": {"x": {}}}}}}, None),
    ],
)
def test_arguments_have_no_more_properties_than_are_listed(given: dict[str, Any], closed: bool | None) -> None:
    """Else a small model fills a call with arguments of its own, and LiteLLM or a Python function gets them."""
    made = parameters(tool("f", parameters={"type": "object"} | given))
    assert made.get("additionalProperties") == (False if closed else given.get("additionalProperties"))


def test_objects_inside_arguments_are_closed_too() -> None:
    inner: dict[str, Any] = {"type": "object", "properties": {"properties": {"type": "string"}}}
    given = {"type": "object", "properties": {"a": inner, "b": {"items": inner}, "c": {"anyOf": [inner, {"type": "null"}]}},
             "$defs": {"D": inner}}
    made = parameters(tool("f", parameters=given))
    shut = inner | {"additionalProperties": False}
    assert made["properties"] == {"a": shut, "b": {"items": shut}, "c": {"anyOf": [shut, {"type": "null"}]}}
    assert made["$defs"]["D"] == shut and given["$defs"]["D"] == inner


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


NUMBER: dict[str, Any] = {"type": "integer"}
CIRCLE, SQUARE = thing(kind={"const": "circle"}, r=NUMBER), thing(kind={"const": "square"}, a=NUMBER)


@pytest.mark.parametrize("branches", [
    [CIRCLE, SQUARE],                                    # told apart by a value
    [CIRCLE, {"type": "string"}, {"type": ["number", "null"]}],
    [thing(x=NUMBER), thing(y=NUMBER)],                  # each needs what the other has not
    [thing(kind={"enum": ["a", "b"]}), thing(kind={"enum": ["c"]}, x=NUMBER)],
    [{"const": 1}, {"const": True}, {"const": "1"}],
    [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square", "description": "four sides"}],
])
@pytest.mark.parametrize("depth", [0, 2])
def test_one_of_several_is_closed_where_they_are_apart(branches: list[Any], depth: int) -> None:
    """However deep it is: no branch takes properties that it does not list, and the grammar can be followed."""
    schema: dict[str, Any] = {"oneOf": branches}
    for _ in range(depth):
        schema = thing(inner={"type": "array", "items": schema})
    schema["$defs"] = {"circle": CIRCLE, "square": SQUARE}
    made = closed(schema)
    text = json.dumps(made)
    assert "oneOf" not in text and text.count('"type": "object"') == text.count('"additionalProperties": false')
    llguidance = pytest.importorskip("llguidance")
    assert llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(text)) == ""


@pytest.mark.parametrize("branches", [
    [thing(x=NUMBER), thing(x=NUMBER, y=NUMBER)],        # an answer with both fits both, as given, and so neither
    [NUMBER, {"type": "number"}],
    [thing(x=NUMBER), {"type": "object", "properties": {"y": NUMBER}}],
    [thing(x=NUMBER), thing(y=NUMBER) | {"additionalProperties": True}],
    [CIRCLE, {"description": "anything"}],
    [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/nothing"}],
])
def test_one_of_several_that_overlap_is_left_to_whoever_can_keep_to_it(branches: list[Any]) -> None:
    schema = thing(inner={"oneOf": branches}) | {"$defs": {"circle": CIRCLE}}
    assert closed(schema)["properties"]["inner"] == {"oneOf": branches}


def test_a_discriminator_says_that_branches_are_apart() -> None:
    optional = {"type": "object", "properties": {"kind": {"const": "circle", "default": "circle"}}}
    schema = {"oneOf": [optional, SQUARE], "discriminator": {"propertyName": "kind"}}
    assert closed(schema) == {"anyOf": [each | {"additionalProperties": False} for each in (optional, SQUARE)]}


def test_a_function_without_parameters_has_no_arguments() -> None:
    use = tool_use([{"type": "function", "function": {"name": "f"}}], {"type": "function", "function": {"name": "f"}}, True)
    assert use.schema() == {"type": "object", "properties": {}, "additionalProperties": False}
    assert parameters(tool(parameters={})) == {"type": "object"}


def test_names_of_functions_are_as_long_as_anthropics_may_be() -> None:
    assert tool_use([tool("m" * 128)], None, True).names == ["m" * 128]
    with pytest.raises(BadRequest, match="1 to 128"):
        tool_use([tool("m" * 129)], None, True)


def test_tools_that_could_not_be_read_are_refused() -> None:
    vocabulary: Any = Vocabulary("{{ tools }}")
    use = tool_use([tool()], None, True)
    with pytest.raises(BadRequest, match="--tool-call-parser"):
        reading(use, SamplingParams(), ServerOptions(), vocabulary)
    assert reading(use, SamplingParams(), ServerOptions(tool_call_parser="hermes"), vocabulary).format == "hermes"
    assert reading(tool_use([tool()], "required", True), SamplingParams(), ServerOptions(), vocabulary).format == "required"
