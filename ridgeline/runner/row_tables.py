"""What the device half knows of each row: its known tokens, its length and its block tables, which are in device memory.

A plan is applied in the order removed, added, appended. On a GPU only changes of the tables are sent, with the step's other
integers. One extra row is for padding. It has no blocks, so its writes go to block 0 (null).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.messages import StepPlan
from ridgeline.runner.staging import Staging


class RowTables:
    def __init__(self, num_groups: int, block_size: int, max_rows: int, max_model_len: int, device: torch.device) -> None:
        self.block_size = block_size
        self.length = np.zeros(max_rows + 1, np.int64)       # tokens whose KV is in the cache
        self.num_given = np.zeros(max_rows + 1, np.int64)    # tokens that came from the host
        self.given: list[np.ndarray] = [np.zeros(0, np.int32)] * max_rows
        self.num_prompt = np.zeros(max_rows, np.int64)
        max_blocks = -(-max_model_len // block_size)
        self.blocks = np.zeros((num_groups, max_rows + 1, max_blocks), np.int32)
        self.most_changes = 2 * num_groups * max_rows + max_blocks
        self._changed: list[np.ndarray] = []             # places in the flat tables that the device has not seen
        self._on_cpu = device.type == "cpu"
        on_device = torch.from_numpy(self.blocks)        # on the CPU both are one memory
        self.place_on_device(on_device if self._on_cpu else on_device.to(device))

    def place_on_device(self, tables: Tensor) -> None:
        self.on_device = tables                          # [groups, rows, blocks]
        self.groups = list(tables)
        self._flat = tables.view(-1)

    @property
    def num_groups(self) -> int:
        return len(self.blocks)

    def apply(self, plan: StepPlan) -> None:
        blocks = self.blocks
        _, num_rows, width = blocks.shape
        for added in plan.added:
            row = added.row
            self.given[row] = added.token_ids
            self.num_given[row] = len(added.token_ids)
            self.num_prompt[row] = added.num_prompt
            self.length[row] = added.num_computed
            for group, own in enumerate(added.block_ids):
                blocks[group, row, : len(own)] = own
                first = (group * num_rows + row) * width
                self._changed.append(np.arange(first, first + len(own)))
        if len(plan.appended):
            group, row, index, block = plan.appended.T
            blocks[group, row, index] = block
            self._changed.append((group.astype(np.int64) * num_rows + row) * width + index)
        if self._on_cpu:
            self._changed.clear()

    def slots(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Where the keys of each position go: [groups, T]"""
        index, offsets = np.divmod(positions, self.block_size)
        return self.blocks[:, rows, index] * np.int64(self.block_size) + offsets

    def changes(self, staging: Staging) -> np.ndarray | None:
        """The changes of the tables for the next copy; what does not fit is sent ahead of it. None: there are none."""
        if not self._changed:
            return None
        places = np.concatenate(self._changed)
        self._changed.clear()
        while len(places) > self.most_changes:
            written = self.put_changes(staging, places[: self.most_changes])
            staging.send_at_once()
            self.write(*written)
            places = places[self.most_changes :]
        return places

    def put_changes(self, staging: Staging, places: np.ndarray | None) -> tuple[Tensor, Tensor]:
        if places is None:
            places = _NO_PLACES
        return staging.put(places), staging.put(self.blocks.ravel()[places])

    def write(self, places: Tensor, blocks: Tensor) -> None:
        if len(places):
            self._flat.index_copy_(0, places, blocks)


_NO_PLACES = np.zeros(0, np.int64)
