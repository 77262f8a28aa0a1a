"""Tools for a model whose chat template does not support them: written into the messages as plain text, in Hermes' format.

Most clients send tools without knowing whether the model's template can show them. Here tools become a part of the system
message, calls a part of the assistant's text, and results a user's text; server/parse/tool_calls parses the answer as usual.
Messages in, messages out: no prompt, no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ridgeline.errors import BadRequest
from ridgeline.server.parse.partial_json import completed, is_object

_WORD = re.compile(r"\btools\b")
# The words of Gemma's templates, and of the first Mistral and Mixtral ones.
_NO_SYSTEM = re.compile(r"system role (?:is )?not supported|only user and assistant roles are supported!", re.IGNORECASE)

MOST_MENDED = 2**19                  # characters of cut calls that are looked at in one conversation: seconds, for a long one

INTRODUCTION = """You can call functions. Each of these lines describes one:
<tools>
{tools}
</tools>
To call functions, write for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Its result comes back between <tool_response> and </tool_response>. Without a call, answer in words."""


def knows_tools(templates: str) -> bool:
    """Whether a model's chat templates, as one text, do anything with tools."""
    return _WORD.search(templates) is not None


def tells_of_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def in_plain_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], templates: str
) -> list[dict[str, Any]]:
    """The same conversation without tools, tool calls and messages of role tool. Contents become lists of parts, which the
    template gets as one text, a part per line. Parts that are not text stay, and are refused later."""
    made: list[dict[str, Any]] = []
    last_role = ""
    for message in messages:
        role = message["role"]
        if role == "tool":
            result = [_part("<tool_response>"), *_parts(message), _part("</tool_response>")]
            if last_role == "tool":                      # results of parallel calls are one turn
                made[-1]["content"] += result
            else:
                made.append({"role": "user", "content": result})
        elif role == "user" and last_role == "tool":     # so is the user's next text: some templates require turns to alternate
            made[-1]["content"] += _parts(message)
        elif message.get("tool_calls"):
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            calls = [_part(_call(call["function"])) for call in message["tool_calls"]]
            made.append(rest | {"content": [*_parts(message), *calls]})
        else:
            made.append(dict(message))
        last_role = role
    if tools:
        _introduce(made, tools, has_system=_NO_SYSTEM.search(templates) is None)
    return made


def mended(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For templates that read arguments as an object: arguments that are not valid JSON keep their complete part. Clients send a
    cut or malformed call back with the conversation, which must not fail because of it."""
    left = MOST_MENDED
    made = [{**message} for message in messages]
    for message in (each for each in made if each.get("tool_calls")):
        calls = []
        for call in message["tool_calls"]:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str) and arguments and not is_object(arguments):
                arguments, left = completed(arguments[:left]), max(0, left - len(arguments))
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        message["tool_calls"] = calls
    return made


def _introduce(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], has_system: bool) -> None:
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    text = _part(INTRODUCTION.format(tools=lines))
    first = messages[0]
    if first["role"] == "system":
        first["content"] = [*_parts(first), _part(""), text]
        return
    user = next((message for message in messages if message["role"] == "user"), None)
    if has_system or user is None:
        messages.insert(0, {"role": "system", "content": [text]})
    else:
        user["content"] = [text, _part(""), *_parts(user)]


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):       # text that is not JSON stays as the model wrote it
            arguments = json.loads(arguments or "{}")
    return f"<tool_call>\n{_json({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def _json(value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise BadRequest("messages and tools are nested too deep", field="messages") from None


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [_part(content)] if content else []


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
