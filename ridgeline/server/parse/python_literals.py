"""Python's keyword arguments as JSON: numbers, texts, lists, dicts. Read by hand from a model's text; nothing is ever run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ridgeline.sampling_params import is_unicode
from ridgeline.server.parse.incremental import BLANKS, Malformed
from ridgeline.server.parse.json_text import MAX_NUMBER

MAX_DEPTH = 64

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}


def json_arguments(text: str) -> str:
    """`a=1, b="x"` as a JSON object; Malformed when it is anything but keywords and literals."""
    return _Literals(text).arguments()


def literal(text: str) -> Any:
    """The value of one literal; Malformed when `text` is anything else."""
    reader = _Literals(text)
    value = reader.value()
    if not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise Malformed
    return value


class _Literals:

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def arguments(self) -> str:
        found: dict[str, Any] = {}
        while self._peek():
            name = self._word()
            if not name or name in found or self._peek() != "=":
                raise Malformed
            self._place += 1
            found[name] = self._value(0)
            if not self._peek():
                break
            self._expect(",")
        try:
            written = json.dumps(found, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise Malformed from None
        if not is_unicode(written):
            raise Malformed
        return written

    def value(self) -> Any:
        found = self._value(0)
        if self._peek():
            raise Malformed
        return found

    def _peek(self) -> str:
        text = self._text
        while self._place < len(text) and text[self._place] in BLANKS:
            self._place += 1
        return text[self._place : self._place + 1]

    def _expect(self, char: str) -> None:
        if self._peek() != char:
            raise Malformed
        self._place += 1

    def _word(self, also: str = "_") -> str:
        self._peek()
        begin = self._place
        while self._place < len(self._text) and (self._text[self._place].isalnum() or self._text[self._place] in also):
            self._place += 1
        return self._text[begin : self._place]

    def _value(self, depth: int) -> Any:
        char = self._peek()
        if depth > MAX_DEPTH or not char:
            raise Malformed
        if char in "\"'":
            text = self._string(char)
            while (next_quote := self._peek()) and next_quote in "\"'":      # "a" "b" is "ab"
                text += self._string(next_quote)
            return text
        if char in "[(":
            return self._items("]" if char == "[" else ")", lambda: self._value(depth + 1))
        if char == "{":
            return dict(self._items("}", lambda: self._pair(depth + 1)))
        word = self._word(also="_+-.")
        constants = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
        if word in constants:
            return constants[word]
        if len(word) > MAX_NUMBER or "I" in word or "N" in word:
            raise Malformed
        try:
            return json.loads(word.removeprefix("+"))
        except ValueError:
            raise Malformed from None

    def _items(self, closing: str, read: Callable[[], Any]) -> list[Any]:
        self._place += 1
        items = []
        while self._peek() != closing:
            items.append(read())
            if self._peek() != closing:
                self._expect(",")
        self._place += 1
        return items

    def _pair(self, depth: int) -> tuple[str, Any]:
        char = self._peek()
        if not char or char not in "\"'":
            raise Malformed
        key = self._string(char)
        self._expect(":")
        return key, self._value(depth)

    def _string(self, quote: str) -> str:
        pieces: list[str] = []
        self._place += 1
        while True:
            char = self._text[self._place : self._place + 1]
            self._place += 1
            if not char:
                raise Malformed
            if char == quote:
                return "".join(pieces)
            pieces.append(self._escaped() if char == "\\" else char)

    def _escaped(self) -> str:
        char = self._text[self._place : self._place + 1]
        self._place += 1
        if char in _ESCAPES:
            return _ESCAPES[char]
        length = {"x": 2, "u": 4, "U": 8}.get(char)
        if length is None:
            return f"\\{char}"                           # as Python reads an escape it does not know
        digits = self._text[self._place : self._place + length]
        if len(digits) != length or not all(each in "0123456789abcdefABCDEF" for each in digits):
            raise Malformed
        self._place += length
        code = int(digits, 16)
        if code > 0x10FFFF:
            raise Malformed
        return chr(code)
