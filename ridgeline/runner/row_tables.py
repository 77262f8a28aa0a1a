"""The device half's data of each row: its known tokens, its length and its block tables, which are in device memory; and the
drafts that a plan has for it.

A plan is applied in the order removed, added, appended. On a GPU only changes of the tables are sent, with the step's other
integers. One extra row is for padding. It has no blocks, so its writes go to block 0 (null).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.messages import StepPlan
from ridgeline.native_room import NativeRoom
from ridgeline.ops.attention.late_positions import late_positions
from ridgeline.ops.cpu import native
from ridgeline.runner.staging import Staging

# Block ids in 16 bytes. Kernels have other variants for pointers that are not aligned to those, and none is launched directly.
_WHOLE = 4


class RowTables:
    def __init__(self, num_groups: int, block_size: int, max_rows: int, max_model_len: int, device: torch.device) -> None:
        self.block_size = block_size
        self.length = np.zeros(max_rows + 1, np.int64)       # tokens whose KV is in the cache
        self.num_given = np.zeros(max_rows + 1, np.int64)    # tokens that came from the host
        self.given: list[np.ndarray] = [np.zeros(0, np.int32)] * max_rows
        self.num_prompt = np.zeros(max_rows + 1, np.int64)
        self.stay = np.zeros(max_rows, np.int64)             # grows with each sequence that gets the row
        max_blocks = -(-max_model_len // block_size)
        self.most_tokens = max_blocks * block_size           # of a row
        max_blocks += -max_blocks % _WHOLE               # every group's tables begin at a multiple of 16 bytes
        self.blocks = np.zeros((num_groups, max_rows + 1, max_blocks), np.int32)
        self.most_changes = 2 * num_groups * max_rows + max_blocks
        self._changed: list[np.ndarray] = []             # places in the flat tables that the device has not seen
        self.native = native.if_built()                  # None: what it does is done in numpy
        self._addresses = [each.ctypes.data for each in (self.length, self.num_given, self.blocks)]
        on_device = torch.from_numpy(self.blocks)        # on the CPU both are one memory
        self.place_on_device(on_device if device.type == "cpu" else on_device.to(device))

    def place_on_device(self, tables: Tensor) -> None:
        self.on_device = tables                          # [groups, rows, blocks]
        self.groups = list(tables)
        self._flat = tables.view(-1)

    @property
    def _one_memory(self) -> bool:
        """Does the device read the host's own tables?"""
        return self.on_device.data_ptr() == self._addresses[2]

    @property
    def num_groups(self) -> int:
        return len(self.blocks)

    @functools.cached_property
    def settling(self) -> tuple[int, int, NativeRoom]:
        """For verify.take_back: addresses of stays and lengths, and room for a number of each row."""
        return self.stay.ctypes.data, self._addresses[0], NativeRoom(len(self.stay))

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
        if self._one_memory:
            self._changed.clear()
        elif len(self._changed) > _MOST_PIECES:          # rows that no step of this model computes, as of a draft model at rest
            self._changed = [np.unique(np.concatenate(self._changed))]

    def slots(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Where the keys of each position go: [groups, T]"""
        index, offsets = np.divmod(positions, self.block_size)
        return self.blocks[:, rows, index] * np.int64(self.block_size) + offsets

    def spread(
        self, rows: np.ndarray, counts: np.ndarray, num_decodes: int, num_tokens: int, guesses: Guesses | None
    ) -> Spread:
        """The integers of a batch of these rows, `counts` tokens of each; the first `num_decodes` go on from their newest one."""
        if self.native is None:
            return spread_reference(self, rows, counts, num_decodes, num_tokens, guesses)
        (groups, table_rows, width), count, padding = self.blocks.shape, len(rows), len(self.given)
        guessed = () if guesses is None else (guesses.number, guesses.offset, guesses.tokens)
        number = 0 if guesses is None else len(guesses.number)
        parts = [each.tobytes() for each in guessed] or [b""] * 3        # copied: an address takes longer to ask for
        ints = (4 + groups) * num_tokens + number + count
        out = np.empty(ints + count + 1, np.int64)       # the last: two int32 for each row
        given = self.native.spread_rows(
            rows.tobytes(), counts.tobytes(), *self._addresses, *parts, out.ctypes.data, count, num_decodes, num_tokens, number,
            padding, groups, table_rows, width, self.block_size, self.most_tokens,
        )
        if given < 0:
            raise AssertionError("a row has more tokens than its table has room for")
        where, by_row = (4 + groups) * num_tokens, out[ints:].view(np.int32)
        positions, token_rows, tokens, newest, *slots = out[:where].reshape(4 + groups, num_tokens)
        return Spread(
            tokens, positions, slots, token_rows, newest, out[where : where + number], out[ints - count : ints],
            by_row[: count + 1], by_row[count + 1 : 2 * count + 1], given > 0,
        )

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
        if places.shape[0]:                              # a tensor's len() takes ten times as long
            self._flat.index_copy_(0, places, blocks)


@dataclass(slots=True)
class Spread:
    """The integers of a batch, by token (padding at the end, in block 0), by guess and by row."""

    tokens: np.ndarray               # [T]; 0 where the device knows it, or the host has to look
    positions: np.ndarray
    slots: list[np.ndarray]          # [T] of each group
    token_rows: np.ndarray
    newest: np.ndarray               # [T]: the row whose newest token it is; -1: none's
    where: np.ndarray                # [G]: the tokens that are guesses
    ends: np.ndarray                 # [R]: tokens in the cache after the step, padding included …
    query_start: np.ndarray          # int32 [R + 1]
    kv_len: np.ndarray               # int32 [R]: … and 0 for padding
    given: bool                      # do rows begin with tokens that the host knows?


def spread_reference(
    tables: RowTables, rows: np.ndarray, counts: np.ndarray, num_decodes: int, num_tokens: int, guesses: Guesses | None
) -> Spread:
    """RowTables.spread in numpy, where there is no native library."""
    padding, starts = len(tables.given), tables.length[rows]
    ends = starts + counts
    query_start = np.zeros(len(rows) + 1, np.int32)
    query_start[1:] = counts.cumsum()
    total = int(query_start[-1])
    tokens, positions = np.zeros((2, num_tokens), np.int64)
    positions[:total] = (starts - query_start[:-1]).repeat(counts) + np.arange(total)
    token_rows, newest = np.full(num_tokens, padding), np.full(num_tokens, -1, np.int64)
    token_rows[:total] = rows.repeat(counts)
    decodes = counts[:num_decodes].nonzero()[0]
    newest[query_start[decodes]] = rows[decodes]
    slots = np.zeros((tables.num_groups, num_tokens), np.int64)
    slots[:, :total] = tables.slots(token_rows[:total], positions[:total])
    where = np.zeros(0, np.int64)
    if guesses is not None:
        where = query_start[guesses.number] + 1 + guesses.offset
        tokens[where] = np.maximum(guesses.tokens, 0)    # a token that no guess is for is any one
    kv_len = np.where(rows == padding, 0, ends).astype(np.int32)
    given = bool((starts < tables.num_given[rows]).any())
    return Spread(tokens, positions, list(slots), token_rows, newest, where, ends, query_start, kv_len, given)


@dataclass(slots=True)
class Guesses:
    """The drafts of a plan, row after row. All rows with drafts decode."""

    number: np.ndarray               # [G]: which of the plan's rows has it …
    offset: np.ndarray               # … and how many of the row's drafts come before it
    path: np.ndarray                 # int64: what the plan says of each row, behind each other; -1: nothing
    at: np.ndarray                   # [G]: its place there; n places before, if the row is n tokens shorter than was said
    tokens: np.ndarray               # [G]: if rows are as long as was said; -1: none

    @classmethod
    def of(cls, plan: StepPlan, lengths: np.ndarray) -> Guesses:
        """`lengths` [R]: tokens in the cache; a guess is for the token after the newest one, which is not among them."""
        assert plan.width is not None and plan.drafts is not None and plan.drafts_from is not None
        drafted = plan.width.nonzero()[0]
        width = plan.width[drafted].astype(np.int64)
        first = lengths[drafted] + 1 - plan.drafts_from[drafted]
        if int(first.min()) < 0:
            raise too_early(plan, int(drafted[np.argmin(first)]))
        ends = width.cumsum()
        count = int(ends[-1])
        offset = np.arange(count) - (ends - width).repeat(width)
        path = np.empty((len(drafted), int((first + width).max())), np.int64)
        known = min(path.shape[1], plan.drafts.shape[1])
        path[:, :known], path[:, known:] = plan.drafts[drafted, :known], -1
        at = (np.arange(len(drafted)) * path.shape[1] + first).repeat(width) + offset
        return cls(drafted.repeat(width), offset, path.ravel(), at, path.ravel()[at])


def too_early(plan: StepPlan, place: int) -> AssertionError:
    return AssertionError(f"row {plan.rows[place]}: its drafts are for a position that it has not reached")


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
        """The newest step rejected `rejected` drafts of these rows, and none of the others."""
        self.surplus.zero_()
        self.surplus.index_copy_(0, rows, rejected)

    def joined(self, rows: Tensor) -> None:
        """These rows have other sequences than in the step in flight."""
        self.surplus.index_copy_(0, rows, self._zero.expand(len(rows)))

    def put(self, staging: Staging, spread: Spread, guesses: Guesses | None) -> list[Tensor]:
        """Nothing, if the host knows all lengths."""
        if not self.behind:
            return []
        arrays = [spread.token_rows]
        if guesses is not None:
            arrays += [spread.where, guesses.path, guesses.at]
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
