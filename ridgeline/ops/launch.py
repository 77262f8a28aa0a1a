"""Programmatic dependent launch (PDL) of chains of kernels, where the GPU has it, and facts of the GPU.

A kernel launched with PDL may start while its predecessor drains. It must call `gdc_wait` before it reads what a predecessor
wrote and before it writes anything. Before the wait it may fetch weights: loading them ends with a synchronisation. Every
kernel of a chain waits, so the end of one is also the end of all before it.

Some kernels let the next one start before they wait themselves, so several of a chain can run at once. What is read before the
wait must therefore be older than the whole chain, not only than the predecessor: weights, and what the host has sent for the step
(lists, lengths, tables). A chain begins with a kernel launched without PDL, the embedding, which waits for all before it.
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
    """SMs of the device."""
    if device.type != "cuda":
        return 132                                       # in the interpreter: as many SMs as an H100 or H200 has
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory of a CTA."""
    if device.type != "cuda":
        return 232_448                                   # in the interpreter, likewise
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


# Triton's own functions of these names serve kernels too, and take 4 us on the host.


def cdiv(count: int, size: int) -> int:
    """Pieces of a size that hold them all."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The least one that is not below."""
    return 1 << (count - 1).bit_length() if count > 1 else 1
