"""The batch of one step, as the model sees it: an explicit argument, never a global.

Query token j of row r sits at KV position kv_len[r] - q_len[r] + j. It sees the KV positions up to its own and, with a
window W, only those greater than its own minus W. Rope position, KV slot and visibility are separate inputs.

A batch may be padded to the shape of a captured CUDA graph. Padding rows have a KV length of 0 and one token (decode) or none
(prefill); tokens beyond those of the last row are padding, too. All their slots are in block 0, which no sequence owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import AttentionWork, AttentionWorkspace, OwnKernel, SharedPrefix
from ridgeline.ops.attention.split_kv import DeviceShares


@dataclass(slots=True)
class GroupBatch:
    """One KV group's view of the step."""

    slots: Tensor                    # int64 [T]: where each token's KV is written (block * block_size + offset)
    block_table: Tensor              # int32 [*, B]: block ids; Batch.table_rows says which line belongs to which row
    prefix: SharedPrefix | None = None           # leading blocks that decode rows have in common
    shares: DeviceShares | None = None           # split-KV: which CTA reads which keys of the decode rows


@dataclass(slots=True)
class Runs:
    """With drafts: the positions of each row that samples, among the S with logits."""

    start: Tensor                    # int32 [N + 1]: prefix sums; padding has none
    rows: Tensor                     # int32 [N]: the engine's rows
    longest: int                     # bound of the positions of a row


@dataclass(slots=True)
class Batch:
    tokens: Tensor                   # int64 [T]; see `last_rows` for the first of them
    positions: Tensor                # int64 [T]: rope positions
    query_start: Tensor              # int32 [R + 1]: prefix sums of the tokens per row
    kv_len: Tensor                   # int32 [R]: KV length per row, this step's tokens included
    query_start_host: list[int] | None           # the same two on the host, for the CPU kernels' loops
    kv_len_host: list[int] | None
    groups: list[GroupBatch]
    logits_index: Tensor             # int64 [S]: which of the T positions need logits
    sample_rows: Tensor              # int64 [S]: the engine's rows these belong to
    picks: np.ndarray                # which of the S rows the plan asked for, in its order …
    device_picks: Tensor             # … and the same on the device, int64
    last_rows: Tensor | None = None              # [D]: rows whose newest token is the token of each of the first D; None: no row
    newest: Tensor | None = None                 # with drafts, instead: int64 [T], the row whose newest token it is; -1: none
    runs: Runs | None = None                     # with drafts
    table_rows: Tensor | None = None             # int32 [R]: each row's line in the block tables; None: its own number
    query_tiles: Tensor | None = None            # int32 [N, 4]: query tiles of the prefill kernel; None: the kernel needs none
    sampled: Batch | None = None                 # the rows with logits, one query each, for the last layer; None: all
    workspace: AttentionWorkspace | None = None  # scratch of attention, made once
    own_kernel: tuple[OwnKernel, ...] = ()       # on a CPU: tokens of answers among prompts, of prompts among decodes
    work: AttentionWork | None = None            # the step's shape, as the host knows it; None: see the host lists above

    def picked(self, *each: Tensor) -> tuple[Tensor, ...]:
        """Of tensors with a line for each of the S rows, the lines of those that the plan asked for: the others are padding."""
        count = len(self.picks)
        if len(each[0]) == count:
            return each
        if self.picks[-1] == count - 1:                  # the first ones, as of decodes: nothing is copied
            return tuple(tensor[:count] for tensor in each)
        return tuple(tensor.index_select(0, self.device_picks) for tensor in each)
