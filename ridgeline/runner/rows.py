"""What the device half remembers of each row, and how a plan becomes a Batch.

A row owns its known tokens, its length, its block tables and its last sampled token. A plan is applied in the order
removed, added, appended; then its tokens are packed without a loop over rows, but for rows that join or are in prefill.
The last sampled token stays on the device: a decode needs no token value from the host.
"""

from __future__ import annotations

import numpy as np
import torch

from ridgeline.kv_spec import KVGroupSpec
from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.messages import StepPlan, Want
from ridgeline.runner.staging import Staging


class DeviceRows:
    def __init__(
        self, groups: list[KVGroupSpec], max_rows: int, max_model_len: int, max_step_tokens: int, depth: int,
        device: torch.device,
    ) -> None:  # fmt: skip
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
        # Per token: id, position and a slot in each group. Per row: five numbers at most. And the ends of arrays.
        num_bytes = 8 * (max_step_tokens * (2 + len(groups)) + 5 * (max_rows + 1)) + 16 * (16 + len(groups))
        self._staging = Staging(num_bytes, depth + 1, device)

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
        sampled = (plan.want & np.int8(Want.TOKEN)) != 0
        given = starts < self.num_given[rows]

        staging = self._staging
        staging.begin()
        device_rows = staging.put(rows)
        tokens = staging.put(self._given_tokens(rows, starts, ends, query_start, given))
        borders, lengths = staging.put(query_start), staging.put(ends.astype(np.int32))
        places, slot_tensors = staging.put(positions), [staging.put(each) for each in slots]
        logits_index = staging.put(query_start[1:][sampled].astype(np.int64) - 1)
        decodes = np.nonzero(~given)[0]
        decode_rows, decode_places = staging.put(rows[decodes]), staging.put(query_start[decodes].astype(np.int64))
        staging.send()

        if len(decodes):                                 # the last sampled token never left the device
            tokens[decode_places] = self.last_token[decode_rows]
        groups = [
            GroupBatch(slot_tensor, table[:, :num_blocks].index_select(0, device_rows))
            for slot_tensor, table in zip(slot_tensors, self._device_tables, strict=True)
        ]
        self.length[rows] = ends
        return Batch(
            tokens=tokens,
            positions=places,
            query_start=borders,
            kv_len=lengths,
            query_start_host=query_start.tolist(),
            kv_len_host=ends.tolist(),
            groups=groups,
            logits_index=logits_index,
        )

    def _given_tokens(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, query_start: np.ndarray, given: np.ndarray
    ) -> np.ndarray:
        """The tokens that came from the host; 0 where a row has used them all up and goes on with what it sampled."""
        tokens = np.zeros(int(query_start[-1]), np.int64)
        for place in np.nonzero(given)[0].tolist():
            first = query_start[place]
            tokens[first : query_start[place + 1]] = self.given[rows[place]][starts[place] : ends[place]]
        return tokens
