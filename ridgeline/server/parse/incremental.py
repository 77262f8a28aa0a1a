"""The base of parsers that are fed text piece by piece, and their events: the parts of a model's message.

A parser is a generator that reads character by character and never looks back, so the result does not depend on how the text
was cut into pieces. The formats are in server/parse/tool_calls and server/parse/reasoning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from dataclasses import dataclass, replace
from typing import TypeVar

WINDOW = 256                         # characters looked at for the end of a run; bounds the work per character
BLANKS = " \t\r\n"


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class Reasoning:
    text: str


@dataclass(slots=True)
class CallStart:
    index: int
    name: str


@dataclass(slots=True)
class CallArguments:
    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments
T = TypeVar("T")
Reads = Generator[str | None, str, T]                    # yields what to read next, is sent the text


def merged(events: list[Event]) -> list[Event]:
    """The same events, with adjacent parts of one text joined."""
    made: list[Event] = []
    pieces: list[str] = []                               # of the last one

    def close() -> None:
        if len(pieces) > 1:
            last = made[-1]
            assert not isinstance(last, CallStart)
            made[-1] = replace(last, text="".join(pieces))

    for event in events:
        if isinstance(event, CallStart):
            close()
            made.append(event)
            pieces = []
        elif made and _continues(made[-1], event):
            pieces.append(event.text)
        else:
            close()
            made.append(event)
            pieces = [event.text]
    close()
    return made


def _continues(last: Event, event: Event) -> bool:
    if isinstance(event, CallArguments):
        return isinstance(last, CallArguments) and last.index == event.index
    return type(last) is type(event)


class Malformed(Exception):
    """The text is not a call. `rest` was read and not used yet; what follows it was not read."""

    def __init__(self, rest: str = "") -> None:
        self.rest = rest


class Machine(ABC):
    """A parser that is fed text. `_run` reads with `_char` and `_until`; both give "" at the end of the text."""

    def __init__(self) -> None:
        self.content_spans: list[tuple[int, int]] = []   # where in the text its content is, as far as it was emitted
        self._num_read = 0                               # characters
        self._events: list[Event] = []
        self._back = ""                                  # one character that was read and given back
        self._raw: list[str] | None = None               # everything read, while it may turn out not to be a call
        self._cut = False                                # the text is over, and the model had not finished
        self._steps = self._run()
        self._wanted = next(self._steps)

    def begin_at(self, place: int) -> None:
        """The text to be fed begins at `place` of a longer text; call it before feed()."""
        self._num_read = place

    def feed(self, text: str) -> list[Event]:
        place, length = 0, len(text)
        while place < length:
            stops = self._wanted
            if stops is None:
                end = place + 1
            elif stops:
                end = min(place + WINDOW, length)
                for stop in stops:
                    found = text.find(stop, place, end)
                    end = found if found >= 0 else end
                end = max(end, place + 1)
            else:
                end = length
            self._num_read += end - place
            self._wanted = self._steps.send(text[place:end])
            place = end
        return self._take()

    def finish(self, cut: bool = False) -> list[Event]:
        """The text is over; `cut`: because of a length limit."""
        self._cut = cut
        try:
            while True:
                self._steps.send("")
        except StopIteration:
            return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events) if len(events) > 1 else events

    @property
    def _place(self) -> int:
        """The next character's place in the text."""
        return self._num_read - len(self._back)

    def _say(self, text: str, start: int) -> None:
        """Emit content that is at `start` in the text."""
        if not text:
            return
        self._events.append(Content(text))
        spans, end = self.content_spans, start + len(text)
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))

    @abstractmethod
    def _run(self) -> Reads[None]:
        """The parser; returns at the end of the text, never before."""

    def _char(self) -> Reads[str]:
        if self._back:
            char, self._back = self._back, ""
        else:
            char = yield None
        if self._raw is not None:
            self._raw.append(char)
        return char

    def _until(self, stops: str) -> Reads[str]:
        """The characters before the next of `stops`, or that one; without stops, all there are."""
        if self._back:
            text, self._back = self._back, ""
        else:
            text = yield stops
        if self._raw is not None:
            self._raw.append(text)
        return text

    def _unread(self, char: str) -> None:
        self._back = char
        if self._raw is not None:
            self._raw.pop()

    def _solid(self) -> Reads[str]:
        """The next character that is not blank; "" at the end."""
        while True:
            char = yield from self._char()
            if not char or char not in BLANKS:
                return char

    def _is_cut_mark(self, word: str) -> bool:
        """Whether `word`, at least two characters of a mark, was cut off by the end of the text."""
        return self._cut and len(word) > 1

    def _rest_of(self, word: str) -> Reads[str]:
        """Read on along `word`, whose first character was read; returns the part that matched, and unreads what differs."""
        for place in range(1, len(word)):
            char = yield from self._char()
            if char != word[place]:
                self._unread(char)
                return word[:place]
        return word

    def _mark(self, first: str, marks: Collection[str]) -> Reads[str]:
        """Read on along whichever of `marks` begins so, `first` read; returns that mark, or the part that matched."""
        word = first
        while word not in marks:
            char = yield from self._char()
            if not char or not any(mark.startswith(word + char) for mark in marks):
                self._unread(char)
                return word
            word += char
        return word
