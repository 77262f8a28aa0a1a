"""Tool calls of DeepSeek's models and of Kimi K2, parsed while they are written.

    V3, R1    <calls begin><call begin>function<sep>NAME, a line "```json", arguments, a line "```"<call end> … <calls end>
    V3.1      <calls begin><call begin>NAME<sep>arguments<call end> … <calls end>
    Kimi K2   the same, with functions.NAME:0 for the name

The marks are special tokens with characters of their own. Text outside of them is content.
"""

from __future__ import annotations

from ridgeline.server.parse.incremental import BLANKS, Malformed, Reads
from ridgeline.server.parse.tool_calls import CallParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK_MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
KIMI_MARKS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)


class DeepSeekParser(CallParser):
    marks = DEEPSEEK_MARKS

    def _run(self) -> Reads[None]:
        yield from self._behind(self.marks[:1], self._calls)

    def _calls(self, mark: str) -> Reads[None]:
        """The calls up to the mark behind the last."""
        _, calls_end, call_begin, *_ = self.marks
        while True:
            char = yield from self._solid()
            if char != "<":
                raise self._unexpected(char)
            word = yield from self._mark(char, (call_begin, calls_end))
            if word == calls_end:
                return
            if word != call_begin:
                raise Malformed
            yield from self._call()
            self._raw = []                               # the text after it may not be a call

    def _call(self) -> Reads[None]:
        *_, call_end, separator = self.marks
        name = (yield from self._words("<")).strip(BLANKS)
        yield from self._expect(separator)
        header = yield from self._words("{")             # V3: the name, and the opening of a block of code
        if header.strip(BLANKS):
            name = header.strip(BLANKS).split("\n", 1)[0].strip(BLANKS)
        self._named = name = self._function(name)
        if not name or any(each in BLANKS for each in name):
            raise Malformed
        yield from self._value(self._begin(name))
        char = yield from self._solid()
        while char == "`":
            char = yield from self._solid()
        self._unread(char)
        yield from self._expect(call_end)

    def _function(self, written: str) -> str:
        return written

    def _expect(self, mark: str) -> Reads[None]:
        char = yield from self._char()
        if char != mark[0]:
            raise self._unexpected(char)
        if (yield from self._rest_of(mark)) != mark:
            raise Malformed


class KimiParser(DeepSeekParser):
    marks = KIMI_MARKS

    def _function(self, written: str) -> str:
        """Its name, from an id like functions.NAME:0."""
        name, _, number = written.rpartition(":")
        return (name if number.isdigit() and name else written).removeprefix("functions.")
