"""Drafts of rows that are shorter than the host assumed: what is verified one by one is compared with the device's guesses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.runner.verify import Positions, verify


class Said(NamedTuple):
    tokens: Tensor
    failed: Tensor
    none_left: Tensor | None = None


class Penalised:
    """A sampler whose rows all change their logits, so that each position waits for the one before it."""

    asked = 0

    def edits(self, rows: np.ndarray) -> np.ndarray:
        return np.ones(len(rows), bool)

    def sample(self, logits: Tensor, rows: np.ndarray, allowed: Tensor | None) -> Said:
        self.asked += 1
        return Said(logits.argmax(1), torch.zeros(len(logits), dtype=torch.bool))


def test_every_rank_compares_with_what_the_device_knows() -> None:
    """A rank that has packed the step before it took in the last has other guesses than rank 0, which must not change how often
    they meet: each position is one broadcast."""
    logits = torch.eye(8)[[3, 4, 5]]
    asked = []
    for stale in ([3, 4], [0, 0]):
        table = np.array([[*stale, -1]])
        positions = Positions(np.zeros(1, np.int64), np.array([2]), table, np.zeros(1, np.int64), 3, np.array([0, 1]))
        positions.late = torch.tensor([3, 4])
        sampler = Penalised()
        found = verify(sampler, logits, positions, None, lambda tokens: tokens)  # type: ignore[arg-type]
        assert found.accepted.tolist() == [2] and found.newest.tolist() == [5]
        asked.append(sampler.asked)
    assert asked == [3, 3]
