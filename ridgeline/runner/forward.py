"""How a step is launched: the forward pass up to the logits, and the tokens too if all rows are greedy.

This is the eager way, kernel by kernel. `cuda_graphs.py` is the other one: steps as CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.layers.batch import Batch
from ridgeline.layers.kv import LayerKV
from ridgeline.messages import StepPlan
from ridgeline.models.decoder import Decoder
from ridgeline.ops.sampling.greedy import greedy as choose_greedy
from ridgeline.sizes.graph_shapes import Shape

_ALIGN = 16                          # bytes: a kernel is compiled once for pointers that are multiples of it, and once for others


@dataclass(slots=True)
class Computed:
    """What a step's forward pass leaves on the device. S rows of the batch sample."""

    hidden: Tensor | None            # [T, hidden], where all of it was computed and no graph did it
    logits: Tensor | None            # [S, vocabulary]; None if the greedy tokens suffice, or no row samples
    # uint8: first int64 [S], the best token of every row, in `last_token` already; last bool [S], no finite logits.
    greedy: Tensor | None = None


class Forward(Protocol):
    replays: int                     # steps that were a CUDA graph

    def shape(self, plan: StepPlan) -> Shape | None:
        """What this plan's batch is to be filled up to; None: as it is."""

    def run(self, batch: Batch, greedy: bool) -> Computed:
        """`greedy`: every row that samples takes its best token and wants nothing else."""

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster. False: nothing is left to do."""


class EagerForward:
    replays = 0

    def __init__(self, model: Decoder, kv: list[LayerKV], last_token: Tensor) -> None:
        self._model, self._kv, self._last_token = model, kv, last_token
        self._greedy = torch.empty(9 * len(last_token) + _ALIGN, dtype=torch.uint8, device=last_token.device)

    def shape(self, plan: StepPlan) -> Shape | None:
        return None

    def prepare(self) -> bool:
        return False

    def run(self, batch: Batch, greedy: bool) -> Computed:
        if batch.last_rows is not None:                  # the last sampled token never left the device
            torch.index_select(self._last_token, 0, batch.last_rows, out=batch.tokens[: len(batch.last_rows)])
        elif batch.newest is not None:
            newest = self._last_token.index_select(0, batch.newest.clamp(min=0))
            batch.tokens.copy_(torch.where(batch.newest < 0, batch.tokens, newest))
        hidden = self._model(batch, self._kv)
        if not self._model.stage.last:
            return Computed(None, None)
        num_sampled = len(batch.logits_index)
        if not num_sampled:
            return Computed(hidden, None)
        rows = hidden
        if batch.sampled is None and num_sampled < len(hidden):
            rows = hidden.index_select(0, batch.logits_index)
        logits = self._model.logits(rows)
        if not greedy:
            return Computed(hidden, logits)
        second = -(-8 * num_sampled // _ALIGN) * _ALIGN
        found = self._greedy[: second + num_sampled]
        tokens, failed = found[: 8 * num_sampled].view(torch.int64), found[second:].view(torch.bool)
        choose_greedy(logits, tokens, failed, batch.sample_rows, self._last_token)
        return Computed(hidden, None, found)
