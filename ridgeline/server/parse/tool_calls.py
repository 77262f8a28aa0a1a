"""Tool calls in a model's text, parsed while it is written: a hand-written parser for each format.

The events of a stream add up to the same message however the text was cut (server/parse/incremental). Time is linear in the
text; nothing is executed, and no regular expression runs over it.

Text that turns out not to be a call becomes content, from its first character on. A call begins for the client when its name is
known and its arguments begin; arguments are passed on as they are written, and text after them is content again. If the text
is cut inside a call, the call has what was written, its name at least; none of it is content. Knows no requests, tokens or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ridgeline.server.parse.incremental import BLANKS, CallArguments, CallStart, Malformed, Reads
from ridgeline.server.parse.json_text import MAX_WORD, JsonMachine
from ridgeline.server.parse.python_literals import json_arguments

_NO_BLANKS = dict.fromkeys(map(ord, BLANKS))


class CallParser(JsonMachine):
    """What the formats share: content with its blanks, and calls written as JSON objects.

    `names` are the known functions; formats without marks accept only those as calls. Calls after the first `most` are
    left out. `schemas` say of which types a function's arguments are, for formats that do not show it; `learned` is what parsers
    make of them, and the answers to a request share it.
    """

    head = ""                                            # how a call begins, without blanks, in formats without marks
    name_key = "name"                                    # of a call that is a JSON object
    needs_schemas = False                                # the format does not show the types of arguments

    def __init__(
        self, names: Collection[str], most: int | None = None, schemas: Mapping[str, Mapping[str, Any]] | None = None,
        learned: dict[str, Any] | None = None,
    ) -> None:
        self.count = 0                                   # calls begun
        self._names = names
        self._schemas = schemas or {}
        self._learned = {} if learned is None else learned
        self._most = most
        self._held: list[tuple[str, int]] = []           # blanks that are content only if content follows, with their places
        self._spoke = False                              # content came after the last call
        self._named = ""                                 # the function of a call whose arguments have not begun
        super().__init__()

    # -- what comes out ------------------------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        """The text read last is content."""
        if self.count and not self._spoke:
            text = text.lstrip(BLANKS)                   # blanks between calls and after the last are no content
        start = self._place - len(text)
        if solid := text.rstrip(BLANKS):
            for piece, place in [*self._held, (solid, start)]:
                self._say(piece, place)
            self._spoke = True
            self._held = []
        if len(solid) < len(text):
            self._held.append((text[len(solid) :], start + len(solid)))

    def _end_content(self) -> None:
        for piece, place in self._held if not self.count else []:
            self._say(piece, place)

    def _start(self, name: str) -> int:
        self._held, self._spoke, self._raw, self._named = [], False, None, ""
        index, self.count = self.count, self.count + 1
        if self._most is None or index < self._most:
            self._events.append(CallStart(index, name))
        return index

    def _arguments_of(self, index: int) -> Callable[[str], None]:
        if self._most is not None and index >= self._most:
            return lambda text: None
        return lambda text: self._events.append(CallArguments(index, text))

    def _attempt(self, reads: Reads[None], sure: bool) -> Reads[bool]:
        """Read calls; whether it worked. Text that is not a call is emitted as content; `_raw` must hold its beginning. `sure`: a
        mark before it announced calls."""
        count, self._named = self.count, ""
        try:
            yield from reads
            return True
        except Malformed as error:
            if self._cut and (sure or self._named or self.count > count or self._begins_a_call()):
                if self._named:
                    self._start(self._named)
                self._held = []
            elif self._raw is not None:
                raw, self._raw = "".join(self._raw), None
                self._content(raw)
            elif error.rest:
                self._content(error.rest)
            return False
        finally:
            self._raw = None

    def _behind(self, marks: Sequence[str], calls: Callable[[str], Reads[None]], unsure: str = "") -> Reads[None]:
        """The whole text: content, and behind each of `marks` calls, which `calls` reads; it gets the mark. Behind the mark
        `unsure` there may be none."""
        stops = "".join(sorted({mark[0] for mark in marks}))
        while text := (yield from self._until(stops)):
            word = (yield from self._mark(text, marks)) if text in stops else text
            if word not in marks:
                is_cut = text in stops and not text.isalnum() and self._is_cut_mark(word)
                self._content("" if is_cut else word)
                continue
            self._raw = [word]
            yield from self._attempt(calls(word), sure=word != unsure)
        self._end_content()

    def _words(self, stop: str) -> Reads[str]:
        """The characters before `stop`, which is not read."""
        found = ""
        while (char := (yield from self._char())) and char != stop and len(found) < MAX_WORD:
            found += char
        self._unread(char)
        if char != stop:
            raise Malformed
        return found

    def _begins_a_call(self) -> bool:
        """Whether the text so far can be the head of a call of a known function."""
        raw = "".join(self._raw or []).translate(_NO_BLANKS)
        return len(raw) > 1 and any((self.head % name).startswith(raw) for name in self._names if self.head)

    def _no_call_follows(self) -> None:
        """The text since the last call, in `_raw`, is not a call."""
        raw, self._raw = "".join(self._raw or []), None
        self._content("" if self._cut and self.count else raw)

    # -- calls as JSON objects -----------------------------------------------------------------------------------------

    def _list(self, bare: bool) -> Reads[None]:
        """[call, call …], its "[" read."""
        char = yield from self._solid()
        if char == "]" and not bare:
            return
        while True:
            if char != "{":
                raise self._unexpected(char)
            yield from self._object(bare)
            self._raw = []                               # the text after it may not be a call
            char = yield from self._solid()
            if char == "]":
                return
            if char != ",":
                raise self._unexpected(char)
            char = yield from self._solid()

    def _object(self, bare: bool) -> Reads[None]:
        """One call, its "{" read: a name, with arguments before or after it. `bare`: no other keys, and a known name."""
        name: str | None = None
        pieces: list[str] = []                           # arguments that came before the name
        has_arguments = begun = False
        char = yield from self._solid()
        while char != "}":
            if char != '"':
                raise self._unexpected(char)
            key = yield from self._text()
            char = yield from self._solid()
            if char != ":":
                raise self._unexpected(char)
            if key == self.name_key and name is None:
                char = yield from self._solid()
                if char != '"':
                    raise self._unexpected(char)
                name = yield from self._text()
                if not name or (bare and name not in self._names):
                    raise Malformed
                self._named = name
            elif key in ("arguments", "parameters") and not has_arguments:
                has_arguments = True
                if name is None:
                    yield from self._arguments(lambda: pieces.append)
                else:
                    yield from self._arguments(partial(self._begin, name))
                    begun, self._raw = True, []
            elif bare and not begun and key not in ("type", "id"):
                raise Malformed
            else:
                yield from self._value(lambda text: None)
            char = yield from self._solid()
            if char == ",":
                char = yield from self._solid()
            elif char != "}":
                raise self._unexpected(char)
        if name is None:
            raise Malformed
        if not begun:
            self._begin(name)("".join(pieces) or "{}")

    def _begin(self, name: str) -> Callable[[str], None]:
        """The call has begun; returns where its arguments go."""
        return self._arguments_of(self._start(name))

    def _arguments(self, start: Callable[[], Callable[[str], None]]) -> Reads[None]:
        """An object; some models write its text as a string, or null for none. `start` is called once it is sure."""
        char = yield from self._solid()
        if char == "{":
            self._unread(char)
            yield from self._value(start())
        elif char == '"':
            text = yield from self._text()
            try:
                good = isinstance(json.loads(text), dict)
            except (ValueError, RecursionError):
                good = False
            if not good:
                raise Malformed
            start()(text)
        elif char == "n" and (yield from self._rest_of("null")) == "null":
            start()("{}")
        else:
            raise self._unexpected(char)


class HermesParser(CallParser):
    """<tool_call>{"name": …, "arguments": …}</tool_call>, anywhere in the text: Hermes, Qwen and many others."""

    def _run(self) -> Reads[None]:
        called = False                                   # a call has just ended; models sometimes omit its closing mark
        while text := (yield from self._solid() if called else self._until("<")):
            if text != "<":
                if called:
                    self._unread(text)
                else:
                    self._content(text)
                called = False
                continue
            if called:
                called = False
                char = yield from self._char()
                if char == "/":
                    word = "<" + (yield from self._rest_of("/tool_call>"))
                    self._content("" if word == "</tool_call>" or self._cut else word)
                    continue
                self._unread(char)
                if self._cut and not char:
                    continue
            word = yield from self._rest_of("<tool_call>")
            if word != "<tool_call>":
                self._content("" if self._is_cut_mark(word) else word)
                continue
            self._raw = [word]
            called = yield from self._attempt(self._tagged(), sure=True)
        self._end_content()

    def _tagged(self) -> Reads[None]:
        char = yield from self._solid()
        if char != "{":
            raise self._unexpected(char)
        yield from self._object(bare=False)


class LlamaParser(CallParser):
    """{"name": …, "parameters": …} as the whole message, or after <|python_tag|>; several are separated by ";"."""

    head = '{"name":"%s"'

    def _run(self) -> Reads[None]:
        yield from self._calls_or_text("", bare=True)
        while text := (yield from self._until("<")):
            if text != "<":
                self._content(text)
                continue
            word = yield from self._rest_of("<|python_tag|>")
            if word == "<|python_tag|>":
                yield from self._calls_or_text(word, bare=False)
            else:
                self._content("" if self._is_cut_mark(word) else word)
        self._end_content()

    def _calls_or_text(self, word: str, bare: bool) -> Reads[None]:
        """Calls, if an object begins here; otherwise `word` was text."""
        self._raw = [word] if word else []
        char = yield from self._solid()
        if char == "{":
            yield from self._objects(bare=bare)
        else:
            self._unread(char)
            if self._cut and word:
                self._raw, self._held = None, []
            self._no_call_follows()

    def _objects(self, bare: bool) -> Reads[None]:
        """Calls, the first one's "{" read and recorded."""
        while (yield from self._attempt(self._object(bare), sure=not bare or self.count > 0)):
            self._raw = []
            char = yield from self._solid()
            if char == ";" or char == ",":
                char = yield from self._solid()
            if char != "{":
                self._unread(char)
                self._no_call_follows()
                return


class MistralParser(CallParser):
    """[TOOL_CALLS][{"name": …, "arguments": …}, …], or in newer models [TOOL_CALLS]name[ARGS]{…} for each call."""

    def _run(self) -> Reads[None]:
        yield from self._behind(("[TOOL_CALLS]",), self._calls)

    def _calls(self, mark: str) -> Reads[None]:
        char = yield from self._solid()
        if char == "[":
            yield from self._list(bare=False)
            return
        header = ""
        while char and char != "{" and len(header) < MAX_WORD:
            header += char
            char = yield from self._char()
        name, more, _ = header.partition("[")            # a call's id may follow it, and [ARGS]
        name = name.strip()
        self._named = name if more else ""
        if char != "{" or not name or any(each in BLANKS for each in name):
            raise self._unexpected(char)
        self._unread(char)
        yield from self._value(self._begin(name))


class ListParser(CallParser):
    """[{"name": …, "parameters": …}, …] as the whole message: what the schema of `calls_schema` makes a model write."""

    head = '[{"name":"%s"'
    nothing_else = False                                 # the schema allows calls only

    def _run(self) -> Reads[None]:
        self._raw = []
        char = yield from self._solid()
        if char == "[":
            yield from self._attempt(self._list(bare=True), self.nothing_else)
        else:
            self._unread(char)
            self._no_call_follows()
        while text := (yield from self._until("")):
            self._content(text)
        self._end_content()


class RequiredParser(ListParser):
    """The same, if at least one call is required."""

    nothing_else = True


class NamedParser(CallParser):
    """The whole message is the arguments of the one function in `names`."""

    def _run(self) -> Reads[None]:
        (name,) = self._names
        text = yield from self._until("")
        say = self._begin(name)
        while text:
            say(text)
            text = yield from self._until("")


class PythonicParser(CallParser):
    """[f(a=1), g(b="x")] as the whole message. Each call is emitted when its ")" is read."""

    head = "[%s("

    def _run(self) -> Reads[None]:
        yield from self._at_the_beginning()
        while text := (yield from self._until("")):
            self._content(text)
        self._end_content()

    def _at_the_beginning(self) -> Reads[None]:
        """Calls, if the message begins with them."""
        self._raw = []
        char = yield from self._solid()
        if char == "[":
            yield from self._attempt(self._python_list(), sure=False)
        else:
            self._unread(char)
            self._no_call_follows()

    def _python_list(self) -> Reads[None]:
        while True:
            yield from self._python_call((yield from self._solid()))
            char = yield from self._solid()
            if char == "]":
                return
            if char != ",":
                raise self._unexpected(char)

    def _python_call(self, char: str) -> Reads[None]:
        """One call, the first character of its name read."""
        name = ""
        while char and (char.isalnum() or char in "_.-") and len(name) < MAX_WORD:
            name += char
            char = yield from self._char()
        if char != "(" or name not in self._names:
            raise self._unexpected(char)
        self._named = name
        arguments = json_arguments((yield from self._to_closing()))
        self._begin(name)(arguments)
        self._raw = []

    def _to_closing(self) -> Reads[str]:
        """The text up to the ")" that closes what is open, which is read too."""
        pieces: list[str] = []
        depth, quote = 1, ""
        while True:
            text = yield from self._until(f"\\{quote}" if quote else "\"'()[]{}")
            if not text:
                raise Malformed
            if quote and text == "\\":
                text += yield from self._char()
            elif quote and text == quote:
                quote = ""
            elif not quote and text in ('"', "'"):
                quote = text
            elif not quote and text in ("(", "[", "{"):
                depth += 1
            elif not quote and text in (")", "]", "}"):
                depth -= 1
                if not depth:
                    return "".join(pieces)
            pieces.append(text)
