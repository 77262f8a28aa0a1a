"""The batch of one step, as the model sees it: an explicit argument, never a global.

Query token j of row r sits at KV position kv_len[r] - q_len[r] + j. It sees the KV positions up to its own and, with a
window W, only those greater than its own minus W. Rope position, KV slot and visibility are separate inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class GroupBatch:
    """One KV group's view of the step."""

    slots: Tensor                    # int64 [T]: where each token's KV is written (block * block_size + offset)
    block_table: Tensor              # int32 [R, B]: block ids per row; B covers the longest row of this step


@dataclass(slots=True)
class Batch:
    tokens: Tensor                   # int64 [T]
    positions: Tensor                # int64 [T]: rope positions
    query_start: Tensor              # int32 [R + 1]: prefix sums of the tokens per row
    kv_len: Tensor                   # int32 [R]: KV length per row, this step's tokens included
    query_start_host: list[int]      # the same two on the host: CPU loops and grid sizes need no device read
    kv_len_host: list[int]
    groups: list[GroupBatch]
    logits_index: Tensor             # int64 [S]: which of the T positions need logits
