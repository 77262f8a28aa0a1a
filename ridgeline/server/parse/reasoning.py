"""Reasoning at the start of a model's message, and the message as a whole: reasoning, then content and tool calls."""

from __future__ import annotations

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


class ReasoningParser(Machine):
    """<think> … </think> at the start of a message; blanks around either part are left out.

    `inside`: the prompt has opened it. `reasoning_end` is where the content begins; None before that.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self.reasoning_end: int | None = None
        super().__init__()

    def _run(self) -> Reads[None]:
        read = 0                                         # characters up to here
        if not self._inside:
            held = ""
            while True:
                char = yield from self._char()
                if char and char in BLANKS:
                    held += char
                    continue
                word = (yield from self._rest_of("<think>")) if char == "<" else char
                break
            if word != "<think>":
                self.reasoning_end = 0
                self._content("" if self._is_cut_mark(word) else held + word)
                yield from self._rest()
                return
            read = len(held) + len(word)
        blanks: list[str] = []                           # left out if the reasoning ends with them
        begun = False
        while True:
            text = yield from self._until("<")
            if not text:
                return
            word = (yield from self._rest_of("</think>")) if text == "<" else text
            read += len(word)
            if word == "</think>":
                break
            if text == "<" and self._is_cut_mark(word):
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
        self._content(char)
        yield from self._rest()

    def _rest(self) -> Reads[None]:
        while text := (yield from self._until("")):
            self._content(text)

    def _content(self, text: str) -> None:
        """What was read last is content."""
        self._say(text, self._place - len(text))


class MessageParser:
    """One message: reasoning is parsed first, then calls in the rest; either may be None."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._last_arguments: list[str] = []             # of the last call that has begun
        self._is_reasoning = reasoning is not None       # no content has come yet

    @property
    def content_spans(self) -> list[tuple[int, int]]:
        """Where in the text its content is, as far as it was emitted; the rest is reasoning, calls and their marks."""
        last = self._calls or self._reasoning
        return last.content_spans if last is not None else []

    @property
    def last_call_is_whole(self) -> bool:
        """Whether its arguments are complete; known once the text is over."""
        return is_object("".join(self._last_arguments))

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

    def reasoning_tokens(self, text_offsets: list[int]) -> int:
        """The number of reasoning tokens, marks included, among tokens that begin at these offsets."""
        if self._reasoning is None and not isinstance(self._calls, HarmonyParser):
            return 0
        end = (self._reasoning or self._calls).reasoning_end      # type: ignore[union-attr]
        if end is None:
            return len(text_offsets)
        return sum(offset < end for offset in text_offsets)

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
                self._last_arguments = []
            elif isinstance(event, CallArguments):
                self._last_arguments.append(event.text)
        return events
