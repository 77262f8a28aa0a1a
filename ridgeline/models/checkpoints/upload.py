"""Tensors of mapped files to a GPU: threads read into pinned memory, and copies to the device overlap with reading.

A plain copy reads a mapped file with one thread, page by page, and then copies through the driver's own staging: a fifth of
what the page cache and the bus can give. Elsewhere than on a GPU a copy is a copy.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ridgeline.process import platform

CHUNK = 16 * 2**20                   # bytes of one pinned buffer
MOST_THREADS = 8


class Upload:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads: ThreadPoolExecutor | None = None
        self._free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event]] = queue.SimpleQueue()
        self._jobs: list[Future[None]] = []

    def copy(self, target: Tensor, values: Tensor) -> None:
        """`target` holds the values once `finish` has returned."""
        mapped = self._device.type == "cuda" and values.device.type == "cpu" and values.dtype == target.dtype
        rows = CHUNK // max(1, values.nbytes // len(values)) if mapped and values.nbytes >= CHUNK // 4 else 0
        if not rows:                                     # small, or a row is more than a buffer
            target.copy_(values)
            return
        self._start()
        # Memory that the allocator has just given may still be read by what the device was told before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for first in range(0, len(values), rows):
            here = slice(first, first + rows)
            self._jobs.append(self._pool.submit(self._copy_chunk, target[here], values[here]))

    def fetched(self, values: Tensor) -> Tensor:
        """The values on the device, ready for its current stream."""
        if self._device.type != "cuda" or values.device.type != "cpu":
            return values
        target = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        self.copy(target, values)
        self.finish()
        return target

    def finish(self) -> None:
        """Wait for the threads; what the device does from now on comes after the copies."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        if jobs:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *error: object) -> None:
        """Give the pinned memory back."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._stream.synchronize()
            self._threads, self._free = None, queue.SimpleQueue()

    @property
    def _pool(self) -> ThreadPoolExecutor:
        assert self._threads is not None
        return self._threads

    def _start(self) -> None:
        if self._threads is not None:
            return
        count = min(MOST_THREADS, max(1, platform.cpu_count() // 2))
        self._threads = ThreadPoolExecutor(count, "upload")
        self._stream = torch.cuda.Stream(self._device)
        for _ in range(2 * count):                       # one is filled while the other is copied
            self._free.put((torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))

    @torch.inference_mode()
    def _copy_chunk(self, target: Tensor, values: Tensor) -> None:
        buffer, copied = self._free.get()
        try:
            copied.synchronize()
            staged = buffer[: values.nbytes].view(values.dtype).view(values.shape)
            values = values.contiguous()
            # Without the interpreter's lock, and in this thread alone: torch would begin threads of its own for each of these.
            ctypes.memmove(staged.data_ptr(), values.data_ptr(), values.nbytes)
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                target.copy_(staged, non_blocking=True)
                copied.record()
        finally:
            self._free.put((buffer, copied))


class FiniteChecks:
    """Are all values finite? On a GPU the answers are fetched once, at the end."""

    def __init__(self, fail: Callable[[str, str, torch.dtype], None]) -> None:
        self._fail = fail
        self._later: list[tuple[Tensor, str, str]] = []

    def add(self, values: Tensor, name: str, file: str) -> None:
        self._later.append((values, name, file))
        if values.device.type != "cuda":
            self.finish()

    def finish(self) -> None:
        checked, self._later = [each for each in self._later if each[0].numel()], []
        if not checked:
            return
        flags = [_finite(values) for values, _, _ in checked]
        for good, (values, name, file) in zip(torch.stack(flags).tolist(), checked, strict=True):
            if not good:
                self._fail(name, file, values.dtype)


def _finite(values: Tensor) -> Tensor:
    if values.dtype == torch.float8_e4m3fn:              # 127 without its sign is the only code that is no number
        return ((values.view(torch.uint8) & 127) != 127).all()
    if not values.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=values.device)
    low, high = torch.aminmax(values)
    return torch.isfinite(low) & torch.isfinite(high)
