"""Which tokens of an answer belong to its content: others are reasoning, calls, and their marks.

A token belongs to the content if any of its characters does, so the tokens' texts join to the content wherever tokens and marks
end at the same places. Entries are opaque here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class TextTokens(Generic[Entry]):
    """Entries of tokens, kept until their part of the content is sent."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Entry]] = deque()        # with each token's offset in the answer
        self._sent = 0                                   # characters of the text
        self._span = 0                                   # the span of the last of them
        self._before = 0                                 # characters of the text in spans before it

    def add(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """Entries of the next tokens, each with its offset in the answer."""
        self._waiting.extend(entries)

    def take(self, num_chars: int, spans: Sequence[tuple[int, int]]) -> list[Entry]:
        """The entries of the next `num_chars` characters of content, which is at `spans` in the answer."""
        self._sent += num_chars
        while self._sent - self._before > (size := spans[self._span][1] - spans[self._span][0]):
            self._span, self._before = self._span + 1, self._before + size
        end = spans[self._span][0] + self._sent - self._before
        taken = []
        while self._waiting and self._waiting[0][0] < end:
            start, entry = self._waiting.popleft()
            # A character of several tokens: all of them begin where the last one does, and are part of it.
            stop = max(start + 1, self._waiting[0][0]) if self._waiting else end
            last = bisect_left(spans, (stop,)) - 1       # of those that begin before the token ends
            if last >= 0 and spans[last][1] > start:
                taken.append(entry)
        return taken
