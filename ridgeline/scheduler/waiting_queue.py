"""The queue of waiting sequences: a heap by rank, with ageing, and an order for offline runs.

A sequence that ends while it waits stays in the heap until it comes up, or until ended ones are more than half of it.
Which sequence may be admitted, and when, is the scheduler's business.
"""

from __future__ import annotations

import heapq

from ridgeline.scheduler.policy import AGED_PRIORITY, rank
from ridgeline.scheduler.sequence import Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self.heap: list[tuple[tuple[int, int], Sequence]] = []
        self._num_ended = 0                              # of these, the ones that have ended

    def __len__(self) -> int:
        return len(self.heap) - self._num_ended

    def sequences(self) -> list[Sequence]:
        """Those that still wait, in no order."""
        return [sequence for _, sequence in self.heap if not sequence.finished]

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self.heap, (rank(sequence), sequence))

    def first(self) -> Sequence | None:
        while self.heap:
            sequence = self.heap[0][1]
            if not sequence.finished:
                return sequence
            heapq.heappop(self.heap)
            self._num_ended -= 1
        return None

    def pop(self) -> Sequence:
        """Take out what first() returned."""
        return heapq.heappop(self.heap)[1]

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence; usually it is the first."""
        if self.heap[0][1] is sequence:
            heapq.heappop(self.heap)
        else:
            self.heap = [entry for entry in self.heap if entry[1] is not sequence]
            heapq.heapify(self.heap)

    def ended(self) -> None:
        """One of the waiting sequences has ended."""
        self._num_ended += 1
        self.tidy()

    def tidy(self) -> None:
        """Remove ended sequences once they are more than half of the heap, so each costs a constant share of the work."""
        if 2 * self._num_ended > len(self.heap):
            self.heap = [entry for entry in self.heap if not entry[1].finished]
            heapq.heapify(self.heap)
            self._num_ended = 0

    def promote_aged(self, deadline: int) -> None:
        """Put sequences that arrived before the deadline (a step) first: a stream of more important ones must not starve them."""
        if deadline <= 0:
            return
        aged = [sequence for _, sequence in self.heap if sequence.turn.arrived_at <= deadline]
        aged = [sequence for sequence in aged if sequence.turn.priority != AGED_PRIORITY and not sequence.finished]
        if aged:
            for sequence in aged:
                sequence.turn.priority = AGED_PRIORITY
            self._rank_again()

    def longest_first(self) -> None:
        """Put the longest possible answers first, and keep the order among equals."""
        waiting = self.sequences()
        orders = sorted(sequence.turn.order for sequence in waiting)
        waiting.sort(key=lambda sequence: (sequence.num_prompt - sequence.limit, sequence.turn.order))
        for sequence, order in zip(waiting, orders, strict=True):
            sequence.turn.order = order
        self._rank_again()

    def _rank_again(self) -> None:
        self.heap = [(rank(sequence), sequence) for _, sequence in self.heap]
        heapq.heapify(self.heap)
