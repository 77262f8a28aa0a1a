"""The device half's state of each row, and how a plan becomes a Batch.

A row owns its known tokens, its length, its block tables and its newest token. A plan is applied in the order removed,
added, appended; then its tokens are packed with numpy, and only joining rows and rows in prefill are looped over. The newest
token stays on the device: a decode needs no token value from the host.

On a GPU the block tables are in device memory, and only changes are sent. If a step decodes the same rows as the last one
(`advance`), only lengths, positions and slots are sent. One extra row is for padding. It has no blocks, so its writes go to
block 0 (null).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.messages import StepPlan, Want
from ridgeline.ops.attention import kernel_prefill_hopper
from ridgeline.ops.attention.attention_arguments import (
    AttentionWork,
    SharedPrefix,
    make_workspace,
    prefix_tile_rows,
    workspace_floats,
)
from ridgeline.ops.attention.prefill_tiles import cut_queries, most_tiles
from ridgeline.ops.attention.split_kv import SHARE_UNIT, DeviceShares, num_items, programs_at_once, share_out
from ridgeline.ops.launch import multiprocessors
from ridgeline.runner.shared_prefix import SPARE_TILES, NoSharedPrefixes, SharedPrefixes
from ridgeline.runner.staging import Staging
from ridgeline.sizes.graph_shapes import Shape, decode_sizes
from ridgeline.sizes.kv_spec import KVGroupSpec

TOKEN = np.int8(Want.TOKEN)
EVERY_HIDDEN = np.int8(Want.PROMPT_LOGPROBS | Want.HIDDEN | Want.HIDDEN_SUM)     # what needs all tokens after the last layer


@dataclass(slots=True)
class _Layout:
    """A plan's rows as the batch has them, padding included."""

    rows: np.ndarray                 # [R]
    counts: np.ndarray               # [R]: tokens of each; none for padding after the decodes
    live: np.ndarray | slice         # which of the rows are the plan's
    sampled: np.ndarray | slice      # which of the rows have logits
    picks: np.ndarray                # which of those logits the plan wants, in its order
    num_decodes: int                 # leading rows with one token
    num_tokens: int                  # padding included
    longest: int                     # bound of the tokens of a later row


@dataclass(slots=True)
class _Steady:
    """A step in which every row went on from what it had sampled, as the device has it."""

    batch: Batch
    rows: np.ndarray                 # [R], padding included …
    live: np.ndarray                 # … and without
    shares_left: int                 # further steps for which the work of attention is shared out
    end: int                         # of what is staged for it


def leading_ones(counts: np.ndarray) -> int:
    longer = np.nonzero(counts != 1)[0]
    return int(longer[0]) if len(longer) else len(counts)


class DeviceRows:
    def __init__(
        self, groups: list[KVGroupSpec], max_rows: int, max_model_len: int, max_step_tokens: int, depth: int,
        device: torch.device, heads: int = 1, shared_prefixes: bool = False, deterministic: bool = False,
    ) -> None:
        self.block_size = groups[0].block_size
        self.depth = depth                               # steps that may be in flight when another is packed
        self.max_rows = max_rows                         # also the number of the row for padding
        self.device = device
        self.length = np.zeros(max_rows + 1, np.int64)       # tokens whose KV is in the cache
        self.num_given = np.zeros(max_rows + 1, np.int64)    # tokens that came from the host
        self.given: list[np.ndarray] = [np.zeros(0, np.int32)] * max_rows
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.last_token = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        kv_heads = groups[0].num_kv_heads
        tile_rows = prefix_tile_rows(heads // kv_heads)
        self.prefixes = [
            SharedPrefixes(self.block_size, tile_rows) if shared_prefixes and group.window is None and not deterministic
            else NoSharedPrefixes() for group in groups
        ]
        self._workspace = None
        if device.type != "cpu":
            floats = workspace_floats(
                max_rows, heads, kv_heads, groups[0].head_dim, multiprocessors=multiprocessors(device),
                prefix_tiles=-(-max_rows // tile_rows) + SPARE_TILES if shared_prefixes else 0,
                deterministic=deterministic,
            )
            self._workspace = make_workspace(floats, max_rows, kv_heads, device)
        self._prompts: dict[Shape, Batch] = {}           # of single prompts: by shape, all tensors are the same
        self._steady: _Steady | None = None              # the newest step, if every row decoded in it
        self._deterministic = deterministic
        # Query heads per KV head, where prompts are attended to tile by tile of a list; None: there is no list.
        self._tile_group: int | None = None
        shape = (heads // kv_heads, groups[0].head_dim, self.block_size)
        if not deterministic and kernel_prefill_hopper.wants_tiles(device, *shape):
            self._tile_group = heads // kv_heads
        self._windows = [group.window for group in groups]
        self._programs = programs_at_once(multiprocessors(device), kv_heads)     # CTAs that attend at once, per KV head
        # Tokens by which rows may grow before their keys are shared out anew; deterministic, shares follow from lengths alone.
        self._growth = 0 if deterministic else SHARE_UNIT
        max_blocks = -(-max_model_len // self.block_size)
        self._tables = np.zeros((len(groups), max_rows + 1, max_blocks), np.int32)
        self._device_tables = torch.from_numpy(self._tables)         # on the CPU both are one memory
        if device.type != "cpu":
            self._device_tables = self._device_tables.to(device)
        self._flat_tables, self.tables = self._device_tables.view(-1), list(self._device_tables)
        self._changed: list[np.ndarray] = []             # places in the flat tables that the device has not seen
        self._most_changes = 2 * len(groups) * max_rows + max_blocks
        self._sizes = decode_sizes(max_rows)
        self._pads = device.type != "cpu" and not deterministic      # sampled rows beside prompts: see _launched
        self._ones = torch.arange(max_rows + 1, dtype=torch.int32, device=device)    # borders of rows with a query each
        self._arange = np.arange(max(max_step_tokens, max_rows) + 1, dtype=np.int64)
        # Per token: id, position and a slot in each group. Per row: ten numbers at most. Changes of the tables: place
        # and value. And the ends of arrays.
        num_tiles = -(-max_rows // tile_rows) + SPARE_TILES
        num_bytes = 8 * (max(max_step_tokens, max_rows) * (2 + len(groups)) + 10 * (max_rows + 1))
        num_bytes += len(groups) * (4 * (4 * num_tiles + 2 * max_rows) + 6 * 16)
        # How decodes are shared out: of all layers but the last, and of that one.
        items = max(num_items(rows, self._programs, deterministic) for rows in range(1, max_rows + 1))
        num_bytes += len(groups) * 2 * (4 * (items + 2 * max_rows) + 3 * 16)
        if self._tile_group is not None:
            num_bytes += 16 * (most_tiles(max_step_tokens, max_rows, self._tile_group) + 1)
        self._staging = Staging(num_bytes + 12 * self._most_changes + 16 * (24 + len(groups)), depth + 1, device)

    # -- the delta -----------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        tables = self._tables
        _, num_rows, width = tables.shape
        for added in plan.added:
            row = added.row
            self.given[row] = added.token_ids
            self.num_given[row] = len(added.token_ids)
            self.num_prompt[row] = added.num_prompt
            self.length[row] = added.num_computed
            for group, blocks in enumerate(added.block_ids):
                tables[group, row, : len(blocks)] = blocks
                first = (group * num_rows + row) * width
                self._changed.append(np.arange(first, first + len(blocks)))
        if plan.added:
            for each in self.prefixes:
                each.forget()
        if len(plan.appended):
            group, row, index, block = plan.appended.T
            tables[group, row, index] = block
            self._changed.append((group.astype(np.int64) * num_rows + row) * width + index)
        if self.device.type == "cpu":
            self._changed.clear()

    def _changes(self) -> np.ndarray:
        """The changes of the tables for the next copy; what does not fit is sent ahead of it."""
        if not self._changed:
            return self._arange[:0]
        places = np.concatenate(self._changed)
        self._changed.clear()
        while len(places) > self._most_changes:
            written = self._put_changes(places[: self._most_changes])
            self._staging.send_at_once()
            self._write_tables(*written)
            places = places[self._most_changes :]
        return places

    def _put_changes(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._staging.put(places), self._staging.put(self._tables.ravel()[places])

    def _write_tables(self, places: Tensor, blocks: Tensor) -> None:
        if len(places):
            self._flat_tables.index_copy_(0, places, blocks)

    # -- the batch -----------------------------------------------------------------------------------------------------

    def pack(self, plan: StepPlan, shape: Shape | None = None) -> Batch:
        """`shape`: the CUDA graph's shape to pad to. With it every row gets logits, because a graph cannot skip rows."""
        single = shape is not None and (shape.decodes, shape.prompts) == (0, 1) and bool(plan.want[0] & TOKEN)
        if shape is not None and single and shape in self._prompts:
            return self._pack_prompt(plan, shape)
        layout = self._layout(plan, shape)
        rows, counts, live = layout.rows, layout.counts, layout.live
        starts = self.length[rows]
        ends = starts + counts
        query_start = np.zeros(len(rows) + 1, np.int32)
        query_start[1:] = counts.cumsum()
        total = int(query_start[-1])
        # Padding tokens are at the end, in block 0.
        tokens, positions = np.zeros((2, layout.num_tokens), np.int64)
        slots = np.zeros((len(self._tables), layout.num_tokens), np.int64)
        if layout.num_decodes == len(rows):              # one token each: nothing to repeat
            positions[:], token_rows = starts, rows
        else:
            positions[:total] = np.repeat(starts - query_start[:-1], counts) + self._arange[:total]
            token_rows = np.repeat(rows, counts)
        slots[:, :total] = self._slots(token_rows, positions[:total])
        given = np.nonzero(starts < self.num_given[rows])[0]
        for place in given.tolist():                     # the others go on with what they sampled: see Batch.last_rows
            tokens[query_start[place] : query_start[place + 1]] = self.given[rows[place]][starts[place] : ends[place]]
        alone = given[given < layout.num_decodes]        # single tokens from the host are the newest of their rows
        if len(given) - len(alone) < np.count_nonzero(counts[layout.num_decodes :]):
            raise AssertionError("a row that goes on from what it sampled comes before all that compute several tokens")
        kv_len = np.zeros(len(rows), np.int32)
        kv_len[live] = ends[live]
        last = np.maximum(query_start[1:].astype(np.int64) - 1, 0)[layout.sampled]
        on_cpu = self.device.type == "cpu"
        work = None if on_cpu else AttentionWork(layout.num_decodes, layout.longest, self._deterministic)
        goes_on = None if layout.num_decodes == len(rows) else self._goes_on(plan, layout)

        staging = self._staging
        staging.begin()
        changes = self._changes()
        places, lengths, slot_tensors = self._put_moving(positions, kv_len, slots)
        decoding = self._put_decodes(rows, kv_len, layout.num_decodes)
        device_tokens, borders, logits_index = staging.put(tokens), staging.put(query_start), staging.put(last)
        sample_rows, table_rows = staging.put(rows[layout.sampled]), staging.put(rows.astype(np.int32))
        last_rows = staging.put(rows[: layout.num_decodes]) if layout.num_decodes else None
        query_tiles = self._put_tiles(rows, query_start, kv_len, layout.num_decodes, shape)
        if goes_on is not None:
            last_kv_len, last_table_rows = staging.put(kv_len[goes_on]), staging.put(rows[goes_on].astype(np.int32))
            last_shares = [] if on_cpu else [self._put_shares(window, kv_len[goes_on]) for window in self._windows]
        picks = staging.put(layout.picks)                # from here on sizes vary: nothing a graph reads
        newest = staging.put(rows[alone]), staging.put(tokens[alone])
        end = staging.used
        written = self._put_changes(changes)
        staging.send()

        self._write_tables(*written)
        if len(alone):
            self.last_token.index_copy_(0, *newest)
        groups = [
            GroupBatch(slot_tensor, table, *shared)
            for slot_tensor, table, shared in zip(slot_tensors, self.tables, decoding, strict=True)
        ]
        self.length[rows[live]] = ends[live]
        batch = Batch(
            tokens=device_tokens,
            positions=places,
            query_start=borders,
            kv_len=lengths,
            query_start_host=query_start.tolist() if on_cpu else None,
            kv_len_host=ends.tolist() if on_cpu else None,
            groups=groups,
            logits_index=logits_index,
            sample_rows=sample_rows,
            picks=layout.picks,
            device_picks=picks,
            last_rows=last_rows,
            table_rows=table_rows,
            query_tiles=query_tiles,
            work=work,
            workspace=self._workspace,
        )
        if goes_on is not None:
            batch.sampled = self._last_tokens(batch, goes_on, last_kv_len, last_table_rows, last_shares)
        self._steady = None
        if not (on_cpu or len(given)) and layout.num_decodes == len(rows):
            self._steady = _Steady(batch, rows, rows[live], self._growth, end)
        if shape is not None and single and goes_on is not None and not on_cpu:
            self._prompts[shape] = batch
        return batch

    def _pack_prompt(self, plan: StepPlan, shape: Shape) -> Batch:
        """pack() for a single prompt that fits into a shape which the device has seen: the same numbers, at the same places, in
        a third of the time. It is on the way to the first token of a lone request."""
        row, count, padded = int(plan.rows[0]), int(plan.num_tokens[0]), shape.prompt_tokens
        start = int(self.length[row])
        end = start + count
        rows, table_rows = np.array([row], np.int64), np.array([row], np.int32)
        query_start, kv_len = np.array([0, count], np.int32), np.array([end], np.int32)
        tokens, positions = np.zeros((2, padded), np.int64)
        tokens[:count], positions[:count] = self.given[row][start:end], np.arange(start, end)
        slots = np.zeros((len(self._tables), padded), np.int64)
        slots[:, :count] = self._slots(row, positions[:count])
        staging = self._staging
        staging.begin()
        changes = self._changes()
        self._put_moving(positions, kv_len, slots)
        for values in (tokens, query_start, self._arange[count - 1 : count], rows, table_rows):
            staging.put(values)
        self._put_tiles(rows, query_start, kv_len, 0, shape)
        staging.put(kv_len)
        staging.put(table_rows)
        for window in self._windows:
            self._put_shares(window, kv_len)
        staging.put(self._arange[:1])
        written = self._put_changes(changes)
        staging.send()
        self._write_tables(*written)
        self.length[row] = end
        self._steady = None
        return self._prompts[shape]

    def advance(self) -> Batch | None:
        """Reuse the last batch, one token later, if the same rows decode again. None: the step must be packed."""
        steady, staging = self._steady, self._staging
        if steady is None:
            return None
        num_rows = len(steady.live)
        positions = self.length[steady.rows]
        kv_len = (positions + 1).astype(np.int32)
        kv_len[num_rows:] = 0
        slots = self._slots(steady.rows, positions)
        staging.begin()
        changes = self._changes()
        self._put_moving(positions, kv_len, slots)
        steady.shares_left -= 1
        if steady.shares_left < 0:
            self._put_decodes(steady.rows, kv_len, len(steady.rows))
            steady.shares_left = self._growth
        staging.send()
        if len(changes):
            staging.skip_to(steady.end)
            written = self._put_changes(changes)
            staging.send()
            self._write_tables(*written)
        self.length[steady.live] = kv_len[:num_rows]
        return steady.batch

    def shared(self, batch: Batch) -> int:
        """KV positions that this (the newest) step reads once for several rows, in each layer without a window."""
        found = zip(self.prefixes, batch.groups, strict=True)
        return max((prefixes.saved for prefixes, group in found if group.prefix is not None), default=0)

    def _slots(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Where the keys of each position go: [groups, T]"""
        blocks, offsets = np.divmod(positions, self.block_size)
        return self._tables[:, rows, blocks] * np.int64(self.block_size) + offsets

    def _put_moving(self, positions: np.ndarray, kv_len: np.ndarray, slots: np.ndarray) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What no step has in common with the one before it. First of all, so that it can be sent alone."""
        put = self._staging.put
        return put(positions), put(kv_len), [put(each) for each in slots]

    def _layout(self, plan: StepPlan, shape: Shape | None) -> _Layout:
        """Decodes, then prompts, each filled up to the shape."""
        rows, counts = plan.rows.astype(np.int64), plan.num_tokens.astype(np.int64)
        num_decodes = leading_ones(counts)
        wanted = np.nonzero(plan.want & TOKEN)[0]
        longest = int(counts[num_decodes:].max(initial=0))
        if shape is None:
            alone = self._pads and not (plan.want & EVERY_HIDDEN).any()
            return self._launched(rows, counts, wanted, num_decodes, longest, alone)
        num_rows = shape.decodes + shape.prompts
        full_rows, full_counts = np.full(num_rows, self.max_rows), np.zeros(num_rows, np.int64)
        places = self._arange[: len(rows)].copy()
        places[num_decodes:] += shape.decodes - num_decodes
        full_counts[: shape.decodes] = 1
        full_rows[places], full_counts[places] = rows, counts
        return _Layout(
            full_rows, full_counts, places, slice(0, num_rows), places[wanted], shape.decodes,
            shape.decodes + shape.prompt_tokens, shape.prompt_tokens,
        )

    def _launched(
        self, rows: np.ndarray, counts: np.ndarray, wanted: np.ndarray, num_decodes: int, longest: int, alone: bool
    ) -> _Layout:
        """A step without a graph. Where wanted rows go through the last layer's GEMMs `alone`, beside prompts, they are padded,
        with a row without tokens, to a number for which decodes are captured. Other numbers may need cuBLAS kernels that were
        not launched before, and loading those stalls the device."""
        num_rows, num_tokens = len(rows), int(counts.sum())
        live, picks = slice(0, num_rows), self._arange[: len(wanted)]
        missing = self._sizes[bisect.bisect_left(self._sizes, len(wanted))] - len(wanted) if len(wanted) else 0
        if alone and missing and num_decodes < num_rows:
            rows, counts = np.append(rows, self.max_rows), np.append(counts, 0)
            wanted = np.append(wanted, np.full(missing, num_rows))
        return _Layout(rows, counts, live, wanted, picks, num_decodes, num_tokens, longest)

    def _goes_on(self, plan: StepPlan, layout: _Layout) -> np.ndarray | None:
        """The rows that the last layer has to go on with, where it is not with every token. Where results may not depend on who
        else is there, it always is: other requests may want all of it."""
        if self._deterministic or (plan.want & EVERY_HIDDEN).any():
            return None
        return self._arange[: len(layout.rows)][layout.sampled]

    def _last_tokens(
        self, batch: Batch, places: np.ndarray, kv_len: Tensor, table_rows: Tensor, shares: list[DeviceShares | None]
    ) -> Batch:
        """The same step with one query per row, its last token: attention of the last layer needs no other."""
        count, lengths = len(places), batch.kv_len_host
        if lengths is not None:
            return replace(
                batch,
                query_start=self._ones[: count + 1],
                kv_len=kv_len,
                query_start_host=list(range(count + 1)),
                kv_len_host=[lengths[place] for place in places.tolist()],
                groups=[GroupBatch(each.slots, each.block_table) for each in batch.groups],
                table_rows=table_rows,
                query_tiles=None,
            )
        return replace(
            batch,
            query_start=self._ones[: count + 1],
            kv_len=kv_len,
            groups=[
                GroupBatch(each.slots, each.block_table, shares=share)
                for each, share in zip(batch.groups, shares, strict=True)
            ],
            table_rows=table_rows,
            query_tiles=None,
            work=AttentionWork(count, 0, self._deterministic),
        )

    def _put_tiles(
        self, rows: np.ndarray, query_start: np.ndarray, kv_len: np.ndarray, first: int, shape: Shape | None
    ) -> Tensor | None:
        """The prompts, from the first row on, cut into tiles of queries: of a shape always as many."""
        group = self._tile_group
        if group is None or first == len(rows):
            return None
        size = None if shape is None else most_tiles(shape.prompt_tokens, shape.prompts, group)
        return self._staging.put(cut_queries(query_start[first:], kv_len[first:], rows[first:], group, size))

    def _put_decodes(
        self, rows: np.ndarray, kv_len: np.ndarray, num_decodes: int
    ) -> list[tuple[SharedPrefix | None, DeviceShares | None]]:
        """For the decode rows: the shared prefix of each group, and the split-KV shares of the rest."""
        if not num_decodes or self.device.type == "cpu":
            return [(None, None)] * len(self._tables)
        decodes = rows[:num_decodes]
        live = decodes[decodes != self.max_rows]
        own = kv_len[:num_decodes]
        put: list[tuple[SharedPrefix | None, DeviceShares | None]] = []
        for prefixes, table, window in zip(self.prefixes, self._tables, self._windows, strict=True):
            found = prefixes.find(table, live, self.length[live], len(rows))
            if found is None:
                put.append((None, self._put_shares(window, own)))
            else:
                prefix = SharedPrefix(*(self._staging.put(array) for array in found.arrays()))
                put.append((prefix, self._put_shares(None, own - found.prefix_len[: len(own)])))
        return put

    def _put_shares(self, window: int | None, lengths: np.ndarray) -> DeviceShares | None:
        if not len(lengths):
            return None
        read = lengths + self._growth
        if window is not None:
            read = np.minimum(read, window)
        shares = share_out(read, self._programs, self._deterministic)
        return DeviceShares(*(self._staging.put(array) for array in (shares.item_row, shares.first_item, shares.size)))
