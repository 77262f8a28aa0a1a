"""Tool calls of DeepSeek's models, parsed while they are written.

    V3, R1   <calls begin><call begin>function<sep>NAME, a line "```json", arguments, a line "```"<call end> … <calls end>
    V3.1     <calls begin><call begin>NAME<sep>arguments<call end> … <calls end>

The marks are special tokens with characters of their own. Text outside of them is content.
"""

from __future__ import annotations

from ridgeline.server.parse.incremental import BLANKS, Malformed, Reads
from ridgeline.server.parse.json_text import MAX_WORD
from ridgeline.server.parse.tool_calls import CallParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK_MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


class DeepSeekParser(CallParser):
    def _run(self) -> Reads[None]:
        while text := (yield from self._until("<")):
            word = (yield from self._rest_of(CALLS_BEGIN)) if text == "<" else text
            if word != CALLS_BEGIN:
                self._content("" if text == "<" and self._is_cut_mark(word) else word)
                continue
            self._raw = [word]
            yield from self._attempt(self._calls(), sure=True)
        self._end_content()

    def _calls(self) -> Reads[None]:
        """The calls up to the mark behind the last."""
        while True:
            char = yield from self._solid()
            if char != "<":
                raise self._unexpected(char)
            word = yield from self._rest_of(CALL_BEGIN)
            if word != CALL_BEGIN:                       # the marks are alike up to here
                yield from self._expect(CALLS_END, word)
                return
            yield from self._call()
            self._raw = []                               # the text after it may not be a call

    def _call(self) -> Reads[None]:
        name = (yield from self._words("<")).strip(BLANKS)
        char = yield from self._char()
        if char != "<":
            raise self._unexpected(char)
        yield from self._expect(SEPARATOR, char)
        header = yield from self._words("{")             # V3: the name, and the opening of a block of code
        if header.strip(BLANKS):
            name = header.strip(BLANKS).split("\n", 1)[0].strip(BLANKS)
        self._named = name
        if not name or any(each in BLANKS for each in name):
            raise Malformed
        yield from self._value(self._begin(name))
        char = yield from self._solid()
        while char == "`":
            char = yield from self._solid()
        if char != "<":
            raise self._unexpected(char)
        yield from self._expect(CALL_END, char)

    def _words(self, stop: str) -> Reads[str]:
        """The characters before `stop`, which is not read."""
        found = ""
        while (char := (yield from self._char())) and char != stop and len(found) < MAX_WORD:
            found += char
        self._unread(char)
        if char != stop:
            raise Malformed
        return found

    def _expect(self, mark: str, word: str) -> Reads[None]:
        """Read on along `mark`, of which `word` was read."""
        if not mark.startswith(word):
            raise Malformed
        rest = mark[len(word) - 1 :]
        if (yield from self._rest_of(rest)) != rest:
            raise Malformed
