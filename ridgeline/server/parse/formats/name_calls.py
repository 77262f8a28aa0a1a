"""Tool calls that are a name and its arguments, with few marks or none, parsed while they are written.

    Command R         Action: ```json [{"tool_name": …, "parameters": …}, …] ```
    functionary 3.1   <function=NAME>{…}</function>
    functionary 3.2   all, a line break and an answer, or NAME, a line break and {…}; >>> before each but the first
    GLM-4             NAME, a line break and {…} as the whole message
    Llama 4           <|python_start|>[f(a=1), …]<|python_end|>, or the list as the whole message
    MiniCPM3          <|tool_call_start|> ```python, a line f(a=1) for each call, ``` <|tool_call_end|>
"""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.server.parse.formats.list_calls import MarkedListParser
from ridgeline.server.parse.incremental import BLANKS, Malformed, Reads
from ridgeline.server.parse.json_text import MAX_WORD
from ridgeline.server.parse.tool_calls import CallParser, PythonicParser


def _nothing(text: str) -> None:
    """Where the arguments of no call go."""


class CommandRParser(MarkedListParser):
    """`directly_answer` is how the model says that it calls nothing."""

    begins = ends = ("Action:",)
    word = "Action:"
    name_key = "tool_name"

    def _calls(self, mark: str) -> Reads[None]:
        yield from self._fence("```json")
        char = yield from self._solid()
        if char != "[":
            raise self._unexpected(char)
        yield from self._list(bare=False)
        self._raw = []                                   # the text after it may be anything
        yield from self._fence("```")

    def _fence(self, fence: str) -> Reads[None]:
        """The beginning or the end of a block of code, where there is one."""
        char = yield from self._solid()
        if char != "`":
            self._unread(char)
        elif (yield from self._rest_of(fence)) != fence:
            raise Malformed

    def _begin(self, name: str) -> Callable[[str], None]:
        return _nothing if name == "directly_answer" and name not in self._names else super()._begin(name)


class FunctionaryParser(CallParser):
    """Functionary 3.1, and Llama 3.1 with functions of its own."""

    head = "<function=%s>"
    call, call_end = "<function=", "</function>"

    def _run(self) -> Reads[None]:
        yield from self._behind((self.call,), self._call)

    def _call(self, mark: str) -> Reads[None]:
        while mark == self.call:
            name = yield from self._words(">")
            yield from self._char()
            if not name or any(char in BLANKS for char in name):
                raise Malformed
            self._named = name
            char = yield from self._solid()
            if char != "{":
                raise self._unexpected(char)
            self._unread(char)
            yield from self._value(self._begin(name))
            self._raw = []
            char = yield from self._solid()
            if char != "<":
                raise self._unexpected(char)
            mark = yield from self._mark(char, (self.call, self.call_end))
            if mark == self.call_end:
                return
        raise Malformed


class NameFirstParser(CallParser):
    """A known function's name, a line break and its arguments as the whole message (GLM-4)."""

    head = "%s{"
    answers = ""                                         # a word in the place of a name: an answer follows

    def _run(self) -> Reads[None]:
        self._raw = []
        yield from self._attempt(self._named_call(""), sure=False)
        while text := (yield from self._until("")):
            self._content(text)
        self._end_content()

    def _named_call(self, mark: str) -> Reads[None]:
        name, char = "", (yield from self._solid())
        while char and char not in BLANKS and char != "{" and len(name) < MAX_WORD:
            name += char
            if not any(known.startswith(name) for known in self._names) and not self.answers.startswith(name):
                raise Malformed
            char = yield from self._char()
        if name == self.answers and char == "\n" and name not in self._names:
            self._raw = None
            return
        if name not in self._names:
            raise self._unexpected(char)
        blanks = ""
        while char and char in BLANKS:
            blanks += char
            char = yield from self._char()
        if char != "{" or "\n" not in blanks:
            raise self._unexpected(char)
        self._named = name
        self._unread(char)
        yield from self._value(self._once_sure(name))

    def _once_sure(self, name: str) -> Callable[[str], None]:
        """Where the arguments go. There is no mark, so the call begins with the first key, or with the end of an empty object."""
        held: list[str] = []
        say: Callable[[str], None] | None = None

        def take(text: str) -> None:
            nonlocal say
            held.append(text)
            if say is None and text in ('"', "}"):
                say = self._begin(name)
            if say is not None:
                say("".join(held))
                held.clear()

        return take


class RecipientParser(NameFirstParser):
    """Functionary 3.2: who a part of the message is for. The prompt ends with the first >>>."""

    answers = "all"
    recipient = ">>>"

    def _run(self) -> Reads[None]:
        self._raw = []
        yield from self._attempt(self._named_call(""), sure=False)
        yield from self._behind((self.recipient,), self._named_call, unsure=self.recipient)

    def _begins_a_call(self) -> bool:
        raw = "".join(self._raw or []).strip(BLANKS).removeprefix(self.recipient)
        return any(name.startswith(raw) for name in (*self._names, self.answers))


class Llama4Parser(PythonicParser):
    begins, ends, answer = ("<|python_start|>",), ("<|python_end|>",), ()

    def _run(self) -> Reads[None]:
        yield from self._at_the_beginning()
        yield from self._behind(self.begins, self._marked)

    def _marked(self, mark: str) -> Reads[None]:
        char = yield from self._solid()
        if char == "[":
            yield from self._python_list()
        elif char == "{":                                # as its own template shows it
            yield from self._object(bare=False)
        else:
            raise self._unexpected(char)
        self._raw = []
        char = yield from self._solid()
        if char != "<" or (yield from self._rest_of(self.ends[0])) != self.ends[0]:
            raise self._unexpected(char) if char != "<" else Malformed


class MiniCPMParser(PythonicParser):
    begins, ends, answer = ("<|tool_call_start|>",), ("<|tool_call_end|>",), ()

    def _run(self) -> Reads[None]:
        yield from self._behind(self.begins, self._lines)

    def _lines(self, mark: str) -> Reads[None]:
        char = yield from self._solid()
        if char == "`":
            if (yield from self._rest_of("```python")) != "```python":
                raise Malformed
            char = yield from self._solid()
        while char not in ("<", "`"):
            yield from self._python_call(char)
            char = yield from self._solid()
        if char == "`":
            if (yield from self._rest_of("```")) != "```":
                raise Malformed
            char = yield from self._solid()
        if char != "<":
            raise self._unexpected(char)
        if (yield from self._rest_of(self.ends[0])) != self.ends[0]:
            raise Malformed
