"""Triton kernels for many queries at once: prefill chunks over their paged context, and shared prefixes of decode rows.

A tile of queries is made of (token, head of the group) pairs, so that K and V are read once for all heads of a group. Tiles of
keys that every query of the tile sees are walked without a mask. Only tiles on the diagonal, and at the far edge of a window,
compare positions. kernel_prefill_hopper.py is the faster kernel for what it supports.
"""

from __future__ import annotations

from ridgeline.ops.attention.kernel_decode import (
    attend_keys,
    fetch_tile,
    first_blocks,
    from_sinks,
    load_query,
    oldest_key,
    share_of,
)
from ridgeline.ops.registry import tl, triton_kernel

# ── prefill ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel(do_not_specialize=["rows", "first_row", "table_stride"])
def prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, table_rows_ptr, query_start_ptr, kv_len_ptr,
    k_scale_ptr, v_scale_ptr, rows, first_row, score_scale, softcap, table_stride, sinks_ptr,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride,
    v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, NARROW: tl.constexpr, V_NARROW: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr, SINKS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr, UPCAST: tl.constexpr,
):
    """One CTA: one tile of TILE_TOKENS tokens of one row, one KV head. The `rows` rows from `first_row` on; rows before it
    decode, with one query each, or several with drafts.

    Row r's tiles begin at index (queries between `first_row` and it) // TILE_TOKENS + r: never less than the tiles before it, and
    one more at most. So the grid is a host number, and a CTA finds its row by counting the rows that begin before it.
    Tiles are taken from the last one: under the causal mask a row's last tiles are the longest, and the short ones
    fill the gaps at the end.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    first_query = tl.load(query_start_ptr + first_row)
    before = 0
    for begin in range(0, rows, TILE_ROWS):
        candidate = begin + tl.arange(0, TILE_ROWS)
        start = tl.load(query_start_ptr + first_row + candidate, mask=candidate < rows, other=0) - first_query
        before += tl.sum(((candidate < rows) & (start // TILE_TOKENS + candidate <= tile)).to(tl.int32), axis=0)
    row = first_row + before - 1
    query_begin = tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - query_begin
    tile_token = (tile - (query_begin - first_query) // TILE_TOKENS - (before - 1)) * TILE_TOKENS
    if tile_token >= queries:
        return
    kv_len = tl.load(kv_len_ptr + row)
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows_ptr + row)
    table_ptr += table_row.to(tl.int64) * table_stride

    pair = tl.arange(0, TILE_QUERIES)                                    # token-major: pair = token * GROUP + head
    query = tile_token + pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    position = kv_len - queries + query
    dim = tl.arange(0, TILE_DIM)
    live = ((query < queries) & (pair < TILE_TOKENS * GROUP))[:, None] & (dim < HEAD_DIM)[None, :]
    token = (query_begin + query).to(tl.int64)
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    k_scale_ptr += kv_head * k_scale_head_stride
    v_scale_ptr += kv_head * v_scale_head_stride
    q_offset = token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q, score_scale = load_query(q_ptr, q_offset, live, score_scale, NARROW, UPCAST)

    maximum, total = from_sinks(sinks_ptr + head, pair < TILE_TOKENS * GROUP, 0, SINKS, TILE_QUERIES)
    accumulated = tl.zeros([TILE_QUERIES, TILE_DIM], tl.float32)
    first_position = kv_len - queries + tile_token                       # of the tile's first query, and of its last
    last_position = tl.minimum(first_position + TILE_TOKENS, kv_len) - 1
    begin = 0
    limit = last_position + 1
    if WINDOW != 0:
        begin = oldest_key(tl.maximum(first_position, 0), WINDOW)
    block = first_blocks(table_ptr, begin, limit, BLOCK_SIZE, TILE_KEYS)
    if WINDOW != 0:
        # The tiles in which some key is behind the window of the last query, or in the chunk before its own.
        edge = tl.minimum(tl.maximum(oldest_key(tl.maximum(last_position, 0), WINDOW) - begin, 0), limit - begin)
        edge = tl.minimum(begin + tl.cdiv(edge, TILE_KEYS) * TILE_KEYS, limit)
        maximum, total, accumulated, _, block = attend_keys(
            q, q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
            block, begin, edge, limit, position, score_scale, softcap,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            k_scale_block_stride, k_scale_slot_stride, v_scale_block_stride, v_scale_slot_stride,
            BLOCK_SIZE, HEAD_DIM, WINDOW, SOFTCAP, True, K_SCALED, V_SCALED, NARROW, V_NARROW, False, TILE_KEYS, TILE_DIM, UPCAST,
        )
        begin = tl.maximum(begin, edge)
    inner = begin + tl.maximum(first_position + 1 - begin, 0) // TILE_KEYS * TILE_KEYS
    maximum, total, accumulated, _, block = attend_keys(
        q, q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
        block, begin, inner, limit, position, score_scale, softcap, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        k_scale_block_stride, k_scale_slot_stride, v_scale_block_stride, v_scale_slot_stride,
        BLOCK_SIZE, HEAD_DIM, 0, SOFTCAP, False, K_SCALED, V_SCALED, NARROW, V_NARROW, False, TILE_KEYS, TILE_DIM, UPCAST,
    )
    maximum, total, accumulated, _, block = attend_keys(
        q, q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
        block, inner, limit, limit, position, score_scale, softcap, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        k_scale_block_stride, k_scale_slot_stride, v_scale_block_stride, v_scale_slot_stride,
        BLOCK_SIZE, HEAD_DIM, WINDOW, SOFTCAP, True, K_SCALED, V_SCALED, NARROW, V_NARROW, False, TILE_KEYS, TILE_DIM, UPCAST,
    )
    out = accumulated / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offset = token[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=live)


# ── shared prefixes ──────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel(do_not_specialize=["table_stride", "prefix_shares"])
def prefix_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, table_ptr, tile_row_ptr, tile_len_ptr, tile_first_ptr, tile_count_ptr, members_ptr,
    k_scale_ptr, v_scale_ptr, accumulated_ptr, statistics_ptr, prefix_shares,
    score_scale, softcap, table_stride, q_token_stride, q_head_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride,
    v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, NARROW: tl.constexpr, V_NARROW: tl.constexpr,
    MINIMUM_PREFIX: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
    DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):
    """One CTA: the decode queries of one tile of rows that share a prefix, one KV head, one share of the prefix.

    It leaves partial results in the slots that the decode kernel's merge reads first; that kernel computes the same
    share from the row's own prefix length.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    share = tl.program_id(2)
    # Tiles and tables were written when the step began, and the prefix in earlier steps.
    prefix_len = tl.load(tile_len_ptr + tile)
    count = tl.load(tile_count_ptr + tile)
    table_row = tl.load(tile_row_ptr + tile).to(tl.int64)
    first_member = tl.load(tile_first_ptr + tile)
    size = share_of(prefix_len, prefix_shares, MINIMUM_PREFIX, TILE_KEYS)
    begin = share * size
    if begin >= prefix_len:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        return
    end = tl.minimum(begin + size, prefix_len)
    table_ptr += table_row * table_stride

    pair = tl.arange(0, TILE_QUERIES)
    member = pair // GROUP
    own_head = pair % GROUP
    there = member < count
    row = tl.load(members_ptr + first_member + member, mask=there, other=0).to(tl.int64)
    dim = tl.arange(0, TILE_DIM)
    live = there[:, None] & (dim < HEAD_DIM)[None, :]
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    k_scale_ptr += kv_head * k_scale_head_stride
    v_scale_ptr += kv_head * v_scale_head_stride
    block = first_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE_KEYS)
    if DEPENDENT:
        slot = tl.minimum(begin + tl.arange(0, TILE_KEYS), end - 1) % BLOCK_SIZE
        fetch_tile(k_ptr, block, slot, k_block_stride, k_slot_stride, HEAD_DIM)
        fetch_tile(v_ptr, block, slot, v_block_stride, v_slot_stride, HEAD_DIM)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_offset = row[:, None] * q_token_stride + (kv_head * GROUP + own_head)[:, None] * q_head_stride + dim[None, :]
    q, score_scale = load_query(q_ptr, q_offset, live, score_scale, NARROW, UPCAST)

    maximum = tl.full([TILE_QUERIES], -1e30, tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    accumulated = tl.zeros([TILE_QUERIES, TILE_DIM], tl.float32)
    last = tl.full([TILE_QUERIES], 0, tl.int32) + (end - 1)
    inner = begin + (end - begin) // TILE_KEYS * TILE_KEYS
    maximum, total, accumulated, _, block = attend_keys(
        q, q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
        block, begin, inner, end, last, score_scale, softcap, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        k_scale_block_stride, k_scale_slot_stride, v_scale_block_stride, v_scale_slot_stride,
        BLOCK_SIZE, HEAD_DIM, 0, SOFTCAP, False, K_SCALED, V_SCALED, NARROW, V_NARROW, False, TILE_KEYS, TILE_DIM, UPCAST,
    )
    maximum, total, accumulated, _, block = attend_keys(
        q, q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
        block, inner, end, end, last, score_scale, softcap, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        k_scale_block_stride, k_scale_slot_stride, v_scale_block_stride, v_scale_slot_stride,
        BLOCK_SIZE, HEAD_DIM, 0, SOFTCAP, True, K_SCALED, V_SCALED, NARROW, V_NARROW, False, TILE_KEYS, TILE_DIM, UPCAST,
    )

    slot = (row * KV_HEADS + kv_head) * prefix_shares + share
    tl.store(statistics_ptr + slot * (2 * GROUP) + own_head, maximum, mask=there)
    tl.store(statistics_ptr + slot * (2 * GROUP) + GROUP + own_head, total, mask=there)
    place = (slot * GROUP + own_head)[:, None] * TILE_DIM
    tl.store(accumulated_ptr + place + dim[None, :], accumulated, mask=there[:, None])
