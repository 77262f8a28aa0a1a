"""What the device half knows of each row: its known tokens, its length and its block tables, which are in device memory; and
which drafts a plan has for it.

A plan is applied in the order removed, added, appended. On a GPU only changes of the tables are sent, with the step's other
integers. One extra row is for padding. It has no blocks, so its writes go to block 0 (null).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.messages import StepPlan
from ridgeline.ops.attention.late_positions import late_positions
from ridgeline.runner.staging import Staging


class RowTables:
    def __init__(self, num_groups: int, block_size: int, max_rows: int, max_model_len: int, device: torch.device) -> None:
        self.block_size = block_size
        self.length = np.zeros(max_rows + 1, np.int64)       # tokens whose KV is in the cache
        self.num_given = np.zeros(max_rows + 1, np.int64)    # tokens that came from the host
        self.given: list[np.ndarray] = [np.zeros(0, np.int32)] * max_rows
        self.num_prompt = np.zeros(max_rows + 1, np.int64)
        self.stay = np.zeros(max_rows, np.int64)             # grows with each sequence that gets the row
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
            self.stay[row] += 1
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
        elif len(self._changed) > _MOST_PIECES:          # rows that no step of this model computes, as of a draft model at rest
            self._changed = [np.unique(np.concatenate(self._changed))]

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


@dataclass(slots=True)
class Guesses:
    """The drafts of a plan, row after row."""

    number: np.ndarray               # [G]: which of the plan's rows has it …
    offset: np.ndarray               # … and how many of the row's drafts come before it
    path: np.ndarray                 # int64: what the plan says of each row, behind each other; -1: nothing
    at: np.ndarray                   # [G]: its place there; n places before, if the row is n tokens shorter than was said

    @classmethod
    def of(cls, plan: StepPlan, lengths: np.ndarray) -> Guesses:
        """`lengths` [R]: tokens in the cache; a guess is for the token after the newest one, which is not among them."""
        assert plan.width is not None and plan.drafts is not None and plan.drafts_from is not None
        drafted = plan.width.nonzero()[0]
        width = plan.width[drafted].astype(np.int64)
        first = lengths[drafted] + 1 - plan.drafts_from[drafted]
        if int(first.min()) < 0:
            row = int(plan.rows[drafted[np.argmin(first)]])
            raise AssertionError(f"row {row}: its drafts are for a position that it has not reached")
        ends = width.cumsum()
        count = int(ends[-1])
        offset = np.arange(count) - (ends - width).repeat(width)
        path = np.empty((len(drafted), int((first + width).max())), np.int64)
        known = min(path.shape[1], plan.drafts.shape[1])
        path[:, :known], path[:, known:] = plan.drafts[drafted, :known], -1
        at = (np.arange(len(drafted)) * path.shape[1] + first).repeat(width) + offset
        return cls(drafted.repeat(width), offset, path.ravel(), at)

    @property
    def tokens(self) -> np.ndarray:
        """[G]: if rows are as long as was said; -1: none."""
        return self.path[self.at]


class LateLengths:
    """While a step with drafts is in flight, only the device knows how many were accepted. The host packs the next step for rows
    of the largest length, and here the device takes back what was rejected: positions, slots, lengths and guesses move."""

    def __init__(self, tables: RowTables, device: torch.device) -> None:
        self._tables = tables
        self.behind = False                              # the step that is packed next follows one whose drafts are in flight
        # By row, with one for padding: tokens that it is shorter than `tables.length` says.
        self.surplus = torch.zeros(len(tables.length), dtype=torch.int64, device=device)
        self.guesses: Tensor | None = None               # [G] of the step packed last, as they truly are; None: as the host says
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)

    def follow(self, rows: Tensor, rejected: Tensor) -> None:
        """The newest step has rejected so many drafts of these rows; of the others, none."""
        self.surplus.zero_()
        self.surplus.index_copy_(0, rows, rejected)

    def joined(self, rows: Tensor) -> None:
        """These rows have other sequences than in the step in flight."""
        self.surplus.index_copy_(0, rows, self._zero.expand(len(rows)))

    def put(self, staging: Staging, token_rows: np.ndarray, where: np.ndarray | None, guesses: Guesses | None) -> list[Tensor]:
        """`token_rows` [T]: of each token; `where` [G]: the tokens that are guesses. Nothing, if the host knows all lengths."""
        if not self.behind:
            return []
        arrays = [token_rows]
        if where is not None and guesses is not None:
            arrays += [where, guesses.path, guesses.at]
        return [staging.put(each) for each in arrays]

    def correct(
        self, sent: list[Tensor], positions: Tensor, slots: list[Tensor], tokens: Tensor, lengths: list[tuple[Tensor, Tensor]]
    ) -> None:
        """With what `put` has sent: a step's numbers by token, and lengths with their rows."""
        self.guesses = None
        if not sent:
            return
        token_rows, *drafts = sent
        where, path, at = drafts or (None, None, None)
        if where is not None:
            self.guesses = torch.empty_like(where)
        (kv_len, rows), *others = lengths
        late_positions(
            self.surplus, token_rows, positions, slots, self._tables.groups, self._tables.block_size, kv_len, rows, tokens,
            where, path, at, self.guesses,
        )
        for kv_len, rows in others:
            kv_len.sub_(self.surplus.index_select(0, rows).to(kv_len.dtype))


_NO_PLACES = np.zeros(0, np.int64)
_MOST_PIECES = 4096
