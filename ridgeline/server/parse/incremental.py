"""A parser that is fed text piece by piece, and what such parsers tell: the parts of a model's message.

A parser here is a generator that reads one character after another and never looks back, so the pieces in which the text
arrives cannot change what it makes of it. Which formats there are is not known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
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
Reads = Generator[str | None, str, T]                    # yields what it wants to read next, is sent the text


def merged(events: list[Event]) -> list[Event]:
    """The same, with neighbours that continue each other as one."""
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
    """This is no call. `rest` has been read and belongs to nothing yet; what follows has not been read."""

    def __init__(self, rest: str = "") -> None:
        self.rest = rest


class Machine(ABC):
    """A parser that is fed text. `_run` reads with `_char` and `_until`; both give "" at the end of the text."""

    def __init__(self) -> None:
        self.content_spans: list[tuple[int, int]] = []   # where in the text its content stands, as far as it has been said
        self._num_read = 0                               # characters
        self._events: list[Event] = []
        self._back = ""                                  # one character that was read and given back
        self._raw: list[str] | None = None               # everything read, while it is not sure to be a call
        self._cut = False                                # the text is over, and its writer had not come to an end
        self._steps = self._run()
        self._wanted = next(self._steps)

    def begin_at(self, place: int) -> None:
        """What is fed stands there in a longer text; to be said before it is."""
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
        """The text is over; `cut`: because it may not be longer."""
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
        """Where in the text reading goes on."""
        return self._num_read - len(self._back)

    def _say(self, text: str, start: int) -> None:
        """Content, which stands there in the text."""
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
        """Characters that are none of `stops`, as many as there are; or one that is. No stops: all there is."""
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
        """Whether `word`, the beginning of a mark and more than its first character, is all there will be of it."""
        return self._cut and len(word) > 1

    def _rest_of(self, word: str) -> Reads[str]:
        """Reads on along `word`, whose first character is read; returns how much of it came, and unreads what differs."""
        for place in range(1, len(word)):
            char = yield from self._char()
            if char != word[place]:
                self._unread(char)
                return word[:place]
        return word
