"""The formats in which models write tool calls and reasoning, and how a chat template shows which one it is.

A format is one entry here: its parser, its marks, and texts of which a template in that format has at least one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.server.parse.deepseek_calls import DEEPSEEK_MARKS, KIMI_MARKS, DeepSeekParser, KimiParser
from ridgeline.server.parse.formats import element_calls, list_calls, name_calls
from ridgeline.server.parse.formats.gemma_calls import GEMMA_MARKS, FunctionGemmaParser
from ridgeline.server.parse.harmony import HARMONY_MARKS, HarmonyParser
from ridgeline.server.parse.reasoning import Thought
from ridgeline.server.parse.tool_calls import (
    CallParser,
    HermesParser,
    ListParser,
    LlamaParser,
    MistralParser,
    NamedParser,
    PythonicParser,
    RequiredParser,
)
from ridgeline.server.parse.tool_prompt import knows_tools


@dataclass(frozen=True, slots=True)
class CallFormat:
    parser: type[CallParser]
    marks: tuple[str, ...]           # that may be special tokens; the parser must see them
    signs: tuple[tuple[str, ...], ...]       # a template in this format has all texts of one of these


def _elements(parser: type[element_calls.QwenCoderParser], *signs: str) -> CallFormat:
    return CallFormat(parser, parser.around, (signs,))


def _list(parser: type[list_calls.MarkedListParser] | type[list_calls.OlmoParser], *signs: str) -> CallFormat:
    return CallFormat(parser, (*parser.begins, *parser.ends, *parser.answer), (signs,))


# Formats that models write by themselves. A template's is the first whose signs it has.
FREE: dict[str, CallFormat] = {
    "mistral": CallFormat(MistralParser, ("[TOOL_CALLS]", "[ARGS]"), (("[TOOL_CALLS]",),)),
    "harmony": CallFormat(HarmonyParser, HARMONY_MARKS, (("<|channel|>", "<|message|>"),)),
    "deepseek_v3": CallFormat(DeepSeekParser, DEEPSEEK_MARKS, (DEEPSEEK_MARKS[:1],)),
    "kimi_k2": CallFormat(KimiParser, KIMI_MARKS, (KIMI_MARKS[:1],)),
    "minimax_m2": _elements(element_calls.MiniMaxParser, "<minimax:tool_call>"),
    "seed_oss": _elements(element_calls.SeedParser, "<seed:tool_call>"),
    "dots": _elements(element_calls.DotsParser, "<dots_function_call>"),
    "glm45": _elements(element_calls.GlmParser, "<tool_call>", "<arg_key>"),
    "qwen3_coder": _elements(element_calls.QwenCoderParser, "<tool_call>", "<function=", "<parameter="),
    "apertus": _list(list_calls.ApertusParser, "<|tools_prefix|>"),
    "cohere_command": _list(list_calls.CohereParser, "<|START_ACTION|>"),
    "hunyuan_a13b": _list(list_calls.HunyuanParser, "<tool_calls>["),
    "nemotron_json": _list(list_calls.NemotronParser, "<TOOLCALL>"),
    "olmo3": _list(list_calls.OlmoParser, "<function_calls>"),
    "functiongemma": CallFormat(FunctionGemmaParser, GEMMA_MARKS, (GEMMA_MARKS[:1],)),
    "granite": _list(list_calls.GraniteParser, "<|start_of_role|>", "<|tool_call|>"),
    "hermes": CallFormat(HermesParser, ("<tool_call>", "</tool_call>"), (("<tool_call>",),)),
    "phi4_mini_json": CallFormat(
        list_calls.PhiParser, ("<|tool_call|>", "<|/tool_call|>"),
        (("<|tool|>", "<|/tool|>"), ("<|tool_call|>", "<|/tool_call|>"), ("functools[",)),
    ),
    "minicpm3": CallFormat(name_calls.MiniCPMParser, ("<|tool_call_start|>", "<|tool_call_end|>"), (("<|tool_call_start|>",),)),
    "llama4_pythonic": CallFormat(name_calls.Llama4Parser, ("<|python_start|>", "<|python_end|>"), (("<|python_start|>",),)),
    "functionary_v3_1": CallFormat(name_calls.FunctionaryParser, (), (("start_tag => `<function`",),)),
    "functionary_v3_2": CallFormat(name_calls.RecipientParser, (), ((">>>all",),)),
    "command_r": CallFormat(name_calls.CommandRParser, (), (("followed by a json-formatted list of actions",),)),
    "glm4": CallFormat(name_calls.NameFirstParser, (), (("[gMASK]", "<|observation|>"),)),
    "pythonic": CallFormat(PythonicParser, (), (("func_name1(",), ("[func_name",))),
    "xlam": CallFormat(ListParser, (), (("JSON array", '[{"name": "tool_call_name"'),)),
    "llama3_json": CallFormat(LlamaParser, ("<|python_tag|>",), (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'))),
}
# Their messages say what each part of them is for, with and without tools.
ADDRESSED = ("harmony", "functionary_v3_2")
# What a schema makes a model write.
FORCED: dict[str, type[CallParser]] = {"list": ListParser, "required": RequiredParser, "named": NamedParser}


def parser_of(name: str) -> type[CallParser]:
    return FORCED[name] if name in FORCED else FREE[name].parser


def tool_format(option: str, templates: str) -> str | None:
    """The format of calls: the option's; with auto, the one in the chat template's text, or Hermes' if the template does not
    support tools (server/parse/tool_prompt). None: unknown."""
    if option != "auto":
        return None if option == "none" else option
    for name, form in FREE.items():
        if any(all(text in templates for text in signs) for signs in form.signs):
            return name
    return None if knows_tools(templates) else "hermes"


def needs_plain_text(option: str, templates: str) -> bool:
    """Whether the chat template ignores tools and calls, so that they must be written into the messages."""
    return tool_format(option, templates) == "hermes" and not knows_tools(templates)


# Reasoning at the start of an answer, by the names of the option. A template's is the first whose closing mark and sign it has.
THOUGHTS = {
    "seed_oss": Thought("<seed:think>", "</seed:think>"),
    "mistral": Thought("[THINK]", "[/THINK]"),
    "cohere_command": Thought("<|START_THINKING|>", "<|END_THINKING|>", list_calls.COHERE_ANSWER),
    "granite": Thought(answer=list_calls.GRANITE_ANSWER, sign="<|start_of_role|>"),
    "hunyuan_a13b": Thought(answer=list_calls.HUNYUAN_ANSWER, sign="</answer>"),
    "think": Thought(),
}


def reasoning_format(option: str, templates: str) -> str | None:
    """A name in THOUGHTS: the option's, or with auto the one in the chat template's text."""
    if option != "auto":
        return None if option == "none" else option
    return next((name for name, each in THOUGHTS.items() if each.end in templates and each.sign in templates), None)


def marks_of(calls: str | None, reasoning: str | None) -> tuple[str, ...]:
    """The marks that parsers of these formats look for."""
    thought = THOUGHTS.get(reasoning or "")
    return (*(FREE[calls].marks if calls in FREE else ()), *((thought.begin, thought.end) if thought is not None else ()))
