"""The complete part of a JSON object that was cut while it was written, as clients of streams read it.

Pairs and elements with a complete value are kept, open objects and arrays are closed. A number at the very end counts as
complete. Time is linear in the text, without recursion, and bounded: a client may send megabytes of a cut call back.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ridgeline.server.parse.json_text import MAX_NUMBER

_BLANKS = " \t\r\n"
_AFTER_A_WORD = frozenset(_BLANKS + ",:]}")
_MOST_STEPS = 2**20                  # of values, blanks and marks between them; what comes after them is left out


def is_object(text: str) -> bool:
    """Whether it is a whole JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def completed(text: str) -> dict[str, Any]:
    """Empty if it is not an object, or nothing of it is complete."""
    value = _decoded(text)                               # the usual case, without a Python loop
    if value is None:
        end, closing = _last_complete(text)
        value = _decoded(text[:end] + closing)
    return value if isinstance(value, dict) else {}


def _decoded(text: str) -> Any:
    """None if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _last_complete(text: str) -> tuple[int, str]:
    """(where the last complete value ends, what closes everything that is open there)."""
    is_open: tuple[Any, ...] = ()                        # the innermost closing bracket, then the same for those around it
    complete: tuple[int, tuple[Any, ...]] = (0, ())
    place, is_key = 0, False
    for _ in range(_MOST_STEPS):
        if place >= len(text):
            break
        char = text[place]
        if char in _BLANKS or char in ",:":
            is_key = char == "," and is_open[:1] == ("}",) if char in ",:" else is_key
            place += 1
            continue
        if char in "{[":
            is_open, is_key = ("}" if char == "{" else "]", is_open), char == "{"
            place += 1
        elif char in "}]":
            is_open, is_key = is_open[1] if is_open else (), False
            place += 1
        else:
            place = _end_of_text(text, place) if char == '"' else _end_of_word(text, place)
            if not place:
                break
        if not is_key or char == "{":
            complete = place, is_open
    closing = []
    end, is_open = complete
    while is_open:
        closing.append(is_open[0])
        is_open = is_open[1]
    return end, "".join(closing)


def _end_of_text(text: str, place: int) -> int:
    """The place after its closing quote; 0: there is none."""
    place += 1
    quote = text.find('"', place)
    while quote >= 0:
        escape = text.find("\\", place, quote)
        if escape < 0:
            return quote + 1
        place = escape + 2
        if place > quote:                                # not for every escape: the quote may be far
            quote = text.find('"', place)
    return 0


def _end_of_word(text: str, place: int) -> int:
    """The end of a number, true, false or null; 0: it is incomplete."""
    end = place
    while end < len(text) and text[end] not in _AFTER_A_WORD:
        end += 1
        if end - place > MAX_NUMBER:
            return 0
    try:
        json.loads(text[place:end])
    except ValueError:
        return 0
    return end
