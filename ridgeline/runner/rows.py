"""What the device half remembers of each row, and how a plan becomes a Batch.

A row owns its known tokens, its length, its block tables and its last sampled token. A plan is applied in the order
removed, added, appended; then its tokens are packed without a loop over rows, but for rows that join or are in prefill.
The last sampled token stays on the device: a decode needs no token value from the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.kv_spec import KVGroupSpec
from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.messages import StepPlan, Want


class DeviceRows:
    def __init__(
        self, groups: list[KVGroupSpec], max_rows: int, max_model_len: int, max_step_tokens: int, device: torch.device
    ) -> None:
        self.block_size = groups[0].block_size
        self.device = device
        self.length = np.zeros(max_rows, np.int64)       # tokens whose KV is in the cache
        self.num_given = np.zeros(max_rows, np.int64)    # tokens that came from the host
        self.given: list[np.ndarray] = [np.zeros(0, np.int32)] * max_rows
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        max_blocks = -(-max_model_len // self.block_size)
        self._tables = np.zeros((len(groups), max_rows, max_blocks), np.int32)
        self._device_tables = torch.from_numpy(self._tables)         # on the CPU both are one memory
        if device.type != "cpu":
            self._device_tables = self._device_tables.to(device)
        self._arange = np.arange(max_step_tokens + 1, dtype=np.int64)

    # -- the delta -----------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        touched: list[int] = []
        for added in plan.added:
            row = added.row
            self.given[row] = added.token_ids
            self.num_given[row] = len(added.token_ids)
            self.num_prompt[row] = added.num_prompt
            self.length[row] = added.num_computed
            for group, blocks in enumerate(added.block_ids):
                self._tables[group, row, : len(blocks)] = blocks
            touched.append(row)
        if len(plan.appended):
            group, row, index, block = plan.appended.T
            self._tables[group, row, index] = block
            touched.extend(row.tolist())
        if touched and self.device.type != "cpu":
            rows = sorted(set(touched))
            self._device_tables[:, rows] = torch.from_numpy(self._tables[:, rows]).to(self.device)

    # -- the batch -----------------------------------------------------------------------------------------------------

    def pack(self, plan: StepPlan) -> Batch:
        rows = plan.rows.astype(np.int64)
        counts = plan.num_tokens.astype(np.int64)
        starts = self.length[rows]
        ends = starts + counts
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        total = int(query_start[-1])
        if total == len(rows):                           # one token each: nothing to repeat
            positions, token_rows = starts, rows
        else:
            positions = np.repeat(starts - query_start[:-1], counts) + self._arange[:total]
            token_rows = np.repeat(rows, counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        num_blocks = -(-int(ends.max()) // self.block_size)
        slots = self._tables[:, token_rows, blocks] * np.int64(self.block_size) + offsets
        table_rows = self._to_device(rows)
        groups = [
            GroupBatch(self._to_device(places), table[:, :num_blocks].index_select(0, table_rows))
            for places, table in zip(slots, self._device_tables, strict=True)
        ]
        sampled = (plan.want & np.int8(Want.TOKEN)) != 0
        batch = Batch(
            tokens=self._tokens(rows, starts, ends, query_start, total),
            positions=self._to_device(positions),
            query_start=self._to_device(query_start),
            kv_len=self._to_device(ends.astype(np.int32)),
            query_start_host=query_start.tolist(),
            kv_len_host=ends.tolist(),
            groups=groups,
            logits_index=self._to_device(query_start[1:][sampled].astype(np.int64) - 1),
        )
        self.length[rows] = ends
        return batch

    def _tokens(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, query_start: np.ndarray, total: int
    ) -> Tensor:
        """Tokens from the host; where a row has used them all up, its last sampled token, already on the device."""
        given = starts < self.num_given[rows]
        if not given.any():
            return self.last_token[self._to_device(rows)]
        tokens = np.zeros(total, np.int64)
        for place in np.nonzero(given)[0].tolist():
            first = query_start[place]
            tokens[first : query_start[place + 1]] = self.given[rows[place]][starts[place] : ends[place]]
        packed = self._to_device(tokens)
        sampled = ~given
        if sampled.any():
            packed[self._to_device(query_start[:-1][sampled].astype(np.int64))] = self.last_token[
                self._to_device(rows[sampled])
            ]
        return packed

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
