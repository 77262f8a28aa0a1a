"""Decode attention of one row, with norm, rotation and KV write: a kernel whose time is latency, not bytes.

The keys and values of one row of 640 tokens are read in 0.3 us, and the kernels for any number of rows take 11. So everything
that is known before the projection ends is done before the PDL wait: a CTA has its first tile of keys and values in registers
when the queries arrive. All of them were written in earlier steps but the newest. That one has a CTA of its own, which writes the
page as well, and no other CTA reads that slot.

What follows the wait is one trip to L2 for the queries, two small products, one trip for the arrival and one for the merge.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import (
    AttentionWorkspace,
    FreshTokens,
    make_workspace,
    partial_floats,
    tile_dim,
)
from ridgeline.ops.attention.attention_launch import LOG2E
from ridgeline.ops.attention.kernel_decode import (
    angles,
    attend_keys,
    fold_tile,
    from_sinks,
    in_compute_type,
    load_heads,
    load_tile,
    norm_weights,
    oldest_key,
    slot_of,
    turned,
)
from ridgeline.ops.attention.split_kv import DeviceShares
from ridgeline.ops.launch import dependent_launch, power_of_two
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel


@triton_kernel()
def load_turned(  # type: ignore[no-untyped-def]
    qkv_ptr, head, norm_ptr, position, cos_sin_ptr, dim, live, eps, norm_offset, head_stride,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Heads of the projection, normalised and rotated. What they are multiplied by is loaded before the wait."""
    cos, sin = angles(cos_sin_ptr, position, dim, HALF)
    weight, partner = norm_weights(norm_ptr, dim, norm_offset, HEAD_DIM, HALF, NORM)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own, other = load_heads(qkv_ptr, head[:, None] * head_stride, dim, live, HALF)
    return turned(own, other, weight, partner, cos, sin, eps, HEAD_DIM, NORM).to(qkv_ptr.dtype.element_ty)


@triton_kernel()
def merge_in_order(  # type: ignore[no-untyped-def]
    accumulated_ptr, statistics_ptr, out_ptr, kv_head, parts, out_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_GROUP: tl.constexpr, TILE_DIM: tl.constexpr,
    MOST: tl.constexpr,
):
    """All partial results of a KV head, one after the other: every thread has the same values of each, and nothing passes from
    one to another. The loop is unrolled, so that all loads are on their way at once."""
    head = tl.arange(0, TILE_GROUP)
    dim = tl.arange(0, TILE_DIM)
    maximum = tl.full([TILE_GROUP], -1e30, tl.float32)
    total = tl.zeros([TILE_GROUP], tl.float32)
    merged = tl.zeros([TILE_GROUP, TILE_DIM], tl.float32)
    for part in tl.static_range(MOST):
        place = part * KV_HEADS + kv_head
        known = (head < GROUP) & (part < parts)
        statistics = statistics_ptr + place * (2 * GROUP) + head
        # Written by other CTAs a moment ago: read from L2, never from the L1 of this SM.
        their_maximum = tl.load(statistics, mask=known, other=-1e30, cache_modifier=".cg")
        their_total = tl.load(statistics + GROUP, mask=known, other=0.0, cache_modifier=".cg")
        theirs = accumulated_ptr + (place * GROUP + head)[:, None] * TILE_DIM + dim[None, :]
        values = tl.load(theirs, mask=known[:, None], other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, their_maximum)
        decay = tl.exp2(maximum - new_maximum)
        shrink = tl.exp2(their_maximum - new_maximum)
        total = total * decay + their_total * shrink
        merged = merged * decay[:, None] + values * shrink[:, None]
        maximum = new_maximum
    live = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + head[:, None] * out_head_stride + dim[None, :], merged.to(out_ptr.dtype.element_ty), mask=live)


@triton_kernel(do_not_specialize=["table_stride"])
def one_row_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, k_ptr, v_ptr, out_ptr, table_ptr, table_rows_ptr, kv_len_ptr, size_ptr, accumulated_ptr, statistics_ptr, arrived_ptr,
    positions_ptr, slots_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, sinks_ptr, eps, norm_offset, score_scale, softcap,
    table_stride, q_head_stride, out_head_stride, k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, HAS_TABLE_ROWS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    MOST_PARTS: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):
    """CTA (KV head, part). Part 0 is the newest key, with the sinks; the others are shares of the older keys, in their order."""
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    kv_len = tl.load(kv_len_ptr)
    size = tl.load(size_ptr)
    position = tl.load(positions_ptr)
    if HAS_TABLE_ROWS:
        table_ptr += tl.load(table_rows_ptr).to(tl.int64) * table_stride
    first = 0
    if WINDOW != 0:
        first = oldest_key(tl.maximum(kv_len - 1, 0), WINDOW)
    parts = 1 + tl.cdiv(tl.maximum(kv_len - 1 - first, 0), size)
    dim = tl.arange(0, TILE_DIM)
    out_ptr += kv_head * GROUP * out_head_stride
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    if (part >= parts) | (kv_len <= 0):
        if DEPENDENT:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        if part == 0:                                    # a padding row: nothing to see
            no_head = tl.arange(0, TILE_GROUP)
            nothing = tl.zeros([TILE_GROUP, TILE_DIM], out_ptr.dtype.element_ty)
            empty = (no_head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
            tl.store(out_ptr + no_head[:, None] * out_head_stride + dim[None, :], nothing, mask=empty)
        return

    place = part * KV_HEADS + kv_head
    if part == 0:                                        # names of their own: the branches may not share them
        head = tl.arange(0, TILE_GROUP)
        known = head < GROUP
        one = tl.arange(0, 1)
        inside = (dim < HEAD_DIM)[None, :]
        newest = tl.load(slots_ptr)
        sink, sinks = from_sinks(sinks_ptr + kv_head * GROUP + head, known, part, SINKS, TILE_GROUP)
        query = load_turned(
            qkv_ptr, kv_head * GROUP + head, q_norm_ptr, position, cos_sin_ptr, dim, known[:, None] & inside, eps, norm_offset,
            q_head_stride, HEAD_DIM, HALF, NORM, DEPENDENT,
        )
        new_k = load_turned(
            qkv_ptr, KV_HEADS * GROUP + kv_head + one, k_norm_ptr, position, cos_sin_ptr, dim, inside, eps, norm_offset,
            q_head_stride, HEAD_DIM, HALF, NORM, False,
        ).to(k_ptr.dtype.element_ty)
        new_head = (KV_HEADS * (GROUP + 1) + kv_head + one)[:, None]
        new_v = tl.load(qkv_ptr + new_head * q_head_stride + dim[None, :], mask=inside, other=0.0).to(v_ptr.dtype.element_ty)
        page, offset = newest // BLOCK_SIZE, newest % BLOCK_SIZE
        tl.store(k_ptr + page * k_block_stride + offset * k_slot_stride + dim[None, :], new_k, mask=inside)
        tl.store(v_ptr + page * v_block_stride + offset * v_slot_stride + dim[None, :], new_v, mask=inside)
        score = tl.sum(query.to(tl.float32) * new_k.to(tl.float32), axis=1) * score_scale
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
        largest = tl.maximum(sink, score)
        weight = tl.exp2(score - largest)
        tl.store(statistics_ptr + place * (2 * GROUP) + head, largest, mask=known)
        tl.store(statistics_ptr + place * (2 * GROUP) + GROUP + head, sinks * tl.exp2(sink - largest) + weight, mask=known)
        values = weight[:, None] * new_v.to(tl.float32)
        tl.store(accumulated_ptr + (place * GROUP + head)[:, None] * TILE_DIM + dim[None, :], values, mask=known[:, None])
    else:
        member = tl.arange(0, TILE_QUERIES)
        mine = member < GROUP
        begin = first + (part - 1) * size
        end = tl.minimum(begin + size, kv_len - 1)
        key = begin + tl.arange(0, TILE_KEYS)
        block = tl.load(table_ptr + tl.minimum(key, end - 1) // BLOCK_SIZE)
        slot = slot_of(tl.minimum(key, end - 1), BLOCK_SIZE)
        k = load_tile(k_ptr, block, slot, k_block_stride, k_slot_stride, HEAD_DIM, TILE_DIM)
        v = load_tile(v_ptr, block, slot, v_block_stride, v_slot_stride, HEAD_DIM, TILE_DIM)
        q = load_turned(
            qkv_ptr, kv_head * GROUP + member, q_norm_ptr, position, cos_sin_ptr, dim, mine[:, None] & (dim < HEAD_DIM)[None, :],
            eps, norm_offset, q_head_stride, HEAD_DIM, HALF, NORM, DEPENDENT,
        )
        q = in_compute_type(q, q.dtype, False, UPCAST)
        maximum = tl.full([TILE_QUERIES], -1e30, tl.float32)
        total = tl.zeros([TILE_QUERIES], tl.float32)
        accumulated = tl.zeros([TILE_QUERIES, TILE_DIM], tl.float32)
        last = tl.full([TILE_QUERIES], 0, tl.int32) + (end - 1)
        scores = tl.dot(q, tl.trans(in_compute_type(k, q.dtype, False, UPCAST)), input_precision="ieee")
        v = in_compute_type(v, q.dtype, False, UPCAST)
        maximum, total, accumulated, _ = fold_tile(
            scores, v, v, maximum, total, accumulated, accumulated, key, last, kv_len_ptr, kv_len_ptr, score_scale, softcap,
            True, 0, SOFTCAP, False, False, False, False, UPCAST,
        )
        if end > begin + TILE_KEYS:                      # a branch: what a loop does before its first turn takes time, too
            block = tl.load(table_ptr + tl.minimum(key + TILE_KEYS, end - 1) // BLOCK_SIZE)
            maximum, total, accumulated, _, block = attend_keys(
                q, q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, kv_len_ptr, kv_len_ptr, block,
                begin + TILE_KEYS, end, end, last, score_scale, softcap, k_block_stride, k_slot_stride, v_block_stride,
                v_slot_stride, 0, 0, 0, 0, BLOCK_SIZE, HEAD_DIM, 0, SOFTCAP, True, False, False, False, False, False, TILE_KEYS,
                TILE_DIM, UPCAST,
            )
        tl.store(statistics_ptr + place * (2 * GROUP) + member, maximum, mask=mine)
        tl.store(statistics_ptr + place * (2 * GROUP) + GROUP + member, total, mask=mine)
        tl.store(accumulated_ptr + (place * GROUP + member)[:, None] * TILE_DIM + dim[None, :], accumulated, mask=mine[:, None])
    tl.debug_barrier()                                   # all threads have stored before one of them counts the arrival
    arrived = tl.atomic_add(arrived_ptr + kv_head, 1, sem="acq_rel")
    if arrived == parts - 1:
        tl.store(arrived_ptr + kv_head, 0)               # ready for the next launch
        merge_in_order(
            accumulated_ptr, statistics_ptr, out_ptr, kv_head, parts, out_head_stride, KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP,
            TILE_DIM, MOST_PARTS,
        )


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class OneRow(NamedTuple):
    keys: int                        # of a tile
    warps: int
    stages: int                      # of the tiles behind the first
    registers: int                   # of a thread


def one_row_tiles(dtype: torch.dtype, head_dim: int) -> OneRow:
    """The first tile is held in registers; shares of rows up to 1,024 tokens have no other. Four CTAs of a GEMV leave a quarter
    of an SM's registers to one CTA of this kernel, which then starts while the projection runs, and has the SM for itself."""
    if dtype == torch.float32:       # dot products are unrolled
        return OneRow(32, 4, 2, 255)
    return OneRow(64, 4, 2, 128) if head_dim <= 128 else OneRow(32, 4, 2, 255)


def suits_one_row(k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> bool:
    """Keys and values as wide as the queries."""
    return k_cache.dtype == v_cache.dtype == dtype


def one_row_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, kv_len: Tensor, fresh: FreshTokens, shares: DeviceShares, *,
    scale: float, window: int | None, softcap: float | None, table_rows: Tensor | None, sinks: Tensor | None,
    workspace: AttentionWorkspace | None,
) -> Tensor:
    """qkv [1, H + 2 KH, D], the projection -> [1, H, D]. K and V of the row's newest position are in the cache afterwards."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads, parts = qkv.shape[1] - 2 * kv_heads, shares.item_row.shape[0] + 1
    group, wide = heads // kv_heads, tile_dim(head_dim)
    out = torch.empty((1, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if workspace is None:
        workspace = make_workspace(partial_floats(parts, heads, head_dim), 1, kv_heads, qkv.device)
    elif workspace.partials.shape[0] < partial_floats(parts, heads, head_dim):
        raise ValueError("the attention workspace was made without a place for the newest key of a single row")
    tiles, tile_group = one_row_tiles(qkv.dtype, head_dim), power_of_two(group)
    factor, cap = (scale * LOG2E, 0.0) if softcap is None else (2 * LOG2E * scale / softcap, softcap * LOG2E)
    one_row_kernel[kv_heads, parts](
        qkv, k_cache, v_cache, out, table, kv_len if table_rows is None else table_rows, kv_len, shares.size,
        workspace.partials, workspace.partials[parts * heads * wide :], workspace.arrived, fresh.positions, fresh.slots,
        fresh.cos_sin, qkv if fresh.q_norm is None else fresh.q_norm, qkv if fresh.k_norm is None else fresh.k_norm,
        kv_len if sinks is None else sinks, fresh.eps, fresh.norm_offset, factor, cap, table.stride(0), qkv.stride(1),
        out.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1], WINDOW=window or 0, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        HAS_TABLE_ROWS=table_rows is not None, HALF=fresh.cos_sin.shape[-1], NORM=fresh.q_norm is not None,
        MOST_PARTS=parts, TILE_QUERIES=max(16, tile_group), TILE_KEYS=tiles.keys, TILE_DIM=wide, TILE_GROUP=tile_group,
        UPCAST=TRITON_INTERPRETED, num_warps=tiles.warps, num_stages=tiles.stages,
        maxnreg=tiles.registers, **dependent_launch(qkv.device),
    )
    return out
