"""The mesh of ranks that run one model: one axis for each way in which the work is divided. At size 1 every collective is the
identity.

    tensor     every rank has a part of every layer: heads, columns, rows of the vocabulary
    stages     every rank has some of the layers, one after the other (pipeline.py)
    experts    every rank has some of the experts, whole; its ranks are those of the tensor axis
    context    every rank has some positions of the KV cache, with all KV heads; its ranks are those of the tensor axis

Processes meet through a file or a store (`meet`). This file moves tensors; `sharding.py` says which rank keeps which part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.distributed.one_shot import OneShot
from ridgeline.distributed.pipeline import WHOLE, Stage

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor        # its new name, from torch 2.13 on


class Axis:
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

    def all_to_all(self, x: Tensor) -> Tensor:
        """x[r] goes to rank r; what comes from rank r is in its place."""
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`source`'s x on every rank, in place."""
        return x


ALONE = Axis()


class Communicator:
    """The mesh as one rank sees it. Without arguments: one rank alone, which has everything."""

    def __init__(
        self, tensor: Axis = ALONE, stages: Stage = WHOLE, experts: Axis = ALONE, rank: int = 0, context: Axis = ALONE
    ) -> None:
        self.tensor, self.stages, self.experts, self.context, self.rank = tensor, stages, experts, context, rank
        self.device_index: int | None = None             # of the GPU on this rank's machine; None: by its rank

    @property
    def size(self) -> int:
        """Ranks, all together."""
        return self.tensor.size * self.stages.count

    @property
    def waited(self) -> float:
        """Seconds in blocking collectives so far."""
        return self.tensor.waited + self.stages.waited

    def reach_peers(self, device: torch.device) -> None:
        """Once the device of this rank is known, on all ranks: let GPUs read each other's memory where they can."""

    def agree(self, decision: bool) -> bool:
        """Rank 0's decision, on every rank: where a clock decides, they would differ."""
        return decision

    @property
    def can_rejoin(self) -> bool:
        """Can ranks leave the mesh in the middle of a step, and meet again?"""
        return False

    def leave(self) -> None:
        """Collectives of ranks that wait for this one fail at once."""

    def rejoin(self, name: str) -> None:
        """Meet the others again, all of which give the same new name. Layers keep their axes."""
        raise AssertionError("one rank alone leaves nobody")

    def give_up(self) -> None:
        """From another thread: end what waits for a rank that is gone."""

    def close(self) -> None:
        """Leave the mesh."""


class ProcessAxis(Axis):
    """Ranks in processes of their own, over gloo (CPU) or NCCL (CUDA)."""

    def __init__(self, members: list[int], rank: int, group: dist.ProcessGroup | None = None) -> None:
        """`members`: the ranks of this axis as the mesh counts them; `rank`: this one, likewise."""
        self.rank, self.size = members.index(rank), len(members)
        self._members, self.group = members, group
        self.one_shot: OneShot | None = None             # of small messages between GPUs that reach each other
        self._waits = dist.get_backend(group) == "gloo"              # NCCL only queues its work

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.one_shot is not None and self.one_shot.takes(x):
            return self.one_shot.sum(x)
        return self.sum_over_group(x)

    def sum_over_group(self, x: Tensor) -> Tensor:
        """By gloo or NCCL, whatever the size."""
        with self._waiting():
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Into one tensor of a size that the host knows: a CUDA graph can hold it."""
        found = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self._waiting():
            _gather(found, x.contiguous(), group=self.group)
        return torch.cat(found.chunk(self.size), dim=-1)

    def all_to_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        found = torch.empty_like(x)
        with self._waiting():
            dist.all_to_all_single(found, x, group=self.group)
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        with self._waiting():
            dist.broadcast(x, self._members[source], group=self.group)
        return x

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter() if self._waits else 0.0
        yield
        if self._waits:
            self.waited += time.perf_counter() - began
