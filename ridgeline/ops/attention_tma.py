"""Prompt attention for Hopper: pages come through the copy engine, and warps have different jobs.

A program stays on its multiprocessor and works through a list of query tiles that the host has made, longest first. Two
warps do nothing but ask for queries, keys and values; two groups of four compute, each with half of the tile's queries:
while one takes exponentials, the other one keeps the tensor cores busy, and each has a product under way while it takes
its own. A tile of queries is made of (token, head of the group) pairs, as in attention_prefill.py, which has the kernel
for everything that is not supported here: windows, soft caps, narrow caches, other head sizes, other devices.

Keys are walked from the last to the first, so that those that need a mask come first. Written in Gluon, Triton's language
for layouts and barriers; the interpreter does not know it, so what runs without a GPU is the list of tiles alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops.launch import multiprocessors, shared_memory
from ridgeline.ops.registry import HAS_TRITON, TRITON_INTERPRETED, triton

TILE_PAIRS = 128                     # queries of a tile: 64 for each group of warps, the rows of one instruction
TILE_KEYS = 128
# Tiles of queries, of keys and of values that are on their way or in use. Values are needed later than keys of the same
# tile, and so are free later.
QUERY_STAGES, KEY_STAGES, VALUE_STAGES = 2, 2, 3
SHARED_BYTES = (2 * 32 + 2 * 32 + 3 * 32 + 1) * 1024     # with heads of 128
CLASSES = 4                          # of lengths in the list of tiles, for each doubling
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (8, 16, 32, 64, 128)   # a page begins where the pattern does in which shared memory is filled
REGISTERS = 168                      # of each of 384 threads, before those that only ask give most of theirs away

# The language is young: before Triton 3.6 it was spelt otherwise.
HAS_GLUON = HAS_TRITON and not TRITON_INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
if HAS_GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language._core import builtin
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    OUTSIDE = gl.constexpr(1 << 30)  # a row beyond every cache: the copy engine fills in zeros

    # Names that changed between the versions of Triton in use, 3.6 and later.
    fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

    @builtin
    def viewed(memory, dtype, shape, layout, _semantic=None):  # type: ignore[no-untyped-def]
        """The same shared memory as another shape."""
        method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
        return method(dtype, shape, layout, _semantic=_semantic)

else:
    gl = None


def _gluon_kernel(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`gluon.jit`, or the bare function where there is none (nothing may call it there)."""

    def decorate(function: Callable[..., Any]) -> Any:
        return gluon.jit(function, do_not_specialize=list(do_not_specialize)) if HAS_GLUON else function

    return decorate


# ── the list of tiles ────────────────────────────────────────────────────────────────────────────────────────────────


def tile_tokens(group: int) -> int:
    """Tokens of a tile, for `group` query heads per KV head."""
    return TILE_PAIRS // _rounded(group)


def most_tiles(tokens: int, rows: int, group: int) -> int:
    """Of so many rows that have so many tokens together."""
    return tokens // tile_tokens(group) + rows


def query_tiles(
    query_start: np.ndarray, kv_len: np.ndarray, table_rows: np.ndarray, group: int, size: int | None = None
) -> np.ndarray:
    """int32 [N, 4], per tile: its first token, tokens of the row from there on, that token's position, row of the table.

    For rows with the borders `query_start` [R + 1], `kv_len` positions each, at `table_rows`. `size`: fill up to so many
    with tiles of no tokens. Longest first, but tiles of one row that are nearly as long as each other are neighbours: the
    second finds the row's keys and values in the cache of the device, which the first has brought there.
    """
    step = tile_tokens(group)
    if len(kv_len) == 1:                                 # no need to sort, and on the way to the first token
        count = int(query_start[1] - query_start[0])
        begin = np.arange(0, count, step)[::-1]
        tiles = np.zeros((len(begin) if size is None else size, 4), np.int32)
        first, left, position, row = tiles[: len(begin)].T
        first[:], left[:], row[:] = begin + query_start[0], count - begin, table_rows[0]
        position[:] = begin + (int(kv_len[0]) - count)
        return tiles
    queries = np.diff(query_start).astype(np.int64)
    counts = -(-queries // step)
    row = np.repeat(np.arange(len(queries)), counts)
    before = np.cumsum(counts) - counts
    begin = (np.arange(len(row)) - before[row]) * step
    position = (kv_len - queries)[row] + begin
    walked = (position + np.minimum(queries[row] - begin, step) - 1) // TILE_KEYS + 1
    length = (CLASSES * np.log2(walked)).astype(np.int64)
    order = np.lexsort((-position, row, -length))
    tiles = np.zeros((len(row) if size is None else size, 4), np.int32)
    columns = (query_start[:-1][row] + begin, queries[row] - begin, position, table_rows[row])
    tiles[: len(row)] = np.stack(columns, axis=1)[order]
    return tiles


def _rounded(group: int) -> int:
    return 1 << (group - 1).bit_length()


# ── the warps that fetch ─────────────────────────────────────────────────────────────────────────────────────────────
# Shared memory is filled and read in rows of 64 values, 128 bytes, in the pattern that tensor cores want. A tile [keys,
# 128] is two halves [keys, 64] after each other, and each half is pages [BLOCK_SIZE, 64] after each other.


@_gluon_kernel()
def _item_of(turn):  # type: ignore[no-untyped-def]
    """This program's item number `turn`: there and back again, since items become shorter."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, own, programs - 1 - own)


@_gluon_kernel()
def _tile_of(turn, tiles_ptr, items, KV_HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """This program's item number `turn`: KV head, first token, tokens from there on (none: no item), position, table row.

    Read one item ahead of their use.
    """
    item = _item_of(turn)
    tile_ptr = tiles_ptr + gl.minimum(item, items - 1) // KV_HEADS * 4
    live = gl.where(item < items, gl.load(tile_ptr + 1), 0)
    return item % KV_HEADS, gl.load(tile_ptr), live, gl.load(tile_ptr + 2), gl.load(tile_ptr + 3)


@_gluon_kernel()
def _page_rows(  # type: ignore[no-untyped-def]
    table_ptr, first_page, last_page, PAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr
):  # fmt: skip
    """Where the pages of a tile begin in the cache; those after the last one are outside of it."""
    rows = ()
    for page in gl.static_range(PAGES):
        number = first_page + page
        block = gl.load(table_ptr + gl.minimum(number, last_page))
        rows += (gl.where(number <= last_page, block * BLOCK_SIZE, OUTSIDE),)  # type: ignore[assignment]
    return rows


@_gluon_kernel()
def _fetch_queries(  # type: ignore[no-untyped-def]
    queries, shared, full, empty, turn, token, kv_head,
    GROUP: gl.constexpr, ROUND: gl.constexpr, HALVES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    """Both groups' 64 pairs. Heads beyond the group and tokens beyond the row are somebody else's; nobody looks."""
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


@_gluon_kernel()
def _fetch(  # type: ignore[no-untyped-def]
    queries, cache, query_shared, shared, query_full, query_empty, full, empty, table_ptr, tiles_ptr, items, table_stride,
    QUERIES: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROUND: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE_KEYS: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: the keys or the values of all items; with QUERIES the queries as well."""
    PAGES: gl.constexpr = TILE_KEYS // BLOCK_SIZE
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
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), TILE_KEYS * HALVES * 64 * 2)
                for page in gl.static_range(PAGES):
                    for half in gl.static_range(HALVES):
                        target = shared.index((slot * HALVES + half) * PAGES + page)
                        fetch(cache, [rows[page], (kv_head * HALVES + half) * 64], full.index(slot), target)
                step += 1
            done += 1
        kv_head, token, live, first_position, table_row = upcoming


# ── the warps that compute ───────────────────────────────────────────────────────────────────────────────────────────


@_gluon_kernel()
def _weigh(  # type: ignore[no-untyped-def]
    scores, maximum, total, score_scale, position, first_key, MASKED: gl.constexpr, TILE_KEYS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Weights of a tile of scores, relative to the new running maximum (base 2); what came before shrinks by `decay`."""
    if MASKED:
        key = first_key + gl.arange(0, TILE_KEYS, gl.SliceLayout(0, layout))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * score_scale)
    weights = gl.exp2(scores * score_scale - new_maximum[:, None])
    decay = gl.exp2(maximum - new_maximum)
    return weights, new_maximum, total * decay + gl.sum(weights, axis=1), decay


@_gluon_kernel()
def _walk(  # type: ignore[no-untyped-def]
    begin, end, tiles, step, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, weights, maximum, total, out,
    score_scale, position, MASKED: gl.constexpr, TILE_KEYS: gl.constexpr, KEY_STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr, score_layout: gl.constexpr, out_layout: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The item's tiles of keys [begin, end), counted from the last one. Each turn computes the scores of its tile, and has
    the weights of the one before it multiplied with their values meanwhile. Keys of a turn have arrived before it."""
    zeros = gl.zeros([64, TILE_KEYS], gl.float32, score_layout)
    for i in range(begin, end):
        now = step + i
        slot = now % KEY_STAGES
        old_slot = (now - 1) % VALUE_STAGES
        scores = warpgroup_mma(q, k_tiles.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
        mbarrier.arrive(v_empty.index((now - 2) % VALUE_STAGES), count=1, pred=i > 1)
        mbarrier.wait(v_full.index(old_slot), ((now - 1) // VALUE_STAGES) & 1)
        running = warpgroup_mma(weights, v_tiles.index(old_slot), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(slot), count=1)
        wide, maximum, total, decay = _weigh(
            scores, maximum, total, score_scale, position, (tiles - 1 - i) * TILE_KEYS, MASKED, TILE_KEYS, score_layout
        )
        narrow = gl.convert_layout(wide.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
        # Waiting for the next keys here keeps the assembler from moving the exponentials behind the wait for the product,
        # which they are to overlap.
        mbarrier.wait(k_full.index((now + 1) % KEY_STAGES), ((now + 1) // KEY_STAGES) & 1, pred=i + 1 < tiles)
        out, weights = warpgroup_mma_wait(0, deps=[running, narrow])
        out = out * gl.convert_layout(decay, gl.SliceLayout(1, out_layout))[:, None]
    return weights, maximum, total, out


@_gluon_kernel()
def _clear_rest(  # type: ignore[no-untyped-def]
    shared, slot, page, rest, HALVES: gl.constexpr, PAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr
):  # fmt: skip
    """Zeros for the values of a block from slot `rest` on: they are nobody's and may be NaN, which no weight of zero
    hides. Both groups do it, and write the same."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, layout))
    for half in gl.static_range(HALVES):
        place = shared.index((slot * HALVES + half) * PAGES + page)
        values = place.load(layout)
        place.store(gl.where((row < rest)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    group_barrier()


@_gluon_kernel()
def _compute(  # type: ignore[no-untyped-def]
    q_shared, k_shared, v_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr, tiles_ptr, items,
    score_scale, out_token_stride,
    PART: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROUND: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE_KEYS: gl.constexpr, QUERY_STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps: one half of every item's queries."""
    DIM: gl.constexpr = HALVES * 64
    TOKENS: gl.constexpr = 64 // ROUND
    PAGES: gl.constexpr = TILE_KEYS // BLOCK_SIZE
    dtype: gl.constexpr = q_shared.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8 // HALVES, 4 * HALVES], [4, 1], [1, 0])
    q_tiles = viewed(q_shared, dtype, [QUERY_STAGES * 2, 64, DIM], layout)
    k_tiles = viewed(k_shared, dtype, [KEY_STAGES, TILE_KEYS, DIM], layout)
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
            q = q_tiles.index(q_slot * 2 + PART)
            position = first_position + PART * TOKENS + pair // ROUND
            maximum = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, score_layout))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
            out = gl.zeros([64, DIM], gl.float32, out_layout)
            mbarrier.wait(q_full.index(q_slot), (done // QUERY_STAGES) & 1)
            mbarrier.wait(k_full.index(slot), (step // KEY_STAGES) & 1)
            zeros = gl.zeros([64, TILE_KEYS], gl.float32, score_layout)
            scores = warpgroup_mma(q, k_tiles.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(slot), count=1)
            wide, maximum, total, _decay = _weigh(
                scores, maximum, total, score_scale, position, (tiles - 1) * TILE_KEYS, True, TILE_KEYS, score_layout
            )
            weights = gl.convert_layout(wide.to(dtype), weight_layout)
            mbarrier.wait(k_full.index((step + 1) % KEY_STAGES), ((step + 1) // KEY_STAGES) & 1, pred=tiles > 1)
            if limit % BLOCK_SIZE != 0:
                mbarrier.wait(v_full.index(v_slot), (step // VALUE_STAGES) & 1)
                page = (limit - 1) // BLOCK_SIZE - (tiles - 1) * PAGES
                _clear_rest(v_shared, v_slot, page, limit % BLOCK_SIZE, HALVES, PAGES, BLOCK_SIZE)
            weights, maximum, total, out = _walk(
                1, masked, tiles, step, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, weights, maximum,
                total, out, score_scale, position, True, TILE_KEYS, KEY_STAGES, VALUE_STAGES, score_layout,
                out_layout, dtype,
            )  # fmt: skip
            weights, maximum, total, out = _walk(
                masked, tiles, tiles, step, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, weights, maximum,
                total, out, score_scale, position, False, TILE_KEYS, KEY_STAGES, VALUE_STAGES, score_layout,
                out_layout, dtype,
            )  # fmt: skip
            last = step + tiles - 1
            v_slot = last % VALUE_STAGES
            mbarrier.wait(v_full.index(v_slot), (last // VALUE_STAGES) & 1)
            out = warpgroup_mma(weights, v_tiles.index(v_slot), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=[out])
            mbarrier.arrive(v_empty.index((last - 1) % VALUE_STAGES), count=1, pred=tiles > 1)
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            out = out * gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))[:, None]
            q.store(out.to(dtype))                   # where the queries were, to be written in whole lines
            result = q.load(store_layout)
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


@_gluon_kernel(do_not_specialize=["items", "table_stride"])
def prompt_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, out_ptr, table_ptr, tiles_ptr, items, score_scale, table_stride, out_token_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROUND: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE_KEYS: gl.constexpr, QUERY_STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
):  # fmt: skip
    """`queries` [T, H, D], `keys` and `values` [blocks * BLOCK_SIZE, KH * D] are descriptors of the copy engine. An item is
    one tile of the list and one KV head. ROUND: GROUP rounded up to a power of two."""
    HALVES: gl.constexpr = HEAD_DIM // 64
    PAGES: gl.constexpr = TILE_KEYS // BLOCK_SIZE
    dtype: gl.constexpr = queries.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_shared = gl.allocate_shared_memory(dtype, [QUERY_STAGES * 2 * HALVES, 64, 64], layout)
    k_shared = gl.allocate_shared_memory(dtype, [KEY_STAGES * HALVES * PAGES, BLOCK_SIZE, 64], layout)
    v_shared = gl.allocate_shared_memory(dtype, [VALUE_STAGES * HALVES * PAGES, BLOCK_SIZE, 64], layout)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], barrier)
    for i in gl.static_range(QUERY_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(KEY_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(VALUE_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize([
        (_compute, (
            q_shared, k_shared, v_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr, tiles_ptr, items,
            score_scale, out_token_stride, 0, KV_HEADS, GROUP, ROUND, HALVES, BLOCK_SIZE, TILE_KEYS, QUERY_STAGES,
            KEY_STAGES, VALUE_STAGES,
        )),
        (_compute, (
            q_shared, k_shared, v_shared, q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr, tiles_ptr, items,
            score_scale, out_token_stride, 1, KV_HEADS, GROUP, ROUND, HALVES, BLOCK_SIZE, TILE_KEYS, QUERY_STAGES,
            KEY_STAGES, VALUE_STAGES,
        )),
        (_fetch, (
            queries, keys, q_shared, k_shared, q_full, q_empty, k_full, k_empty, table_ptr, tiles_ptr, items, table_stride,
            True, KV_HEADS, GROUP, ROUND, HALVES, BLOCK_SIZE, TILE_KEYS, KEY_STAGES, QUERY_STAGES,
        )),
        (_fetch, (
            queries, values, q_shared, v_shared, q_full, q_empty, v_full, v_empty, table_ptr, tiles_ptr, items, table_stride,
            False, KV_HEADS, GROUP, ROUND, HALVES, BLOCK_SIZE, TILE_KEYS, VALUE_STAGES, QUERY_STAGES,
        )),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    """The copy engine and the instructions of four warps at once came with compute capability 9, and the latter went."""
    if not HAS_GLUON or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and shared_memory(device) >= SHARED_BYTES


def wants_tiles(device: torch.device, group: int, head_dim: int, block_size: int) -> bool:
    """Whether prompts of such a model may come here: the list of tiles is worth making.

    Groups that are no power of two leave pairs of a tile empty; beyond a quarter of them the other kernel is as fast.
    """
    fits = head_dim in HEAD_DIMS and block_size in BLOCK_SIZES and 3 * _rounded(group) <= 4 * group <= 4 * 64
    return fits and _has_copy_engine(device)


def suits(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> bool:
    """Whether the kernel can read these: the cache in the queries' dtype, a block's slots after each other."""
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_contiguous() or not out.is_contiguous():
        return False
    rows = kv_heads * head_dim
    strides = (block_size * rows, rows, head_dim, 1)
    same = all(cache.dtype == q.dtype and cache.stride() == strides for cache in (k_cache, v_cache))
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (q, k_cache, v_cache, out))
    return same and aligned and wants_tiles(q.device, heads // kv_heads, head_dim, block_size)


def prompt_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, tiles: Tensor, out: Tensor, scale: float
) -> None:
    """Attention of the queries in `tiles` (see `query_tiles`), written to `out`."""
    tokens, heads, head_dim = q.shape
    blocks, block_size, kv_heads, _ = k_cache.shape
    group, width = heads // kv_heads, kv_heads * head_dim
    rounded = _rounded(group)
    flat, cube = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(128, 16, rank=3)
    caches = [
        TensorDescriptor(cache, [blocks * block_size, width], [width, 1], [block_size, 64], flat)
        for cache in (k_cache, v_cache)
    ]
    items = tiles.shape[0] * kv_heads
    prompt_kernel[min(items, multiprocessors(q.device)),](
        TensorDescriptor(q, [tokens, heads, head_dim], [heads * head_dim, head_dim, 1], [64 // rounded, rounded, 64], cube),
        *caches, out, block_table, tiles, items, scale * math.log2(math.e), block_table.stride(0), out.stride(0),
        KV_HEADS=kv_heads, GROUP=group, ROUND=rounded, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE_KEYS=TILE_KEYS,
        QUERY_STAGES=QUERY_STAGES, KEY_STAGES=KEY_STAGES, VALUE_STAGES=VALUE_STAGES, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
