"""Results on their way from the device to the host, and the time a step took there. Neither waits until it is asked."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor


class Fetched:
    """Copies of device tensors as numpy arrays, started now and waited for when they are read."""

    def __init__(self, *tensors: Tensor) -> None:
        on_gpu = tensors[0].is_cuda
        # Into pinned memory: any other makes the host wait for the copy, and so for every step before it. Copied on a
        # CPU, too: the next step may write to the same place.
        self._tensors = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu).copy_(tensor, non_blocking=on_gpu)
            for tensor in tensors
        ]
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record()

    def arrays(self) -> list[np.ndarray]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


class Clock:
    """Seconds between two points of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events is None:
            self._times[which] = time.perf_counter()
        else:
            self._events[which].record()

    def seconds(self) -> float:
        if self._events is None:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3
