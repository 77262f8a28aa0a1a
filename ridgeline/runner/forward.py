"""How a step is launched: the forward pass up to the logits, and the tokens too if all rows are greedy.

This is the eager way, kernel by kernel. `cuda_graphs.py` is the other one: steps as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.layers.batch import Batch
from ridgeline.layers.kv import LayerKV
from ridgeline.messages import StepPlan
from ridgeline.models.decoder import Decoder
from ridgeline.ops.sampling.accept import accept
from ridgeline.ops.sampling.divided_logits import best_here, elect
from ridgeline.ops.sampling.greedy import greedy as choose_greedy
from ridgeline.runner.to_host import after_tokens, greedy_bytes
from ridgeline.sizes.graph_shapes import Shape

Choose = Callable[[Tensor, Tensor, Tensor | None], None]


@dataclass(slots=True)
class Computed:
    """What a step's forward pass leaves on the device. S rows of the batch sample."""

    hidden: Tensor | None            # [T, hidden], where all of it was computed and no graph did it
    logits: Tensor | None            # [S, ids of this rank]; None if the greedy tokens suffice, or no row samples
    # uint8: first int64 [S], the best token of every row, in `last_token` already; last bool [S], no finite logits. Of a step
    # with drafts: of every position; and between the two int64 [N], how many drafts of each row are accepted.
    greedy: Tensor | None = None


class Forward(Protocol):
    replays: int                     # steps that were a CUDA graph
    stood_in: bool                   # the newest step was slower than it will be: a larger CUDA graph ran it, or no program yet …

    @property
    def passing(self) -> bool:
        """… and only for a few steps: its time tells nothing of those behind it."""

    @property
    def eager(self) -> Forward:
        """The same steps, kernel by kernel: as the model is now, not as it was when a step was recorded."""

    def shape(self, plan: StepPlan, greedy: bool) -> Shape | None:
        """What this plan's batch is to be filled up to; None: as it is. `greedy`: see run(); of a plan without drafts it may
        be another when the same rows come again."""

    def run(self, batch: Batch, greedy: bool) -> Computed:
        """`greedy`: every row that samples takes its best token and wants nothing else."""

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster. False: nothing is left to do."""

    def release(self) -> None:
        """No step comes any more: let go of CUDA graphs. NCCL's communicators do not end before the graphs that hold their
        collectives."""


class EagerForward:
    replays = 0
    stood_in = passing = False

    def __init__(self, model: Decoder, kv: list[LayerKV], last_token: Tensor, surplus: Tensor) -> None:
        """By row: its newest token, and tokens by which it is shorter than the host assumes."""
        self._model, self._kv, self._last_token, self._surplus = model, kv, last_token, surplus
        # Zeros: while launches are only collected (ops/compile_ahead.py), they are read as what was accepted.
        self._greedy = torch.zeros(greedy_bytes(len(last_token)), dtype=torch.uint8, device=last_token.device)

    @property
    def eager(self) -> EagerForward:
        return self

    def shape(self, plan: StepPlan, greedy: bool) -> Shape | None:
        return None

    def prepare(self) -> bool:
        return False

    def release(self) -> None:
        """It holds none."""

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
        if not greedy:
            return Computed(hidden, self._model.logits_here(rows))

        def choose(tokens: Tensor, failed: Tensor, sample_rows: Tensor | None) -> None:
            self._choose(rows, tokens, failed, sample_rows)

        return Computed(hidden, None, best_tokens(choose, batch, self._greedy, self._last_token, self._surplus))

    def _choose(self, rows: Tensor, tokens: Tensor, failed: Tensor, sample_rows: Tensor | None) -> None:
        """The best token of each row; with `sample_rows`, also into `last_token`. Of several ranks, each finds the best of its
        own ids, and two numbers travel."""
        head = self._model.head
        assert head is not None
        if head.comm.size == 1:
            last_token = None if sample_rows is None else self._last_token
            choose_greedy(self._model.logits(rows), tokens, failed, sample_rows, last_token)
            return
        best = best_here(self._model.logits_here(rows), head.shard.start, failed)
        elect(head.division.pairs(best[:, None]), tokens, failed)
        if sample_rows is not None:
            self._last_token.index_copy_(0, sample_rows, tokens)


def best_tokens(choose: Choose, batch: Batch, room: Tensor, last_token: Tensor, surplus: Tensor) -> Tensor:
    """`Computed.greedy`, in this room, which has greedy_bytes(). `choose(tokens, failed, rows)`: the best ones into `tokens`,
    and into `last_token` of the rows, if given."""
    runs, count = batch.runs, len(batch.logits_index)
    second = third = after_tokens(count)
    if runs is not None:
        third += after_tokens(len(runs.rows))
    found = room[: third + count]
    tokens, failed = found[: 8 * count].view(torch.int64), found[third:].view(torch.bool)
    choose(tokens, failed, batch.sample_rows if runs is None else None)
    if runs is not None:
        accepted = found[second : second + 8 * len(runs.rows)].view(torch.int64)
        accept(
            surplus, last_token, batch.tokens, tokens, failed, batch.logits_index, runs.start, runs.rows, accepted, runs.longest
        )
    return found
