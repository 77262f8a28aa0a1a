"""Tools: a request's tools and tool_choice, the schema that enforces calls, and the parser for the answer.

The chat template, or an option, decides the format in which a model writes its calls. If calls are required (`required`, or
one function by name), the answer is constrained: to a grammar of the model's own format where arguments are elements
(formats/element_grammar), else to a JSON schema made here. The parsers are in server/parse/tool_calls and server/parse/reasoning.
Knows no prompts and no HTTP.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.errors import BadRequest, Unsupported, shown
from ridgeline.grammar.llguidance_schema import rewritten
from ridgeline.sampling_params import MAX_SCHEMA_DEPTH, SamplingParams, StructuredOutputs
from ridgeline.server.api.generation import structured_outputs
from ridgeline.server.options import ServerOptions
from ridgeline.server.parse.closed_schema import closed
from ridgeline.server.parse.formats.element_grammar import FORMS, calls_rules
from ridgeline.server.parse.formats.known_formats import (
    ADDRESSED,
    FREE,
    THOUGHTS,
    marks_of,
    parser_of,
    reasoning_format,
    tool_format,
)
from ridgeline.server.parse.one_of import Budget
from ridgeline.server.parse.reasoning import MessageParser, ReasoningParser, Thought
from ridgeline.server.parse.tool_calls import CallParser
from ridgeline.text.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_NAME = 128                       # Anthropic's limit; OpenAI's is 64, but a name here may have its namespace before it
TAIL_TOKENS = 8                      # at the end of a prompt that are searched for "<think>"

_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")


# -- what a request says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, checked. `mode` is none, auto, required or named; named has one tool."""

    mode: str = "none"
    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the functions' arguments, as given, by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    def schema(self) -> dict[str, Any] | None:
        """The schema of the whole answer, if calls are required."""
        if self.mode == "named":
            return parameters(self.tools[0])
        return calls_schema(self.tools, self.parallel) if self.mode == "required" else None


def tool_use(tools: Sequence[Any] | None, choice: Any, parallel: bool) -> ToolUse:
    """BadRequest names the fault. Tools that may not be called are left out: the model does not see them."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice needs tools", field="tool_choice")
        return ToolUse()
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", field="tools")
    plain = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in plain]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise BadRequest(f"tools has two functions with the name {shown(twice)}", field="tools")
    mode, wanted = _choice(choice, names)
    if mode == "none":
        return ToolUse()
    callable_ones = frozenset(wanted)
    return ToolUse(mode, tuple(tool for tool in plain if tool["function"]["name"] in callable_ones), parallel)


def _choice(choice: Any, names: list[str]) -> tuple[str, Iterable[str]]:
    """(mode, names of the functions that may be called)."""
    known = '"none", "auto", "required", {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …}'
    match choice:
        case None:
            return "auto", names
        case "none" | "auto" | "required":
            return choice, names
        case "any":                                      # Mistral's word
            return "required", names
        case {"function": {"name": str(name)} as function} if choice.get("type", "function") == "function":
            only(choice, "tool_choice", "type", "function")      # without a type as huggingface_hub sends it, and vLLM takes it
            only(function, "tool_choice.function", "name")
            return "named", _known([name], names)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)} as allowed}:
            only(choice, "tool_choice", "type", "allowed_tools")
            only(allowed, "tool_choice.allowed_tools", "mode", "tools")
            if not tools:
                message = "tool_choice.allowed_tools.tools must name at least one function"
                raise BadRequest(message, field="tool_choice.allowed_tools.tools")
            return mode, _known([_name_of(each, place) for place, each in enumerate(tools)], names)
    raise BadRequest(f"tool_choice must be one of {known}; got {shown(choice)}", field="tool_choice")


def only(given: Mapping[str, Any], where: str, *names: str) -> None:
    """BadRequest for any other field."""
    for name in given:
        if name not in names:
            raise BadRequest(f"{where} has the unknown field {shown(name)}", field=where)


def _name_of(allowed: Any, place: int) -> Any:
    where = f"tool_choice.allowed_tools.tools[{place}]"
    match allowed:
        case {"type": "function", "function": {"name": name} as function}:
            only(allowed, where, "type", "function")
            only(function, f"{where}.function", "name")
            return name
    message = f"tool_choice.allowed_tools.tools must hold functions by their names; got {shown(allowed)}"
    raise BadRequest(message, field="tool_choice.allowed_tools.tools")


def _known(given: list[Any], names: list[str]) -> list[str]:
    known = frozenset(names)
    for name in given:
        if not isinstance(name, str) or name not in known:
            message = f"tool_choice names the function {shown(name)}, which is not among the tools"
            raise BadRequest(message, field="tool_choice")
    return given


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "function"):
            raise Unsupported(f"{where}.type {shown(kind)} is not supported; only 'function' is", field=f"{where}.type")
        raise BadRequest(f"{where} must be an object with type 'function' and a function", field=where)
    only(tool, where, "type", "function", "strict", *HINTS)
    if tool.get("type", "function") != "function":
        raise Unsupported(f"{where}.type {shown(tool['type'])} is not supported; only 'function' is", field=f"{where}.type")
    function = tool["function"]
    if function.get("strict") is None and "strict" in tool:      # some clients have it a level higher, as the Responses API does
        function = {**function, "strict": tool["strict"]}
    return {"type": "function", "function": plain_function(function, f"{where}.function")}


HINTS = ("cache_control", "defer_loading")               # of a tool or its function; ignored here


def plain_function(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    only(function, where, "name", "description", "parameters", "strict", "return", *HINTS)
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not _NAME_CHARACTERS.issuperset(name):
        message = f"{where}.name must be 1 to {MAX_NAME} letters, digits, dots, underscores and dashes; got {shown(name)}"
        raise BadRequest(message, field=f"{where}.name")
    if not isinstance(function.get("description", ""), str | None):
        raise BadRequest(f"{where}.description must be a text", field=f"{where}.description")
    if not isinstance(function.get("parameters", {}), Mapping | None):
        message = f"{where}.parameters must be a JSON schema; got {shown(function['parameters'])}"
        raise BadRequest(message, field=f"{where}.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise BadRequest(f"{where}.strict must be true or false; got {shown(function['strict'])}", field=f"{where}.strict")
    return {key: value for key, value in function.items() if value is not None and key not in HINTS}


# -- schemas -----------------------------------------------------------------------------------------------------------


def parameters(tool: Mapping[str, Any], budget: Budget | None = None) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object; without `parameters` it has none. `budget`: of all tools."""
    given = tool["function"].get("parameters")
    schema = {"properties": {}} if given is None else dict(given)
    if "type" not in schema and not {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema["type"] = "object"
    return closed(schema, budget)


def calls_schema(tools: Sequence[Mapping[str, Any]], parallel: bool = True) -> dict[str, Any]:
    """A list of calls, at least one, as JSON."""
    definitions: dict[str, Any] = {}
    calls, budget = [], Budget()
    for place, tool in enumerate(tools):
        definitions[f"tool{place}"] = moved(parameters(tool, budget), f"#/$defs/tool{place}")
        calls.append({
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "parameters": {"$ref": f"#/$defs/tool{place}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        })
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "items": items, "minItems": 1, "$defs": definitions}
    if not parallel:
        schema["maxItems"] = 1
    return schema


def answer_or_calls_schema(answer: Mapping[str, Any], use: ToolUse) -> dict[str, Any]:
    """An answer of that schema, or a list of calls."""
    calls = calls_schema(use.tools, use.parallel)
    definitions = calls.pop("$defs")
    definitions["answer"] = moved(dict(answer), "#/$defs/answer")
    return {"anyOf": [calls, {"$ref": "#/$defs/answer"}], "$defs": definitions}


def moved(schema: Any, to: str) -> Any:
    """A schema for the place `to` instead of the root, with its references adapted."""
    try:
        return _moved(schema, to)
    except RecursionError:
        raise BadRequest(f"tools has a schema that is nested more than {MAX_SCHEMA_DEPTH} deep", field="tools") from None


def _moved(schema: Any, to: str) -> Any:
    if isinstance(schema, Mapping):
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str) and value.startswith("#"):
                made[key] = to + value[1:]
            elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
                made[key] = {name: _moved(each, to) for name, each in value.items()}     # names, not keywords
            else:
                made[key] = value if key in ("enum", "const", "default", "examples") else _moved(value, to)
        return made
    return [_moved(each, to) for each in schema] if isinstance(schema, list) else schema


AFTER_REASONING = ("json", "json_object", "choice")


def after_reasoning(
    asked: StructuredOutputs, inside: bool, thought: Thought, special: Sequence[int] = ()
) -> StructuredOutputs:
    """The same grammar with reasoning before it, in Lark. `inside`: the prompt has opened the reasoning; `special`: the ids of
    its marks, if they are special tokens, which a grammar's text cannot match."""
    if asked.choice is not None:
        answer = " | ".join(json.dumps(text) for text in asked.choice)
    else:
        schema = rewritten(json.loads(asked.json)) if isinstance(asked.json, str) else {"type": "object"}
        blanks = {"whitespace_flexible": False} if asked.disable_any_whitespace else {"whitespace_pattern": _BLANKS}
        answer = "%json " + json.dumps({**schema, "x-guidance": blanks})
    return structured_outputs("response_format", grammar=_behind_reasoning(f"answer: {answer}", inside, thought, special))


def _behind_reasoning(rules: str, inside: bool, thought: Thought, special: Sequence[int]) -> str:
    """`rules`: of `answer`."""
    if len(special) == 2:
        begin = "" if inside else f"<[{special[0]}]> "
        reasoning, rule = f"({begin}text <[{special[1]}]>)", "text: /(.|\\n)*/"
    else:
        begin = "" if inside else rf"[ \t\r\n]*{_escaped(thought.begin)}"
        reasoning, rule = "text", rf"text[lazy]: /{begin}(.|\n)*{_escaped(thought.end)}/"
    start = f"start: {reasoning}{'' if inside else '?'} BLANKS answer"
    return "\n".join(["%llguidance {}", start, rule, r"BLANKS: /[ \t\r\n]{0,8}/", rules])


def _escaped(mark: str) -> str:
    return re.escape(mark).replace("/", r"\/")


_BLANKS = r"[ \t]{1,8}|\r?\n[ \t]{0,40}"                  # between the parts of JSON, as without reasoning


# -- which parser ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reading:
    """How the answers to one request are parsed."""

    format: str | None = None        # of known_formats
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)     # of arguments, by the functions' names; {}: not needed
    learned: dict[str, Any] = field(default_factory=dict)                # of these schemas, by the parsers of all answers
    most_calls: int | None = None
    reasoning: str | None = None     # a name in THOUGHTS
    inside: bool = False             # the prompt has opened the reasoning
    short_ids: bool = False          # Mistral's templates accept only ids of nine characters
    required: str = ""               # rules of required calls in the model's own format, which hold after the reasoning

    @property
    def parses(self) -> bool:
        """Whether a text may have other parts than content."""
        return self.format is not None or self.reasoning is not None

    def parser(self) -> MessageParser | None:
        """For one answer; None if all of its text is content."""
        if not self.parses:
            return None
        calls: CallParser | None = None
        if self.format is not None:
            calls = parser_of(self.format)(self.schemas, self.most_calls, self.schemas, self.learned)
        reasoning: ReasoningParser | None = None
        if self.reasoning is not None:
            thought = THOUGHTS[self.reasoning]
            reasoning = ReasoningParser(self.inside, thought, thought.answer if calls is None else ())
        return MessageParser(reasoning, calls)

    def new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def follow(self, prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer) -> None:
        """Look at the prompt's end: a template may open the reasoning, so that the answer begins inside it, or close it at once.
        A grammar of `params` applies after the reasoning."""
        if self.reasoning is None:
            return
        thought = THOUGHTS[self.reasoning]
        tail = tokenizer.decode(list(prompt[-TAIL_TOKENS:])).rstrip()
        self.inside = tail.endswith(thought.begin)
        asked = params.structured_outputs
        if asked is not None and (asked.kind in AFTER_REASONING or self.required) and not tail.endswith(thought.end):
            marks = [tokenizer.token_id(mark) for mark in (thought.begin, thought.end)]
            special = tuple(mark for mark in marks if mark in tokenizer.special_ids)
            params.structured_outputs = after_reasoning(asked, self.inside, thought, special) if not self.required else (
                structured_outputs("tools", grammar=_behind_reasoning(self.required, self.inside, thought, special)))


def reading(use: ToolUse, params: SamplingParams, options: ServerOptions, tokenizer: Tokenizer | None) -> Reading:
    """BadRequest if calls could not be parsed from the answer. Sets `params` so that mark tokens are shown and strict tools keep
    their schemas."""
    if tokenizer is None:
        if use.mode == "auto":
            raise BadRequest("tools need a tokenizer, and skip_tokenizer_init is set", field="tools")
        return Reading()
    templates = "\n".join(tokenizer.chat_templates.values())
    form = tool_format(options.tool_call_parser, templates)
    asked = params.structured_outputs
    made = Reading(most_calls=None if use.parallel else 1, short_ids=form == "mistral")
    # Other grammars apply from the first token on: no reasoning comes before them.
    free = asked is None or asked.kind in (*AFTER_REASONING, "structural_tag")
    if free:
        made.reasoning = reasoning_format(options.reasoning_parser, templates)
    made.format = _answer_format(use, asked, form)
    if made.format in ("named", "required") and form in FORMS:
        _require_in_own_format(made, use, form, params, tokenizer)
    made.schemas = _schemas(use, made.format)
    if made.format is None and form in ADDRESSED and asked is None:
        made.format, made.schemas = form, {}             # no functions: what is for the user is all that there is
    if any(tokenizer.token_id(mark) in tokenizer.special_ids for mark in marks_of(made.format, made.reasoning)):
        params.skip_special_tokens = False
    elif made.format == "hermes" and any(tool["function"].get("strict") for tool in use.tools):
        params.structured_outputs = structured_outputs("tools", structural_tag=strict_calls(use.tools))
    return made


def _require_in_own_format(made: Reading, use: ToolUse, form: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Models answer better in the form that they were trained on. Where their format cannot say the schemas, it stays JSON."""

    def special(mark: str) -> int | None:
        found = tokenizer.token_id(mark)
        return found if found in tokenizer.special_ids else None

    budget = Budget()
    closed_schemas = {tool["function"]["name"]: parameters(tool, budget) for tool in use.tools}
    rules = calls_rules(form, closed_schemas, use.mode == "required" and use.parallel, special)
    if rules is not None:
        made.format, made.required = form, rules
        params.structured_outputs = structured_outputs("tools", grammar=f"%llguidance {{}}\nstart: answer\n{rules}")


def _schemas(use: ToolUse, form: str | None) -> dict[str, dict[str, Any]]:
    """By the functions' names; empty ones where the format shows the types of arguments by itself."""
    if form is not None and parser_of(form).needs_schemas:
        return use.schemas
    return {name: {} for name in use.names}


def _answer_format(use: ToolUse, asked: StructuredOutputs | None, form: str | None) -> str | None:
    """A name of known_formats; None: no calls. `form`: the model's own format."""
    if use.mode in ("named", "required"):
        return use.mode
    if use.mode != "auto":
        return None
    if asked is not None:
        return "list"
    if form is None:
        raise BadRequest(
            "tools with tool_choice 'auto' need a known format of calls, and the chat template has another; start the "
            f"server with --tool-call-parser ({', '.join(FREE)}), or set tool_choice to 'required' or one function",
            field="tools",
        )
    return form


def strict_calls(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Free text in which each Hermes call is to one of these tools, with the schema enforced for strict ones.

    Only for marks that are ordinary text: a grammar's free text cannot contain special tokens, so there would be no calls.
    """
    structures, budget = [], Budget()
    for tool in tools:
        schema = parameters(tool, budget) if tool["function"].get("strict") else {"type": "object"}
        begin = f'<tool_call>\n{{"name": {json.dumps(tool["function"]["name"])}, "arguments": '
        structures.append({"begin": begin, "schema": schema, "end": "}\n</tool_call>"})
    return {"triggers": ["<tool_call>"], "structures": structures}
