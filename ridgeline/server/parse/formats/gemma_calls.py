"""Tool calls of FunctionGemma: <start_function_call>call:NAME{KEY:<escape>text<escape>,KEY:3}<end_function_call>.

Texts stand between two marks, other values as in JSON, and keys are bare words. A call is emitted when it is complete.
"""

from __future__ import annotations

import json

from ridgeline.server.parse.incremental import BLANKS, Malformed, Reads
from ridgeline.server.parse.tool_calls import CallParser

BEGIN, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
GEMMA_MARKS = (BEGIN, END, QUOTE)


class FunctionGemmaParser(CallParser):
    def _run(self) -> Reads[None]:
        yield from self._behind((BEGIN,), self._call)

    def _call(self, mark: str) -> Reads[None]:
        while mark == BEGIN:                             # the mark behind a call may be missing before the next
            char = yield from self._solid()
            if char != "c":
                raise self._unexpected(char)
            if (yield from self._rest_of("call:")) != "call:":
                raise Malformed
            name = yield from self._word("{")
            if not name:
                raise Malformed
            self._named = name
            pieces: list[str] = ["{"]
            yield from self._members(pieces)
            self._begin(name)("".join(pieces))
            self._raw = []
            char = yield from self._solid()
            if char != "<":
                raise self._unexpected(char)
            mark = yield from self._mark(char, (BEGIN, END))
        if mark != END:
            raise Malformed

    def _members(self, pieces: list[str]) -> Reads[None]:
        """All up to the "}" that closes the arguments, as JSON. An explicit stack: depth costs no recursion."""
        stack = ["}"]
        starts = True                                    # nothing stands between the bracket and here
        while stack:
            char = yield from self._solid()
            if char == stack[-1]:
                pieces.append(stack.pop())
                starts = False
                continue
            if not starts:
                if char != ",":
                    raise self._unexpected(char)
                pieces.append(", ")
                char = yield from self._solid()
            self._unread(char)
            if stack[-1] == "}":
                key = yield from self._word(":")
                pieces.append(f"{json.dumps(key.replace(QUOTE, ''), ensure_ascii=False)}: ")
                char = yield from self._solid()
                self._unread(char)
            starts = False
            if char == "<":
                pieces.append((yield from self._quoted()))
            elif char and char in "{[":
                yield from self._char()
                pieces.append(char)
                stack.append("}" if char == "{" else "]")
                starts = True
            else:
                yield from self._value(pieces.append)

    def _quoted(self) -> Reads[str]:
        yield from self._char()
        if (yield from self._rest_of(QUOTE)) != QUOTE:
            raise Malformed
        found: list[str] = []
        while text := (yield from self._until("<")):
            word = (yield from self._rest_of(QUOTE)) if text == "<" else text
            if word == QUOTE:
                return json.dumps("".join(found), ensure_ascii=False)
            found.append(word)
        raise Malformed

    def _word(self, stop: str) -> Reads[str]:
        """The characters before `stop`, which is read."""
        found = (yield from self._words(stop)).strip(BLANKS)
        yield from self._char()
        return found
