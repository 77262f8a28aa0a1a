"""The time of a decode step by its number of tokens: a table of what was measured, with a rough model where nothing was yet.

CUDA graphs pad steps to captured sizes, and GEMMs have tiles, so the time is a staircase, and beyond 128 tokens it is not even
monotone. It is kept as measured: no line is fitted. It also grows with the keys that attention reads, so each power of two of
these has its own row in the table.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence

_REMEMBERED = 7                      # steps of each shape, whose median counts: a slow one (a graph captured) does not
_EVERY = 32                          # without captured sizes each number of tokens up to it is a shape; beyond, an eighth more

# Sizes that were not measured are believed to be a little faster than they may be. A model that is too careful would keep them
# from ever being tried; one that is too bold is found out by the first try.
_HOPE = 0.5                          # beyond the largest measured size: the share believed of the growth that the model predicts
_DIP = 0.95                          # between two sizes: of the line between their times
_STEEP = 0.1                         # below the smallest: growth with the size, at least

Model = Callable[[int, int], float]  # (tokens, keys) -> seconds, roughly: only its proportions matter once steps were measured


class ShapeTimes:
    """`sizes`: token counts to which steps are padded, ascending; empty: none are."""

    def __init__(self, model: Model, sizes: Sequence[int] = (), most: int = 4096) -> None:
        self._model = model
        self.sizes = list(sizes) or _geometric(most)
        self._measured: dict[int, dict[int, deque[float]]] = {}  # by keys (bits of their number), then by size
        self._known: dict[int, dict[int, float]] = {}    # estimates, until another step is measured

    def observe(self, tokens: int, keys: int, seconds: float) -> None:
        if seconds <= 0 or tokens > self.sizes[-1]:
            return
        row, size = keys.bit_length(), self.size_of(tokens)
        measured = self._measured.setdefault(row, {}).setdefault(size, deque(maxlen=_REMEMBERED))
        measured.append(seconds)
        if self._known.get(row, {}).get(size) != _median(measured):
            self._known.pop(row, None)                   # what was estimated from it is wrong now

    def size_of(self, tokens: int) -> int:
        """The size that a step of that many tokens has."""
        return self.sizes[min(bisect.bisect_left(self.sizes, tokens), len(self.sizes) - 1)]

    def seconds(self, tokens: int, keys: int) -> float:
        """Of a step with that many tokens, padding included."""
        row, size = keys.bit_length(), self.size_of(tokens)
        known = self._known.setdefault(row, {})
        if size not in known:
            known[size] = self._estimate(row, size, keys)
        return known[size]

    def measured(self, tokens: int, keys: int) -> bool:
        return self.size_of(tokens) in self._measured.get(keys.bit_length(), {})

    def _estimate(self, row: int, size: int, keys: int) -> float:
        """The median; where there is none, the model times what neighbours took relative to it."""
        measured = self._measured.get(row)
        if not measured:
            near = min(self._measured, key=lambda each: abs(each - row), default=None)
            if near is None:
                return self._model(size, keys)
            row, measured = near, self._measured[near]
            if size in measured:                         # the same shape with other keys: what the model says they change
                return _median(measured[size]) * self._model(size, keys) / self._model(size, _typical(row))
        if size in measured:
            return _median(measured[size])
        listed = sorted(measured)
        place = bisect.bisect_left(listed, size)
        above = listed[place] if place < len(listed) else None
        if place == 0:
            assert above is not None
            grown = max(self._model(above, keys) / self._model(size, keys) - 1, _STEEP * (above / size - 1))
            return _median(measured[above]) / (1 + grown)
        below = listed[place - 1]
        least = _median(measured[below])
        if above is not None:
            return _DIP * (least + (_median(measured[above]) - least) * (size - below) / (above - below))
        grown = self._model(size, keys) / self._model(below, keys) - 1
        return least * (1 + _HOPE * grown)


def _typical(row: int) -> int:
    """Keys of a row of the table."""
    return 3 << max(0, row - 2) if row > 1 else row


def _geometric(most: int) -> list[int]:
    sizes = list(range(1, _EVERY + 1))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + sizes[-1] // 8)
    return sizes


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]
