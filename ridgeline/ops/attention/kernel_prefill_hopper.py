"""Prefill attention for Hopper: TMA loads, warp-specialised (2 producer warps, 8 MMA warps, 4 fp8-conversion warps).

Persistent CTAs, one per SM, work through a list of query tiles that the host has made (prefill_tiles.py). Two producer warps
issue the TMA loads of queries, keys and values. Two consumer warpgroups compute, each with half of the queries of the tile:
while one takes exponentials, the other keeps the tensor cores busy, and each has a wgmma in flight during its own
exponentials. kernel_prefill.py has the kernel for what is not supported here: windows, softcaps, other head sizes and dtypes,
other devices.

An fp8 cache is read as fp8. QK^T is an fp8 MMA: a query becomes the sum of two fp8 tiles, as precise as bfloat16, and both
take the time of one bfloat16 MMA. Values need a transposed operand, which wgmma does not take in eight bits: four more warps
convert them to the dtype of the queries.

Keys are walked from the last to the first, so that masked tiles come first. Written in Gluon, Triton's language for layouts and
barriers, which Triton's interpreter cannot run.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import scale_argument
from ridgeline.ops.attention.prefill_tiles import TILE_KEYS, rounded
from ridgeline.ops.hopper import (
    HAS_GLUON,
    described,
    fence_async_shared,
    fetch,
    gl,
    group_barrier,
    is_hopper,
    mbarrier,
    ring_barriers,
    tiles_of,
    viewed,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ridgeline.ops.launch import multiprocessors, shared_memory
from ridgeline.ops.registry import gluon_kernel

# Stages of the shared-memory rings of queries, keys and values. Values of a tile are needed later than its keys, and so are
# free later.
QUERY_STAGES, KEY_STAGES, VALUE_STAGES = 2, 2, 3
# For an fp8 cache, whose values have a ring of bytes as well. Measured: the third stage of keys is worth more.
NARROW_KEY_STAGES, BYTE_STAGES, NARROW_VALUE_STAGES = 3, 2, 2
SHARED_BYTES = (2 * 32 + 2 * 32 + 3 * 32 + 1) * 1024     # with heads of 128; eight-bit caches take less
CONVERTED_KEYS = 64                  # keys of a tile of values that are converted at once
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (8, 16, 32, 64, 128)   # a page begins where the swizzle pattern of shared memory does
REGISTERS = 168                      # per thread of 384, before the producer warps give most of theirs away (setmaxnreg),
NARROW_REGISTERS = 128               # and of 512

if HAS_GLUON:
    OUTSIDE = gl.constexpr(1 << 30)  # a row beyond every cache: TMA fills in zeros


# ── producer warps ───────────────────────────────────────────────────────────────────────────────────────────────────
# Shared memory has rows of 64 values, 128 bytes, in the 128-byte swizzle that wgmma wants. A tile [keys, 128] is two halves
# [keys, 64] after each other, and each half is pages [BLOCK_SIZE, 64] after each other.


@gluon_kernel()
def _item_of(turn):  # type: ignore[no-untyped-def]
    """Item number `turn` of this CTA. Every second turn runs backwards, since items become shorter along the list."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, own, programs - 1 - own)


@gluon_kernel()
def _tile_of(turn, tiles_ptr, items, KV_HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Item number `turn` of this CTA: KV head, first token, tokens from there on (none: no item), position, table row.

    Read one item ahead of their use.
    """
    item = _item_of(turn)
    tile_ptr = tiles_ptr + gl.minimum(item, items - 1) // KV_HEADS * 4
    live = gl.where(item < items, gl.load(tile_ptr + 1), 0)
    return item % KV_HEADS, gl.load(tile_ptr), live, gl.load(tile_ptr + 2), gl.load(tile_ptr + 3)


@gluon_kernel()
def _page_rows(  # type: ignore[no-untyped-def]
    table_ptr, first_page, last_page, PAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """First rows of the pages of a tile in the cache. Pages after the last one get a row outside of it."""
    rows = ()
    for page in gl.static_range(PAGES):
        number = first_page + page
        block = gl.load(table_ptr + gl.minimum(number, last_page))
        rows += (gl.where(number <= last_page, block * BLOCK_SIZE, OUTSIDE),)  # type: ignore[assignment]
    return rows


@gluon_kernel()
def _fetch_queries(  # type: ignore[no-untyped-def]
    queries, shared, full, empty, turn, token, kv_head,
    GROUP: gl.constexpr, ROUND: gl.constexpr, HALVES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):
    """64 pairs for each consumer warpgroup. Heads beyond the group and tokens beyond the row are loaded too, and never stored."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    TOKENS: gl.constexpr = 64 // ROUND
    slot = turn % QUERY_STAGES
    mbarrier.wait(empty.index(slot), ((turn // QUERY_STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), 2 * HALVES * 64 * 64 * 2)
    for part in gl.static_range(2):
        for half in gl.static_range(HALVES):
            place = shared.index((slot * 2 + part) * HALVES + half)
            target = viewed(place, queries.dtype, [TOKENS, ROUND, 64], layout)
            fetch(queries, [token + part * TOKENS, kv_head * GROUP, half * 64], full.index(slot), target)


@gluon_kernel()
def _fetch(  # type: ignore[no-untyped-def]
    queries, cache, query_shared, shared, scale_shared, query_full, query_empty, full, empty, table_ptr, tiles_ptr, items,
    table_stride, scale_ptr, scale_block_stride, scale_slot_stride, scale_head_stride,
    QUERIES: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROUND: gl.constexpr, HALVES: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE_KEYS: gl.constexpr, STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr, NARROW: gl.constexpr,
):
    """One producer warp: TMA loads of the keys or the values of all items, WIDTH of a head at a time. NARROW: their scales too.
    QUERIES: the queries too."""
    PARTS: gl.constexpr = HALVES * 64 // WIDTH
    PAGES: gl.constexpr = TILE_KEYS // BLOCK_SIZE
    key_layout: gl.constexpr = gl.BlockedLayout([TILE_KEYS // 32], [32], [1], [0])
    lane = gl.arange(0, TILE_KEYS, key_layout)
    TILE_TOKENS: gl.constexpr = 128 // ROUND
    step = 0
    done = 0
    kv_head, token, live, first_position, table_row = _tile_of(0, tiles_ptr, items, KV_HEADS)
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        upcoming = _tile_of(turn + 1, tiles_ptr, items, KV_HEADS)
        if live > 0:
            limit = first_position + gl.minimum(live, TILE_TOKENS)
            tiles = gl.cdiv(limit, TILE_KEYS)
            last_page = (limit - 1) // BLOCK_SIZE
            row_table_ptr = table_ptr + table_row.to(gl.int64) * table_stride
            if QUERIES:
                _fetch_queries(
                    queries, query_shared, query_full, query_empty, done, token, kv_head, GROUP, ROUND, HALVES, QUERY_STAGES
                )
            for i in range(tiles):
                slot = step % STAGES
                rows = _page_rows(row_table_ptr, (tiles - 1 - i) * PAGES, last_page, PAGES, BLOCK_SIZE)
                if NARROW:
                    key = (tiles - 1 - i) * TILE_KEYS + lane
                    block = gl.load(row_table_ptr + gl.minimum(key, limit - 1) // BLOCK_SIZE).to(gl.int64)
                    place = block * scale_block_stride + key % BLOCK_SIZE * scale_slot_stride + kv_head * scale_head_stride
                    scale = gl.load(scale_ptr + place, mask=key < limit, other=0.0)
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                if NARROW:
                    scale_shared.index(slot).store(scale)
                    group_barrier()
                mbarrier.expect(full.index(slot), TILE_KEYS * PARTS * WIDTH * cache.dtype.primitive_bitwidth // 8)
                for page in gl.static_range(PAGES):
                    for part in gl.static_range(PARTS):
                        target = shared.index((slot * PARTS + part) * PAGES + page)
                        fetch(cache, [rows[page], (kv_head * PARTS + part) * WIDTH], full.index(slot), target)
                step += 1
            done += 1
        kv_head, token, live, first_position, table_row = upcoming


# ── conversion warps ─────────────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel()
def _convert(  # type: ignore[no-untyped-def]
    bytes_shared, scale_shared, v_shared, bytes_full, bytes_empty, v_full, v_empty, tiles_ptr, items,
    KV_HEADS: gl.constexpr, ROUND: gl.constexpr, HALVES: gl.constexpr, TILE_KEYS: gl.constexpr, KEYS: gl.constexpr,
    BYTE_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
):
    """Four warps: fp8 values times their scales, converted to the dtype of the queries, KEYS of a tile at a time."""
    TILE_TOKENS: gl.constexpr = 128 // ROUND
    CUTS: gl.constexpr = TILE_KEYS // KEYS
    dtype: gl.constexpr = v_shared.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    stored = viewed(
        bytes_shared, bytes_shared.dtype, [BYTE_STAGES * HALVES * CUTS, KEYS, 64], gl.NVMMASharedLayout(64, 8, rank=2)
    )
    wide = viewed(v_shared, dtype, [VALUE_STAGES * HALVES * CUTS, KEYS, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    scales = viewed(scale_shared, gl.float32, [BYTE_STAGES * CUTS, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    step = 0
    _kv_head, _token, live, first_position, _table_row = _tile_of(0, tiles_ptr, items, KV_HEADS)
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        upcoming = _tile_of(turn + 1, tiles_ptr, items, KV_HEADS)
        if live > 0:
            tiles = gl.cdiv(first_position + gl.minimum(live, TILE_TOKENS), TILE_KEYS)
            for i in range(tiles):
                now = step + i                           # Triton 3.6 drops carried values that are only loop bounds
                source = now % BYTE_STAGES
                slot = now % VALUE_STAGES
                mbarrier.wait(bytes_full.index(source), (now // BYTE_STAGES) & 1)
                mbarrier.wait(v_empty.index(slot), ((now // VALUE_STAGES) & 1) ^ 1)
                for cut in range(CUTS):
                    scale = scales.index(source * CUTS + cut).load(gl.SliceLayout(1, layout))
                    for half in gl.static_range(HALVES):
                        values = stored.index((source * HALVES + half) * CUTS + cut).load(layout).to(gl.float32)
                        wide.index((slot * HALVES + half) * CUTS + cut).store((values * scale[:, None]).to(dtype))
                fence_async_shared()
                group_barrier()
                mbarrier.arrive(bytes_empty.index(source), count=1)
                mbarrier.arrive(v_full.index(slot), count=1)
            step += tiles
        _kv_head, _token, live, first_position, _table_row = upcoming


# ── consumer warpgroups ──────────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel()
def _weigh(  # type: ignore[no-untyped-def]
    scores, k_scale, maximum, total, score_scale, position, first_key, MASKED: gl.constexpr, TILE_KEYS: gl.constexpr,
    NARROW: gl.constexpr, layout: gl.constexpr,
):
    """Weights of a tile of scores, relative to the new running maximum (base 2); what came before shrinks by `decay`.

    NARROW: each key has a scale, and each query its own `score_scale`.
    """
    wide_scale = score_scale
    if NARROW:
        wide_scale = score_scale[:, None]
        scores = scores * k_scale[None, :]
    if MASKED:
        key = first_key + gl.arange(0, TILE_KEYS, gl.SliceLayout(0, layout))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * score_scale)
    weights = gl.exp2(scores * wide_scale - new_maximum[:, None])
    decay = gl.exp2(maximum - new_maximum)
    return weights, new_maximum, total * decay + gl.sum(weights, axis=1), decay


@gluon_kernel()
def _multiply(q, fine_q, k_tile, zeros, NARROW: gl.constexpr):  # type: ignore[no-untyped-def]
    """Issue the wgmma of the scores of a tile of keys. NARROW queries are a sum of two tiles."""
    scores = warpgroup_mma(q, k_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if NARROW:
        scores = warpgroup_mma(fine_q, k_tile.permute([1, 0]), scores, is_async=True)
    return scores


@gluon_kernel()
def _scales_of(scale_shared, slot, NARROW: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of the keys of a tile; an unused number if they have none."""
    scale = 1.0
    if NARROW:
        scale = scale_shared.index(slot).load(gl.SliceLayout(0, layout))
    return scale


@gluon_kernel()
def _walk(  # type: ignore[no-untyped-def]
    begin, end, tiles, step, q, fine_q, k_tiles, v_tiles, scale_shared, k_full, k_empty, v_full, v_empty, weights, maximum,
    total, out, score_scale, position, MASKED: gl.constexpr, TILE_KEYS: gl.constexpr, KEY_STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr, NARROW: gl.constexpr, score_layout: gl.constexpr, out_layout: gl.constexpr,
    dtype: gl.constexpr,
):
    """The tiles of keys [begin, end) of the item, counted from the last one. Each iteration issues QK^T of its tile and PV of the
    tile before, which overlap. The keys of an iteration have arrived before it starts."""
    zeros = gl.zeros([64, TILE_KEYS], gl.float32, score_layout)
    for i in range(begin, end):
        now = step + i
        slot = now % KEY_STAGES
        old_slot = (now - 1) % VALUE_STAGES
        scores = _multiply(q, fine_q, k_tiles.index(slot), zeros, NARROW)
        mbarrier.arrive(v_empty.index((now - 2) % VALUE_STAGES), count=1, pred=i > 1)
        mbarrier.wait(v_full.index(old_slot), ((now - 1) // VALUE_STAGES) & 1)
        running = warpgroup_mma(weights, v_tiles.index(old_slot), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        k_scale = _scales_of(scale_shared, slot, NARROW, score_layout)
        mbarrier.arrive(k_empty.index(slot), count=1)
        wide, maximum, total, decay = _weigh(
            scores, k_scale, maximum, total, score_scale, position, (tiles - 1 - i) * TILE_KEYS, MASKED, TILE_KEYS, NARROW,
            score_layout,
        )
        narrow = gl.convert_layout(wide.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
        # This wait for the next keys keeps the assembler from moving the exponentials behind the wait for PV, which they are
        # to overlap.
        mbarrier.wait(k_full.index((now + 1) % KEY_STAGES), ((now + 1) // KEY_STAGES) & 1, pred=i + 1 < tiles)
        out, weights = warpgroup_mma_wait(0, deps=[running, narrow])
        out = out * gl.convert_layout(decay, gl.SliceLayout(1, out_layout))[:, None]
    return weights, maximum, total, out


@gluon_kernel()
def _clear_rest(  # type: ignore[no-untyped-def]
    shared, slot, page, rest, HALVES: gl.constexpr, PAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr
):
    """Zeros for the values of a block from slot `rest` on. These slots are unused and may hold NaN, which a weight of zero
    does not hide. Both warpgroups write the same zeros. The swizzle stays within a row."""
    ROWS: gl.constexpr = STAGES * HALVES * PAGES * BLOCK_SIZE
    rows = viewed(shared, shared.dtype, [ROWS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    zeros = gl.zeros([64], shared.dtype, gl.BlockedLayout([2], [32], [4], [0]))
    for half in gl.static_range(HALVES):
        for row in range(rest, BLOCK_SIZE):
            rows.index(((slot * HALVES + half) * PAGES + page) * BLOCK_SIZE + row).store(zeros)
    fence_async_shared()
    group_barrier()


@gluon_kernel()
def _split_queries(  # type: ignore[no-untyped-def]
    q, coarse, fine, layout: gl.constexpr, LARGEST: gl.constexpr
):
    """Replace the queries in shared memory by the sum of two fp8 tiles, in units of each query's largest value, which are
    returned. The sum is as precise as bfloat16, and two fp8 MMAs take the time of one in bfloat16."""
    values = q.load(layout).to(gl.float32)
    unit = gl.maximum(gl.max(gl.abs(values), axis=1), 1e-30) / LARGEST
    values = values * (1.0 / unit)[:, None]
    first = values.to(coarse.dtype)
    second = (values - first.to(gl.float32)).to(coarse.dtype)
    group_barrier()
    coarse.store(first)
    fine.store(second)
    fence_async_shared()
    group_barrier()
    return unit


@gluon_kernel()
def _compute(  # type: ignore[no-untyped-def]
    q_shared, k_shared, v_shared, scale_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr,
    tiles_ptr, items, score_scale, out_token_stride,
    PART: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROUND: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE_KEYS: gl.constexpr, QUERY_STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr, NARROW: gl.constexpr,
):
    """One consumer warpgroup (four warps): half of the queries of every item."""
    DIM: gl.constexpr = HALVES * 64
    TOKENS: gl.constexpr = 64 // ROUND
    PAGES: gl.constexpr = TILE_KEYS // BLOCK_SIZE
    dtype: gl.constexpr = q_shared.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    narrow_layout: gl.constexpr = gl.NVMMASharedLayout(DIM, 8, rank=2)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KEYS, 32 if NARROW else 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8 // HALVES, 4 * HALVES], [4, 1], [1, 0])     # whole lines
    q_tiles = viewed(q_shared, dtype, [QUERY_STAGES * 2, 64, DIM], layout)
    k_tiles = viewed(k_shared, k_shared.dtype, [KEY_STAGES, TILE_KEYS, DIM], narrow_layout if NARROW else layout)
    v_tiles = viewed(v_shared, dtype, [VALUE_STAGES, TILE_KEYS, DIM], layout)
    pair = gl.arange(0, 64, gl.SliceLayout(1, score_layout))             # token-major: pair = token * ROUND + head
    out_pair = gl.arange(0, 64, gl.SliceLayout(1, store_layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, store_layout))
    step = 0
    done = 0
    kv_head, token, live, first_position, _table_row = _tile_of(0, tiles_ptr, items, KV_HEADS)
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        upcoming = _tile_of(turn + 1, tiles_ptr, items, KV_HEADS)
        if live > 0:
            limit = first_position + gl.minimum(live, 2 * TOKENS)
            tiles = gl.cdiv(limit, TILE_KEYS)
            masked = gl.maximum(tiles - (first_position + 1) // TILE_KEYS, 1)
            q_slot = done % QUERY_STAGES
            slot = step % KEY_STAGES
            v_slot = step % VALUE_STAGES
            q_place = q_tiles.index(q_slot * 2 + PART)
            q = q_place
            fine_q = q_place
            row_scale = score_scale
            position = first_position + PART * TOKENS + pair // ROUND
            maximum = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, score_layout))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
            out = gl.zeros([64, DIM], gl.float32, out_layout)
            mbarrier.wait(q_full.index(q_slot), (done // QUERY_STAGES) & 1)
            if NARROW:
                split = viewed(q_shared, k_shared.dtype, [QUERY_STAGES * 2 * 2, 64, DIM], narrow_layout)
                q = split.index((q_slot * 2 + PART) * 2)
                fine_q = split.index((q_slot * 2 + PART) * 2 + 1)
                unit = _split_queries(q_place, q, fine_q, out_layout, 448.0)
                row_scale = score_scale * gl.convert_layout(unit, gl.SliceLayout(1, score_layout))
            mbarrier.wait(k_full.index(slot), (step // KEY_STAGES) & 1)
            zeros = gl.zeros([64, TILE_KEYS], gl.float32, score_layout)
            scores = _multiply(q, fine_q, k_tiles.index(slot), zeros, NARROW)
            scores = warpgroup_mma_wait(0, deps=[scores])
            k_scale = _scales_of(scale_shared, slot, NARROW, score_layout)
            mbarrier.arrive(k_empty.index(slot), count=1)
            wide, maximum, total, _decay = _weigh(
                scores, k_scale, maximum, total, row_scale, position, (tiles - 1) * TILE_KEYS, True, TILE_KEYS, NARROW,
                score_layout,
            )
            weights = gl.convert_layout(wide.to(dtype), weight_layout)
            mbarrier.wait(k_full.index((step + 1) % KEY_STAGES), ((step + 1) // KEY_STAGES) & 1, pred=tiles > 1)
            if limit % BLOCK_SIZE != 0:
                mbarrier.wait(v_full.index(v_slot), (step // VALUE_STAGES) & 1)
                page = (limit - 1) // BLOCK_SIZE - (tiles - 1) * PAGES
                _clear_rest(v_shared, v_slot, page, limit % BLOCK_SIZE, HALVES, PAGES, BLOCK_SIZE, VALUE_STAGES)
            weights, maximum, total, out = _walk(
                1, masked, tiles, step, q, fine_q, k_tiles, v_tiles, scale_shared, k_full, k_empty, v_full, v_empty, weights,
                maximum, total, out, row_scale, position, True, TILE_KEYS, KEY_STAGES, VALUE_STAGES, NARROW,
                score_layout, out_layout, dtype,
            )
            weights, maximum, total, out = _walk(
                masked, tiles, tiles, step, q, fine_q, k_tiles, v_tiles, scale_shared, k_full, k_empty, v_full, v_empty, weights,
                maximum, total, out, row_scale, position, False, TILE_KEYS, KEY_STAGES, VALUE_STAGES, NARROW,
                score_layout, out_layout, dtype,
            )
            last = step + tiles - 1
            v_slot = last % VALUE_STAGES
            mbarrier.wait(v_full.index(v_slot), (last // VALUE_STAGES) & 1)
            out = warpgroup_mma(weights, v_tiles.index(v_slot), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=[out])
            mbarrier.arrive(v_empty.index((last - 1) % VALUE_STAGES), count=1, pred=tiles > 1)
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            out = out * gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))[:, None]
            q_place.store(out.to(dtype))             # through the shared memory of the queries, to store whole lines
            result = q_place.load(store_layout)
            fence_async_shared()
            mbarrier.arrive(q_empty.index(q_slot), count=1)
            own = PART * TOKENS + out_pair // ROUND
            there = (own < live) & (out_pair % ROUND < GROUP)
            place = (token + own).to(gl.int64) * out_token_stride + (kv_head * GROUP + out_pair % ROUND) * DIM
            gl.store(out_ptr + place[:, None] + dim[None, :], result, mask=there[:, None])
            step += tiles
            done += 1
        kv_head, token, live, first_position, _table_row = upcoming


# ── the kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel(do_not_specialize=["items", "table_stride"])
def prompt_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, out_ptr, table_ptr, tiles_ptr, k_scale_ptr, v_scale_ptr, items, score_scale,
    table_stride, out_token_stride, k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride,
    v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROUND: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE_KEYS: gl.constexpr, QUERY_STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    BYTE_STAGES: gl.constexpr, CONVERTED_KEYS: gl.constexpr, NARROW: gl.constexpr,
):
    """`queries` [T, H, D], `keys` and `values` [blocks * BLOCK_SIZE, KH * D] are TMA descriptors. An item is
    one tile of the list and one KV head. ROUND: GROUP rounded up to a power of two.

    NARROW: the cache is fp8. Keys are multiplied as fp8, with queries in two parts. Values are converted by warps of their own,
    since wgmma cannot transpose an operand of bytes.
    """
    HALVES: gl.constexpr = HEAD_DIM // 64
    PAGES: gl.constexpr = TILE_KEYS // BLOCK_SIZE
    KEY_WIDTH: gl.constexpr = HEAD_DIM if NARROW else 64
    dtype: gl.constexpr = queries.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    key_layout: gl.constexpr = gl.NVMMASharedLayout(HEAD_DIM, 8, rank=2) if NARROW else layout
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_shared = gl.allocate_shared_memory(dtype, [QUERY_STAGES * 2 * HALVES, 64, 64], layout)
    k_shared = gl.allocate_shared_memory(
        keys.dtype, [KEY_STAGES * (HEAD_DIM // KEY_WIDTH) * PAGES, BLOCK_SIZE, KEY_WIDTH], key_layout
    )
    v_shared = gl.allocate_shared_memory(dtype, [VALUE_STAGES * HALVES * PAGES, BLOCK_SIZE, 64], layout)
    q_full, q_empty = ring_barriers(QUERY_STAGES, 2)
    k_full, k_empty = ring_barriers(KEY_STAGES, 2)
    v_full, v_empty = ring_barriers(VALUE_STAGES, 2)
    if NARROW:
        bytes_shared = gl.allocate_shared_memory(
            values.dtype, [BYTE_STAGES * HALVES * PAGES, BLOCK_SIZE, 64], gl.NVMMASharedLayout(64, 8, rank=2)
        )
        k_scales = gl.allocate_shared_memory(gl.float32, [KEY_STAGES, TILE_KEYS], row)
        v_scales = gl.allocate_shared_memory(gl.float32, [BYTE_STAGES, TILE_KEYS], row)
        bytes_full, bytes_empty = ring_barriers(BYTE_STAGES, 1)
        gl.warp_specialize([
            (_compute, (
                q_shared, k_shared, v_shared, k_scales, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr,
                tiles_ptr, items, score_scale, out_token_stride, 0, KV_HEADS, GROUP, ROUND, HALVES, BLOCK_SIZE,
                TILE_KEYS, QUERY_STAGES, KEY_STAGES, VALUE_STAGES, True,
            )),
            (_compute, (
                q_shared, k_shared, v_shared, k_scales, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr,
                tiles_ptr, items, score_scale, out_token_stride, 1, KV_HEADS, GROUP, ROUND, HALVES, BLOCK_SIZE,
                TILE_KEYS, QUERY_STAGES, KEY_STAGES, VALUE_STAGES, True,
            )),
            (_convert, (
                bytes_shared, v_scales, v_shared, bytes_full, bytes_empty, v_full, v_empty, tiles_ptr, items, KV_HEADS,
                ROUND, HALVES, TILE_KEYS, CONVERTED_KEYS, BYTE_STAGES, VALUE_STAGES,
            )),
            (_fetch, (
                queries, keys, q_shared, k_shared, k_scales, q_full, q_empty, k_full, k_empty, table_ptr, tiles_ptr, items,
                table_stride, k_scale_ptr, k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride,
                True, KV_HEADS, GROUP, ROUND, HALVES, KEY_WIDTH, BLOCK_SIZE, TILE_KEYS, KEY_STAGES, QUERY_STAGES, True,
            )),
            (_fetch, (
                queries, values, q_shared, bytes_shared, v_scales, q_full, q_empty, bytes_full, bytes_empty, table_ptr,
                tiles_ptr, items, table_stride, v_scale_ptr, v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride,
                False, KV_HEADS, GROUP, ROUND, HALVES, 64, BLOCK_SIZE, TILE_KEYS, BYTE_STAGES, QUERY_STAGES, True,
            )),
        ], [4, 4, 1, 1], [216, 56, 24, 24])
    else:
        gl.warp_specialize([
            (_compute, (
                q_shared, k_shared, v_shared, q_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr,
                tiles_ptr, items, score_scale, out_token_stride, 0, KV_HEADS, GROUP, ROUND, HALVES, BLOCK_SIZE,
                TILE_KEYS, QUERY_STAGES, KEY_STAGES, VALUE_STAGES, False,
            )),
            (_compute, (
                q_shared, k_shared, v_shared, q_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr,
                tiles_ptr, items, score_scale, out_token_stride, 1, KV_HEADS, GROUP, ROUND, HALVES, BLOCK_SIZE,
                TILE_KEYS, QUERY_STAGES, KEY_STAGES, VALUE_STAGES, False,
            )),
            (_fetch, (
                queries, keys, q_shared, k_shared, q_shared, q_full, q_empty, k_full, k_empty, table_ptr, tiles_ptr, items,
                table_stride, k_scale_ptr, k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride,
                True, KV_HEADS, GROUP, ROUND, HALVES, 64, BLOCK_SIZE, TILE_KEYS, KEY_STAGES, QUERY_STAGES, False,
            )),
            (_fetch, (
                queries, values, q_shared, v_shared, q_shared, q_full, q_empty, v_full, v_empty, table_ptr, tiles_ptr, items,
                table_stride, v_scale_ptr, v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride,
                False, KV_HEADS, GROUP, ROUND, HALVES, 64, BLOCK_SIZE, TILE_KEYS, VALUE_STAGES, QUERY_STAGES, False,
            )),
        ], [4, 1, 1], [240, 24, 24])


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return HAS_GLUON and is_hopper(device) and shared_memory(device) >= SHARED_BYTES


def wants_tiles(device: torch.device, group: int, head_dim: int, block_size: int) -> bool:
    """Whether prompts of this model can run here, so that the list of tiles is worth making.

    Groups that are no power of two leave pairs of a tile empty; beyond a quarter of them the other kernel is as fast.
    """
    fits = head_dim in HEAD_DIMS and block_size in BLOCK_SIZES and 3 * rounded(group) <= 4 * group <= 4 * 64
    return fits and _has_tma(device)


def suits(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> bool:
    """Whether the kernel can read these tensors: the cache in the dtype of the queries, or in e4m3 with bfloat16 queries, and the
    slots of a block contiguous."""
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_contiguous() or not out.is_contiguous():
        return False
    rows = kv_heads * head_dim
    strides = (block_size * rows, rows, head_dim, 1)
    readable = {q.dtype, torch.float8_e4m3fn} if q.dtype == torch.bfloat16 else {q.dtype}
    same = k_cache.dtype == v_cache.dtype in readable and all(cache.stride() == strides for cache in (k_cache, v_cache))
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (q, k_cache, v_cache, out))
    return same and aligned and wants_tiles(q.device, heads // kv_heads, head_dim, block_size)


def prompt_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, tiles: Tensor, out: Tensor, scale: float,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:
    """Attention of the queries in `tiles` (prefill_tiles.py), written to `out`. An fp8 cache has scales of K and V."""
    tokens, heads, head_dim = q.shape
    blocks, block_size, kv_heads, _ = k_cache.shape
    group, width = heads // kv_heads, kv_heads * head_dim
    pairs = rounded(group)
    narrow = k_scale is not None
    k_scale, k_strides = scale_argument(k_scale, q)
    v_scale, v_strides = scale_argument(v_scale, q)
    pages = [
        described(
            cache, (blocks * block_size, width), (width, 1), (block_size, part),
            tiles_of(part * cache.element_size(), 8 * cache.element_size(), 2),
        )
        for cache, part in ((k_cache, head_dim if narrow else 64), (v_cache, 64))
    ]
    items = tiles.shape[0] * kv_heads
    prompt_kernel[min(items, multiprocessors(q.device)),](
        described(
            q, (tokens, heads, head_dim), (heads * head_dim, head_dim, 1), (64 // pairs, pairs, 64), tiles_of(128, 16, 3)
        ),
        *pages, out, block_table, tiles, k_scale, v_scale, items, scale * math.log2(math.e), block_table.stride(0),
        out.stride(0), *k_strides, *v_strides,
        KV_HEADS=kv_heads, GROUP=group, ROUND=pairs, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE_KEYS=TILE_KEYS,
        QUERY_STAGES=QUERY_STAGES, KEY_STAGES=NARROW_KEY_STAGES if narrow else KEY_STAGES,
        VALUE_STAGES=NARROW_VALUE_STAGES if narrow else VALUE_STAGES, BYTE_STAGES=BYTE_STAGES,
        CONVERTED_KEYS=CONVERTED_KEYS, NARROW=narrow, num_warps=4, maxnreg=NARROW_REGISTERS if narrow else REGISTERS,
    )
