"""The collectives that sharded layers need. At size 1 each is the identity.

Processes meet through a file, not a port, so nothing listens on the network. This file moves tensors; `sharding.py` says
which rank keeps which part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    waited = 0.0                     # seconds in blocking collectives so far (gloo)

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
        """Leave the group."""


class ProcessGroup(Communicator):
    """Ranks in processes of their own, over gloo (CPU) or NCCL (CUDA)."""

    def __init__(
        self, rank: int, size: int, store: Path, backend: str = "gloo", timeout_seconds: float = 120.0
    ) -> None:
        """`store` is a new path, the same for all ranks. A collective fails after `timeout_seconds` if a rank has not joined,
        and at once if a rank has exited."""
        if not 0 <= rank < size:
            raise ConfigError(f"rank must be in 0..{size - 1}, got {rank}")
        if backend == "gloo":
            # All ranks are on this machine; gloo would otherwise look up the host's name, which may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.rank = rank
        self.size = size
        self._waits = backend == "gloo"                  # NCCL only queues its work
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._waiting():
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._waiting():
            dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        with self._waiting():
            dist.broadcast(x, source)
        return x

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter() if self._waits else 0.0
        yield
        if self._waits:
            self.waited += time.perf_counter() - began

    def close(self) -> None:
        dist.destroy_process_group()
