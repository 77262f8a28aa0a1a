"""Tool calls as a list behind a mark, parsed while they are written.

    Granite 3     <|tool_call|>[{"name": …, "arguments": …}, …]
    Phi-4-mini    <|tool_call|>[…]<|/tool_call|>, or functools[…]
    Hunyuan       <tool_calls>[…]</tool_calls>
    Nemotron      <TOOLCALL>[…]</TOOLCALL>
    Command R7B   <|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": …}, …]<|END_ACTION|>
    Apertus       <|tools_prefix|>[{"NAME": {…}}, …]<|tools_suffix|>
    OLMo 3        <function_calls>, a line f(a=1) for each call, </function_calls>
"""

from __future__ import annotations

from functools import partial

from ridgeline.server.parse.incremental import BLANKS, Malformed, Reads
from ridgeline.server.parse.tool_calls import CallParser, PythonicParser

GRANITE_ANSWER = ("<response>", "</response>")
HUNYUAN_ANSWER = ("<answer>", "</answer>")
COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class MarkedListParser(CallParser):
    """`begins` are the marks before a list, `ends` those behind it, which may be missing. `answer` are pairs of marks around an
    answer: neither is part of it (server/parse/reasoning.Thought)."""

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    word = ""                                            # of `begins`, one that is also a word in texts

    def _run(self) -> Reads[None]:
        self._closing = (yield from self._opening()) if self.answer else ""
        marks = (*self.begins, self._closing) if self._closing else self.begins
        yield from self._behind(marks, self._calls, unsure=self.word)

    def _opening(self) -> Reads[str]:
        """The closing mark for the opening one that the text begins with; "" if it begins otherwise."""
        held, char = "", (yield from self._char())
        while char and char in BLANKS:
            held += char
            char = yield from self._char()
        openings = self.answer[::2]
        word = (yield from self._mark(char, (*openings, *self.begins))) if char == "<" else char
        if word in openings:
            self._unread((yield from self._solid()))
            return self.answer[self.answer.index(word) + 1]
        if word in self.begins:
            self._unread(word)
            word = ""
        self._content(held if char == "<" and self._is_cut_mark(word) else held + word)
        return ""

    def _calls(self, mark: str) -> Reads[None]:
        if mark == self._closing:
            self._raw = None
            self._held.append((mark, self._place - len(mark)))       # content only if content follows
            return
        while mark in self.begins:
            char = yield from self._solid()
            if char == "[":
                yield from self._list(bare=False)
            elif char == "{":
                yield from self._object(bare=False)
            else:
                raise self._unexpected(char)
            self._raw = []                               # the text after it may be neither a mark nor a call
            char = yield from self._solid()
            if char != "<":
                raise self._unexpected(char)
            mark = yield from self._mark(char, (*self.begins, *self.ends))
        if mark not in self.ends:
            raise Malformed

    def _is_cut_mark(self, word: str) -> bool:
        """One character may be the beginning of a call where the answer before it is closed."""
        return super()._is_cut_mark(word) or (self._cut and any(piece == self._closing for piece, _ in self._held))

    def _begins_a_call(self) -> bool:
        return len("".join(self._raw or []).strip(BLANKS)) > len(self.word)

    def _end_content(self) -> None:
        if all(piece != self._closing for piece, _ in self._held):
            super()._end_content()


class GraniteParser(MarkedListParser):
    begins, ends, answer = ("<|tool_call|>", "<tool_call>"), ("</tool_call>",), GRANITE_ANSWER


class PhiParser(MarkedListParser):
    begins, ends, word = ("<|tool_call|>", "functools"), ("<|/tool_call|>",), "functools"


class HunyuanParser(MarkedListParser):
    begins, ends, answer = ("<tool_calls>",), ("</tool_calls>",), HUNYUAN_ANSWER


class NemotronParser(MarkedListParser):
    begins, ends = ("<TOOLCALL>",), ("</TOOLCALL>",)


class CohereParser(MarkedListParser):
    begins, ends, answer = ("<|START_ACTION|>",), ("<|END_ACTION|>",), COHERE_ANSWER
    name_key = "tool_name"


class ApertusParser(MarkedListParser):
    begins, ends = ("<|tools_prefix|>",), ("<|tools_suffix|>",)

    def _object(self, bare: bool) -> Reads[None]:
        """{"NAME": arguments}, its "{" read."""
        char = yield from self._solid()
        if char != '"':
            raise self._unexpected(char)
        name = yield from self._text()
        char = yield from self._solid()
        if char != ":" or not name:
            raise self._unexpected(char)
        self._named = name
        yield from self._arguments(partial(self._begin, name))
        self._raw = []
        char = yield from self._solid()
        if char != "}":
            raise self._unexpected(char)


class OlmoParser(PythonicParser):
    begins, ends, answer = ("<function_calls>",), ("</function_calls>",), ()

    def _run(self) -> Reads[None]:
        yield from self._behind(self.begins, self._lines)

    def _lines(self, mark: str) -> Reads[None]:
        char = yield from self._solid()
        while char != "<":
            yield from self._python_call(char)
            char = yield from self._solid()
            if char == ",":                              # some models write calls into one line, as in a list
                char = yield from self._solid()
        if (yield from self._rest_of(self.ends[0])) != self.ends[0]:
            raise Malformed
