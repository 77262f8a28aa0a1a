"""Causal attention of a ragged batch over the paged KV cache: prompts, prompt chunks, decode and draft verification.

Query j of row r sits at KV position kv_len[r] - query_len[r] + j and sees the positions up to its own; with a window W
only the W last of them. Slots that no query of the row sees are never read: they may hold anything, NaN included.
Where positions come from, how blocks are shared and what rope did to the queries is not known here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops import native
from ridgeline.ops.attention import kernel_decode, kernel_prefill, kernel_prefill_hopper, two_formats
from ridgeline.ops.attention.prefill_tiles import cut_queries, tile_tokens
from ridgeline.ops.attention.split_kv import (
    FIXED_SHARES,
    LEAST_FIXED_SHARE,
    LEAST_SHARE,
    SINGLE_SHARES,
    DeviceShares,
    num_items,
    programs_at_once,
    share_out,
)
from ridgeline.ops.launch import dependent_launch, multiprocessors
from ridgeline.ops.registry import (
    TRITON_DTYPES,
    TRITON_INTERPRETED,
    Implementation,
    Op,
    Site,
    Tolerance,
)
from ridgeline.sizes.op_costs import PAGED_ATTENTION_CASES, paged_attention_cost

# Decode rows are gathered together, padded to the longest of them. Rows of different length are split into groups in
# which padding stays below a third, and which gather at most this many tokens at once.
GATHER_TOKENS = 1 << 16
PADDING = 1.5
MASK_ELEMENTS = 1 << 22              # of one explicit mask; longer chunks are cut into pieces

# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────

ScaleLayout = Literal["none", "tensor", "head", "token", "channel", "block"]

PREFIX_QUERIES = 128                 # (row, head of a group) pairs in a tile of rows that share a prefix


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What the host knows of a step's shape. The device has the true lengths; these fix the grids."""

    num_decodes: int                 # leading rows that have exactly one query each; padding among them has kv_len 0
    longest_query: int               # no later row has more queries than this; 0: there are none
    deterministic: bool = False      # a row's result depends on that row alone, to the last bit


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Leading blocks that decode rows have in common, so that they are read once per tile of rows, not once per row.

    An opportunity, never an obligation: the block tables are complete, and whoever ignores this computes the same.
    A tile is up to `prefix_tile_rows(group)` rows with one prefix. The number of tiles and members may be upper bounds.
    """

    tile_row: Tensor                 # int32 [N]: a row of the block table whose first blocks are the prefix
    tile_len: Tensor                 # int32 [N]: tokens of the prefix, a multiple of the block size; 0: unused tile
    tile_first: Tensor               # int32 [N]: where the tile's rows stand in `members`
    tile_count: Tensor               # int32 [N]: how many they are
    members: Tensor                  # int32 [M]: batch rows, each in one tile at most
    prefix_len: Tensor               # int32 [R]: tile_len of the row's tile, less than kv_len; 0: shares nothing


@dataclass(frozen=True, slots=True, eq=False)
class FreshTokens:
    """What is still to be done with the new tokens of decodes: norm and rotation, and the write of K and V. One a row."""

    positions: Tensor                # int64 [R]: row of cos_sin
    slots: Tensor                    # int64 [R]: block * block_size + offset, where the row's table has the newest position
    cos_sin: Tensor                  # [max_position, 2, rotary_dim / 2]
    q_norm: Tensor | None = None     # [D]: weights of the norm on each head
    k_norm: Tensor | None = None
    eps: float = 0.0
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How keys and values are stored: value = stored * scale, with float32 scales [K and V alike]

    tensor [1], head [KH], token [blocks, block_size, KH], channel [KH, D] or block [blocks, KH].
    """

    k_dtype: torch.dtype
    v_dtype: torch.dtype
    k_scale: ScaleLayout = "none"
    v_scale: ScaleLayout = "none"


@dataclass(frozen=True, slots=True, eq=False)
class OlderKV:
    """The first positions of every row when they are kept in another format than the later ones: an own cache with own
    blocks. The row's table says nothing about them, and `shares` are those of the later ones.

    Whatever a step writes is among the later positions: a row's queries see all of its older ones, but for a window.
    """

    k_cache: Tensor                  # [blocks', block_size, KH, D]
    v_cache: Tensor
    block_table: Tensor              # int32 [*, B'], by the same rows as the main one
    length: Tensor                   # int32 [R]: positions kept here, whole blocks, of those before the row's queries
    format: KVFormat | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def prefix_tile_rows(group: int) -> int:
    """Rows in a tile of `SharedPrefix`, for `group` query heads per KV head."""
    return max(1, PREFIX_QUERIES // group)


def shared_prefix(
    groups: list[tuple[list[int], int]], rows: int, group: int, *,
    table_rows: list[int] | None = None, tiles: int = 0, device: torch.device | str = "cpu",
) -> SharedPrefix:  # fmt: skip
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
    ))  # fmt: skip


def scale_shape(layout: ScaleLayout, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return {
        "tensor": (1,), "head": (kv_heads,), "token": (blocks, block_size, kv_heads), "channel": (kv_heads, head_dim),
        "block": (blocks, kv_heads),
    }[layout]  # fmt: skip


def _scale_per_value(scale: Tensor, layout: ScaleLayout) -> Tensor:
    """A view that multiplies [blocks, block_size, KH, D]."""
    if layout == "head":
        return scale.view(1, 1, -1, 1)
    if layout == "token":
        return scale.unsqueeze(-1)
    if layout == "block":
        return scale.view(scale.shape[0], 1, -1, 1)
    return scale                                                             # tensor [1], channel [KH, D]


def quantise_kv(values: Tensor, scale: Tensor, layout: ScaleLayout, dtype: torch.dtype) -> Tensor:
    """What a cache of `dtype` stores for values [N, KH, D] (new tokens) under scales that already cover them: for the
    layouts token and block `scale` is [N, KH], each token's own. Values beyond the dtype's range are cut to it."""
    if layout in ("token", "block"):
        scale = scale.unsqueeze(-1)
    elif layout == "head":
        scale = scale.view(1, -1, 1)
    wide = torch.promote_types(values.dtype, torch.float32)
    limit = torch.finfo(dtype).max
    return (values.to(wide) / scale).clamp_(-limit, limit).to(dtype)


def token_scales(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [N, KH] that use the whole range of `dtype` for each token and head of values [N, KH, D]."""
    largest = values.abs().amax(dim=-1).to(torch.float32)
    return torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)


# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def paged_attention_reference(
    q: Tensor,                       # [T, H, D]
    k_cache: Tensor,                 # [blocks, block_size, KH, D], maybe a strided view; H is a multiple of KH
    v_cache: Tensor,
    block_table: Tensor,             # int32 [R, B]: the block of each row's positions 0.., block_size..
    query_start: Tensor,             # int32 [R + 1]: prefix sums of queries per row
    kv_len: Tensor,                  # int32 [R]: positions per row, this step's included
    *,
    query_start_host: list[int] | None = None,
    kv_len_host: list[int] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    table_rows: Tensor | None = None,    # int32 [R]: the row of block_table that is each row's; None: its own number
    work: AttentionWork | None = None,
    prefix: SharedPrefix | None = None,
    shares: DeviceShares | None = None,  # which program reads which keys of the decodes; None: it is worked out anew
    query_tiles: Tensor | None = None,   # int32 [N, 4]: the rows after the decodes, cut up by prefill_tiles.py
    kv_format: KVFormat | None = None,   # of quantised caches, with their scales
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    older: OlderKV | None = None,
    workspace: AttentionWorkspace | None = None,
    out: Tensor | None = None,           # where the result goes; None: into a new tensor
) -> Tensor:
    """softmax(softcap(scale * q k^T) + mask) v -> [T, H, D]. A row without keys (padding) gives zeros.

    `work`, `prefix`, `shares`, `query_tiles` and `workspace` serve the kernels; they do not change the result.
    """
    if kv_len_host is None:
        kv_len_host = kv_len.tolist()
    if query_start_host is None:
        query_start_host = query_start.tolist()
    rows = len(kv_len_host)
    if table_rows is not None:
        block_table = block_table.index_select(0, table_rows)
    if older is not None or k_scale is not None or v_scale is not None:
        k_cache, v_cache, block_table = _plain_cache(
            q.dtype, k_cache, v_cache, block_table, kv_format, k_scale, v_scale, older, table_rows
        )
    if 0 in kv_len_host or out is not None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
        kept = [row for row in range(rows) if kv_len_host[row]]
        if kept:
            queries = [query_start_host[row + 1] - query_start_host[row] for row in kept]
            tokens = torch.tensor(
                [token for row in kept for token in range(query_start_host[row], query_start_host[row + 1])],
                device=q.device,
            )
            starts = list(itertools.accumulate(queries, initial=0))
            chosen = torch.tensor(kept, device=q.device)
            out[tokens] = paged_attention_reference(
                q[tokens], k_cache, v_cache, block_table[chosen], torch.tensor(starts, device=q.device), kv_len[chosen],
                query_start_host=starts, kv_len_host=[kv_len_host[row] for row in kept],
                scale=scale, window=window, softcap=softcap,
            )  # fmt: skip
        return out
    if rows == 1:
        return _attend_row(q, k_cache, v_cache, block_table[0], kv_len_host[0], scale, window, softcap)
    if q.shape[0] == rows and _alike(kv_len_host):       # plain decode: the rows are the queries
        return _attend_decode(q, k_cache, v_cache, block_table, kv_len, kv_len_host, scale, window, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode = [row for row in range(rows) if query_start_host[row + 1] - query_start_host[row] == 1]
    groups = [group for group in _length_groups(decode, kv_len_host) if len(group) > 1]
    for group in groups:
        chosen = torch.tensor(group, device=q.device)
        queries = query_start[chosen].long()
        out[queries] = _attend_decode(
            q[queries], k_cache, v_cache, block_table[chosen], kv_len[chosen],
            [kv_len_host[row] for row in group], scale, window, softcap,
        )
    for row in set(range(rows)).difference(*groups):
        start, end = query_start_host[row], query_start_host[row + 1]
        if start < end:
            out[start:end] = _attend_row(
                q[start:end], k_cache, v_cache, block_table[row], kv_len_host[row], scale, window, softcap
            )
    return out


def _plain_cache(
    dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_format: KVFormat | None,
    k_scale: Tensor | None, v_scale: Tensor | None, older: OlderKV | None, table_rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Caches of the queries' dtype with the blocks of these rows alone, and the table of them."""
    blocks, table = torch.unique(block_table, return_inverse=True)
    table = table.to(torch.int32)
    k = _dequantised(k_cache, blocks, k_scale, kv_format.k_scale if kv_format else "none", dtype)
    v = _dequantised(v_cache, blocks, v_scale, kv_format.v_scale if kv_format else "none", dtype)
    if older is not None:
        old_table = older.block_table if table_rows is None else older.block_table.index_select(0, table_rows)
        old_k, old_v, old_table = _plain_cache(
            dtype, older.k_cache, older.v_cache, old_table, older.format, older.k_scale, older.v_scale, None, None
        )
        width = max(table.shape[1], old_table.shape[1])
        table, old_table = (F.pad(part, (0, width - part.shape[1])) for part in (table + len(old_k), old_table))
        is_old = torch.arange(width, device=table.device) < (older.length // k_cache.shape[1]).unsqueeze(1)
        table = torch.where(is_old, old_table, table)
        k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
    return k, v, table


def _dequantised(
    cache: Tensor, blocks: Tensor, scale: Tensor | None, layout: ScaleLayout, dtype: torch.dtype
) -> Tensor:
    values = cache[blocks]
    if scale is None:
        return values.to(dtype)
    if layout in ("token", "block"):
        scale = scale[blocks]
    wide = torch.promote_types(dtype, torch.float32)
    return (values.to(wide) * _scale_per_value(scale, layout)).to(dtype)


def _alike(lengths: list[int]) -> bool:
    padded = len(lengths) * max(lengths)
    return padded <= GATHER_TOKENS and padded <= PADDING * sum(lengths)


def _length_groups(rows: list[int], kv_len: list[int]) -> list[list[int]]:
    """Rows by length, cut where the padding or the group would grow too large."""
    groups: list[list[int]] = []
    shortest = 0
    for row in sorted(rows, key=kv_len.__getitem__):
        length = kv_len[row]
        if groups and length <= PADDING * shortest and (len(groups[-1]) + 1) * length <= GATHER_TOKENS:
            groups[-1].append(row)
        else:
            groups.append([row])
            shortest = length
    return groups


def _attend_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_len: Tensor, kv_len_host: list[int],
    scale: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """One query per row, all rows at once. The heads that share a KV head stand where queries usually do."""
    rows, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    longest, shortest = max(kv_len_host), min(kv_len_host)
    span = longest if window is None else min(longest, window)
    positions = torch.arange(span, device=q.device)                          # [span], the same for all rows …
    if longest > span:
        positions = positions + (kv_len.unsqueeze(1) - span).clamp_(min=0)   # … or [R, span]: each row's window
    blocks = block_table.gather(1, (positions // block_size).expand(rows, span))
    slots = blocks * block_size + positions % block_size
    mask = None
    if shortest < span:
        # Padding reads the row's first visible slot again, which holds real numbers, and hides it.
        mask = positions < kv_len.unsqueeze(1)
        slots = torch.where(mask, slots, slots[:, :1])
        mask = mask.view(rows, 1, 1, span)
    slots = slots.view(-1)
    k = _gather_slots(k_cache, slots).view(rows, span, kv_heads, head_dim)
    v = _gather_slots(v_cache, slots).view(rows, span, kv_heads, head_dim)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    out = _attend(grouped, k.transpose(1, 2), v.transpose(1, 2), mask, False, scale, softcap)
    return out.reshape(rows, heads, head_dim)


def _attend_row(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, kv_len: int,
    scale: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """One row with any number of queries."""
    queries, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    start = kv_len - queries                                                 # position of the first query
    first = 0 if window is None else max(0, start - window + 1)              # oldest position that any query sees
    blocks = blocks[first // block_size : -(-kv_len // block_size)]
    skipped = first - first % block_size
    k = k_cache.index_select(0, blocks).view(-1, kv_heads, head_dim)[first - skipped : kv_len - skipped]
    v = v_cache.index_select(0, blocks).view(-1, kv_heads, head_dim)[first - skipped : kv_len - skipped]
    k, v = k.transpose(0, 1), v.transpose(0, 1)                              # [KH, L, D]
    if queries == 1:
        grouped = q.view(1, kv_heads, group, head_dim)
        return _attend(grouped, k[None], v[None], None, False, scale, softcap).reshape(q.shape)
    # KV heads stand where the batch does, and each is repeated over its group without a copy.
    q = q.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = k[:, None].expand(-1, group, -1, -1), v[:, None].expand(-1, group, -1, -1)
    if start == 0 and (window is None or window >= kv_len) and softcap is None:
        out = _attend(q, k, v, None, True, scale, None)
        return out.permute(2, 0, 1, 3).reshape(queries, heads, head_dim)
    pieces = []
    piece = max(16, MASK_ELEMENTS // k.shape[2])
    if window is not None:
        piece = min(piece, max(window, 128))             # or most of the scores would lie behind the window
    for begin in range(0, queries, piece):
        end = min(begin + piece, queries)
        low = first if window is None else max(first, start + begin - window + 1)
        high = start + end
        position = torch.arange(start + begin, start + end, device=q.device).unsqueeze(1)
        key = torch.arange(low, high, device=q.device)
        mask = key <= position
        if window is not None:
            mask &= key > position - window
        seen = slice(low - first, high - first)
        out = _attend(q[:, :, begin:end], k[:, :, seen], v[:, :, seen], mask, False, scale, softcap)
        pieces.append(out.permute(2, 0, 1, 3).reshape(end - begin, heads, head_dim))
    return torch.cat(pieces)


def _gather_slots(cache: Tensor, slots: Tensor) -> Tensor:
    if cache.is_contiguous():                                                # one memcpy per slot
        return cache.view(-1, cache.shape[2] * cache.shape[3]).index_select(0, slots)
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> Tensor:
    """Dense attention of q [A, B, n, D] over k, v [A, B, L, D]; mask is true where a query may look."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1), v.to(wide)).to(q.dtype)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Launch = dict[str, int]              # Triton's options of a launch
LOG2E = math.log2(math.e)
PREFIX_MINIMUM = 256                 # keys of a prefix that are worth a program


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWorkspace:
    """Where programs leave partial results for each other. One serves all layers: launches of a stream follow each
    other, and every launch leaves the counters at zero."""

    partials: Tensor                 # float32, `workspace_floats` of them
    arrived: Tensor                  # int32 [rows * kv_heads], zeros


def workspace_floats(
    max_rows: int, heads: int, kv_heads: int, head_dim: int, *, multiprocessors: int, prefix_tiles: int = 0,
    deterministic: bool = False, older: bool = False,
) -> int:  # fmt: skip
    """Most float32 partials that a launch with up to `max_rows` decodes leaves behind; `older`: of two formats."""
    programs = programs_at_once(multiprocessors, kv_heads)
    slots = 0
    for rows in range(1, max_rows + 1):
        before = prefix_shares(rows, heads // kv_heads, kv_heads, multiprocessors) if prefix_tiles else 0
        if older:
            before = max(before, older_shares(rows, programs, deterministic)[0])
        slots = max(slots, num_items(rows, programs, deterministic) + rows * before)
    return _partial_floats(slots, heads, head_dim)


def _partial_floats(slots: int, heads: int, head_dim: int) -> int:
    return slots * heads * (tile_dim(head_dim) + 2)      # accumulated values; and the maximum and the sum


def make_workspace(floats: int, max_rows: int, kv_heads: int, device: torch.device) -> AttentionWorkspace:
    return AttentionWorkspace(
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device),
    )


def tile_dim(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def prefix_shares(rows: int, group: int, kv_heads: int, multiprocessors: int) -> int:
    """Into how many shares a prefix of so many rows is cut at most: one program fills a multiprocessor."""
    tiles = -(-rows // prefix_tile_rows(group))
    return max(1, min(16, multiprocessors // (tiles * kv_heads)))


def older_shares(rows: int, programs: int, deterministic: bool) -> tuple[int, int]:
    """(most shares, least keys of one) into which the older keys of each row are cut, when `programs` can run at once for
    each KV head. Lengths are not known here, unlike in split_kv.py: all rows have equally many, if they are long."""
    if deterministic:
        return FIXED_SHARES, LEAST_FIXED_SHARE
    return max(1, min(SINGLE_SHARES, programs // rows)), LEAST_SHARE


def decode_tiles(dtype: torch.dtype, head_dim: int, narrow: bool, pairs: int, processors: int) -> tuple[int, int, Launch]:
    """(keys per tile, partial values that a merge takes at once, launch options) for so many pairs of a row and a KV
    head, as measured on an H200; 0 for deterministic mode, where the number of rows may not matter."""
    if dtype == torch.float32:
        # No tensor cores: dot products are unrolled, and large tiles take seconds to compile.
        return 32, 4096, {"num_warps": 4, "num_stages": 2}
    if narrow:                                           # as many bytes as tiles of 32 wide keys, whatever the rows
        return 64, 8192, {"num_warps": 2, "num_stages": 4 if head_dim <= 128 else 3}
    if pairs > 40 * processors and 64 < head_dim <= 128:
        return 64, 4096, {"num_warps": 4, "num_stages": 3}
    if pairs > 6 * processors and head_dim <= 128:
        # Small enough for eight on a multiprocessor: rows of equal length are then all under way at once, where two
        # waves of them would both begin and both end without anything to stream.
        return 64 if head_dim <= 64 else 32, 2048, {"num_warps": 2, "num_stages": 2, "maxnreg": 128}
    if pairs > 6 * processors:                           # the shared memory of five fits, and registers for as many
        return 32, 2048, {"num_warps": 2, "num_stages": 2}
    return 32, 8192, {"num_warps": 2, "num_stages": 4 if head_dim <= 128 else 3}


def prefill_tiles(dtype: torch.dtype, head_dim: int, pairs: int) -> tuple[int, int, Launch]:
    """(query pairs per tile, keys per tile, launch options) for rows of up to so many pairs."""
    if dtype == torch.float32:
        return 32, 32, {"num_warps": 4, "num_stages": 2}
    queries = max(16, min(128, 1 << (pairs - 1).bit_length()))
    if head_dim > 128:
        return min(queries, 64), 32, {"num_warps": 4, "num_stages": 2}
    if queries < 128:
        return queries, 64, {"num_warps": 4, "num_stages": 2}
    return 128, 128, {"num_warps": 8, "num_stages": 2, "maxnreg": 232}


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """A cache as the kernels take it."""

    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    k_scale: Tensor
    v_scale: Tensor
    strides: tuple[int, ...]         # of K and V over blocks, slots and heads, and of their scales
    constants: dict[str, Any]

    @classmethod
    def of(
        cls, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, kv_format: KVFormat | None,
        k_scale: Tensor | None, v_scale: Tensor | None,
    ) -> _Pages:  # fmt: skip
        k_layout, k_scale, k_scale_strides = _scale_argument(k_scale, kv_format.k_scale if kv_format else "none", q)
        v_layout, v_scale, v_scale_strides = _scale_argument(v_scale, kv_format.v_scale if kv_format else "none", q)
        strides = (*k_cache.stride()[:3], *v_cache.stride()[:3], *k_scale_strides, *v_scale_strides)
        return cls(k_cache, v_cache, table, k_scale, v_scale, strides, {
            "K_SCALE": k_layout, "V_SCALE": v_layout, "K_NARROW": _is_narrow(k_cache, q), "V_NARROW": _is_narrow(v_cache, q),
        })  # fmt: skip

    @property
    def narrow(self) -> bool:
        return bool(self.constants["K_NARROW"] or self.constants["V_NARROW"])

    def paired(self, q: Tensor) -> bool:
        return _in_pairs(self.k_cache, q) and _in_pairs(self.v_cache, q)

    @property
    def scales(self) -> tuple[kernel_prefill_hopper.Scales, kernel_prefill_hopper.Scales] | None:
        """As kernel_prefill_hopper.py takes them: those of an eight-bit cache."""
        if self.k_cache.element_size() > 1:
            return None
        return (self.k_scale, self.strides[6:9]), (self.v_scale, self.strides[9:])

    @property
    def plain(self) -> bool:
        """Whether kernel_prefill_hopper.py can read the scales."""
        layouts = {self.constants["K_SCALE"], self.constants["V_SCALE"]}
        return layouts <= {"key", "head"} if self.k_cache.element_size() == 1 else layouts == {"none"}


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What all launches of one call have in common."""

    q: Tensor
    out: Tensor
    query_start: Tensor
    kv_len: Tensor
    table_rows: Tensor | None
    work: AttentionWork
    heads: int
    kv_heads: int
    scale: float
    window: int | None
    score_scale: float
    cap: float
    constants: dict[str, Any]        # of all kernels


def paged_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start: Tensor, kv_len: Tensor, *,
    query_start_host: list[int] | None = None, kv_len_host: list[int] | None = None, scale: float,
    window: int | None = None, softcap: float | None = None, table_rows: Tensor | None = None,
    work: AttentionWork | None = None, prefix: SharedPrefix | None = None, query_tiles: Tensor | None = None,
    kv_format: KVFormat | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    older: OlderKV | None = None, workspace: AttentionWorkspace | None = None, out: Tensor | None = None,
    shares: DeviceShares | None = None, fresh: FreshTokens | None = None,
) -> Tensor:  # fmt: skip
    """`fresh`, for decodes alone: q is the projection [R, H + 2 KH, D], and its keys and values go into the cache here.

    `older` positions are read by passes of their own (two_formats.py); a shared prefix is then not looked at. With a
    window as well the definition runs: a window may end among the older positions, and no kernel takes both that end
    and the end of the older ones. Layers with a window free what lies behind it: they have little to keep in another format.
    """
    if older is not None and window is not None:
        return paged_attention_reference(
            q, k_cache, v_cache, block_table, query_start, kv_len, query_start_host=query_start_host,
            kv_len_host=kv_len_host, scale=scale, window=window, softcap=softcap, table_rows=table_rows,
            kv_format=kv_format, k_scale=k_scale, v_scale=v_scale, older=older, out=out,
        )  # fmt: skip
    if older is not None and fresh is not None:
        raise ValueError("with older positions in another format, write new tokens by rotary_write before attention")
    if work is None:
        work = _work_of(query_start_host if query_start_host is not None else query_start.tolist())
    tokens, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    if fresh is not None:
        heads -= 2 * kv_heads
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    constants: dict[str, Any] = {
        "GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "SOFTCAP": softcap is not None,
        "TILE_DIM": tile_dim(head_dim),
        "UPCAST": TRITON_INTERPRETED,    # the interpreter's narrow dot products are wrong
    }  # fmt: skip
    # Base-2 exponentials: log2(e) is folded into the scale, or with a softcap into the factors around the tanh.
    score_scale = scale * LOG2E if softcap is None else 2 * LOG2E * scale / softcap
    call = _Call(
        q, out, query_start, kv_len, table_rows, work, heads, kv_heads, scale, window, score_scale,
        0.0 if softcap is None else softcap * LOG2E, constants,
    )  # fmt: skip
    pages = _Pages.of(q, k_cache, v_cache, block_table, kv_format, k_scale, v_scale)
    if work.num_decodes:
        new_tokens = _fresh_arguments(fresh, q, kv_format, k_cache, v_cache)
        if window is not None or work.deterministic or older is not None:
            prefix = None
        if shares is None:
            shares = _shares_of(kv_len, kv_len_host, work.num_decodes, kv_heads, window, prefix, work.deterministic, older)
        _attend_decodes(call, pages, shares, prefix, older, workspace, new_tokens)
    if work.num_decodes == kv_len.shape[0]:
        return out
    if older is None:
        _attend_prompts(call, pages, out, query_tiles)
    else:
        _attend_prompts_in_parts(call, pages, older, query_tiles)
    return out


def _older_pages(q: Tensor, older: OlderKV) -> _Pages:
    return _Pages.of(q, older.k_cache, older.v_cache, older.block_table, older.format, older.k_scale, older.v_scale)


def _attend_decodes(
    call: _Call, pages: _Pages, shares: DeviceShares, prefix: SharedPrefix | None, older: OlderKV | None,
    workspace: AttentionWorkspace | None, new_tokens: tuple[tuple[Any, ...], dict[str, Any]],
) -> None:  # fmt: skip
    """The rows with one query each. What precedes a row's own keys, a shared prefix or older positions, is read by another
    kernel, which leaves partial results for this one to merge."""
    q, out, heads, kv_heads, constants = call.q, call.out, call.heads, call.kv_heads, call.constants
    group, head_dim, decodes = heads // kv_heads, q.shape[2], call.work.num_decodes
    items = shares.item_row.shape[0]
    processors = _processors(q.device)
    tiles = 0 if prefix is None else prefix.tile_row.shape[0]
    cut, least = prefix_shares(decodes, group, kv_heads, processors) if tiles else 0, PREFIX_MINIMUM
    if older is not None:
        cut, least = older_shares(decodes, programs_at_once(processors, kv_heads), call.work.deterministic)
    slots = decodes * cut + items
    if workspace is None:
        workspace = make_workspace(_partial_floats(slots, heads, head_dim), decodes, kv_heads, q.device)
    elif workspace.partials.shape[0] < _partial_floats(slots, heads, head_dim):
        raise ValueError(
            f"the attention workspace was made for fewer than {decodes} decodes, or without prefixes or older positions"
        )
    accumulated, statistics = workspace.partials, workspace.partials[slots * heads * tile_dim(head_dim) :]
    before = call.kv_len
    table_rows = call.kv_len if call.table_rows is None else call.table_rows
    pairs = 0 if call.work.deterministic else decodes * kv_heads
    tile_group = 1 << (group - 1).bit_length()
    # As many queries as the rows can have together: a tile of few is faster.
    prefix_queries = max(16, min(PREFIX_QUERIES, 1 << (decodes * group - 1).bit_length()))
    queries, prefix_keys, launch = prefill_tiles(q.dtype, head_dim, prefix_queries)
    if prefix_queries > queries:                         # more than a prompt's tile would have: their sums need registers
        launch = launch | {"num_warps": 8}
    if prefix is not None:
        before = prefix.prefix_len
    if prefix is not None and tiles:
        kernel_prefill.prefix_kernel[tiles, kv_heads, cut](
            q, pages.k_cache, pages.v_cache, pages.table, prefix.tile_row, prefix.tile_len, prefix.tile_first,
            prefix.tile_count, prefix.members, pages.k_scale, pages.v_scale, accumulated, statistics, cut,
            call.score_scale, call.cap, pages.table.stride(0), q.stride(0), q.stride(1), *pages.strides,
            **constants, **pages.constants, KV_HEADS=kv_heads, MINIMUM_PREFIX=least, TILE_QUERIES=prefix_queries,
            TILE_KEYS=prefix_keys, **launch, **dependent_launch(q.device),
        )  # fmt: skip
    if older is not None:
        before, kept = older.length, _older_pages(q, older)
        prefix_keys, _, launch = decode_tiles(q.dtype, head_dim, kept.narrow, pairs, processors)
        two_formats.older_kernel[kv_heads, decodes, cut](
            q, kept.k_cache, kept.v_cache, kept.table, table_rows, older.length, kept.k_scale, kept.v_scale, accumulated,
            statistics, cut, call.score_scale, call.cap, kept.table.stride(0), q.stride(0), q.stride(1), *kept.strides,
            **constants, **kept.constants, KV_HEADS=kv_heads, PAIRED=kept.paired(q),
            HAS_TABLE_ROWS=call.table_rows is not None, MINIMUM_SHARE=least, TILE_QUERIES=max(16, tile_group),
            TILE_KEYS=prefix_keys, **launch, **dependent_launch(q.device),
        )  # fmt: skip
    new_tensors, new_constants = new_tokens
    tile_keys, tile_values, launch = decode_tiles(q.dtype, head_dim, pages.narrow, pairs, processors)
    kernel_decode.decode_kernel[kv_heads, items](
        q, pages.k_cache, pages.v_cache, out, pages.table, table_rows, call.kv_len, before, shares.item_row,
        shares.first_item, shares.size, pages.k_scale, pages.v_scale, accumulated, statistics, workspace.arrived, cut,
        decodes * kv_heads * cut, *new_tensors, call.score_scale, call.cap, pages.table.stride(0), q.stride(0), q.stride(1),
        out.stride(0), out.stride(1), *pages.strides, **constants, **pages.constants, **new_constants,
        KV_HEADS=kv_heads, WINDOW=call.window or 0, HAS_TABLE_ROWS=call.table_rows is not None,
        HAS_PREFIX=tiles > 0 or older is not None, PAIRED=pages.paired(q), MINIMUM_PREFIX=least, TILE_PREFIX=prefix_keys,
        TILE_QUERIES=max(16, tile_group), TILE_KEYS=tile_keys, TILE_GROUP=tile_group,
        TILE_SLOTS=max(1, tile_values // (tile_group * tile_dim(head_dim))), **launch, **dependent_launch(q.device),
    )  # fmt: skip


def _attend_prompts(
    call: _Call, pages: _Pages, out: Tensor, tiles: Tensor | None, keys: Literal["all", "older", "newer"] = "all",
    older_len: Tensor | None = None, statistics: Tensor | None = None, table_stride: int | None = None,
) -> None:  # fmt: skip
    """The rows after the decodes, over all of their keys or one part, into `out`. `tiles` are for that part."""
    q, work = call.q, call.work
    tokens, _, head_dim = q.shape
    decodes, rows = work.num_decodes, call.kv_len.shape[0] - work.num_decodes
    plain = pages.plain and call.window is None and not call.constants["SOFTCAP"] and not work.deterministic
    if tiles is not None and plain and kernel_prefill_hopper.suits(q, pages.k_cache, pages.v_cache, out):
        kernel_prefill_hopper.prompt_attention(
            q, pages.k_cache, pages.v_cache, pages.table, tiles, out, call.scale, pages.scales, keys, statistics,
            table_stride,
        )  # fmt: skip
    elif work.longest_query:
        group = call.heads // call.kv_heads
        pairs = PREFIX_QUERIES if work.deterministic else work.longest_query * group
        tile_queries, tile_keys, launch = prefill_tiles(q.dtype, head_dim, pairs)
        tile_queries = max(tile_queries, 1 << (group - 1).bit_length())
        tile_tokens = tile_queries // group
        kernel_prefill.prefill_kernel[(tokens - decodes) // tile_tokens + rows, call.kv_heads](
            q, pages.k_cache, pages.v_cache, out, pages.table, call.kv_len if call.table_rows is None else call.table_rows,
            call.query_start, call.kv_len, call.kv_len if older_len is None else older_len,
            q if statistics is None else statistics, pages.k_scale, pages.v_scale, rows, decodes, call.score_scale, call.cap,
            pages.table.stride(0), q.stride(0), q.stride(1), out.stride(0), out.stride(1), *pages.strides,
            **call.constants, **pages.constants, WINDOW=call.window or 0, HAS_TABLE_ROWS=call.table_rows is not None,
            TILE_ROWS=256, TILE_TOKENS=tile_tokens, TILE_QUERIES=tile_queries, TILE_KEYS=tile_keys, RANGE=keys, **launch,
        )  # fmt: skip


def _attend_prompts_in_parts(call: _Call, pages: _Pages, older: OlderKV, tiles: Tensor | None) -> None:
    """The older keys, the later ones, and the merge. Both parts of the result, and what they weigh, are float32 (rounded
    before they are merged, they would be wrong by up to a unit of bfloat16 more) and allocated meanwhile."""
    q, decodes = call.q, call.work.num_decodes
    tokens, head_dim = q.shape[0], q.shape[2]
    rows = call.kv_len.shape[0] - decodes
    kept, width = _older_pages(q, older), tile_dim(head_dim)
    parts = torch.empty((2, tokens, call.heads, width), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, tokens, 2, call.heads), dtype=torch.float32, device=q.device)
    lists: list[Tensor | None] = [None, None]
    if tiles is not None:
        made = torch.empty((2, *tiles.shape), dtype=torch.int32, device=q.device)
        two_formats.split_tiles_kernel[-(-tiles.shape[0] // 64),](
            tiles, made, call.query_start, older.length, tiles.shape[0], rows, decodes, pages.table.stride(0),
            BLOCK_SIZE=pages.k_cache.shape[1], TILE_TOKENS=tile_tokens(call.heads // call.kv_heads), TILE_ROWS=32, BLOCK=64,
            num_warps=4,
        )  # fmt: skip
        lists = [made[0], made[1]]
    _attend_prompts(call, kept, parts[0], lists[0], "older", older.length, statistics[0], kept.table.stride(0))
    _attend_prompts(call, pages, parts[1], lists[1], "newer", older.length, statistics[1], 1)
    tile_heads = 1 << (call.heads - 1).bit_length()
    two_formats.merge_kernel[tokens - decodes,](
        parts, statistics, call.out, call.query_start, older.length, tokens, rows, decodes,
        call.out.stride(0), call.out.stride(1), HEADS=call.heads, HEAD_DIM=head_dim, TILE_HEADS=tile_heads, TILE_DIM=width,
        TILE_SLOTS=2 if tile_heads * width <= 4096 else 1, TILE_ROWS=256, num_warps=4 if tile_heads * width <= 8192 else 8,
    )  # fmt: skip


def _fresh_arguments(
    fresh: FreshTokens | None, unused: Tensor, kv_format: KVFormat | None, k_cache: Tensor, v_cache: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(tensors and numbers, constants) for a decode kernel that reads new tokens, or does not."""
    if fresh is None:
        constants = {"FRESH": False, "HALF": 1, "NORM": False, "K_SCALES": 0, "V_SCALES": 0, "K_LIMIT": 0.0, "V_LIMIT": 0.0}
        return (unused,) * 5 + (0.0, 0.0), constants
    tensors = (
        fresh.positions, fresh.slots, fresh.cos_sin, unused if fresh.q_norm is None else fresh.q_norm,
        unused if fresh.k_norm is None else fresh.k_norm, fresh.eps, fresh.norm_offset,
    )  # fmt: skip
    layouts = ("none", "none") if kv_format is None else (kv_format.k_scale, kv_format.v_scale)
    k_scales, v_scales = ({"none": 0, "token": 2}.get(layout, 1) for layout in layouts)
    return tensors, {
        "FRESH": True, "HALF": fresh.cos_sin.shape[-1], "NORM": fresh.q_norm is not None,
        "K_SCALES": k_scales, "V_SCALES": v_scales,
        "K_LIMIT": torch.finfo(k_cache.dtype).max, "V_LIMIT": torch.finfo(v_cache.dtype).max,
    }  # fmt: skip


def _processors(device: torch.device) -> int:
    return 8 if TRITON_INTERPRETED else multiprocessors(device)      # the interpreter runs one program after another


def device_shares(
    lengths: list[int], kv_heads: int, window: int | None, prefix: SharedPrefix | None, deterministic: bool,
    device: torch.device, older: OlderKV | None = None,
) -> DeviceShares:  # fmt: skip
    """For decodes of so many positions; whoever has them every step keeps them on the device
    (runner/device_rows.py). What a kernel
    before theirs reads, of a shared prefix or of older positions, is not shared out."""
    read = np.array(lengths, np.int32) if window is None else np.minimum(np.array(lengths, np.int32), window)
    if older is not None:
        read = read - older.length.cpu().numpy()[: len(read)]
    elif prefix is not None:
        read = read - prefix.prefix_len.cpu().numpy()[: len(read)]
    found = share_out(read, programs_at_once(_processors(device), kv_heads), deterministic)
    return DeviceShares(*(torch.from_numpy(each).to(device) for each in (found.item_row, found.first_item, found.size)))


def _shares_of(
    kv_len: Tensor, kv_len_host: list[int] | None, decodes: int, kv_heads: int, window: int | None,
    prefix: SharedPrefix | None, deterministic: bool, older: OlderKV | None,
) -> DeviceShares:  # fmt: skip
    lengths = kv_len.tolist() if kv_len_host is None else kv_len_host
    return device_shares(lengths[:decodes], kv_heads, window, prefix, deterministic, kv_len.device, older)


def _work_of(query_start: list[int]) -> AttentionWork:
    decodes = _leading_decodes(query_start)
    rest = range(decodes, len(query_start) - 1)
    return AttentionWork(decodes, max((query_start[row + 1] - query_start[row] for row in rest), default=0))


def _is_narrow(cache: Tensor, q: Tensor) -> bool:
    """Whether values of eight bits meet queries of sixteen: they are then computed with in float16."""
    return cache.element_size() == 1 and q.element_size() == 2


def _in_pairs(cache: Tensor, q: Tensor) -> bool:
    """Whether two values of eight bits can be read as one of sixteen, and half of a head is enough for a tensor core."""
    even = all(stride % 2 == 0 for stride in cache.stride()[:3]) and cache.stride(3) == 1 and cache.data_ptr() % 2 == 0
    return _is_narrow(cache, q) and even and tile_dim(cache.shape[3]) >= 32


def _scale_argument(scale: Tensor | None, layout: ScaleLayout, unused: Tensor) -> tuple[str, Tensor, tuple[int, ...]]:
    """(how the kernels apply it, the tensor, its strides over blocks, slots and KV heads)"""
    if scale is None:
        return "none", unused, (0, 0, 0)
    if layout == "token":
        return "key", scale, scale.stride()
    if layout == "block":
        return "key", scale, (scale.stride(0), 0, scale.stride(1))
    if layout == "channel":
        return "channel", scale, (0, 0, scale.stride(0))
    return "head", scale, (0, 0, scale.stride(0) if layout == "head" else 0)


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES and site.width <= 256


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def paged_attention_native(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start: Tensor, kv_len: Tensor,
    *, query_start_host: list[int], kv_len_host: list[int], scale: float, window: int | None = None,
    softcap: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The cache is read where it lies: by one kernel for the decodes in front, by another from the first longer row on."""
    if 0 in kv_len_host or any(options.get(name) is not None for name in NOT_NATIVE):
        return paged_attention_reference(
            q, k_cache, v_cache, block_table, query_start, kv_len, query_start_host=query_start_host,
            kv_len_host=kv_len_host, scale=scale, window=window, softcap=softcap, **options,
        )  # fmt: skip
    (tokens, heads, head_dim), rows, kv_heads = q.shape, len(kv_len_host), k_cache.shape[2]
    decodes = rows if tokens == rows else _leading_decodes(query_start_host)
    packed = q.stride()[1:] == (head_dim, 1) and k_cache.is_contiguous() and v_cache.is_contiguous()
    if not packed or block_table.stride(1) != 1:
        return paged_attention_reference(
            q, k_cache, v_cache, block_table, query_start, kv_len, query_start_host=query_start_host,
            kv_len_host=kv_len_host, scale=scale, window=window, softcap=softcap,
        )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype)
    shape = (kv_heads, heads // kv_heads, head_dim, k_cache.shape[1], block_table.stride(0), q.stride(0))
    if decodes:
        lengths = kv_len_host[:decodes]
        splits = -(-max(lengths) // native.SPLIT)
        partial = torch.empty(decodes * splits * heads * (head_dim + 2), dtype=q.dtype)
        native.library().ridgeline_decode_attention(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table.data_ptr(), kv_len.data_ptr(),
            out.data_ptr(), partial.data_ptr(), decodes, *shape, splits, window or 0, sum(lengths), scale, softcap or 0.0,
        )  # fmt: skip
    if decodes < rows:
        longest = max(end - start for start, end in itertools.pairwise(query_start_host[decodes:]))
        native.library().ridgeline_prefill_attention(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table[decodes:].data_ptr(),
            query_start[decodes:].data_ptr(), kv_len[decodes:].data_ptr(), out.data_ptr(), rows - decodes, *shape,
            longest, window or 0, scale, softcap or 0.0,
        )  # fmt: skip
    return out


# Options that the native kernels do not read; the others do not change the result.
NOT_NATIVE = ("table_rows", "k_scale", "v_scale", "older", "out")


def _native_supports(site: Site) -> bool:
    # A head is a whole number of vectors of 16, and its sums are kept on the stack.
    return native.supports(site) and site.width % 16 == 0 and site.width <= 256


def _leading_decodes(query_start: list[int]) -> int:
    """How many rows from the first on have one query. Schedulers put decodes first."""
    count = 0
    while count + 1 < len(query_start) and query_start[count + 1] == count + 1:
        count += 1
    return count


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, rows: tuple[tuple[int, int], ...], heads: int, kv_heads: int, head_dim: int, block_size: int,
    window: int | None, softcap: float | None, scattered: bool = False,
    shared: tuple[tuple[tuple[int, ...], int], ...] = (), kv_format: tuple[str, ScaleLayout, str, ScaleLayout] | None = None,
    older: tuple[int, ...] = (), older_format: tuple[str, ScaleLayout, str, ScaleLayout] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Scattered blocks, NaN in every slot that nobody may read, and block 0 (NaN too) where a table has no block."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    needed = [-(-kv_len // block_size) for _, kv_len in rows]
    blocks = torch.randperm(sum(needed) + 2, generator=generator) + 1
    cache_shape = (sum(needed) + 3, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full(cache_shape, float("nan")), torch.full(cache_shape, float("nan"))
    table = torch.zeros(len(rows), max(*needed, 1), dtype=torch.int32)
    first_of = {row: (members[0], length) for members, length in shared for row in members[1:]}
    used = 0
    for row, (query_len, length) in enumerate(rows):
        own = blocks[used : used + needed[row]]
        used += needed[row]
        oldest = 0 if window is None else max(0, length - query_len - window + 1)
        if row in first_of:
            owner, oldest = first_of[row]
            table[row, : oldest // block_size] = table[owner, : oldest // block_size]
        for position in range(oldest, length):
            block, offset = int(own[position // block_size]), position % block_size
            k_cache[block, offset], v_cache[block, offset] = random(kv_heads, head_dim), random(kv_heads, head_dim)
            table[row, position // block_size] = block
    query_start = list(itertools.accumulate((query_len for query_len, _ in rows), initial=0))
    kv_len = [length for _, length in rows]
    kwargs: dict[str, Any] = {
        "query_start_host": query_start, "kv_len_host": kv_len,
        "scale": head_dim**-0.5, "window": window, "softcap": softcap,
    }  # fmt: skip
    place = None
    decodes = _leading_decodes(query_start)
    if scattered:
        place = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]
        spread = torch.zeros(len(rows) + 2, table.shape[1], dtype=torch.int32)
        spread[place] = table
        table = spread
        kwargs["table_rows"] = place.to(device, torch.int32)
    if shared:
        groups = [(list(members), length) for members, length in shared]
        kwargs["prefix"] = shared_prefix(
            groups, len(rows), heads // kv_heads, table_rows=None if place is None else place.tolist(),
            tiles=len(rows) + 1, device=device,
        )  # fmt: skip
    k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
    if older:
        place = torch.arange(len(rows)) if place is None else place
        kwargs["older"] = _moved(k_cache, v_cache, table, place, older, older_format, generator, device)
    if decodes:
        kwargs["shares"] = device_shares(
            kv_len[:decodes], kv_heads, window, None if window is not None else kwargs.get("prefix"), False,
            torch.device(device), kwargs.get("older"),
        )  # fmt: skip
    if decodes < len(rows):
        table_rows = torch.arange(len(rows)) if place is None else place
        cut = cut_queries(
            np.array(query_start[decodes:]), np.array(kv_len[decodes:]), table_rows[decodes:].numpy(), heads // kv_heads
        )
        kwargs["query_tiles"] = torch.from_numpy(cut).to(device)
    if kv_format is not None:
        kwargs["kv_format"] = form = _format_of(kv_format)
        k_cache, kwargs["k_scale"] = _stored(k_cache, form.k_dtype, form.k_scale, generator, device)
        v_cache, kwargs["v_scale"] = _stored(v_cache, form.v_dtype, form.v_scale, generator, device)
    args = (
        random(query_start[-1], heads, head_dim).to(device, dtype),
        k_cache.to(device),
        v_cache.to(device),
        table.to(device),
        torch.tensor(query_start, dtype=torch.int32, device=device),
        torch.tensor(kv_len, dtype=torch.int32, device=device),
    )
    return args, kwargs


def _moved(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, place: Tensor, lengths: tuple[int, ...],
    kv_format: tuple[str, ScaleLayout, str, ScaleLayout] | None, generator: torch.Generator, device: str,
) -> OlderKV:  # fmt: skip
    """The first positions of each row out of the caches, where NaN is left, into caches of their own."""
    block_size = k_cache.shape[1]
    counts = [length // block_size for length in lengths]
    blocks = torch.randperm(sum(counts) + 1, generator=generator)[: sum(counts)] + 1
    own_table = torch.zeros(len(table), max(*counts, 1), dtype=torch.int32)
    caches = [torch.full((sum(counts) + 2, *cache.shape[1:]), float("nan"), dtype=cache.dtype) for cache in (k_cache, v_cache)]
    for row, count, own in zip(place.tolist(), counts, blocks.split(counts), strict=True):
        moved = table[row, :count].long()
        for cache, source in zip(caches, (k_cache, v_cache), strict=True):
            cache[own] = source[moved]
            source[moved] = float("nan")
        table[row, :count] = 0
        own_table[row, :count] = own.to(torch.int32)
    form = None if kv_format is None else _format_of(kv_format)
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if form is not None:
        (caches[0], k_scale), (caches[1], v_scale) = (
            _stored(cache, dtype, layout, generator, device)
            for cache, dtype, layout in zip(caches, (form.k_dtype, form.v_dtype), (form.k_scale, form.v_scale), strict=True)
        )
        scales = k_scale, v_scale
    length = torch.tensor(lengths, dtype=torch.int32, device=device)
    return OlderKV(caches[0].to(device), caches[1].to(device), own_table.to(device), length, form, *scales)


def _format_of(named: tuple[str, ScaleLayout, str, ScaleLayout]) -> KVFormat:
    return KVFormat(getattr(torch, named[0]), getattr(torch, named[2]), named[1], named[3])


def _stored(
    cache: Tensor, dtype: torch.dtype, layout: ScaleLayout, generator: torch.Generator, device: str
) -> tuple[Tensor, Tensor | None]:
    """A cache in its quantised form, and scales that it could have."""
    if layout == "none":
        return cache.to(dtype), None
    scale = 0.01 + 0.02 * torch.rand(scale_shape(layout, *cache.shape), generator=generator)
    limit = torch.finfo(dtype).max
    stored = (cache.to(torch.float32) / _scale_per_value(scale, layout)).clamp(-limit, limit).to(dtype)
    return stored, scale.to(device)


paged_attention = Op(
    "paged_attention",
    paged_attention_reference,
    kernels=[
        Implementation("triton", paged_attention_triton, _triton_supports),
        Implementation("native", paged_attention_native, _native_supports),
    ],
    cases=PAGED_ATTENTION_CASES,
    cost=paged_attention_cost,
    inputs=_inputs,
    # An average of values below 5, its weights known to a few units of the dtype they are kept in: scores below 10 in
    # float32 carry 10 * 2^-24 into the exponent; narrow dtypes round the weights and the result once.
    tolerance={
        "float32": Tolerance(2**-18, 2**-18),
        "bfloat16": Tolerance(2**-8, 2**-7),
        "float16": Tolerance(2**-11, 2**-10),
    },
)
