"""What single chat templates expect of messages, read from their text: most take strings and objects, some do not.

    DeepSeek-V3, R1     a message with calls is known by a content of null, and arguments are JSON text that is joined with "+"
    Mistral, Kimi, …    the parts of a message are written one behind the other, without a line break between them
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NULL_CONTENT = re.compile(r"""['"]assistant['"]\s+and\s+message(\[['"]content['"]\]|\.content)\s+is\s+none""")
_JOINED_ARGUMENTS = re.compile(r"""\+\s*\w+(\[['"]function['"]\]|\.function)(\[['"]arguments['"]\]|\.arguments)(?!\s*\|)""")


def adapt_calls(source: str, conversation: Sequence[dict[str, Any]]) -> None:
    """Change messages with calls to what this template expects of them."""
    null_content, joined = (each.search(source) is not None for each in (_NULL_CONTENT, _JOINED_ARGUMENTS))
    for message in conversation:
        calls = message.get("tool_calls")
        if not calls:
            continue
        if null_content and not message["content"]:
            message["content"] = None
        if joined:
            for call in calls:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)


def parts_of(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """The parts of a user's message that has several, all of them text; empty: it has one."""
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, list | tuple) or len(content) < 2:
        return []
    return [{"type": "text", "text": part if isinstance(part, str) else part["text"]} for part in content]


def with_parts(conversation: Sequence[Mapping[str, Any]], parts: Mapping[int, Any]) -> list[dict[str, Any]]:
    """The conversation with these contents, by the places of messages."""
    return [{**message, "content": parts.get(place, message["content"])} for place, message in enumerate(conversation)]


def probes(places: Iterable[int]) -> dict[int, list[dict[str, str]]]:
    """Parts whose rendered text shows whether a template takes parts in the messages at these places."""
    return {place: [{"type": "text", "text": text} for text in _probe_texts(place)] for place in places}


def shows_parts(rendered: str, places: Iterable[int]) -> bool:
    """Whether a template has taken all parts of `probes` as texts, and did not print them as objects."""
    for place in places:
        first, last = (rendered.find(text) for text in _probe_texts(place))
        if not 0 <= first < last or "type" in rendered[first:last]:
            return False
    return True


def _probe_texts(place: int) -> tuple[str, str]:
    return f"first-of-message-{place}-parts", f"last-of-message-{place}-parts"
