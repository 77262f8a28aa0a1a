"""How many run at once, of requests that are all there from the start. No torch.

A run ends with its longest answer. If all begin together, the last hundreds of its steps have few rows and take nearly as long as
full ones; and with hundreds of rows products compute all the time, so that more of them make none cheaper. So short answers are
kept to run beside the longest:

    rows     all at once      levelled
    1000  │▇▅
          │▇▇▅
     250  │▇▇▇▇▃              ▇▇▇▇▇▇▇▇▇▆
       0  └──────────── steps ───────────

Whoever ends leaves a place, and places are filled several at a time: a token of many prompts in one step costs less than of one
prompt beside decodes. All of this needs lengths that are known: with bounds alone, the longest answer may be one that was kept.
"""

from __future__ import annotations

import heapq

from ridgeline.sizes.graph_shapes import decode_sizes

_TOGETHER = 16                       # places are filled once this part of them is free
_AS_MANY = 1.02                      # steps, of those that the longest answer takes


def level_rows(answers: list[int], enough_rows: int | None, max_rows: int) -> int | None:
    """The fewest rows at once with which answers of these lengths, the longest begun first, take no more steps than the longest
    of them; None: all at once.

    Not below `enough_rows`, which make each of them as cheap as can be (None: nobody knows how many those are), and a number that
    steps are recorded for.
    """
    if enough_rows is None or not answers:
        return None
    longest_first = sorted(answers, reverse=True)
    rows = max(enough_rows, -(-sum(answers) // longest_first[0]))
    sizes = [size for size in decode_sizes(max_rows) if rows <= size < len(answers)]
    return next((size for size in sizes if _num_steps(longest_first, size) <= _AS_MANY * longest_first[0]), None)


def _num_steps(longest_first: list[int], rows: int) -> int:
    """Whoever is next begins where somebody has ended first."""
    ends = sorted(longest_first[:rows])                  # a heap
    for answer in longest_first[rows:]:
        heapq.heapreplace(ends, ends[0] + answer)
    return max(ends)


class Level:
    """So many rows, for as long as more than that want to run."""

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
        """Somebody has begun, and so many run now. `full`: no other found room."""
        self._filling = num_running < self.rows and not full
