"""Reserves the memory of steps before the first one: the ledger's size, in one piece for each pool.

torch's allocator takes a segment from the device for each tensor that fits into no free block. Left to itself it makes segments
of the sizes that come first, and what fits into none of them later, though all are free, takes another. In one piece that is
free as a whole every step finds room. Tensors of up to 1 MiB it keeps apart, in segments of 2 MiB, of which the largest steps
need hardly any: 128 rows of an 8B model need 12 MiB of them that 1,024 rows do not.

There are two pools: for steps that are launched kernel by kernel, and for CUDA graphs (cuda_graphs.py). In each, cuBLAS has a
workspace from its first product on, and keeps it. It has to be there before anything else: put into a free block that loading
or a larger step has left, it would hold that block's whole segment, hundreds of MiB that no step could use.
"""

from __future__ import annotations

import torch

from ridgeline.process.log import get_logger
from ridgeline.sizes.ledger import SMALL_BLOCK, SMALL_BLOCKS

logger = get_logger("worker")


def take_library(device: torch.device) -> None:
    """cuBLAS's workspace, for the pool that is allocated from now: torch makes it with the handle."""
    if device.type == "cuda":
        torch.cuda.current_blas_handle()


def take(device: torch.device, num_bytes: int) -> None:
    """For the pool that is allocated from now: cuBLAS's workspace, `num_bytes` for large tensors, and what small ones need."""
    try:
        take_library(device)
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in (num_bytes, *[SMALL_BLOCK] * SMALL_BLOCKS)]
        del blocks                                       # they stay with the allocator
    except torch.OutOfMemoryError:                       # more is in use than was foreseen: steps take what is left as they come
        logger.warning("no memory to reserve %.2f GiB for steps", num_bytes / 2**30)
