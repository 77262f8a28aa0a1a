"""JSON values in a model's text, read while it is written and passed on as they are read.

Common mistakes of models are mended: line breaks in strings, escapes that JSON does not have. Which values are tool calls is
decided in server/parse/tool_calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ridgeline.sampling_params import is_unicode
from ridgeline.server.parse.incremental import BLANKS, Machine, Malformed, Reads

MAX_WORD = 512                       # characters of a function's name or a header
MAX_NUMBER = 4_300                   # characters: no longer integers are read by Python's json

_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(32)}    # JSON has them escaped only


class JsonMachine(Machine):
    def _unexpected(self, char: str) -> Malformed:
        self._unread(char)
        return Malformed()

    def _value(self, sink: Callable[[str], None]) -> Reads[None]:
        """One JSON value, passed to `sink` as it is read. An explicit stack: depth costs no recursion."""
        stack: list[str] = []                            # the brackets that will close what is open
        state = "value"
        while state != "after" or stack:
            char = yield from self._char()
            if not char:
                raise Malformed
            if char in BLANKS:
                sink(char)
                continue
            if stack and char == stack[-1] and state in ("after", "first"):
                stack.pop()
                sink(char)
                state = "after"
            elif state == "after" and char == ",":
                sink(char)
                state = "key" if stack[-1] == "}" else "value"
            elif state == "colon" and char == ":":
                sink(char)
                state = "value"
            elif state == "key" or (state == "first" and stack[-1] == "}"):
                yield from self._key(char, sink)
                state = "colon"
            elif state in ("value", "first"):
                state = yield from self._value_from(char, sink, stack)
            else:
                raise self._unexpected(char)

    def _key(self, char: str, sink: Callable[[str], None]) -> Reads[None]:
        if char != '"':
            raise self._unexpected(char)
        yield from self._string(sink)

    def _value_from(self, char: str, sink: Callable[[str], None], stack: list[str]) -> Reads[str]:
        """A value's first character: all of a string or scalar is read, a bracket is opened. Returns the next state."""
        if char in "{[":
            sink(char)
            stack.append("}" if char == "{" else "]")
            return "first"
        if char == '"':
            yield from self._string(sink)
        elif char in "-0123456789tfn":
            yield from self._scalar(char, sink)
        else:
            raise self._unexpected(char)
        return "after"

    def _string(self, sink: Callable[[str], None]) -> Reads[None]:
        """A string, its opening quote read. Models forget to escape line breaks, and escape what needs none: mended."""
        sink('"')
        while True:
            text = yield from self._until('"\\')
            if not text:
                raise Malformed
            if text == '"':
                sink(text)
                return
            if text != "\\":
                sink(text.translate(_CONTROLS))
                continue
            char = yield from self._char()
            if char == "u":
                yield from self._code(sink)
            elif char == "'":
                sink(char)
            elif char and char in '"\\/bfnrt':
                sink(f"\\{char}")
            elif char:
                sink(f"\\\\{char.translate(_CONTROLS)}")
            else:
                sink("\\")

    def _code(self, sink: Callable[[str], None]) -> Reads[None]:
        """The four digits of a \\u escape; without them it was no escape."""
        digits = ""
        while len(digits) < 4:
            char = yield from self._char()
            if not char or char not in "0123456789abcdefABCDEF":
                self._unread(char)
                break
            digits += char
        sink(f"\\u{digits}" if len(digits) == 4 or not char else f"\\\\u{digits}")

    def _text(self) -> Reads[str]:
        """A string's value, its opening quote read."""
        pieces: list[str] = []
        yield from self._string(pieces.append)
        text = str(json.loads("".join(pieces)))
        if not is_unicode(text):
            raise Malformed
        return text

    def _scalar(self, first: str, sink: Callable[[str], None]) -> Reads[None]:
        """A number, true, false or null."""
        word = first
        while True:
            char = yield from self._char()
            if not char or not (char.isascii() and (char.isalnum() or char in "+-.")):
                break
            word += char
            if len(word) > MAX_NUMBER:
                raise Malformed(word)
        self._unread(char)
        try:
            if "I" in word:                              # Python's json would take -Infinity
                raise ValueError
            json.loads(word)
        except ValueError:
            if char:
                raise Malformed(word) from None
        sink(word)                                       # a part of a word at the end of the text is passed on as it is
