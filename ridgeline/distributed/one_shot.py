"""One-shot all-reduces of small messages between GPUs that read each other's memory. Where they are used: one_shot_choice.py.

A kernel that waits for a rank that is gone is let go by writing large numbers over its flags.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.one_shot_sum import DTYPES, one_shot_sum
from ridgeline.sizes.mesh_shape import ONE_SHOT_CTAS, ONE_SHOT_MOST

_PAST_ALL = 2**62                    # more calls than there will ever be


class OneShot:
    """The buffers of an axis."""

    def __init__(self, buffer: Tensor, bases: Tensor, rank: int, most: int = ONE_SHOT_MOST, keep: object = None) -> None:
        """`buffer`: this rank's, int64; `bases`: all ranks' addresses here; `most`: bytes of the largest message; `keep`: what
        holds the others' memory."""
        self.most = most
        self._bases, self._rank, self._buffer, self._keep = bases, rank, buffer, keep
        self._flags = buffer[2 * ONE_SHOT_MOST // 8 :][: ONE_SHOT_CTAS * len(bases)]
        self._past_all = torch.full(self._flags.shape, _PAST_ALL, dtype=torch.int64, pin_memory=buffer.is_cuda)
        self._side = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None

    def takes(self, x: Tensor) -> bool:
        return 0 < x.numel() * x.element_size() <= self.most and x.dtype in DTYPES and x.is_contiguous()

    def sum(self, x: Tensor) -> Tensor:
        """In place, with the same bits on every rank."""
        return one_shot_sum(x, self._bases, self._rank)

    def let_go(self) -> None:
        """From any thread: no kernel waits for another rank from now on, and sums are undefined. A copy engine writes the flags:
        another kernel might have to be loaded first, which can wait for those that run."""
        with torch.cuda.stream(self._side):              # None: no stream is changed
            self._flags.copy_(self._past_all, non_blocking=True)
