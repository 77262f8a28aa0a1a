"""Reasoning at the start of a model's message, and the message as a whole: reasoning, then content and tool calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.server.parse.harmony import HarmonyParser
from ridgeline.server.parse.incremental import (
    BLANKS,
    CallArguments,
    CallStart,
    Content,
    Event,
    Machine,
    Reads,
    Reasoning,
)
from ridgeline.server.parse.partial_json import is_object
from ridgeline.server.parse.tool_calls import CallParser


@dataclass(frozen=True, slots=True)
class Thought:
    """The marks around reasoning, and those around the answer behind it, if it has any: pairs, of which one is used. `sign`: what
    a chat template has beside the closing mark."""

    begin: str = "<think>"
    end: str = "</think>"
    answer: tuple[str, ...] = ()
    sign: str = ""


class ReasoningParser(Machine):
    """Reasoning at the start of a message; blanks around either part are left out.

    `inside`: the prompt has opened it. `reasoning_end` is where the content begins; None before that. `answer`: pairs of marks
    around the content; an opening one counts as the first text of it, its closing one as the last. Neither is content.
    """

    def __init__(self, inside: bool, thought: Thought | None = None, answer: tuple[str, ...] = ()) -> None:
        self._inside = inside
        self._thought = thought or Thought()
        self._answer = answer
        self.reasoning_end: int | None = None
        super().__init__()

    def _run(self) -> Reads[None]:
        end = self._thought.end
        read = 0 if self._inside else (yield from self._opening())       # characters up to here
        if read is None:
            return
        blanks: list[str] = []                           # left out if the reasoning ends with them
        begun = False
        while True:
            text = yield from self._until(end[0])
            if not text:
                return
            word = (yield from self._rest_of(end)) if text == end[0] else text
            read += len(word)
            if word == end:
                break
            if text == end[0] and self._is_cut_mark(word):
                return
            if not begun:
                word = word.lstrip(BLANKS)
            if solid := word.rstrip(BLANKS):
                begun = True
                self._events.append(Reasoning("".join([*blanks, solid])))
                blanks = []
            blanks.append(word[len(solid) :])
        self.reasoning_end = read
        char = yield from self._solid()
        word = (yield from self._mark(char, self._answer[::2])) if char == "<" else char
        yield from self._rest(word)

    def _opening(self) -> Reads[int | None]:
        """The characters up to the end of the opening mark; None if there is no such mark, and all of the text was read."""
        held, char = "", (yield from self._char())
        while char and char in BLANKS:
            held += char
            char = yield from self._char()
        begin, answers = self._thought.begin, self._answer[::2]
        word = (yield from self._mark(char, (begin, *answers))) if char in (begin[0], "<") else char
        if word == begin:
            return len(held) + len(word)
        self.reasoning_end = 0
        yield from self._rest(word, held)
        return None

    def _rest(self, word: str, blanks: str = "") -> Reads[None]:
        """The content. `word` was read: a mark, a part of one at its beginning, or the first character; `blanks` before it."""
        if word in self._answer[::2]:
            self._unread((yield from self._solid()))
            yield from self._up_to(self._answer[self._answer.index(word) + 1])
            return
        if not self._is_cut_mark(word):
            self._content(blanks + word)
        while text := (yield from self._until("")):
            self._content(text)

    def _up_to(self, closing: str) -> Reads[None]:
        """The content before a closing mark at the end of the text."""
        held: list[tuple[str, int]] = []                 # blanks and the closing mark, which are content only if content follows
        while text := (yield from self._until("<")):
            word = (yield from self._mark(text, (closing,))) if text == "<" else text
            if text == "<" and self._is_cut_mark(word):
                continue
            solid = "" if word == closing else word.rstrip(BLANKS)
            start = self._place - len(word)
            if solid:
                for piece, place in [*held, (solid, start)]:
                    self._say(piece, place)
                held = []
            if len(solid) < len(word):
                held.append((word[len(solid) :], start + len(solid)))
        if all(piece != closing for piece, _ in held):
            for piece, place in held:
                self._say(piece, place)

    def _content(self, text: str) -> None:
        """What was read last is content."""
        self._say(text, self._place - len(text))


class MessageParser:
    """One message: reasoning is parsed first, then calls in the rest; either may be None."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._last_arguments: list[str] | None = None    # of the last call that has begun
        self._earlier_are_whole = True                   # the calls before it
        self._is_reasoning = reasoning is not None       # no content has come yet

    @property
    def content_spans(self) -> list[tuple[int, int]]:
        """Where in the text its content is, as far as it was emitted; the rest is reasoning, calls and their marks."""
        last = self._calls or self._reasoning
        return last.content_spans if last is not None else []

    @property
    def calls_are_whole(self) -> bool:
        """Whether the arguments of every call are complete; known once the text is over."""
        return self._earlier_are_whole and is_object("".join(self._last_arguments or ()))

    @property
    def num_calls(self) -> int:
        return self._calls.count if self._calls is not None else 0

    def feed(self, text: str) -> list[Event]:
        if self._reasoning is None:
            return self._to_calls([Content(text)] if text else [])
        return self._to_calls(self._reasoning.feed(text))

    def finish(self, cut: bool = False) -> list[Event]:
        """The text is over; `cut`: because of a length limit or a stop string."""
        events = self._to_calls(self._reasoning.finish(cut) if self._reasoning is not None else [])
        return events + (self._noted(self._calls.finish(cut)) if self._calls is not None else [])

    def reasoning_tokens(self, text_offsets: Sequence[int]) -> int:
        """The number of reasoning tokens, marks included, among tokens that begin at these offsets, in order."""
        if self._reasoning is None and not isinstance(self._calls, HarmonyParser):
            return 0
        end = (self._reasoning or self._calls).reasoning_end      # type: ignore[union-attr]
        if end is None:
            return len(text_offsets)
        return bisect_left(text_offsets, end)            # not one by one: every event of a stream may have the count

    def _to_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        made: list[Event] = []
        if self._is_reasoning and any(isinstance(event, Content) for event in events):
            assert self._reasoning is not None
            self._is_reasoning = False
            self._calls.begin_at(self._reasoning.content_spans[0][0])        # nothing after it is left out
        for event in events:
            made += self._noted(self._calls.feed(event.text)) if isinstance(event, Content) else [event]
        return made

    def _noted(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, CallStart):
                self._earlier_are_whole = self._last_arguments is None or self.calls_are_whole
                self._last_arguments = []
            elif isinstance(event, CallArguments):
                assert self._last_arguments is not None
                self._last_arguments.append(event.text)
        return events
