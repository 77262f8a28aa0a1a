"""How a step's attention is divided: shared prefixes, split-KV shares of decodes, query tiles of prompts, and the workspace.

All of it is integers that go to the device with the step's others. Lengths may be upper bounds: kernels read the true ones.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.layers.batch import Batch
from ridgeline.ops.attention import kernel_prefill_hopper
from ridgeline.ops.attention.attention_arguments import (
    PREFIX_QUERIES,
    AttentionWork,
    AttentionWorkspace,
    DecodeShape,
    SharedPrefix,
    decode_shape,
    make_workspace,
    prefix_tile_rows,
    workspace_floats,
)
from ridgeline.ops.attention.prefill_tiles import cut_queries, most_tiles
from ridgeline.ops.attention.split_kv import SHARE_UNIT, DeviceShares, num_items, share_out
from ridgeline.ops.cpu import native
from ridgeline.ops.launch import multiprocessors
from ridgeline.runner.row_tables import RowTables
from ridgeline.runner.shared_prefix import SPARE_TILES, NoSharedPrefixes, SharedPrefixes
from ridgeline.runner.staging import Staging
from ridgeline.sizes.graph_shapes import Shape, most_queries
from ridgeline.sizes.kv_spec import KVGroupSpec

Decoding = tuple[SharedPrefix | None, DeviceShares | None]       # of one group


def _workspace(
    groups: list[KVGroupSpec], shapes: list[DecodeShape], max_rows: int, prefix_tiles: int, deterministic: bool, drafts: bool,
    device: torch.device,
) -> AttentionWorkspace:
    """One for all groups, which attend one after another."""
    floats = max(
        workspace_floats(
            max_rows, shape.heads, group.num_kv_heads, group.value_dim, multiprocessors=multiprocessors(device),
            prefix_tiles=prefix_tiles, deterministic=deterministic, drafts=drafts, programs=shape.programs,
        ) for group, shape in zip(groups, shapes, strict=True)
    )
    # Latents have a counter for each query as well.
    columns = max(
        shape.columns * (most_queries(1) if drafts and group.kind == "latent" else 1)
        for group, shape in zip(groups, shapes, strict=True)
    )
    return make_workspace(floats, max_rows, columns, device)


def _prefixes(group: KVGroupSpec, shape: DecodeShape, shared: bool) -> SharedPrefixes:
    if shared and group.kind == "full" and shape.group <= PREFIX_QUERIES:
        return SharedPrefixes(group.block_size, prefix_tile_rows(shape.group))
    return NoSharedPrefixes()


def _tile_group(groups: list[KVGroupSpec], shapes: list[DecodeShape], device: torch.device) -> int | None:
    """Query heads per KV head, where prompts are attended to tile by tile of a list, one for all groups; None: there is none."""
    sizes = {shape.group for shape in shapes}
    wanted = len(sizes) == 1 and all(
        kernel_prefill_hopper.wants_tiles(device, shape.group, group.head_dim, group.block_size)
        for group, shape in zip(groups, shapes, strict=True)
    )
    return sizes.pop() if wanted else None


class AttentionSchedule:
    def __init__(
        self, groups: list[KVGroupSpec], max_rows: int, device: torch.device, heads: int, shared_prefixes: bool,
        deterministic: bool, drafts: bool = False,
    ) -> None:
        """`drafts`: decode rows may have several queries."""
        shapes = [decode_shape(group, heads, multiprocessors(device)) for group in groups]
        self._tile_rows = min(prefix_tile_rows(shape.group) for shape in shapes)
        self.prefixes = [
            _prefixes(group, shape, shared_prefixes and not deterministic)
            for group, shape in zip(groups, shapes, strict=True)
        ]
        self.workspace = None if device.type == "cpu" else _workspace(
            groups, shapes, max_rows, -(-max_rows // self._tile_rows) + SPARE_TILES if shared_prefixes else 0, deterministic,
            drafts, device,
        )
        self.deterministic = deterministic
        # Tokens by which rows may grow before their keys are shared out anew; deterministic, shares follow from lengths alone.
        self.growth = 0 if deterministic else SHARE_UNIT
        self._tile_group = None if deterministic else _tile_group(groups, shapes, device)
        self._windows = [group.window for group in groups]
        self._programs = [shape.programs for shape in shapes]    # per group: CTAs that attend at once, for each KV head
        self._on_cpu = device.type == "cpu"
        self._native = native.if_built()

    def num_bytes(self, max_rows: int, max_step_tokens: int) -> int:
        """Most that it puts into staging for one step."""
        groups = len(self._windows)
        num_tiles = -(-max_rows // self._tile_rows) + SPARE_TILES
        size = groups * (4 * (4 * num_tiles + 2 * max_rows) + 6 * 16)
        # How decodes are shared out: of all layers but the last, and of that one.
        items = max(num_items(rows, each, self.deterministic) for rows in range(1, max_rows + 1) for each in self._programs)
        size += groups * 2 * (4 * (items + 2 * max_rows) + 3 * 16)
        if self._tile_group is not None:
            size += 16 * (most_tiles(max_step_tokens, max_rows, self._tile_group) + 1)
        return size

    def forget(self) -> None:
        """Rows have other blocks than before."""
        for each in self.prefixes:
            each.forget()

    def shared(self, batch: Batch) -> int:
        """KV positions that this (the newest) step reads once for several rows, in each layer without a window."""
        found = zip(self.prefixes, batch.groups, strict=True)
        return max((prefixes.saved for prefixes, group in found if group.prefix is not None), default=0)

    def work(self, num_decodes: int, longest: int, queries: int = 1, older: bool = True) -> AttentionWork | None:
        return None if self._on_cpu else AttentionWork(num_decodes, longest, self.deterministic, older, queries)

    def put_tiles(
        self, staging: Staging, rows: np.ndarray, query_start: np.ndarray, kv_len: np.ndarray, first: int, shape: Shape | None
    ) -> Tensor | None:
        """The prompts, from the first row on, cut into tiles of queries: of a shape always as many."""
        group = self._tile_group
        if group is None or first == len(rows):
            return None
        size = None if shape is None else most_tiles(shape.prompt_tokens, shape.prompts, group)
        return staging.put(cut_queries(query_start[first:], kv_len[first:], rows[first:], group, size))

    def put_decodes(
        self, staging: Staging, tables: RowTables, rows: np.ndarray, kv_len: np.ndarray, num_decodes: int, queries: int = 1
    ) -> list[Decoding]:
        """For the decode rows: the shared prefix of each group, and the split-KV shares of the rest."""
        if not num_decodes or self._on_cpu:
            return [(None, None)] * len(self._windows)
        decodes = rows[:num_decodes]
        live = decodes[decodes != len(tables.given)]
        own = kv_len[:num_decodes]
        put: list[Decoding] = []
        for group, (prefixes, table) in enumerate(zip(self.prefixes, tables.blocks, strict=True)):
            # The kernel of shared prefixes has one query per row: rows with drafts read theirs themselves.
            found = None if queries > 1 else prefixes.find(table, live, tables.length[live], len(rows))
            if found is None:
                put.append((None, self._put_shares(staging, group, own, queries)))
            else:
                prefix = SharedPrefix(*(staging.put(array) for array in found.arrays()))
                put.append((prefix, self._put_shares(staging, group, own - found.prefix_len[: len(own)])))
        return put

    def put_shares(self, staging: Staging, lengths: np.ndarray) -> list[DeviceShares | None]:
        """Of rows with one query each, in every group."""
        return [] if self._on_cpu else [self._put_shares(staging, group, lengths) for group in range(len(self._windows))]

    def _put_shares(self, staging: Staging, group: int, lengths: np.ndarray, queries: int = 1) -> DeviceShares | None:
        if not len(lengths):
            return None
        read, window = lengths + self.growth, self._windows[group]
        if window is not None:
            read = np.minimum(read, window + queries - 1)
        shares = share_out(read, self._programs[group], self.deterministic, self._native)
        return DeviceShares(*(staging.put(array) for array in (shares.item_row, shares.first_item, shares.size)))
