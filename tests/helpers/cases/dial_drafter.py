"""A drafter that knows the answers: it guesses each token right with probability alpha, and otherwise names a wrong one.

The answers are those of a run without drafts. So acceptance is a dial, and everything behind it is real.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from ridgeline.scheduler.drafting import DecodingRows, Drafts
from ridgeline.scheduler.sequence import Sequence


class DialDrafter:
    active, waits, will_look = True, False, True

    def __init__(
        self, answer: Callable[[Sequence, int], list[int]], vocab: int, alpha: float, widest: int = 5, seed: int = 0,
        width: int | None = None,
    ) -> None:
        """`answer(sequence, count)`: the tokens that follow `sequence.tokens`. `width`: of every row; None: at random."""
        self._answer, self._vocab, self._alpha, self._widest, self._width = answer, vocab, alpha, widest, width
        self._random = random.Random(seed)
        self.planned = self.proposed = self.accepted = 0
        self.ended_with: list[list[int]] = []

    def awake(self) -> bool:
        return True

    def plan(self, rows: DecodingRows) -> Drafts | None:
        width = np.zeros(len(rows.sequences), np.int32)
        room = rows.room
        for place, most in enumerate(rows.most.tolist()):
            wanted = self._random.randint(0, self._widest) if self._width is None else self._width
            width[place] = min(wanted, most, room)
            room -= int(width[place])
        if not width.any():
            return None
        self.planned += 1
        path = np.full((len(width), int((width + rows.pending).max())), -1, np.int32)
        for place, sequence in enumerate(rows.sequences):
            if width[place]:
                right = self._answer(sequence, path.shape[1])[: path.shape[1]]
                path[place, : len(right)] = [self._turned(token) for token in right]
        return Drafts(width, path)

    def _turned(self, token: int) -> int:
        if self._random.random() < self._alpha:
            return token
        return (token + 1 + self._random.randrange(self._vocab - 1)) % self._vocab

    def observe(self, sequences: list[Sequence], width: np.ndarray, accepted: np.ndarray, seconds: float) -> None:
        assert len(sequences) == len(width) == len(accepted) and (accepted <= width).all()
        self.proposed += int(width.sum())
        self.accepted += int(accepted.sum())

    def slept(self, rows: int) -> bool:
        return False

    def timed(
        self, rows: int, tokens: int, queries: int, keys: int, seconds: float, rejected: int, waited: bool = False
    ) -> None:
        """It does not look at times."""

    def predicted(self, sequence: Sequence) -> tuple[int, int]:
        return 0, 0

    def ended(self, sequence: Sequence) -> None:
        self.ended_with.append(sequence.tokens.tolist())
