"""A stage of the pipeline: some of the layers, and the way to the stages before and behind it.

The first stage has the embedding, the last one the head and the sampler. What goes from stage to stage is the residual stream of
a step's tokens, [tokens, hidden]; both sides know its size from the plan.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor

from ridgeline.sizes.mesh_shape import stage_layers


class Stage:
    """All layers in one process."""

    number = 0
    count = 1
    waited = 0.0                     # seconds in blocking transfers so far (gloo)

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1

    def layers(self, num_layers: int) -> range:
        return stage_layers(num_layers, self.number, self.count)

    def receive(self, into: Tensor) -> Tensor:
        """The stream from the stage before."""
        raise AssertionError("no stage comes before the first one")

    def send(self, x: Tensor) -> None:
        """The stream to the stage behind."""
        raise AssertionError("no stage comes after the last one")


WHOLE = Stage()


class ProcessStage(Stage):
    """One of several. `before` and `behind`: the ranks with the same part of each layer in the stages next to it."""

    def __init__(self, number: int, count: int, before: int, behind: int) -> None:
        self.number, self.count = number, count
        self._before, self._behind = before, behind
        self._waits = dist.get_backend() == "gloo"

    def receive(self, into: Tensor) -> Tensor:
        began = time.perf_counter() if self._waits else 0.0
        dist.recv(into, self._before)
        if self._waits:
            self.waited += time.perf_counter() - began
        return into

    def send(self, x: Tensor) -> None:
        began = time.perf_counter() if self._waits else 0.0
        dist.send(x.contiguous(), self._behind)
        if self._waits:
            self.waited += time.perf_counter() - began
