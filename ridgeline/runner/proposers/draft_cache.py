"""Which tokens have their draft KV: the keys and values of the draft model, under the block ids of the model.

The draft model computes a token only when a row wants drafts, so blocks may lack its KV: those of prompts, of steps without
drafts, of a prefix that was computed without it. What a block has is counted here, by block and not by row: it survives the
sequence that computed it, as the block does in the prefix cache. A token counts once it is known that the row said it, so a
rejected draft leaves nothing behind.
"""

from __future__ import annotations

import numpy as np

from ridgeline.messages import StepPlan


class DraftCache:
    def __init__(self, num_blocks: int, block_size: int, max_rows: int, max_blocks: int, group: int) -> None:
        """`group`: the model's, whose tables it uses."""
        self._size, self._group = block_size, group
        self._filled = np.zeros(num_blocks, np.int32)    # by block: leading tokens that have draft KV
        self._valid = np.zeros(max_rows, np.int64)       # by row: the same, as far as was looked
        self._blocks = np.zeros((max_rows, max_blocks), np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Blocks that get other tokens have no draft KV. As the model's own are, a copied one is as its source."""
        for added in plan.added:
            own, kept = added.block_ids[self._group], added.num_computed // self._size
            self._blocks[added.row, : len(own)] = own
            self._valid[added.row] = 0
            self._filled[own[kept:]] = 0
        if len(plan.appended):
            _, rows, places, blocks = plan.appended[plan.appended[:, 0] == self._group].T
            self._blocks[rows, places] = blocks
            self._filled[blocks] = 0
        for op in plan.block_ops:
            if op.group == self._group:
                self._filled[op.target] = self._filled[op.source]
        for added in plan.added:
            kept, more = divmod(added.num_computed, self._size)
            if more:                                     # a copy: what the source had behind that were other tokens
                block = added.block_ids[self._group][kept]
                self._filled[block] = min(int(self._filled[block]), more)

    def forget(self, rows: np.ndarray) -> None:
        self._valid[rows] = 0
        self._filled[self._blocks[rows]] = 0

    def lengths(self, rows: np.ndarray, known: np.ndarray) -> np.ndarray:
        """int64 [R]: leading tokens of each row with draft KV. Of the `known` ones not the last: its logits are wanted."""
        valid = self._valid[rows]
        while True:
            place = valid // self._size
            end = np.minimum(place * self._size + self._filled[self._blocks[rows, place]], known - 1)
            if not (end > valid).any():
                self._valid[rows] = valid
                return valid
            valid = np.maximum(valid, end)

    def next_blocks(self, rows: np.ndarray) -> np.ndarray:
        """int32 [R]: the block of each row's first token without draft KV, after lengths()."""
        return np.asarray(self._blocks[rows, self._valid[rows] // self._size])

    def computed(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Tokens of these rows before `ends` have draft KV now."""
        starts = self._valid[rows]
        rows, starts, ends = (each[ends > starts] for each in (rows, starts, ends))
        first = starts // self._size
        counts = (ends - 1) // self._size + 1 - first
        places = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        blocks = self._blocks[np.repeat(rows, counts), places]
        filled = np.minimum(self._size, np.repeat(ends, counts) - places * self._size)
        np.maximum.at(self._filled, blocks, filled.astype(np.int32))
        self._valid[rows] = ends
