"""Decode steps on a CPU as recorded programs: one call for all kernels of a step (ops/cpu/recording.py).

A step in which every row computes one token and samples is recorded when its number of rows comes for the second time, up to its
output: the greedy tokens, or the logits. Its inputs are copied to fixed addresses. Other steps, and those whose ops are not all
native, run op by op.

A step with drafts is such a step, too: each token is a row of its own, with the blocks of its sequence and the keys up to itself.
Every layer writes the keys of all tokens before it attends. So a draft costs what another row would, and goes through the kernels
of steps without drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.messages import StepPlan
from ridgeline.ops.attention.attention_arguments import AttentionWork
from ridgeline.ops.cpu.recording import Arena, Program, Recording
from ridgeline.ops.registry import is_marked
from ridgeline.process.log import get_logger
from ridgeline.runner.device_rows import EVERY_HIDDEN, leading_decodes
from ridgeline.runner.forward import Computed, EagerForward, best_tokens
from ridgeline.runner.to_host import greedy_bytes
from ridgeline.sizes.graph_shapes import Shape

logger = get_logger("programs")

MOST_PROGRAMS = 128                  # the one unused for longest makes room
MOST_DRAFTED = 64                    # tokens of a recorded step with drafts: its logits are kept, and the ledger counts rows
_Key = tuple[int, bool]              # tokens, greedy


@dataclass(slots=True)
class _Recorded:
    program: Program | None = None   # None: not recorded yet, or not to be
    computed: Computed | None = None
    refused: bool = False


class ProgramForward:
    def __init__(self, eager: EagerForward, tables: list[Tensor], last_token: Tensor, surplus: Tensor) -> None:
        """`tables`: of each KV group, the block tables of all rows. They and `last_token` stay where they are."""
        self.eager = eager
        self._inputs = _Inputs(tables, last_token)
        self._last_token, self._surplus = last_token, surplus
        self._accepted = torch.zeros(greedy_bytes(len(last_token)), dtype=torch.uint8)
        self._arena = Arena()
        self._recorded: OrderedDict[_Key, _Recorded] = OrderedDict()
        self._decodes = False                            # is the step that is about to run one that can be recorded?
        self._told = False
        self.replays = 0
        self.stood_in = False

    @property
    def passing(self) -> bool:
        return self.stood_in

    def shape(self, plan: StepPlan, greedy: bool) -> Shape | None:
        self._decodes = leading_decodes(plan) == len(plan.rows) and not (plan.want & EVERY_HIDDEN).any()
        return None

    def prepare(self) -> bool:
        return False

    def release(self) -> None:
        """It holds no CUDA graphs."""

    def run(self, batch: Batch, greedy: bool) -> Computed:
        size, drafted = len(batch.tokens), batch.runs is not None
        alike = self._decodes and len(batch.logits_index) == size <= self._inputs.most
        self.stood_in = False
        if not alike or batch.own_kernel or is_marked():
            return self.eager.run(batch, greedy)
        found = self._recorded.get((size, greedy))
        if found is None:
            if len(self._recorded) == MOST_PROGRAMS:
                self._recorded.popitem(last=False)
            self._recorded[size, greedy], self.stood_in = _Recorded(), True
            if not drafted:
                return self.eager.run(batch, greedy)
            return self._checked(batch, self.eager.run(self._as_rows(batch), greedy))
        self._recorded.move_to_end((size, greedy))
        if found.refused and not drafted:
            return self.eager.run(batch, greedy)
        if found.refused:                                # as rows: by the kernels of steps without drafts
            return self._checked(batch, self.eager.run(self._as_rows(batch), greedy))
        if found.program is None or found.computed is None:
            computed, self.stood_in = self._record(found, batch, greedy), True
        else:
            self._inputs.fill(batch)
            found.program.run()
            self.replays += 1
            computed = found.computed
        return self._checked(batch, computed) if drafted else computed

    def _as_rows(self, batch: Batch) -> Batch:
        """With each token as a row, at places that stay."""
        self._inputs.fill(batch)
        return self._inputs.batch(len(batch.tokens))

    def _checked(self, batch: Batch, computed: Computed) -> Computed:
        """With the drafts that are accepted, where rows take the best token: those of all positions are there."""
        greedy, count = computed.greedy, len(batch.tokens)
        if greedy is None:
            return computed

        def choose(tokens: Tensor, failed: Tensor, sample_rows: Tensor | None) -> None:
            tokens.copy_(greedy[: 8 * count].view(torch.int64))
            failed.copy_(greedy[len(greedy) - count :].view(torch.bool))

        return Computed(None, None, best_tokens(choose, batch, self._accepted, self._last_token, self._surplus))

    def _record(self, found: _Recorded, batch: Batch, greedy: bool) -> Computed:
        inputs, recording = self._as_rows(batch), Recording(self._arena)
        with recording.of_calls():
            computed = self.eager.run(inputs, greedy)
        computed.hidden = None
        if recording.missing:
            found.refused = True
            if not self._told:
                logger.info("decode steps run op by op, not as one native program: %s is not native here", recording.missing)
                self._told = True
            return computed
        if computed.logits is not None:
            computed.logits = self._arena.kept(computed.logits)
        found.program, found.computed = recording.program(), computed
        logger.debug("recorded %d calls for %d rows, %s", len(found.program), len(batch.tokens), "greedy" if greedy else "logits")
        return computed


class _Inputs:
    """The integers of a step, at places that stay."""

    def __init__(self, tables: list[Tensor], last_token: Tensor) -> None:
        self.most = size = max(len(last_token), MOST_DRAFTED)            # tokens
        self._tables = tables
        self._tokens, self._positions, self._sample_rows = (torch.zeros(size, dtype=torch.int64) for _ in range(3))
        self._kv_len, self._table_rows = (torch.zeros(size, dtype=torch.int32) for _ in range(2))
        self._slots = [torch.zeros(size, dtype=torch.int64) for _ in tables]
        self._borders = torch.arange(size + 1, dtype=torch.int32)
        self._last_token = last_token.numpy()
        self._copied = [
            tensor.numpy() for tensor in (self._positions, self._kv_len, self._table_rows, self._sample_rows, *self._slots)
        ]
        self._token_array = self._tokens.numpy()
        self._newest: Batch | None = None
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []           # to, from: of the newest batch
        self._taken: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int32), np.empty(0, np.int64))

    def fill(self, batch: Batch) -> None:
        """Steps whose rows decode again have the same batch, with other numbers in it (DeviceRows.advance)."""
        if batch.newest is not None:
            self._fill_drafted(batch, batch.newest.numpy())
            return
        if batch is not self._newest:
            self._find(batch)
        for target, source in self._copies:
            target[:] = source
        rows, tokens = self._taken
        np.take(self._last_token, rows, out=tokens)

    def _find(self, batch: Batch) -> None:
        size = len(batch.tokens)
        assert batch.table_rows is not None
        given = (batch.positions, batch.kv_len, batch.table_rows, batch.sample_rows, *(group.slots for group in batch.groups))
        self._copies = [(target[:size], source.numpy()) for target, source in zip(self._copied, given, strict=True)]
        self._taken = batch.table_rows.numpy(), self._token_array[:size]
        self._newest = batch

    def _fill_drafted(self, batch: Batch, newest: np.ndarray) -> None:
        """Each token is a row, with the keys up to its own."""
        size = len(batch.tokens)
        self._token_array[:size] = np.where(newest < 0, batch.tokens.numpy(), self._last_token[newest])
        padding = torch.full_like(batch.sample_rows, len(self._last_token) - 1)          # which token is the newest shows later
        given = (batch.positions, batch.positions + 1, batch.sample_rows, padding, *(group.slots for group in batch.groups))
        for target, source in zip(self._copied, given, strict=True):
            target[:size] = source.numpy()

    def batch(self, rows: int) -> Batch:
        """As `fill` has filled it."""
        groups = [
            GroupBatch(slots[:rows], table) for slots, table in zip(self._slots, self._tables, strict=True)
        ]
        places = torch.arange(rows)
        return Batch(
            tokens=self._tokens[:rows], positions=self._positions[:rows], query_start=self._borders[: rows + 1],
            kv_len=self._kv_len[:rows], query_start_host=None, kv_len_host=None, groups=groups, logits_index=places,
            sample_rows=self._sample_rows[:rows], picks=np.arange(rows), device_picks=places,
            table_rows=self._table_rows[:rows], work=AttentionWork(rows, 0),
        )
