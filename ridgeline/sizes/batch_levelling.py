"""Limits the batch of an offline run so that short answers finish beside the longest one instead of before it. No torch.

A run ends with its longest answer. If all requests start together, its last hundreds of steps have few rows and take nearly as
long as full ones; and with hundreds of rows GEMMs are compute-bound, so that more rows make none cheaper. So short answers are
held back to run beside the longest:

    rows     all at once      levelled
    1000  │▇▅
          │▇▇▅
     250  │▇▇▇▇▃              ▇▇▇▇▇▇▇▇▇▆
       0  └──────────── steps ───────────

Places of finished sequences are filled several at a time: a token costs less in a step with many prompts than in one with a
single prompt beside decodes. All of this needs known lengths: with bounds alone, the longest answer may be one held back.
"""

from __future__ import annotations

import heapq

from ridgeline.sizes.graph_shapes import decode_sizes

_TOGETHER = 16                       # places are filled once this part of them is free
_AS_MANY = 1.02                      # steps, of those that the longest answer takes


def level_rows(answers: list[int], enough_rows: int | None, max_rows: int) -> int | None:
    """The smallest batch with which answers of these lengths, the longest first, take no more steps than the longest of them;
    None: all at once.

    Not below `enough_rows`, beyond which a row gets no cheaper (None: unknown), and a size for which CUDA graphs are captured.
    """
    if enough_rows is None or not answers:
        return None
    longest_first = sorted(answers, reverse=True)
    rows = max(enough_rows, -(-sum(answers) // longest_first[0]))
    sizes = [size for size in decode_sizes(max_rows) if rows <= size < len(answers)]
    return next((size for size in sizes if _num_steps(longest_first, size) <= _AS_MANY * longest_first[0]), None)


def _num_steps(longest_first: list[int], rows: int) -> int:
    """Each further answer takes the row that is free first."""
    ends = sorted(longest_first[:rows])                  # a heap
    for answer in longest_first[rows:]:
        heapq.heapreplace(ends, ends[0] + answer)
    return max(ends)


class Level:
    """A limit on the batch, for as long as more sequences want to run."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._filling = True

    def places(self, num_running: int, num_waiting: int) -> int:
        """How many may begin in this step."""
        free = self.rows - num_running
        if free >= num_waiting:
            return num_waiting
        self._filling |= free >= max(1, self.rows // _TOGETHER)
        return max(0, free) if self._filling else 0

    def begun(self, num_running: int, full: bool) -> None:
        """Sequences were admitted, and `num_running` run now. `full`: no further one found room."""
        self._filling = num_running < self.rows and not full
