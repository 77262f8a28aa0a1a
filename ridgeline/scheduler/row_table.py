"""The running sequences as arrays: one row each, so that planning a step is arithmetic and not a loop.

A row keeps its number while its sequence runs. `known` counts tokens whose value exists or is in flight, `computed` those
whose KV is planned; the difference is what the row still has to compute. While drafts are in flight both are upper bounds.
"""

from __future__ import annotations

import heapq

import numpy as np

from ridgeline.scheduler.policy import rank
from ridgeline.scheduler.sequence import Sequence

ARRIVED = 6                          # the last column, as in ops/cpu/src/decodes.c


class RowAnswers:
    """What rows say, by row: so the tokens of a step are taken in at once, and only rows with more to do are looked at."""

    def __init__(self, columns: np.ndarray) -> None:
        self.columns, max_rows = columns, columns.shape[1]
        self.arrived = columns[ARRIVED]                  # tokens whose values are known: the length of `sequence.tokens`
        self.simple = np.zeros(max_rows, bool)           # nothing comes with its tokens, and no grammar follows them
        self.goes_on = np.zeros(max_rows, bool)          # see Sequence.goes_on
        # By token + 1: rows whose answers it ends. None at either end: there is no token -1, and most are beyond the last one.
        self.ending = np.zeros(2, np.int32)
        self.waits = np.zeros(max_rows, bool)            # its next mask takes long: it is in no step until that is there
        self.num_waiting = 0

    def add(self, row: int, sequence: Sequence) -> None:
        self.arrived[row], self.goes_on[row] = len(sequence.tokens), sequence.goes_on
        self.simple[row] = sequence.simple and sequence.request.params.structured_outputs is None
        if sequence.stop_ids:
            missing = max(sequence.stop_ids) + 3 - len(self.ending)
            if missing > 0:
                self.ending = np.append(self.ending, np.zeros(missing, np.int32))
            self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        self.wait(sequence.row, False)

    def wait(self, row: int, waits: bool) -> None:
        self.num_waiting += waits - int(self.waits[row])
        self.waits[row] = waits

    def _count(self, sequence: Sequence, change: int) -> None:
        for token in sequence.stop_ids:
            self.ending[token + 1] += change

    def may_end(self, tokens: np.ndarray) -> np.ndarray:
        """bool: tokens that end the answer of some row, maybe of another one."""
        return self.ending.take(tokens + 1, mode="clip") > 0


class Rows:
    def __init__(self, max_rows: int) -> None:
        columns = np.zeros((ARRIVED + 1, max_rows), np.int64)            # native code reads them (decodes.py)
        # Of a row's tables: logical blocks, and of these the ones offered to the prefix cache. `stay` grows when a sequence gets
        # the row, and when it leaves it.
        self.known, self.computed, self.limit, self.num_blocks, self.committed, self.stay, _ = columns
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.lost = np.zeros(max_rows, np.int64)         # tokens that were computed before, until a preemption
        self.want = np.zeros(max_rows, np.int8)          # Want flags the request asks for
        self.answers = RowAnswers(columns)
        self.num_held = 0                                # blocks in the tables of all rows …
        self.num_used = 0                                # … and the computed tokens in them
        self.sequences: list[Sequence | None] = [None] * max_rows
        self._free = list(range(max_rows))               # a heap: low rows first keeps batches dense
        self._ranked: np.ndarray | None = None           # None: rows have come or gone

    def __len__(self) -> int:
        return len(self.sequences) - len(self._free)

    @property
    def full(self) -> bool:
        return not self._free

    def add(self, sequence: Sequence, want: int, known: int, computed: int) -> int:
        row = heapq.heappop(self._free)
        self.known[row], self.computed[row], self.num_blocks[row] = known, computed, 0
        self.num_used += computed
        sequence.row = row
        self.sequences[row] = sequence
        self.num_prompt[row] = sequence.num_prompt
        self.limit[row] = sequence.limit
        # What was lost with drafts in flight was counted as if all of them had been accepted.
        self.lost[row] = min(sequence.prefill.lost_tokens, len(sequence.tokens) - 1)
        self.want[row] = want
        self.answers.add(row, sequence)
        self.stay[row] += 1
        self._ranked = None
        return row

    def hold(self, row: int, num_blocks: int) -> None:
        self.num_held += num_blocks - int(self.num_blocks[row])
        self.num_blocks[row] = num_blocks

    def remove(self, sequence: Sequence) -> int:
        row = sequence.row
        self.hold(row, 0)
        self.num_used -= int(self.computed[row])
        self.answers.remove(sequence)
        heapq.heappush(self._free, row)
        self.sequences[row] = None
        sequence.row = -1
        self.stay[row] += 1
        self._ranked = None
        return row

    def rank_again(self) -> None:
        """A priority has changed."""
        self._ranked = None

    def ranked(self) -> np.ndarray:
        """The occupied rows, the most important first."""
        if self._ranked is None:
            running = [sequence for sequence in self.sequences if sequence is not None]
            self._ranked = np.array([sequence.row for sequence in sorted(running, key=rank)], np.int64)
        return self._ranked

    def running(self) -> list[Sequence]:
        return [sequence for row in self.ranked().tolist() if (sequence := self.sequences[row]) is not None]
