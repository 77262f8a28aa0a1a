"""Reserves the memory of steps before the first one: the ledger's size, in one piece for each pool.

torch's allocator takes a segment from the device for each tensor that fits into no free block. Left to itself it makes segments
of the sizes that come first, and what fits into none of them later, though all are free, takes another. In one piece that is
free as a whole every step finds room. Tensors of up to 1 MiB it keeps apart, in segments of 2 MiB, of which the largest steps
need hardly any: 128 rows of an 8B model need 12 MiB of them that 1,024 rows do not.

There are two pools: for steps that are launched kernel by kernel, and for CUDA graphs (cuda_graphs.py).
"""

from __future__ import annotations

import torch

from ridgeline.process.log import get_logger
from ridgeline.sizes.ledger import LIBRARY_BYTES, SMALL_BLOCK, SMALL_BLOCKS

logger = get_logger("worker")


def take(device: torch.device, num_bytes: int) -> None:
    """For the pool that is allocated from now: `num_bytes` for large tensors, and what small ones and cuBLAS's workspace need."""
    sizes = [num_bytes + LIBRARY_BYTES, *[SMALL_BLOCK] * SMALL_BLOCKS]
    try:
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        del blocks                                       # they stay with the allocator
    except torch.OutOfMemoryError:                       # more is in use than was foreseen: steps take what is left as they come
        logger.warning("no memory to reserve %.2f GiB for steps", num_bytes / 2**30)
