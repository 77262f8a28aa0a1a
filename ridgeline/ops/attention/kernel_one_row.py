"""Decode attention of one row, with norm, rotation and KV write: a kernel whose time is latency, not bytes.

The keys and values of one row of 640 tokens are read in 0.3 us, and the kernels for any number of rows take 11. So everything that
is known before the projection ends is done before the PDL wait: the CTA has its first tile of keys and values in registers when the
queries arrive. All of them were written in earlier steps but the newest, and that one never passes through the page: every CTA has
it from the projection. Its score is the first that the softmax of the last share sees. That share also writes the page.

What follows the wait is one trip to L2 for the queries, two small products, one for the arrival and one for the merge.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import AttentionWorkspace, FreshTokens, make_workspace, partial_floats, tile_dim
from ridgeline.ops.attention.attention_launch import LOG2E
from ridgeline.ops.attention.kernel_decode import (
    angles,
    attend_keys,
    fold_tile,
    from_sinks,
    in_compute_type,
    load_heads,
    merge_shares,
    norm_weights,
    oldest_key,
    slot_of,
    turned,
)
from ridgeline.ops.attention.split_kv import DeviceShares
from ridgeline.ops.launch import dependent_launch, power_of_two
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel


@triton_kernel()
def fold_newest(  # type: ignore[no-untyped-def]
    q, k, v, maximum, total, seen, score_scale, softcap, SOFTCAP: tl.constexpr
):
    """The newest key [1, dimensions] into the state of queries that have seen no other; nothing where it is not `seen`."""
    score = tl.sum(q.to(tl.float32) * k, axis=1) * score_scale
    if SOFTCAP:
        score = softcap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
    score = tl.where(seen, score, float("-inf"))
    new_maximum = tl.maximum(maximum, score)
    weight = tl.exp2(score - new_maximum)
    total = total * tl.exp2(maximum - new_maximum) + weight
    return new_maximum, total, weight[:, None] * v


@triton_kernel(do_not_specialize=["table_stride"])
def one_row_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, k_ptr, v_ptr, out_ptr, table_ptr, table_rows_ptr, kv_len_ptr, size_ptr, accumulated_ptr, statistics_ptr, arrived_ptr,
    positions_ptr, slots_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, sinks_ptr, eps, norm_offset, score_scale, softcap, table_stride,
    q_head_stride, out_head_stride, k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, HAS_TABLE_ROWS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr, TILE_GROUP: tl.constexpr,
    TILE_SLOTS: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):
    """CTA (KV head, share of the row's keys). The list of shares is not read: a single row has them in their order."""
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    kv_len = tl.load(kv_len_ptr)
    size = tl.load(size_ptr)
    if HAS_TABLE_ROWS:
        table_ptr += tl.load(table_rows_ptr).to(tl.int64) * table_stride
    first = 0
    if WINDOW != 0:
        first = oldest_key(tl.maximum(kv_len - 1, 0), WINDOW)
    used = tl.cdiv(kv_len - first, size)
    dim = tl.arange(0, TILE_DIM)
    member = tl.arange(0, TILE_QUERIES)
    live = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    out_ptr += kv_head * GROUP * out_head_stride
    out_place = member[:, None] * out_head_stride + dim[None, :]
    if share >= used:
        if DEPENDENT:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        if share == 0:                                   # a padding row: nothing to see
            tl.store(out_ptr + out_place, tl.zeros([TILE_QUERIES, TILE_DIM], out_ptr.dtype.element_ty), mask=live)
        return

    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    begin = first + share * size
    end = tl.minimum(begin + size, kv_len - 1)           # without the newest
    key = begin + tl.arange(0, TILE_KEYS)
    block = tl.load(table_ptr + tl.minimum(key, kv_len - 1) // BLOCK_SIZE)
    slot = slot_of(key, BLOCK_SIZE)
    there = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
    wide_block = block.to(tl.int64)
    k = tl.load(k_ptr + (wide_block * k_block_stride + slot * k_slot_stride)[:, None] + dim[None, :], mask=there, other=0.0)
    v = tl.load(v_ptr + (wide_block * v_block_stride + slot * v_slot_stride)[:, None] + dim[None, :], mask=there, other=0.0)
    block = tl.load(table_ptr + tl.minimum(key + TILE_KEYS, kv_len - 1) // BLOCK_SIZE)
    newest = tl.load(slots_ptr)
    cos, sin = angles(cos_sin_ptr, tl.load(positions_ptr), dim, HALF)
    q_weight, q_partner = norm_weights(q_norm_ptr, dim, norm_offset, HEAD_DIM, HALF, NORM)
    k_weight, k_partner = norm_weights(k_norm_ptr, dim, norm_offset, HEAD_DIM, HALF, NORM)
    maximum, total = from_sinks(sinks_ptr + kv_head * GROUP + member % GROUP, member < GROUP, share, SINKS, TILE_QUERIES)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    own, other = load_heads(qkv_ptr, (kv_head * GROUP + member)[:, None] * q_head_stride, dim, live, HALF)
    new_head = (KV_HEADS * GROUP + kv_head + tl.arange(0, 1))[:, None] * q_head_stride
    inside = (dim < HEAD_DIM)[None, :]
    own_k, other_k = load_heads(qkv_ptr, new_head, dim, inside, HALF)
    new_v = tl.load(qkv_ptr + new_head + KV_HEADS * q_head_stride + dim[None, :], mask=inside, other=0.0).to(v_ptr.dtype.element_ty)
    q = turned(own, other, q_weight, q_partner, cos, sin, eps, HEAD_DIM, NORM).to(qkv_ptr.dtype.element_ty)
    new_k = turned(own_k, other_k, k_weight, k_partner, cos, sin, eps, HEAD_DIM, NORM).to(k_ptr.dtype.element_ty)
    if share == used - 1:
        new_block = newest // BLOCK_SIZE
        new_slot = newest % BLOCK_SIZE
        tl.store(k_ptr + new_block * k_block_stride + new_slot * k_slot_stride + dim[None, :], new_k, mask=inside)
        tl.store(v_ptr + new_block * v_block_stride + new_slot * v_slot_stride + dim[None, :], new_v, mask=inside)
    maximum, total, accumulated = fold_newest(
        q, new_k.to(tl.float32), new_v.to(tl.float32), maximum, total, share == used - 1, score_scale, softcap, SOFTCAP
    )
    q = in_compute_type(q, q.dtype, False, UPCAST)
    last = tl.full([TILE_QUERIES], 0, tl.int32) + (end - 1)
    scores = tl.dot(q, tl.trans(in_compute_type(k, q.dtype, False, UPCAST)), input_precision="ieee")
    v = in_compute_type(v, q.dtype, False, UPCAST)
    maximum, total, accumulated, _ = fold_tile(
        scores, v, v, maximum, total, accumulated, accumulated, key, last, kv_len_ptr, kv_len_ptr, score_scale, softcap,
        True, 0, SOFTCAP, False, False, False, False, UPCAST,
    )
    maximum, total, accumulated, _, _ = attend_keys(
        q, q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, kv_len_ptr, kv_len_ptr, block,
        begin + TILE_KEYS, end, end, last, score_scale, softcap, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        0, 0, 0, 0, BLOCK_SIZE, HEAD_DIM, 0, SOFTCAP, True, False, False, False, False, False, TILE_KEYS, TILE_DIM, UPCAST,
    )
    if used == 1:
        out = accumulated / total[:, None]
        tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=live)
        return
    part = share * KV_HEADS + kv_head
    mine = member < GROUP
    tl.store(statistics_ptr + part * (2 * GROUP) + member, maximum, mask=mine)
    tl.store(statistics_ptr + part * (2 * GROUP) + GROUP + member, total, mask=mine)
    tl.store(accumulated_ptr + (part * GROUP + member)[:, None] * TILE_DIM + dim[None, :], accumulated, mask=mine[:, None])
    tl.debug_barrier()                                   # all threads have stored before one of them counts the arrival
    arrived = tl.atomic_add(arrived_ptr + kv_head, 1, sem="acq_rel")
    if arrived == used - 1:
        tl.store(arrived_ptr + kv_head, 0)               # ready for the next launch
        merge_shares(
            accumulated_ptr, statistics_ptr, out_ptr, 0, kv_head, 0, used, 0, out_head_stride, GROUP, KV_HEADS, GROUP, 1,
            HEAD_DIM, TILE_GROUP, TILE_DIM, TILE_SLOTS,
        )


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class OneRow(NamedTuple):
    keys: int                        # of a tile
    warps: int
    stages: int                      # of the tiles behind the first


def one_row_tiles(dtype: torch.dtype, head_dim: int) -> OneRow:
    """The first tile is held in registers; shares of rows up to 1,024 tokens have no other."""
    if dtype == torch.float32:       # dot products are unrolled
        return OneRow(32, 4, 2)
    return OneRow(64 if head_dim <= 128 else 32, 8, 3)


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
    heads, items = qkv.shape[1] - 2 * kv_heads, shares.item_row.shape[0]
    group, wide = heads // kv_heads, tile_dim(head_dim)
    out = torch.empty((1, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if workspace is None:
        workspace = make_workspace(partial_floats(items, heads, head_dim), 1, kv_heads, qkv.device)
    tiles, tile_group = one_row_tiles(qkv.dtype, head_dim), power_of_two(group)
    factor, cap = (scale * LOG2E, 0.0) if softcap is None else (2 * LOG2E * scale / softcap, softcap * LOG2E)
    one_row_kernel[kv_heads, items](
        qkv, k_cache, v_cache, out, table, kv_len if table_rows is None else table_rows, kv_len, shares.size,
        workspace.partials, workspace.partials[items * heads * wide :], workspace.arrived, fresh.positions, fresh.slots,
        fresh.cos_sin, qkv if fresh.q_norm is None else fresh.q_norm, qkv if fresh.k_norm is None else fresh.k_norm,
        kv_len if sinks is None else sinks, fresh.eps, fresh.norm_offset, factor, cap, table.stride(0), qkv.stride(1),
        out.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1], WINDOW=window or 0, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        HAS_TABLE_ROWS=table_rows is not None, HALF=fresh.cos_sin.shape[-1], NORM=fresh.q_norm is not None,
        TILE_QUERIES=max(16, tile_group), TILE_KEYS=tiles.keys, TILE_DIM=wide, TILE_GROUP=tile_group,
        TILE_SLOTS=max(1, 64 * 32 * tiles.warps // (tile_group * wide)), UPCAST=TRITON_INTERPRETED, num_warps=tiles.warps,
        num_stages=tiles.stages, **dependent_launch(qkv.device),
    )
    return out
