"""The running sequences as arrays: one row each, so that planning a step is arithmetic and not a loop.

A row keeps its number while its sequence runs. `known` counts tokens whose value exists or is in flight, `computed` those
whose KV is planned; the difference is what the row still wants.
"""

from __future__ import annotations

import heapq

import numpy as np

from ridgeline.scheduler.policy import rank
from ridgeline.scheduler.sequence import Sequence


class Rows:
    def __init__(self, max_rows: int) -> None:
        self.known = np.zeros(max_rows, np.int64)
        self.computed = np.zeros(max_rows, np.int64)
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.limit = np.zeros(max_rows, np.int64)
        self.num_blocks = np.zeros(max_rows, np.int64)   # logical blocks in the row's tables
        self.committed = np.zeros(max_rows, np.int64)    # of these, the ones offered to the prefix cache
        self.lost = np.zeros(max_rows, np.int64)         # tokens that were computed before, until a preemption
        self.want = np.zeros(max_rows, np.int8)          # Want flags the request asks for
        self.sequences: list[Sequence | None] = [None] * max_rows
        self._free = list(range(max_rows))               # a heap: low rows first keeps batches dense
        self._ranked = np.zeros(0, np.int64)
        self._stale = False

    def __len__(self) -> int:
        return len(self.sequences) - len(self._free)

    @property
    def full(self) -> bool:
        return not self._free

    def add(self, sequence: Sequence, want: int) -> int:
        row = heapq.heappop(self._free)
        sequence.row = row
        self.sequences[row] = sequence
        self.num_prompt[row] = sequence.num_prompt
        self.limit[row] = sequence.limit
        self.lost[row] = sequence.lost_tokens
        self.want[row] = want
        self._stale = True
        return row

    def remove(self, sequence: Sequence) -> int:
        row = sequence.row
        heapq.heappush(self._free, row)
        self.sequences[row] = None
        sequence.row = -1
        self._stale = True
        return row

    def ranked(self) -> np.ndarray:
        """The occupied rows, the most important first."""
        if self._stale:
            running = [sequence for sequence in self.sequences if sequence is not None]
            running.sort(key=rank)
            self._ranked = np.array([sequence.row for sequence in running], np.int64)
            self._stale = False
        return self._ranked

    def running(self) -> list[Sequence]:
        return [sequence for row in self.ranked().tolist() if (sequence := self.sequences[row]) is not None]
