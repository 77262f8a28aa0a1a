"""The collectives that sharded layers need. At size 1 each is the identity.

Processes meet through a file, not a port: nothing listens on the network to be found or abused. This file moves
tensors; which part of a tensor belongs to whom is `plan.py`'s business.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import ConfigError


class Communicator:
    """One rank alone."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, possibly in place."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, joined along the last dimension in rank order."""
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`source`'s x on every rank, in place."""
        return x

    def close(self) -> None:
        """Leaves the group."""


class ProcessGroup(Communicator):
    """Ranks in processes of their own, over gloo (CPU) or NCCL (CUDA)."""

    def __init__(
        self, rank: int, size: int, store: Path, backend: str = "gloo", timeout_seconds: float = 120.0
    ) -> None:
        """`store` is a path that no file has yet, the same for all ranks. After `timeout_seconds` a collective that not
        all ranks have joined fails; so does one with a rank that is gone, at once."""
        if not 0 <= rank < size:
            raise ConfigError(f"rank must be in 0..{size - 1}, got {rank}")
        if backend == "gloo":
            # All ranks are on this machine; gloo would otherwise look up the host's name, which may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.rank = rank
        self.size = size
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(x, source)
        return x

    def close(self) -> None:
        dist.destroy_process_group()
