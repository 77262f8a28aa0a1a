"""The time of a decode step by the CUDA graph that runs it: what was measured, with a rough model where nothing was yet.

CUDA graphs pad steps to captured sizes, and GEMMs have tiles, so the time is a staircase, and beyond 128 tokens it is not even
monotone. It is kept as measured: no line is fitted. Graphs for rows with many queries take longer for as many tokens, because
their attention has larger tiles. So each bound of a row's queries has its own times. Time also grows with the keys that
attention reads: each power of two of these has its own table.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ridgeline.sizes.graph_shapes import GraphShapes, most_queries

_REMEMBERED = 7                      # steps of each shape, whose median counts: a slow one (a graph captured) does not
_STALE = 200                         # steps after which what a shape took is forgotten: a GPU's clock changes with its heat; …
_RENEWED = 4                         # … and after which a new one counts alone: those before it may have been slow for a while, …
_LOOK = 32                           # … and how often it is looked for what is to be forgotten
_SURE = 3                            # steps after which a shape's time is believed: the first may have been slow by chance
_LEFT = 0.5                          # of a step's time, at least, where it is told for fewer keys: that is a rough model's
_SAME = 0.02                         # a median that changes by less is the same
_EVERY = 32                          # without captured sizes each number of tokens up to it is a shape; beyond, an eighth more
PLAIN = 1                            # the bound of queries of steps without drafts

# Sizes that were not measured are believed to be a little faster than they may be. A model that is too careful would keep them
# from ever being tried; one that is too bold is found out by the first try.
_HOPE = 0.5                          # beyond the largest measured size: the share believed of the growth that the model predicts
_DIP = 0.95                          # between two sizes: of the line between their times; and of a time with more queries
_STEEP = 0.1                         # below the smallest: growth with the size, at least

Model = Callable[[int, int], float]  # (tokens, keys) -> seconds, roughly: only its proportions matter once steps were measured


@dataclass(slots=True)
class _Shape:
    """What steps of one shape took."""

    newest: int = 0                  # the last step of this shape, counted among all steps
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    median: float = 0.0              # of these; it is asked for far more often than it changes

    def took(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.median = sorted(self.seconds)[len(self.seconds) // 2]


_Measured = dict[int, dict[int, _Shape]]                 # by bound of queries, then by size


@dataclass(slots=True)
class Table:
    """Steps of one bound of queries."""

    sizes: np.ndarray                # int64: tokens, ascending
    seconds: np.ndarray
    sure: np.ndarray                 # bool: measured, and more than once


@dataclass(slots=True)
class Tables:
    """The tables of several bounds, as bytes, for native code."""

    bounds: bytes
    sizes: bytes                     # of all of them
    seconds: bytes
    sure: bytes
    num_bounds: int
    num_sizes: int


class ShapeTimes:
    """`graphs`: the shapes that are captured; None: steps run as they are, and the queries of a row make no difference."""

    def __init__(self, model: Model, graphs: GraphShapes | None = None, most: int = 4096) -> None:
        self._model = model
        self._graphs = graphs
        every = _geometric(most)
        self._plain = graphs.decodes if graphs is not None else every
        self._drafted = graphs.draft_tokens if graphs is not None else every
        self._measured: dict[int, _Measured] = {}        # by keys (bits of their number)
        self._steps = 0                                  # that have passed
        self._models: dict[tuple[int, bool], list[float]] = {}       # what the model says, by keys and whether there are drafts
        self._bounds: dict[tuple[int, int], list[int]] = {}          # what bounds() said, by rows and most
        self._queries: dict[tuple[int, int], int] = {}   # what bound() said, by rows and queries
        self._known: dict[int, dict[int, Table]] = {}    # estimates by keys and queries, until another step is measured
        self._tables: dict[int, tuple[list[int], Tables]] = {}       # what tables() said last, by keys
        self._told: dict[int, float] = {}                # what _of_keys() said when these were estimated

    def another(self) -> ShapeTimes:
        """For the same shapes, with nothing measured."""
        return ShapeTimes(self._model, self._graphs, self._plain[-1])

    def observe(self, rows: int, tokens: int, queries: int, keys: int, seconds: float) -> None:
        """A step of so many rows and tokens, at most `queries` of a row."""
        self.passed()
        bound = self.bound(rows, queries)
        sizes = self._sizes(bound)
        if seconds <= 0 or tokens > sizes[-1]:
            return
        bits, size = keys.bit_length(), _fitting(sizes, tokens)
        shape = self._measured.setdefault(bits, {}).setdefault(bound, {}).setdefault(size, _Shape())
        if self.changes and self._steps - shape.newest > _RENEWED:
            shape.seconds.clear()
        shape.newest = self._steps
        more = self._of_keys(keys)
        shape.took(_with(seconds, -more))
        table = self._known.get(bits, {}).get(bound)
        place = bisect.bisect_left(sizes, size)
        sure = len(shape.seconds) >= _SURE
        if table is None or table.sure[place] != sure or abs(_with(shape.median, more) / table.seconds[place] - 1) > _SAME:
            self._known.pop(bits, None)                  # what was estimated from it is wrong now
            self._tables.clear()

    def passed(self, steps: int = 1) -> None:
        """Steps have passed, measured or not."""
        before, self._steps = self._steps, self._steps + steps
        if before // _LOOK != self._steps // _LOOK:
            self._known.clear()
            self._tables.clear()

    def bound(self, rows: int, queries: int) -> int:
        """The most queries of a row that the graph of such a step is made for."""
        if queries == 1 or self._graphs is None:
            return PLAIN
        known = self._queries.get((rows, queries))
        if known is None:
            known = self._queries[rows, queries] = self._graphs.draft_queries(rows, queries)
        return known

    def has_graph(self, decodes: int, prompts: int, prompt_tokens: int) -> bool:
        """Of a step without drafts."""
        return self._graphs is not None and self._graphs.fit(decodes, prompts, prompt_tokens) is not None

    def bounds(self, rows: int, most: int) -> list[int]:
        """All that steps with drafts may have, at most `most` queries of a row; ascending."""
        if self._graphs is None:
            return [most]
        if (rows, most) not in self._bounds:
            self._bounds[rows, most] = sorted({self._graphs.draft_queries(rows, queries) for queries in range(2, most + 1)})
        return self._bounds[rows, most]

    def size_of(self, rows: int) -> int:
        """The size of a step without drafts."""
        return _fitting(self._plain, rows)

    def seconds(self, rows: int, keys: int) -> float:
        """Of a step without drafts, padding included."""
        own = self._measured.get(keys.bit_length(), {}).get(PLAIN, {}).get(self.size_of(rows))
        if own is not None:                              # as the table has it, which is new after each step that changes it
            return _with(own.median, self._of_keys(keys))
        table = self.table(PLAIN, keys)
        return float(table.seconds[min(bisect.bisect_left(self._plain, rows), len(self._plain) - 1)])

    def most_queries(self, rows: int) -> int:
        """Of each row, in a step in which all have drafts."""
        return self._drafted[-1] // rows if self._graphs is None else min(most_queries(rows), self._drafted[-1] // rows)

    def drafted(self, rows: int, tokens: int, queries: int, keys: int) -> float:
        """Of a step with drafts: `tokens` in all, at most `queries` of a row."""
        table = self.table(self.bound(rows, queries), keys)
        return float(table.seconds[min(int(table.sizes.searchsorted(tokens)), len(table.sizes) - 1)])

    def measured(self, rows: int, keys: int) -> bool:
        """Was a step without drafts?"""
        return self.size_of(rows) in self._measured.get(keys.bit_length(), {}).get(PLAIN, {})

    def table(self, bound: int, keys: int) -> Table:
        bound = bound if self._graphs is not None else PLAIN
        self._look_at_keys(keys)
        known = self._known.setdefault(keys.bit_length(), {})
        if bound not in known:
            known[bound] = self._estimated(bound, keys)
        return known[bound]

    def tables(self, bounds: list[int], keys: int) -> Tables:
        """Of bounds that steps with drafts may have."""
        bits = keys.bit_length()
        self._look_at_keys(keys)
        known = self._tables.get(bits)
        if known is not None and known[0] == bounds:
            return known[1]
        found = [self.table(bound, keys) for bound in bounds]
        seconds, sure = (b"".join(getattr(each, name).tobytes() for each in found) for name in ("seconds", "sure"))
        sizes, listed = found[0].sizes.astype(np.int64), np.array(bounds, np.int64)
        made = Tables(listed.tobytes(), sizes.tobytes(), seconds, sure, len(found), len(sizes))
        self._tables[bits] = bounds, made
        return made

    def _sizes(self, bound: int) -> list[int]:
        return self._plain if bound == PLAIN else self._drafted

    def _estimated(self, bound: int, keys: int) -> Table:
        """Medians; where there is none, the model times what neighbours took relative to it. A graph with a smaller bound is
        no slower, and one with a larger bound no faster.

        There are a dozen sizes or some: for so few, numpy takes ten times as long as lists, and this runs in most steps in which
        drafts are looked for.
        """
        bits, sizes = keys.bit_length(), self._sizes(bound)
        measured = self._measured.get(bits)
        model, unsure = self._modelled(bound, bits), not measured
        scale = [1.0] * len(sizes)
        if not measured:
            near = min(self._measured, key=lambda each: abs(each - bits), default=None)
            if near is None:
                return Table(np.array(sizes), np.array(model), np.zeros(len(sizes), bool))
            measured = self._measured[near]
            scale = [here / there for here, there in zip(model, self._modelled(bound, near), strict=True)]   # what keys change
        measured = self._fresh(measured)
        points = {size: each.median for own in sorted(measured) if own <= bound for size, each in measured[own].items()}
        slower: dict[int, float] = {}
        for own in sorted(measured, reverse=True):
            slower.update({size: _DIP * each.median for size, each in measured[own].items() if own > bound})
        mine = measured.get(bound, {})
        seconds = [
            min(found, slower[size]) if size in slower and size not in mine else found
            for size, found in zip(sizes, self._between(points or slower, sizes, model, bits), strict=True)
        ]
        more = self._of_keys(keys)
        seconds = [_with(found * each, more) for found, each in zip(seconds, scale, strict=True)]
        sure = [not unsure and size in mine and len(mine[size].seconds) >= _SURE for size in sizes]
        return Table(np.array(sizes), np.array(seconds), np.array(sure))

    def _look_at_keys(self, keys: int) -> None:
        """What was estimated for other keys is forgotten if these make a difference, as where many requests have ended."""
        bits, more = keys.bit_length(), self._of_keys(keys)
        if abs(more - self._told.setdefault(bits, more)) > _SAME * self._model(1, keys):
            self._told[bits] = more
            self._known.pop(bits, None)
            self._tables.pop(bits, None)

    def _of_keys(self, keys: int) -> float:
        """Seconds that so many keys take, beyond those that stand for their power of two. Contexts grow from step to step: a
        shape that ran when they were short is not faster than one that runs now. Without graphs, on a CPU, the model's seconds
        say too little."""
        return self._model(1, keys) - self._model(1, _typical(keys.bit_length())) if self.changes else 0.0

    @property
    def changes(self) -> bool:
        """Does what was measured hold for a while only? Not without graphs, on a CPU: there are hundreds of shapes, and to try
        them again costs more than it tells."""
        return self._graphs is not None

    def _is_stale(self, shape: _Shape) -> bool:
        return self.changes and self._steps - shape.newest > _STALE

    def _fresh(self, measured: _Measured) -> _Measured:
        """Without what is stale; all of it, if everything is. Steps without drafts are measured again now and then by themselves,
        and are never guessed from steps with some: all gains are relative to them."""
        found = {
            bound: {size: each for size, each in own.items() if bound == PLAIN or not self._is_stale(each)}
            for bound, own in measured.items()
        }
        return found if any(found.values()) else measured

    def _between(self, points: dict[int, float], sizes: list[int], model: list[float], bits: int) -> list[float]:
        """By the sizes that were measured."""
        known = sorted(points)
        first, last = known[0], known[-1]
        least, most = self._model(first, _typical(bits)), self._model(last, _typical(bits))
        found = []
        for size, modelled in zip(sizes, model, strict=True):
            if size in points:
                seconds = points[size]
            elif size < first:
                seconds = points[first] / (1 + max(least / modelled - 1, _STEEP * (first / size - 1)))
            elif size > last:
                seconds = points[last] * (1 + _HOPE * (modelled / most - 1))
            else:
                place = bisect.bisect_left(known, size)
                below, above = known[place - 1], known[place]
                steep = (points[above] - points[below]) / (above - below)
                seconds = _DIP * (points[below] + steep * (size - below))
            found.append(seconds)
        return found

    def _modelled(self, bound: int, bits: int) -> list[float]:
        key, drafted = _typical(bits), bound != PLAIN
        if (bits, drafted) not in self._models:
            self._models[bits, drafted] = [self._model(size, key) for size in self._sizes(bound)]
        return self._models[bits, drafted]


class Pace:
    """Times of two kinds of steps. Most are planned while the one before is in flight, and the device does not wait. A step that
    was planned once all tokens had arrived takes longer, by what the host does in between."""

    def __init__(self, ahead: ShapeTimes, overlaps: bool = False) -> None:
        """`overlaps` False: all steps are of one kind."""
        self.ahead = ahead
        self.waited = ahead.another() if overlaps else ahead
        self.now = ahead                                 # of the step that is planned

    def observe(self, rows: int, tokens: int, queries: int, keys: int, seconds: float, waited: bool) -> None:
        own, other = (self.waited, self.ahead) if waited else (self.ahead, self.waited)
        own.observe(rows, tokens, queries, keys, seconds)
        if other is not own:
            other.passed()

    def passed(self, steps: int = 1) -> None:
        self.ahead.passed(steps)
        if self.waited is not self.ahead:
            self.waited.passed(steps)


def _fitting(sizes: list[int], tokens: int) -> int:
    return sizes[min(bisect.bisect_left(sizes, tokens), len(sizes) - 1)]


def _with(seconds: float, more: float) -> float:
    return max(_LEFT * seconds, seconds + more)


def _typical(bits: int) -> int:
    """Keys with so many bits."""
    return 3 << max(0, bits - 2) if bits > 1 else bits


def _geometric(most: int) -> list[int]:
    sizes = list(range(1, _EVERY + 1))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + sizes[-1] // 8)
    return sizes
