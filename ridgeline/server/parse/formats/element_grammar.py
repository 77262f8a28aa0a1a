"""Grammars of required calls in a model's own format, for formats whose arguments are elements (element_calls.py).

Rules in Lark as llguidance takes it: names of functions and arguments are those of the tools, in the order of the schema. A text
is free up to the mark behind it; what cannot be a text is JSON of its own schema. The rule `answer` stands for all calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.grammar.llguidance_schema import rewritten
from ridgeline.server.parse.formats.argument_types import TEXT, ArgumentTypes

MOST_BYTES = 48 * 1024               # of the rules; longer ones are required as JSON
_MARK = re.compile(r"</?[a-z_:]+>")
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
    if form is None or not all(_can_be_elements(schema) for schema in tools.values()):
        return None
    writer = _Writer(form, special)
    calls = " | ".join(writer.call(place, name, schema) for place, (name, schema) in enumerate(tools.items()))
    begin, end = writer.text(form.open), writer.text(form.close)
    one = f"({calls})" if form.together else f"({begin} ({calls}) {end})"
    more = f'("\\n"? {one})*' if several else ""
    answer = f"{begin} {one} {more} {end}" if form.together else f"{one} {more}"
    rules = "\n".join([f"answer: {answer}", *writer.rules])
    return rules if len(rules.encode()) <= MOST_BYTES else None


def _can_be_elements(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", ())
    if not isinstance(properties, Mapping) or schema.keys() - _KNOWN or not set(required) <= properties.keys():
        return False
    if not all(_PLAIN_NAME.fullmatch(name) for name in properties):
        return False
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(properties))
    return all(each.startswith(("#/$defs/", "#/definitions/")) for each in references)


class _Writer:
    def __init__(self, form: ElementForm, special: Callable[[str], int | None]) -> None:
        self.form, self.special = form, special
        self.rules: list[str] = []
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

    def call(self, place: int, name: str, schema: Mapping[str, Any]) -> str:
        """The name of the rule of calls to one function."""
        types, required = ArgumentTypes(schema), schema.get("required", ())
        parts = [self.text(self.form.call.format(name))]
        for number, (key, given) in enumerate(schema["properties"].items()):
            rule = f"argument{place}_{number}"
            self.rules.append(f'{rule}: {self.text(self.form.key.format(key))} {self._value(given, types.of(key), schema)} "\\n"')
            parts.append(rule if key in required else rule + "?")
        if self.form.close_call:
            parts.append(self.text(self.form.close_call))
        self.rules.append(f"call{place}: {' '.join(parts)}")
        return f"call{place}"

    def _value(self, given: Any, types: frozenset[str], root: Mapping[str, Any]) -> str:
        """A value and the mark behind it."""
        end, choices = self.text(self.form.end), _choices(given)
        if types == TEXT and choices:
            return f"({' | '.join(json.dumps(each) for each in choices)}) {end}"
        if "string" in types:                            # quotes would be part of it
            return "bare"
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        schema = rewritten({**given, **shared} if isinstance(given, Mapping) else {})
        return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})} {end}"


def _choices(given: Any) -> Sequence[str]:
    """Of a text that is one of a few; empty: it is any, or one of them is empty, which no literal can be."""
    if not isinstance(given, Mapping):
        return ()
    listed = given.get("enum", [given["const"]] if "const" in given else [])
    texts = [each for each in listed if isinstance(each, str) and each] if isinstance(listed, list) else []
    return texts if len(texts) == len(listed) else ()
