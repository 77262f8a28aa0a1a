"""The integers of a step, in one buffer: written on the host, sent to the device in one copy.

There are as many host buffers as steps that may be between submit and collect: when a buffer is used again, its step has been
collected, so the device has read it. On the device there is one: steps run one after the other there, and equal sequences of
`put` have equal addresses, which a CUDA graph needs. What is not sent stays there as it was. On the CPU host and device are the
same memory, and nothing is copied.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16
_MOST_PLACES = 4096
_KINDS = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Staging:
    def __init__(self, num_bytes: int, num_buffers: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(num_buffers)]
        self._bytes = [host.numpy() for host in self._host]
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device) if device.type != "cpu" else None
        # Arrays and tensors at places of the buffers, by turn; and spans to copy. Steps of one shape use the same ones, and
        # making them takes longer than filling them.
        self._places: dict[tuple[int, np.dtype[Any], tuple[int, ...]], tuple[list[np.ndarray], list[Tensor], int]] = {}
        self._spans: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._turn = 0
        self._sent = 0
        self.used = 0

    def begin(self) -> None:
        """The next host buffer, for the next step."""
        self._turn = (self._turn + 1) % len(self._host)
        self._sent = self.used = 0

    def put(self, values: np.ndarray) -> Tensor:
        """Write values; the tensor returned holds them on the device after send()."""
        place = (self.used, values.dtype, values.shape)
        arrays, tensors, self.used = self._places.get(place) or self._make_place(place)
        arrays[self._turn][...] = values
        return tensors[self._turn]

    def _make_place(
        self, place: tuple[int, np.dtype[Any], tuple[int, ...]]
    ) -> tuple[list[np.ndarray], list[Tensor], int]:
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        start, dtype, shape = place
        end = start + math.prod(shape) * dtype.itemsize
        # Arrays are made by numpy: a tensor takes several times as long, and with drafts some sizes are new in every step.
        arrays = [each[start:end].view(dtype).reshape(shape) for each in self._bytes]
        if self._device is None:
            tensors = [torch.from_numpy(each) for each in arrays]
        else:
            tensors = [self._device[start:end].view(_KINDS[dtype]).view(shape)] * len(arrays)
        made = self._places[place] = (arrays, tensors, -(-end // _ALIGN) * _ALIGN)
        return made

    def skip_to(self, place: int) -> None:
        """What is put next goes there; what lies between stays on the device as it is."""
        self._sent = self.used = place

    def send(self) -> None:
        """What was put since the last time, or since skip_to()."""
        if self._device is None:
            return
        span = (self._turn, self._sent, self.used)
        if span not in self._spans:
            if len(self._spans) >= _MOST_PLACES:
                self._spans.clear()
            self._spans[span] = (self._device[self._sent : self.used], self._host[self._turn][self._sent : self.used])
        target, source = self._spans[span]
        target.copy_(source, non_blocking=True)
        self._sent = self.used

    def send_at_once(self) -> None:
        """send(), and begin again: the device has read it when this returns."""
        self.send()
        if self._device is not None and self._device.is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()
        self._sent = self.used = 0
