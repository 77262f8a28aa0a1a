"""The integers of a step, in one buffer: written on the host, sent to the device in one copy.

There is one host buffer more than there may be steps in flight, and each is reused only when the device has read it. On
the device there is one: steps run one after the other there, and equal sequences of `put` have equal addresses, which is
what a recorded graph needs. On the CPU host and device are the same memory, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16
_MOST_PLACES = 4096
_KINDS = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Staging:
    def __init__(self, num_bytes: int, num_buffers: int, device: torch.device) -> None:
        on_device = device.type != "cpu"
        self._host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_device) for _ in range(num_buffers)]
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device) if on_device else None
        self._read = [torch.cuda.Event() if on_device else None for _ in self._host]
        self._views = [host.numpy() for host in self._host]
        # Tensors at places of the buffers. Steps of one shape use the same ones, and making them takes longer than filling.
        self._places: dict[tuple[int, int, np.dtype[Any], tuple[int, ...]], Tensor] = {}
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """The next host buffer, once the device has read what it held."""
        self._turn = (self._turn + 1) % len(self._host)
        self._used = 0
        event = self._read[self._turn]
        if event is not None:
            event.synchronize()

    def put(self, values: np.ndarray) -> Tensor:
        """Write values; the tensor returned holds them on the device after send()."""
        start, end = self._used, self._used + values.nbytes
        self._used = -(-end // _ALIGN) * _ALIGN
        self._views[self._turn][start:end].view(values.dtype)[:] = values.ravel()
        place = (self._turn if self._device is None else 0, start, values.dtype, values.shape)
        tensor = self._places.get(place)
        if tensor is None:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            memory = self._host[self._turn] if self._device is None else self._device
            tensor = self._places[place] = memory[start:end].view(_KINDS[values.dtype]).view(values.shape)
        return tensor

    def send(self) -> None:
        event = self._read[self._turn]
        if self._device is not None and event is not None:
            self._device[: self._used].copy_(self._host[self._turn][: self._used], non_blocking=True)
            event.record()
