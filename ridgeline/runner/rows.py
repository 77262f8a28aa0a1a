"""What the device half remembers of each row, and how a plan becomes a Batch.

A row owns its known tokens, its length, its block tables and its last sampled token. A plan is applied in the order
removed, added, appended; then its tokens are packed without a loop over rows, but for rows that join or are in prefill.
The last sampled token stays on the device: a decode needs no token value from the host.

On a GPU the block tables live there too, and only what changed is sent. One row more than there are is for padding: it
has no blocks, so whatever it writes goes to block 0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.kv_spec import KVGroupSpec
from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.messages import StepPlan, Want
from ridgeline.ops.launch import multiprocessors
from ridgeline.ops.paged_attention import (
    AttentionWork,
    SharedPrefix,
    make_workspace,
    prefix_tile_rows,
    workspace_floats,
)
from ridgeline.runner.shared_prefix import SPARE_TILES, NoSharedPrefixes, SharedPrefixes
from ridgeline.runner.staging import Staging


class DeviceRows:
    def __init__(
        self, groups: list[KVGroupSpec], max_rows: int, max_model_len: int, max_step_tokens: int, depth: int,
        device: torch.device, heads: int = 1, shared_prefixes: bool = False, deterministic: bool = False,
    ) -> None:  # fmt: skip
        self.block_size = groups[0].block_size
        self.device = device
        self.length = np.zeros(max_rows + 1, np.int64)       # tokens whose KV is in the cache
        self.num_given = np.zeros(max_rows + 1, np.int64)    # tokens that came from the host
        self.given: list[np.ndarray] = [np.zeros(0, np.int32)] * max_rows
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.last_token = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        kv_heads = groups[0].num_kv_heads
        tile_rows = prefix_tile_rows(heads // kv_heads)
        self.prefixes = [
            SharedPrefixes(self.block_size, tile_rows) if shared_prefixes and group.window is None
            else NoSharedPrefixes() for group in groups
        ]
        self._workspace = None
        if device.type != "cpu":
            floats = workspace_floats(
                max_rows, heads, kv_heads, groups[0].head_dim, multiprocessors=multiprocessors(device),
                prefix_tiles=-(-max_rows // tile_rows) + SPARE_TILES if shared_prefixes else 0,
                deterministic=deterministic,
            )  # fmt: skip
            self._workspace = make_workspace(floats, max_rows, kv_heads, device)
        self._padding_row = max_rows
        self._deterministic = deterministic
        max_blocks = -(-max_model_len // self.block_size)
        self._tables = np.zeros((len(groups), max_rows + 1, max_blocks), np.int32)
        self._device_tables = torch.from_numpy(self._tables)         # on the CPU both are one memory
        if device.type != "cpu":
            self._device_tables = self._device_tables.to(device)
        self._changed: list[np.ndarray] = []             # places in the flat tables that the device has not seen
        self._most_changes = 2 * len(groups) * max_rows + max_blocks
        self._ones = torch.arange(max_rows + 1, dtype=torch.int32, device=device)    # borders of rows with a query each
        self._arange = np.arange(max(max_step_tokens, max_rows) + 1, dtype=np.int64)
        # Per token: id, position and a slot in each group. Per row: nine numbers at most. Changes of the tables: place
        # and value. And the ends of arrays.
        num_tiles = -(-max_rows // tile_rows) + SPARE_TILES
        num_bytes = 8 * (max(max_step_tokens, max_rows) * (2 + len(groups)) + 9 * (max_rows + 1))
        num_bytes += len(groups) * (4 * (4 * num_tiles + 2 * max_rows) + 6 * 16)
        self._staging = Staging(num_bytes + 12 * self._most_changes + 16 * (20 + len(groups)), depth + 1, device)

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
        """What the next copy has to tell of the tables; more than fits into one goes ahead of it."""
        if not self._changed:
            return self._arange[:0]
        places = np.concatenate(self._changed)
        self._changed.clear()
        while len(places) > self._most_changes:
            self._staging.begin()
            written = self._put_changes(places[: self._most_changes])
            self._staging.send()
            self._write_tables(*written)
            places = places[self._most_changes :]
        return places

    def _put_changes(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._staging.put(places), self._staging.put(self._tables.ravel()[places])

    def _write_tables(self, places: Tensor, blocks: Tensor) -> None:
        if len(places):
            self._device_tables.view(-1).index_copy_(0, places, blocks)

    # -- the batch -----------------------------------------------------------------------------------------------------

    def pack(self, plan: StepPlan, padded: int = 0) -> Batch:
        """`padded`: fill up with padding rows to so many; then every row has one token."""
        rows, counts = plan.rows.astype(np.int64), plan.num_tokens.astype(np.int64)
        sampled = (plan.want & np.int8(Want.TOKEN)) != 0
        num_live = len(rows)
        if padded:
            rows = np.concatenate([rows, np.full(padded - num_live, self._padding_row)])
            counts = np.ones(padded, np.int64)
            sampled = np.ones(padded, bool)
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
        slots = self._tables[:, token_rows, blocks] * np.int64(self.block_size) + offsets
        given = starts < self.num_given[rows]
        kv_len = ends.astype(np.int32)
        kv_len[num_live:] = 0
        on_cpu = self.device.type == "cpu"

        changes = self._changes()
        staging = self._staging
        staging.begin()
        device_rows = staging.put(rows)
        tokens = staging.put(self._given_tokens(rows, starts, ends, query_start, given))
        borders, lengths = staging.put(query_start), staging.put(kv_len)
        places, slot_tensors = staging.put(positions), [staging.put(each) for each in slots]
        logits_index = staging.put(query_start[1:][sampled].astype(np.int64) - 1)
        sample_rows = staging.put(rows[sampled])
        table_rows = None if on_cpu else staging.put(rows.astype(np.int32))
        work = None if on_cpu else self._work(counts)
        prefixes = [self._put_prefix(group, rows, num_live, work) for group in range(len(slots))]
        sampled_rows = self._put_sampled(plan, kv_len, rows, sampled) if total > len(rows) else None
        decodes = np.nonzero(~given)[0]                  # from here on sizes vary: nothing a graph reads
        decode_rows, decode_places = staging.put(rows[decodes]), staging.put(query_start[decodes].astype(np.int64))
        written = self._put_changes(changes)
        staging.send()

        self._write_tables(*written)
        if len(decodes) == total:                        # the last sampled token never left the device
            torch.index_select(self.last_token, 0, device_rows, out=tokens)
        elif len(decodes):
            tokens.index_copy_(0, decode_places, self.last_token.index_select(0, decode_rows))
        num_blocks = -(-int(ends.max()) // self.block_size)
        groups = [
            GroupBatch(slot_tensor, table[:, :num_blocks].index_select(0, device_rows) if on_cpu else table, prefix)
            for slot_tensor, table, prefix in zip(slot_tensors, self._device_tables, prefixes, strict=True)
        ]
        self.length[rows[:num_live]] = ends[:num_live]
        batch = Batch(
            tokens=tokens,
            positions=places,
            query_start=borders,
            kv_len=lengths,
            query_start_host=query_start.tolist() if on_cpu else None,
            kv_len_host=ends.tolist() if on_cpu else None,
            groups=groups,
            logits_index=logits_index,
            sample_rows=sample_rows,
            table_rows=table_rows,
            work=work,
            workspace=self._workspace,
        )
        if sampled_rows is not None:
            batch.sampled = self._last_tokens(batch, np.nonzero(sampled)[0], *sampled_rows)
        return batch

    def _put_sampled(
        self, plan: StepPlan, kv_len: np.ndarray, rows: np.ndarray, sampled: np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Places, KV lengths and table rows of what the last layer has to go on with; None: with everything."""
        if (plan.want & np.int8(Want.PROMPT_LOGPROBS | Want.HIDDEN)).any():
            return None
        put = self._staging.put
        return put(np.nonzero(sampled)[0]), put(kv_len[sampled]), put(rows[sampled].astype(np.int32))

    def _last_tokens(
        self, batch: Batch, places: np.ndarray, device_places: Tensor, kv_len: Tensor, table_rows: Tensor
    ) -> Batch:
        """The same step with one query a row, its last: to attend that needs no more of the positions."""
        on_cpu = self.device.type == "cpu"
        count = len(places)
        groups = batch.groups
        if on_cpu:
            groups = [GroupBatch(each.slots, each.block_table.index_select(0, device_places)) for each in groups]
        else:
            groups = [GroupBatch(each.slots, each.block_table) for each in groups]
        lengths = batch.kv_len_host
        return replace(
            batch,
            query_start=self._ones[: count + 1],
            kv_len=kv_len,
            query_start_host=list(range(count + 1)) if on_cpu else None,
            kv_len_host=[lengths[place] for place in places.tolist()] if lengths is not None else None,
            groups=groups,
            table_rows=None if on_cpu else table_rows,
            work=None if on_cpu else AttentionWork(count, 0, self._deterministic),
        )

    def _work(self, counts: np.ndarray) -> AttentionWork:
        longer = np.nonzero(counts != 1)[0]
        num_decodes = int(longer[0]) if len(longer) else len(counts)
        return AttentionWork(num_decodes, int(counts[num_decodes:].max(initial=0)), self._deterministic)

    def _put_prefix(
        self, group: int, rows: np.ndarray, num_live: int, work: AttentionWork | None
    ) -> SharedPrefix | None:
        if work is None:
            return None
        decodes = rows[: min(num_live, work.num_decodes)]
        found = self.prefixes[group].find(self._tables[group], decodes, self.length[decodes], len(rows))
        return None if found is None else SharedPrefix(*(self._staging.put(array) for array in found.arrays()))

    def _given_tokens(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, query_start: np.ndarray, given: np.ndarray
    ) -> np.ndarray:
        """The tokens that came from the host; 0 where a row has used them all up and goes on with what it sampled."""
        tokens = np.zeros(int(query_start[-1]), np.int64)
        for place in np.nonzero(given)[0].tolist():
            first = query_start[place]
            tokens[first : query_start[place + 1]] = self.given[rows[place]][starts[place] : ends[place]]
        return tokens
