"""Which tokens of an answer are those of its text: an answer's tokens are thoughts, calls, and the marks of both, too.

A token belongs to the text if any character of it does, so the tokens' own texts join to the text wherever tokens and marks
end at the same places. What an entry says of its token is not known here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class TextTokens(Generic[Entry]):
    """Entries of tokens, which wait until the text that they are part of is told."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Entry]] = deque()        # with where in the answer each token begins
        self._told = 0                                   # characters of the text
        self._span = 0                                   # the one that holds the last of them
        self._before = 0                                 # characters of the text in spans before it

    def add(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """Of the next tokens, each with where in the answer it begins."""
        self._waiting.extend(entries)

    def take(self, num_chars: int, spans: Sequence[tuple[int, int]]) -> list[Entry]:
        """The entries of so many more characters of the text, which stands at `spans` in the answer."""
        self._told += num_chars
        while self._told - self._before > (size := spans[self._span][1] - spans[self._span][0]):
            self._span, self._before = self._span + 1, self._before + size
        end = spans[self._span][0] + self._told - self._before
        taken = []
        while self._waiting and self._waiting[0][0] < end:
            start, entry = self._waiting.popleft()
            # The first tokens of a character that has several begin where the last of them does, and are part of it.
            stop = max(start + 1, self._waiting[0][0]) if self._waiting else end
            last = bisect_left(spans, (stop,)) - 1       # of those that begin before the token ends
            if last >= 0 and spans[last][1] > start:
                taken.append(entry)
        return taken
