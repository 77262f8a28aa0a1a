"""Memory for what native functions write, at a known address: asking numpy for an address takes longer than most of the calls."""

from __future__ import annotations

import numpy as np


class NativeRoom:
    def __init__(self, size: int) -> None:
        self.size = size
        self.numbers = np.zeros(size, np.int64)
        self.address: int = self.numbers.ctypes.data

    def copy(self, count: int, first: int = 0) -> np.ndarray:
        """What was written there, which the next call may overwrite."""
        return self.numbers[first : first + count].copy()
