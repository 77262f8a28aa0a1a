"""Proposes as ngram.py does, for all rows of a step in one native call.

The rows' tokens stay where they are: the native function (ops/cpu/src/grams.c) reads them by address. Beside them each row has a
hash index, which grows with it (gram_index.py says how it works). The engine hands the function over, as this half knows no
kernels; where there is none, ngram.py finds the same drafts, row by row.
"""

from __future__ import annotations

import numpy as np

from ridgeline.scheduler.drafts.gram_index import index_size
from ridgeline.scheduler.drafts.offer import Native, Paths, addresses, as_paths
from ridgeline.scheduler.sequence import Sequence

_SPARE = 64                          # positions that an index has room for beyond those that it holds, at least
_FIRST_ROWS = 64
# A row's numbers, as in ops/cpu/src/grams.c.
_TOKENS, _COUNT, _HEADS, _MASK, _PREVIOUS, _INDEXED, _POSITION, _MATCHED, _KNOWN = range(9)
_FIELDS = 9


class NgramTable:
    """`fewest`, `longest`: tokens that must match, and that are compared. `native`: the library's ngram_drafts."""

    name = "ngram"

    def __init__(self, fewest: int, longest: int, native: Native) -> None:
        self._fewest, self._longest, self._native = fewest, longest, native
        self._table = np.zeros((_FIRST_ROWS, _FIELDS), np.int64)
        self._indices: list[tuple[np.ndarray, np.ndarray] | None] = [None] * _FIRST_ROWS     # heads, and previous
        self._room = np.zeros(_FIRST_ROWS, np.int64)     # positions that a row's index has room for
        self._slots: dict[Sequence, int] = {}            # until ended()
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))
        self._last: tuple[list[Sequence], np.ndarray] | None = None      # rows that were asked for last, and their slots

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for index in self._indices if index is not None for each in index)

    def propose_all(self, sequences: list[Sequence], most: np.ndarray) -> Paths | None:
        count, width = len(sequences), int(most.max(initial=0))
        if width <= 0:
            return None
        slots = self._slots_of(sequences)
        self._table[slots, : _COUNT + 1] = addresses(sequences)
        for place in np.flatnonzero((self._table[slots, _COUNT] >= self._room[slots]) & (most > 0)).tolist():
            self._make_room(int(slots[place]))
        drafts = np.full((count, width), -1, np.int32)
        ends, matched = np.empty((2, count), np.int64)
        asked = np.ascontiguousarray(most, np.int64)
        self._native(
            self._table.ctypes.data, slots.ctypes.data, asked.ctypes.data, drafts.ctypes.data, ends.ctypes.data,
            matched.ctypes.data, count, width, self._fewest, self._longest,
        )
        return as_paths(drafts, ends, matched)

    def ended(self, sequence: Sequence) -> None:
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._table[slot], self._room[slot], self._indices[slot] = 0, 0, None
            self._free.append(slot)
            self._last = None

    def _slots_of(self, sequences: list[Sequence]) -> np.ndarray:
        """Steps that repeat have the same list."""
        if self._last is not None and self._last[0] is sequences and len(self._last[1]) == len(sequences):
            return self._last[1]
        found = np.array([self._slot(sequence) for sequence in sequences], np.int64)
        self._last = sequences, found
        return found

    def _slot(self, sequence: Sequence) -> int:
        slot = self._slots.get(sequence)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[sequence] = self._free.pop()
        return slot

    def _grow(self) -> None:
        size = len(self._room)
        self._free = list(range(2 * size - 1, size - 1, -1))
        self._table, self._room = (np.concatenate([each, np.zeros_like(each)]) for each in (self._table, self._room))
        self._indices += [None] * size

    def _make_room(self, slot: int) -> None:
        """The row is longer than its index may be."""
        row = self._table[slot]
        positions = int(row[_COUNT]) + 1
        index, size = self._indices[slot], int(row[_MASK]) + 1
        if index is None or positions > size:
            size = index_size(positions)
            heads, previous = np.zeros(size, np.int32), np.empty(0, np.int32)
            row[_HEADS], row[_MASK], row[_INDEXED] = heads.ctypes.data, size - 1, 0
        else:
            heads, previous = index
        room = min(size, positions + max(_SPARE, positions // 8))
        longer = np.empty(room, np.int32)
        longer[: len(previous)] = previous
        row[_PREVIOUS], self._room[slot], self._indices[slot] = longer.ctypes.data, room, (heads, longer)
