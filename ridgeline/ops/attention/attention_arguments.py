"""Arguments of attention beside its tensors: the shape of a step, shared prefixes, new tokens, the workspace, and scales.

The kernels that read them are launched by attention_launch.py. The runner makes them once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops.attention.split_kv import DeviceShares, Shares, num_items, programs_at_once, share_out
from ridgeline.ops.launch import multiprocessors
from ridgeline.ops.registry import TRITON_INTERPRETED
from ridgeline.sizes.graph_shapes import most_queries
from ridgeline.sizes.kv_spec import KVGroupSpec

PREFIX_QUERIES = 128                 # (row, head of a group) pairs in a tile of rows that share a prefix

# ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What the host knows of the shape of a step. The device has the true lengths; these numbers fix the grids."""

    num_decodes: int                 # leading rows with at most `queries` queries each; padding among them has kv_len 0
    longest_query: int               # no later row has more queries than this; 0: there are none
    deterministic: bool = False      # a row's result depends on that row alone, to the last bit
    older: bool = True               # a later row may have keys of earlier steps
    queries: int = 1                 # of a decode row: 1, or with drafts as many as any of them has


@dataclass(frozen=True, slots=True)
class OwnKernel:
    """Queries of a row, one after the other, that do not go to the kernel which their step's shape suggests. On a CPU the kernels
    of decodes and of prompts add up in different orders, and activations that are rounded to 8 bits make much of that. So a token
    goes to the same kernel whenever it is computed: one of an answer as a decode, also when the answer goes on elsewhere; one of
    a prompt as a prompt, also when it is the only one that is left."""

    first: int                       # of the step's tokens
    count: int
    line: int                        # of the block table
    position: int                    # of the first
    of_prompt: bool


def work_of(query_start: list[int]) -> AttentionWork:
    """From the prefix sums of queries per row."""
    decodes = leading_decodes(query_start)
    rest = range(decodes, len(query_start) - 1)
    return AttentionWork(decodes, max((query_start[row + 1] - query_start[row] for row in rest), default=0))


def leading_decodes(query_start: list[int]) -> int:
    """How many rows from the first on have one query. Schedulers put decodes first."""
    count = 0
    while count + 1 < len(query_start) and query_start[count + 1] == count + 1:
        count += 1
    return count


@dataclass(frozen=True, slots=True, eq=False)
class FreshTokens:
    """The new tokens of decodes, one per row, before norm, rotation and KV write: the decode kernel does these too."""

    positions: Tensor                # int64 [R]: row of cos_sin
    slots: Tensor                    # int64 [R]: block * block_size + offset of the newest position, as the block table has it
    cos_sin: Tensor                  # [max_position, 2, rotary_dim / 2]
    q_norm: Tensor | None = None     # [D]: weights of the norm on each head
    k_norm: Tensor | None = None
    eps: float = 0.0
    norm_offset: float = 0.0


# ── shared prefixes ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Leading blocks that decode rows have in common. They are read once per tile of rows instead of once per row.

    It is a hint: the block tables are complete, and the result is the same without it. A tile is up to
    `prefix_tile_rows(group)` rows with one prefix. The number of tiles and members may be upper bounds.
    """

    tile_row: Tensor                 # int32 [N]: a row of the block table whose first blocks are the prefix
    tile_len: Tensor                 # int32 [N]: tokens of the prefix, a multiple of the block size; 0: unused tile
    tile_first: Tensor               # int32 [N]: where the tile's rows stand in `members`
    tile_count: Tensor               # int32 [N]: how many they are
    members: Tensor                  # int32 [M]: batch rows, each in one tile at most
    prefix_len: Tensor               # int32 [R]: tile_len of the row's tile, less than kv_len; 0: shares nothing


def prefix_tile_rows(group: int) -> int:
    """Rows in a tile of `SharedPrefix`, for `group` query heads per KV head."""
    return max(1, PREFIX_QUERIES // group)


def shared_prefix(
    groups: list[tuple[list[int], int]], rows: int, group: int, *,
    table_rows: list[int] | None = None, tiles: int = 0, device: torch.device | str = "cpu",
) -> SharedPrefix:
    """From (batch rows, tokens they share) per group of rows; padded to `tiles` tiles and `rows` members."""
    size = prefix_tile_rows(group)
    cut = [(members[i : i + size], length) for members, length in groups for i in range(0, len(members), size)]
    table: list[list[int]] = [[], [], [], []]
    members: list[int] = []
    prefix_len = [0] * rows
    for own, length in cut:
        first = own[0] if table_rows is None else table_rows[own[0]]
        for column, value in zip(table, (first, length, len(members), len(own)), strict=True):
            column.append(value)
        members += own
        for row in own:
            prefix_len[row] = length
    columns = [column + [0] * (tiles - len(column)) for column in table]
    return SharedPrefix(*(
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (*columns, members + [0] * (rows - len(members)), prefix_len)
    ))


def prefix_shares(rows: int, group: int, kv_heads: int, multiprocessors: int) -> int:
    """Most shares into which the prefix of `rows` rows is cut: one CTA fills an SM."""
    tiles = -(-rows // prefix_tile_rows(group))
    return max(1, min(16, multiprocessors // (tiles * kv_heads)))


# ── split-KV and its workspace ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWorkspace:
    """Partial results of split-KV. One workspace serves all layers: launches of a stream follow each other, and every launch
    leaves the counters at zero."""

    partials: Tensor                 # float32, `workspace_floats` of them
    arrived: Tensor                  # int32 [rows * kv_heads], zeros


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How the decodes of one KV group are spread over CTAs."""

    heads: int                       # query heads, padding included
    columns: int                     # CTAs of a share of keys: one per KV head, or per tile of heads that read one latent
    programs: int                    # of each column, those that run at once
    group: int                       # query heads per KV head


def decode_shape(spec: KVGroupSpec, heads: int, multiprocessors: int) -> DecodeShape:
    if spec.latent_value:
        tile = latent_tile_heads(heads)
        columns = -(-heads // tile)
        return DecodeShape(columns * tile, columns, _latent_programs(heads, multiprocessors), heads)
    programs = programs_at_once(multiprocessors, spec.num_kv_heads)
    return DecodeShape(heads, spec.num_kv_heads, programs, heads // spec.num_kv_heads)


def latent_tile_heads(heads: int) -> int:
    """Heads of a CTA that reads latents. Sums of 64 heads would not fit into its registers."""
    return 16 if heads <= 16 else 32


def _latent_programs(heads: int, multiprocessors: int) -> int:
    """CTAs that run at once for each tile of heads. Three stages of 32 latents are half of an SM's shared memory."""
    tile = latent_tile_heads(heads)
    return max(1, (2 if tile == 16 else 1) * multiprocessors // -(-heads // tile))


def latent_shares(lengths: list[int], heads: int, device: torch.device) -> DeviceShares:
    """As `device_shares`, of decodes over latents."""
    return _on_device(share_out(np.array(lengths, np.int32), _latent_programs(heads, sm_count(device))), device)


def workspace_floats(
    max_rows: int, heads: int, kv_heads: int, head_dim: int, *, multiprocessors: int, prefix_tiles: int = 0,
    deterministic: bool = False, drafts: bool = False, programs: int | None = None,
) -> int:
    """Most float32 partials that a launch with up to `max_rows` decodes leaves behind. `drafts`: with several queries.
    `programs`: CTAs at once, for each column of a DecodeShape; as of KV heads, by default."""
    programs = programs or programs_at_once(multiprocessors, kv_heads)
    slots = 0
    for rows in range(1, max_rows + 1):
        before = prefix_shares(rows, heads // kv_heads, kv_heads, multiprocessors) if prefix_tiles else 0
        items = num_items(rows, programs, deterministic)
        # A single row has one part more: its newest key (kernel_one_row.py).
        slots = max(slots, items + max(rows * before, rows == 1), items * most_queries(rows) if drafts else 0)
    return partial_floats(slots, heads, head_dim)


def partial_floats(slots: int, heads: int, head_dim: int) -> int:
    return slots * heads * (tile_dim(head_dim) + 2)      # accumulated values; and the maximum and the sum


def make_workspace(floats: int, max_rows: int, kv_heads: int, device: torch.device) -> AttentionWorkspace:
    return AttentionWorkspace(
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device),
    )


def tile_dim(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def device_shares(
    lengths: list[int], kv_heads: int, window: int | None, prefix: SharedPrefix | None, deterministic: bool,
    device: torch.device, queries: int = 1,
) -> DeviceShares:
    """Split-KV shares of decodes with these lengths. The engine keeps its own on the device (runner/attention_schedule.py).

    The keys of a shared prefix are left out: another kernel reads them.
    """
    read = np.array(lengths, np.int32)
    if window is not None:
        read = np.minimum(read, abs(window) + queries - 1)
    if prefix is not None:
        read = read - prefix.prefix_len.cpu().numpy()[: len(read)]
    return _on_device(share_out(read, programs_at_once(sm_count(device), kv_heads), deterministic), device)


def _on_device(found: Shares, device: torch.device) -> DeviceShares:
    return DeviceShares(*(torch.from_numpy(each).to(device) for each in (found.item_row, found.first_item, found.size)))


def sm_count(device: torch.device) -> int:
    return 8 if TRITON_INTERPRETED else multiprocessors(device)      # the interpreter runs one CTA after another


# ── quantised caches ─────────────────────────────────────────────────────────────────────────────────────────────────
# value = stored * scale, with a float32 scale for each token and KV head: [blocks, block_size, KH], of K and of V.


# Calibrated scales are the same for every token: [KH], seen as the same shape with strides of zero over blocks and slots.


def largest_code(dtype: torch.dtype) -> float:
    """The largest number that a cache of `dtype` stores. int8 is symmetric: -128 is not used."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def quantise_kv(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache of `dtype` stores for values [N, KH, D] (new tokens) with scales [N, KH]. Values beyond the dtype's range
    are clamped."""
    wide = torch.promote_types(values.dtype, torch.float32)
    limit = largest_code(dtype)
    stored = (values.to(wide) / scale.unsqueeze(-1)).clamp_(-limit, limit)
    return (stored.round_() if dtype == torch.int8 else stored).to(dtype)


def token_scales(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [N, KH] that use the whole range of `dtype` for each token and head of values [N, KH, D]."""
    largest = values.abs().amax(dim=-1).to(torch.float32)
    return torch.where(largest > 0, largest / largest_code(dtype), 1.0)


def is_calibrated(scale: Tensor | None) -> bool:
    """Whether every token has the same scale, which is then never written."""
    return scale is not None and scale.stride(0) == 0


def scale_argument(scale: Tensor | None, unused: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The scales as kernels take them, with their strides over blocks, slots and KV heads; `unused` if there are none."""
    return (unused, (0, 0, 0)) if scale is None else (scale, scale.stride())
