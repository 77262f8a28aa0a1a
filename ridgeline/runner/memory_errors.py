"""Which errors say that a step did not fit into memory, and nothing worse. Knows what torch, the driver and gloo raise."""

from __future__ import annotations

import errno

import torch

# Where there is no type for it: torch's allocator on a CPU, the driver, and libraries that allocate by themselves. Any other
# error of a device leaves it in a state that nothing can be said of.
_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",            # torch for ARM, which has another allocator
    "std::bad_alloc", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED", "Cannot allocate memory (12)",
)


def is_out_of_memory(error: BaseException) -> bool:
    """What was launched before it is sound, and so is the device: the same can be tried again with less."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def is_lost_peer(error: BaseException) -> bool:
    """A collective over gloo failed because another rank has left: perhaps for want of memory."""
    return isinstance(error, RuntimeError) and "gloo" in str(error)
