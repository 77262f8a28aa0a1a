"""Grammars of required calls in a model's own format, for formats whose arguments are elements (element_calls.py).

Rules in Lark as llguidance takes it: names of functions and arguments are those of the tools, in the order of the schema. A text
is free up to the mark behind it, or one of a few; what cannot be a text is JSON of its own schema. A text that is limited in
another way would not be enforced: its tools are required as JSON. The rule `answer` stands for all calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.grammar.llguidance_schema import NOTES, rewritten
from ridgeline.server.parse.formats.argument_types import TEXT, ArgumentTypes

MOST_BYTES = 48 * 1024               # of the rules; longer ones are required as JSON
_MARK = re.compile(r"</?[a-z_:]+>")
_MOST_REFERENCES = 8                 # in a chain
_PLAIN_NAME = re.compile(r"[^<>\"'&\s]+")
# What a schema of arguments may have beside its properties; another keyword would not be enforced here.
_KNOWN = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "title",
                    "description"})


@dataclass(frozen=True, slots=True)
class ElementForm:
    """The texts of a call, as the chat templates of its models write them."""

    open: str
    call: str                        # {}: the function's name
    key: str                         # {}: the argument's name
    end: str                         # behind a value
    close_call: str
    close: str
    together: bool = False           # all calls lie between one `open` and one `close`


FORMS = {
    "qwen3_coder": ElementForm(
        "<tool_call>\n", "<function={}>\n", "<parameter={}>\n", "\n</parameter>", "</function>\n", "</tool_call>"),
    "seed_oss": ElementForm(
        "<seed:tool_call>\n", "<function={}>\n", "<parameter={}>", "</parameter>", "</function>\n", "</seed:tool_call>"),
    "minimax_m2": ElementForm(
        "<minimax:tool_call>\n", '<invoke name="{}">\n', '<parameter name="{}">', "</parameter>", "</invoke>\n",
        "</minimax:tool_call>", together=True),
    "dots": ElementForm(
        "<dots_function_call>\n", '<invoke name="{}">\n', '<parameter name="{}">', "</parameter>", "</invoke>\n",
        "</dots_function_call>", together=True),
    "glm45": ElementForm("<tool_call>", "{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "", "</tool_call>"),
}


def calls_rules(
    format: str, tools: Mapping[str, Mapping[str, Any]], several: bool, special: Callable[[str], int | None]
) -> str | None:
    """Lark rules of `answer`: at least one call, or exactly one. `tools`: the closed schemas of arguments, by names; `special`:
    of a mark that is a special token, which text cannot match, its id. None: a schema is beyond what elements can say."""
    form = FORMS.get(format)
    if form is None:
        return None
    arguments = {name: _Arguments(schema, form) for name, schema in tools.items()}
    if not all(each.can_be_elements() for each in arguments.values()):
        return None
    writer = _Writer(form, special)
    try:
        calls = " | ".join(writer.call(place, name, each) for place, (name, each) in enumerate(arguments.items()))
    except _TooLong:
        return None
    begin, end = writer.text(form.open), writer.text(form.close)
    one = f"({calls})" if form.together else f"({begin} ({calls}) {end})"
    more = f'("\\n"? {one})*' if several else ""
    answer = f"{begin} {one} {more} {end}" if form.together else f"{one} {more}"
    rules = "\n".join([f"answer: {answer}", *writer.rules])
    return rules if len(rules.encode()) <= MOST_BYTES else None


class _TooLong(Exception):
    """The rules have more bytes than they may."""


class _Arguments:
    """Those of one function."""

    def __init__(self, schema: Mapping[str, Any], form: ElementForm) -> None:
        self.schema = schema
        self.types = ArgumentTypes(schema)
        self.required = schema.get("required") or []     # some clients write null for none
        self._ends = form.end.strip(), form.key.partition("{}")[0]       # a reader takes them for the end of a text
        # By the identity of parts of the schema: a thousand references may lead to one.
        self._free: dict[int, bool] = {}
        self._listed: dict[int, Sequence[str]] = {}

    def can_be_elements(self) -> bool:
        properties = self.schema.get("properties")
        if not isinstance(properties, Mapping) or self.schema.keys() - _KNOWN or not isinstance(self.required, list):
            return False
        if not all(isinstance(name, str) and name in properties for name in self.required):
            return False
        if not all(_PLAIN_NAME.fullmatch(name) for name in properties):
            return False
        references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(properties))
        if not all(each.startswith(("#/$defs/", "#/definitions/")) for each in references):
            return False
        types = self.types
        return all("string" not in types.of(name) or self._is_free(given)
                   or (types.of(name) == TEXT and self.choices(given)) for name, given in properties.items())

    def _resolved(self, given: Any) -> Any:
        """What a schema refers to; None where that is no schema. One that says more beside its reference stays as it is."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(given, Mapping) or given.keys() - NOTES != {"$ref"}:
                return given
            given = self.types.references.target(given["$ref"])
        return None

    def _is_free(self, given: Any) -> bool:
        """Whether a schema limits nothing but the type, so that any text is valid where one is."""
        found = self._resolved(given)
        if id(found) not in self._free:
            self._free[id(found)] = self._limits_nothing(found)
        return self._free[id(found)]

    def _limits_nothing(self, given: Any) -> bool:
        if not isinstance(given, Mapping):
            return given is True
        branches = given.get("anyOf")
        if isinstance(branches, list) and given.keys() - NOTES == {"anyOf"}:     # as pydantic writes a text or none
            resolved = map(self._resolved, branches)
            return all(isinstance(each, Mapping) and not each.keys() - NOTES - {"type"} for each in resolved)
        return not given.keys() - NOTES - {"type"}

    def choices(self, given: Any) -> Sequence[str]:
        """Of a text that is one of a few; empty: it is any, or one of them cannot be written: it is empty, which no literal can
        be, or it has what a reader takes for the value's end."""
        found = self._resolved(given)
        if id(found) not in self._listed:
            self._listed[id(found)] = self._choices(found)
        return self._listed[id(found)]

    def _choices(self, found: Any) -> Sequence[str]:
        said = found.keys() - NOTES - {"type"} if isinstance(found, Mapping) else ()
        if said not in ({"enum"}, {"const"}):
            return ()
        listed = found["enum"] if said == {"enum"} else [found["const"]]
        if not isinstance(listed, list) or not all(isinstance(each, str) and each for each in listed):
            return ()
        return () if any(end in each for end in self._ends for each in listed) else listed


class _Writer:
    def __init__(self, form: ElementForm, special: Callable[[str], int | None]) -> None:
        self.form, self.special = form, special
        self.rules: list[str] = []
        self._left = MOST_BYTES                          # that the rules of arguments may still have
        mark = special(form.end.strip())
        if mark is None:
            escaped = re.escape(form.end).replace("/", r"\/").replace("\\\n", r"\n")
            self.rules.append(rf"bare[lazy]: /(.|\n)*{escaped}/")
        else:
            self.rules += ["bare: free " + f"<[{mark}]>", r"free: /(.|\n)*/"]

    def text(self, text: str) -> str:
        """A sequence of Lark's literals; marks that are special tokens by their ids."""
        found, last = [], 0
        for mark in _MARK.finditer(text):
            number = self.special(mark[0])
            if number is not None:
                found += [json.dumps(text[last : mark.start()])] * (mark.start() > last) + [f"<[{number}]>"]
                last = mark.end()
        return " ".join(found + [json.dumps(text[last:])] * (len(text) > last))

    def call(self, place: int, name: str, arguments: _Arguments) -> str:
        """The name of the rule of calls to one function."""
        required = frozenset(arguments.required)
        parts = [self.text(self.form.call.format(name))]
        for number, (key, given) in enumerate(arguments.schema["properties"].items()):
            rule = f"argument{place}_{number}"
            self._add(f'{rule}: {self.text(self.form.key.format(key))} {self._value(key, given, arguments)} "\\n"')
            parts.append(rule if key in required else rule + "?")
        if self.form.close_call:
            parts.append(self.text(self.form.close_call))
        self.rules.append(f"call{place}: {' '.join(parts)}")
        return f"call{place}"

    def _add(self, rule: str) -> None:
        """Each rule may have all definitions of its schema, and all choices of one of them."""
        self.rules.append(rule)
        self._left -= len(rule)
        if self._left < 0:
            raise _TooLong

    def _value(self, key: str, given: Any, arguments: _Arguments) -> str:
        """A value and the mark behind it."""
        end = self.text(self.form.end)
        if "string" in arguments.types.of(key):          # quotes would be part of it
            choices = arguments.choices(given)
            return f"({' | '.join(json.dumps(each) for each in choices)}) {end}" if choices else "bare"
        root = arguments.schema
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        schema = rewritten({**given, **shared} if isinstance(given, Mapping) else {})
        return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})} {end}"
