"""Memory into which packed weights are expanded: one piece for all linears of a model, which multiply one after the other.

Steps that are launched kernel by kernel and CUDA graphs share it. In the allocator's pools each of the two would have such a
piece, and a pool would need so much free memory side by side, between the activations of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ExpandRoom:
    def __init__(self) -> None:
        self.needed = 0                                  # bytes of the largest weight that is expanded
        self._memory: Tensor | None = None

    def need(self, num_bytes: int) -> None:
        self.needed = max(self.needed, num_bytes)

    def reserve(self, device: torch.device) -> None:
        """Before the first CUDA graph, which holds its address."""
        if self.needed and device.type == "cuda":
            self._memory = torch.empty(self.needed, dtype=torch.uint8, device=device)

    def numbers(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[outputs, inputs] to write to; the next call gives the same memory. Before `reserve`, while kernels are collected, each
        call gives other memory."""
        size = outputs * inputs * dtype.itemsize
        if self._memory is None or size > self.needed:
            return torch.empty((outputs, inputs), dtype=dtype, device=device)
        return self._memory[:size].view(dtype).view(outputs, inputs)
