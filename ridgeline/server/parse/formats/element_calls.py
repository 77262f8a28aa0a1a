"""Tool calls whose arguments are elements, as in XML, parsed while they are written.

    Qwen3-Coder   <tool_call><function=NAME><parameter=KEY>…</parameter> … </function></tool_call>
    Seed-OSS      <seed:tool_call>, and the same within it
    MiniMax-M2    <minimax:tool_call><invoke name="NAME"><parameter name="KEY">…</parameter> … </invoke></minimax:tool_call>
    dots          <dots_function_call>, and the same within it
    GLM-4.5       <tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</arg_value> … </tool_call>

Values are bare text: no quotes, no escapes. The schema of the function says which of them are numbers, lists and so on
(argument_types.py). A text is passed on as it is written, any other value when it is complete. A value that begins with a line
break has one at its end as well, and neither is part of it. Of an argument that is written twice the first counts.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence

from ridgeline.server.parse.formats.argument_types import TEXT, ArgumentTypes, as_json
from ridgeline.server.parse.incremental import BLANKS, Malformed, Reads
from ridgeline.server.parse.json_text import MAX_WORD
from ridgeline.server.parse.tool_calls import CallParser


class KnownHeads:
    """What comes before each of a function's arguments, sorted: thousands of arguments are not looked at one by one."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """`keys`: by what comes before them."""
        self.keys = keys
        self.all = sorted(keys)


class Heads:
    """The same for the arguments that a call does not have yet."""

    def __init__(self, known: KnownHeads) -> None:
        self._known = known
        self._left_out: list[str] = []                   # sorted

    def leave_out(self, head: str) -> None:
        if head in self:
            insort(self._left_out, head)

    def __contains__(self, word: str) -> bool:
        return word in self._known.keys and not _num_beginning(self._left_out, word, len(word) + 1)

    def begin_with(self, beginning: str) -> bool:
        size = len(beginning)
        return _num_beginning(self._known.all, beginning, size) > _num_beginning(self._left_out, beginning, size)

    def key_of(self, word: str) -> str:
        """Empty for another word."""
        return self._known.keys.get(word, "")


def _num_beginning(words: Sequence[str], word: str, size: int) -> int:
    """How many of these sorted words have `word` as their first `size` characters."""
    def first(each: str) -> str:
        return each[:size]

    return bisect_right(words, word, key=first) - bisect_left(words, word, key=first)


class QwenCoderParser(CallParser):
    """A call without the mark before it counts where the function is known: models forget that mark. In a block of code it is an
    example."""

    head = "<function=%s>"
    needs_schemas = True
    around = ("<tool_call>", "</tool_call>")
    call, call_end = "<function=", "</function>"
    argument, argument_end = "<parameter=", "</parameter>"
    heads_end_values = True                              # a value ends before the next argument, even without its own mark

    def _run(self) -> Reads[None]:
        self._in_code, self._ticks = False, 0            # `_ticks`: at the end of the content so far, of the next ```
        self._marks = [mark for mark in (self.around[0], self.call) if mark]
        yield from self._behind(self._marks, self._part, unsure=self.call or self.around[0])

    def _content(self, text: str) -> None:
        super()._content(text)
        seen = "`" * self._ticks + text
        self._in_code ^= seen.count("```") % 2 == 1
        self._ticks = (len(seen) - len(seen.rstrip("`"))) % 3

    def _part(self, mark: str) -> Reads[None]:
        """Calls behind a mark. Where other text breaks one off, it is complete, and the marks behind that text are no content."""
        ends = (self.call_end, self.around[1])
        if mark in ends:
            self._raw = None
            if mark == self.around[1]:
                self._marks[:] = [each for each in self._marks if each not in ends]
            return
        if mark == self.call and self._in_code:
            raise Malformed
        count = self.count
        try:
            yield from self._calls(mark)
        except Malformed:
            if self.count > count and not self._cut:
                self._marks += [each for each in ends if each not in self._marks]
            raise

    def _calls(self, mark: str) -> Reads[None]:
        """The calls up to the mark behind the last; `mark`: the one before all, or the first call's own."""
        is_open = True
        if mark == self.call:
            is_open = yield from self._call(known_only=True)
            self._raw = []
        while is_open:
            char = yield from self._solid()
            if char == "{":                              # as others write it: name and arguments as one object
                yield from self._object(bare=False)
            elif char == "<":
                word = yield from self._mark(char, (self.call, *self.around) if self.call else self.around)
                if word == self.around[1]:
                    return
                if word == self.around[0]:               # models write it twice, or forget the one that ends the last call
                    continue
                if word != self.call:
                    raise Malformed
                is_open = yield from self._call(known_only=False)
            else:
                raise self._unexpected(char)
            self._raw = []                               # the text after it may not be a call

    def _call(self, known_only: bool) -> Reads[bool]:
        """One call, the mark before its name read; whether the mark behind the last call is still to come."""
        name = yield from self._word(">")
        if known_only and name not in self._names:
            raise Malformed
        return (yield from self._arguments_in(name, (self.argument, self.call_end, *self.around))) != self.around[1]

    def _arguments_in(self, name: str, marks: tuple[str, ...]) -> Reads[str]:
        """Arguments up to the last mark, which is returned: of `marks` the first is before each, the others end the call."""
        say, (types, known_heads) = self._begin(name), self._known_of(name)
        begin, keys, key, heads = "{", set[str](), "", Heads(known_heads)
        while True:
            if not key:
                self._raw = []                           # the text after it may not belong to the call
                char = yield from self._solid()
                try:
                    word = (yield from self._mark(char, marks)) if char == "<" else ""
                    if word in marks[1:]:
                        say("}" if begin == ", " else "{}")
                        return word
                    if word != marks[0]:
                        raise Malformed if word else self._unexpected(char)
                    key = yield from self._key_of_argument()
                except Malformed:
                    if not self._cut:
                        say("}" if begin == ", " else "{}")
                    raise
                self._raw = None
            if key in keys:                              # a client would get the same key twice; the first is sent already
                key = yield from self._bare(lambda text: None, heads)
                continue
            keys.add(key)
            heads.leave_out(self._head_of(key))
            say(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
            begin = ", "
            key = yield from self._typed(types.of(key), say, heads)

    def _head_of(self, key: str) -> str:
        """What comes before this argument: it also ends a value whose own mark is missing."""
        quote = '"' if self.argument.endswith("name=") else ""
        return f"{self.argument}{quote}{key}{quote}>"

    def _known_of(self, name: str) -> tuple[ArgumentTypes, KnownHeads]:
        """The types of a function's arguments, and what comes before each."""
        if name not in self._learned:
            types = ArgumentTypes(self._schemas.get(name, {}))
            keys = types.names if self.heads_end_values else ()
            self._learned[name] = types, KnownHeads({self._head_of(key): key for key in keys})
        known: tuple[ArgumentTypes, KnownHeads] = self._learned[name]
        return known

    def _key_of_argument(self) -> Reads[str]:
        return (yield from self._word(">"))

    def _typed(self, types: frozenset[str], say: Callable[[str], None], heads: Heads) -> Reads[str]:
        """A value and the mark behind it. If that mark was the head of the next argument, its key is returned."""
        if types == TEXT:
            say('"')
            key = yield from self._bare(lambda text: say(json.dumps(text, ensure_ascii=False)[1:-1]), heads)
            say('"')
            return key
        pieces: list[str] = []
        key = yield from self._bare(pieces.append, heads)
        say(as_json("".join(pieces), types))
        return key

    def _bare(self, sink: Callable[[str], None], heads: Heads) -> Reads[str]:
        """Text up to the mark behind it, without the line breaks around it; as `_typed`."""
        pad, held = yield from self._padding()           # `held`: a line break that may be the last
        while text := (yield from self._until(pad + "<")):
            word = (yield from self._end_of_value(heads)) if text == "<" else text
            if word == self.argument_end or word in heads:
                if held and held != pad:
                    sink(held)
                return heads.key_of(word)
            if text == "<" and self._cut:
                break                                    # it may have been the mark
            if pad and word == pad[0]:
                word, held = held, word
            elif held + word == pad:
                word, held = "", pad
            else:
                word, held = held + word, ""
            if word:
                sink(word)
        raise Malformed

    def _padding(self) -> Reads[tuple[str, str]]:
        """The line break at the beginning of a value, and what was read if there is none."""
        char = yield from self._char()
        first = "\r" if char == "\r" else ""
        if first:
            char = yield from self._char()
        if char == "\n":
            return first + char, ""
        self._unread(char)
        return "", first

    def _end_of_value(self, heads: Heads) -> Reads[str]:
        """The mark behind a value, one of `heads`, or what was read, a "<" before it."""
        word = yield from self._mark("<", (self.argument_end, self.argument))
        if word == self.argument and self.heads_end_values:
            while word not in heads:
                char = yield from self._char()
                if not char or not heads.begin_with(word + char):
                    self._unread(char)
                    break
                word += char
        return word

    def _word(self, stop: str) -> Reads[str]:
        """A name up to `stop`, which is read; quotes and blanks around it are not part of it."""
        found = (yield from self._words(stop)).strip(BLANKS).strip("\"'")
        yield from self._char()
        if not found:
            raise Malformed
        return found


class SeedParser(QwenCoderParser):
    around = ("<seed:tool_call>", "</seed:tool_call>")


class MiniMaxParser(QwenCoderParser):
    around = ("<minimax:tool_call>", "</minimax:tool_call>")
    head = '<invokename="%s">'
    call, call_end = "<invoke name=", "</invoke>"
    argument = "<parameter name="


class DotsParser(MiniMaxParser):
    around = ("<dots_function_call>", "</dots_function_call>")


class GlmParser(QwenCoderParser):
    head = call = ""                                          # the name follows the mark before all
    argument, argument_end = "<arg_key>", "</arg_value>"
    heads_end_values = False                             # a key is followed by another mark here

    def _calls(self, mark: str) -> Reads[None]:
        while mark == self.around[0]:                    # the mark behind a call may be missing before the next
            char = yield from self._solid()
            if char == "{":
                self._unread(char)
                yield from super()._calls(mark)
                return
            if char == "<":                              # models write the mark twice
                mark = yield from self._mark(char, self.around[:1])
                if mark != self.around[0]:
                    raise Malformed
                continue
            name = ""
            while char and char not in BLANKS and char != "<" and len(name) < MAX_WORD:
                name += char
                char = yield from self._char()
            if char and char in BLANKS:
                char = yield from self._solid()
            if char != "<":
                raise self._unexpected(char)
            self._unread(char)
            mark = yield from self._arguments_in(name, (self.argument, *self.around))
            self._raw = [mark]

    def _begins_a_call(self) -> bool:
        begin = self.around[0]
        raw, place = "".join("".join(self._raw or []).split()), 0
        while raw.startswith(begin * 2, place):
            place += len(begin)
        raw = raw[place:]
        return raw.startswith(begin + "{") or any((begin + name).startswith(raw) for name in (begin, *self._names))

    def _key_of_argument(self) -> Reads[str]:
        key = yield from self._word("<")
        for mark in ("</arg_key>", "<arg_value>"):
            char = "<" if mark[1] == "/" else (yield from self._solid())
            if (yield from self._mark(char, (mark,))) != mark:
                raise Malformed
        return key
