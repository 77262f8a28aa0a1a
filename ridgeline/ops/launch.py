"""How a chain of kernels is launched: programmatic dependent launch, where the device has it.

A kernel launched so may start while its predecessor drains. It must call `gdc_wait` before it reads what a predecessor
wrote and before it writes anything; what it may do earlier is fetch weights, which therefore must have been written long
before: loading ends with a synchronisation. Every kernel of a chain waits, so that the end of one is also the end of all
before it.

Some kernels let the next one start before they wait themselves, so several of a chain can be under way at once. What is read
before the wait must therefore be older than the whole chain, not than the predecessor alone: weights, and what the host has
sent for the step (lists, lengths, tables). A chain begins with a kernel that is launched plainly, the embedding, and such a
one waits for all that came before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ridgeline.ops.registry import TRITON_INTERPRETED


@functools.cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Arguments for a kernel with the constant DEPENDENT, which says whether it may use the wait instructions."""
    if TRITON_INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132                                       # the interpreter's: as many as the devices the rules are for
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have of it."""
    if device.type != "cuda":
        return 232_448                                   # the interpreter's, likewise
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
