"""Triton kernels for rows whose older positions are kept in another format than the later ones (OlderKV).

Attention is two passes, one over each format, because a kernel reads one format: what it must know of it (dtype, scales,
tiles) is fixed when it is compiled. Each pass leaves its share of the result and what that share weighs, and both are
merged like the parts of a shared prefix, by `merge_shares`.

Decodes: `older_kernel` leaves its parts where the decode kernel looks for those of a prefix, and that kernel does the rest.
Prompts: both passes are the prompt kernels (kernel_prefill_hopper.py, kernel_prefill.py), told which keys are theirs, and
`merge_kernel` follows. The copy engine's kernel knows nothing of two formats: its list of tiles is rewritten for each pass.

All lengths are read on the device, and grids are host numbers: a recorded graph replays it with other lengths.
"""

from __future__ import annotations

from ridgeline.ops.attention.kernel_decode import (
    attend_keys,
    fetch_tile,
    first_blocks,
    load_query,
    merge_shares,
    scale_values,
    share_of,
)
from ridgeline.ops.registry import tl, triton_kernel

# ── decodes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel(do_not_specialize=["table_stride", "shares"])
def older_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, table_ptr, table_rows_ptr, older_len_ptr, k_scale_ptr, v_scale_ptr,
    accumulated_ptr, statistics_ptr, shares, score_scale, softcap, table_stride, q_token_stride, q_head_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride,
    v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, K_NARROW: tl.constexpr, V_NARROW: tl.constexpr,
    PAIRED: tl.constexpr, HAS_TABLE_ROWS: tl.constexpr, MINIMUM_SHARE: tl.constexpr, TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: one KV head, one row's query, one of the `shares` at most into which its older keys are cut.

    Every query sees all of them: it is one of the later positions. The decode kernel computes the same shares from the
    row's older length, which it knows as the length of a prefix.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    share = tl.program_id(2)
    # Lengths and tables were written when the step began, and these keys in earlier steps.
    length = tl.load(older_len_ptr + row)
    size = share_of(length, shares, MINIMUM_SHARE, TILE_KEYS)
    begin = share * size
    if begin >= length:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        return
    end = tl.minimum(begin + size, length)
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows_ptr + row)
    table_ptr += table_row.to(tl.int64) * table_stride
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
    if K_SCALE == "head":
        score_scale *= tl.load(k_scale_ptr)
    dim = tl.arange(0, TILE_DIM)
    member = tl.arange(0, TILE_QUERIES)
    live = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = row.to(tl.int64) * q_token_stride + (kv_head * GROUP + member)[:, None] * q_head_stride + dim[None, :]
    q, score_scale = load_query(q_ptr, q_offset, live, k_scale_ptr, dim, score_scale, HEAD_DIM, K_SCALE, K_NARROW, UPCAST)

    maximum = tl.full([TILE_QUERIES], -1e30, tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    accumulated = tl.zeros([TILE_QUERIES, TILE_DIM // 2 if PAIRED else TILE_DIM], tl.float32)
    odd_q = q
    if PAIRED:
        q, odd_q = tl.split(q.reshape(TILE_QUERIES, TILE_DIM // 2, 2))
    last = tl.full([TILE_QUERIES], 0, tl.int32) + (end - 1)
    maximum, total, accumulated, odd, block = attend_keys(
        q, odd_q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
        block, begin, end, end, last, score_scale, softcap, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        k_scale_block_stride, k_scale_slot_stride, v_scale_block_stride, v_scale_slot_stride,
        BLOCK_SIZE, HEAD_DIM, 0, SOFTCAP, True, K_SCALE, V_SCALE, K_NARROW, V_NARROW, PAIRED, TILE_KEYS, TILE_DIM, UPCAST,
    )  # fmt: skip
    if PAIRED:
        accumulated = tl.interleave(accumulated, odd)
    accumulated = scale_values(accumulated, v_scale_ptr, dim, HEAD_DIM, V_SCALE)

    slot = (row * KV_HEADS + kv_head).to(tl.int64) * shares + share
    mine = member < GROUP
    tl.store(statistics_ptr + slot * (2 * GROUP) + member, maximum, mask=mine)
    tl.store(statistics_ptr + slot * (2 * GROUP) + GROUP + member, total, mask=mine)
    place = (slot * GROUP + member)[:, None] * TILE_DIM + dim[None, :]
    tl.store(accumulated_ptr + place, accumulated, mask=mine[:, None])


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def row_of(token, query_start_ptr, rows, first_row, TILE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of each of the tokens [N], among `rows` rows from `first_row` on; tokens of nobody have some row."""
    before = tl.zeros_like(token)
    for begin in range(0, rows, TILE_ROWS):
        candidate = begin + tl.arange(0, TILE_ROWS)
        start = tl.load(query_start_ptr + first_row + candidate, mask=candidate < rows, other=0)
        begun = (candidate < rows)[None, :] & (start[None, :] <= token[:, None])
        before += tl.sum(begun.to(tl.int32), axis=1)
    return first_row + tl.maximum(before, 1) - 1


@triton_kernel(do_not_specialize=["tiles", "rows", "first_row", "table_stride"])
def split_tiles_kernel(  # type: ignore[no-untyped-def]
    tiles_ptr, lists_ptr, query_start_ptr, older_len_ptr, tiles, rows, first_row, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From a list of query tiles (prefill_tiles.py) two, one after the other in `lists`: for the older keys, then the later.

    The kernel that reads them walks the keys up to the position of a tile's last token. In the first list positions are
    such that it walks the older ones alone, and tiles that have none are nobody's. In the second they count from the first
    later one, and the last number is not a row of the table but the place in it where the later blocks begin.
    """
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tile < tiles
    token = tl.load(tiles_ptr + tile * 4, mask=there, other=0)
    live = tl.load(tiles_ptr + tile * 4 + 1, mask=there, other=0)
    position = tl.load(tiles_ptr + tile * 4 + 2, mask=there, other=0)
    table_row = tl.load(tiles_ptr + tile * 4 + 3, mask=there, other=0)
    row = row_of(token, query_start_ptr, rows, first_row, TILE_ROWS)
    length = tl.load(older_len_ptr + row, mask=there, other=0)
    older_ptr = lists_ptr + tile * 4
    tl.store(older_ptr, token, mask=there)
    tl.store(older_ptr + 1, tl.where(length > 0, live, 0), mask=there)
    tl.store(older_ptr + 2, length - tl.minimum(live, TILE_TOKENS), mask=there)
    tl.store(older_ptr + 3, table_row, mask=there)
    later_ptr = older_ptr + tiles * 4
    tl.store(later_ptr, token, mask=there)
    tl.store(later_ptr + 1, live, mask=there)
    tl.store(later_ptr + 2, position - length, mask=there)
    tl.store(later_ptr + 3, table_row * table_stride + length // BLOCK_SIZE, mask=there)


@triton_kernel(do_not_specialize=["tokens", "rows", "first_row"])
def merge_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, statistics_ptr, out_ptr, query_start_ptr, older_len_ptr, tokens, rows, first_row,
    out_token_stride, out_head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr,
    TILE_SLOTS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: all heads of one token, the first being the first of row `first_row`. Parts and their statistics are those
    of the older keys for all `tokens`, then those of the later keys."""
    token = tl.load(query_start_ptr + first_row) + tl.program_id(0)
    if token >= tl.load(query_start_ptr + first_row + rows):             # padding
        return
    row = row_of(tl.zeros([1], tl.int32) + token, query_start_ptr, rows, first_row, TILE_ROWS)
    has_older = tl.sum((tl.load(older_len_ptr + row) > 0).to(tl.int32), axis=0)
    wide_token = token.to(tl.int64)
    merge_shares(
        parts_ptr, statistics_ptr, out_ptr + wide_token * out_token_stride, wide_token, tokens + wide_token, has_older, 1,
        out_head_stride, 1, HEADS, HEAD_DIM, TILE_HEADS, TILE_DIM, TILE_SLOTS,
    )  # fmt: skip
