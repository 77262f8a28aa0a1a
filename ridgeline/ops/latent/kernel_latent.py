"""Triton kernels of latent attention: one entry of the cache (the latent, and the rotated key behind it) serves all heads.

`latent_decode_kernel`: queries that are absorbed into the latent's space, one per row; split-KV with the merge in the same
launch, as kernel_decode.py. A CTA reads an entry once for a tile of heads: as a key (latent and rotated part), and its latent
again, from shared memory, as the value.

Prompts need two kernels. `latent_older_kernel` attends to what was in the cache before this step, absorbed as well; it leaves
sums of latents and the logarithm of their weights. `latent_prompt_kernel` attends to the step's own tokens, whose keys and values
are widened to heads in a dense tensor, and merges the older part into its result. A row without older keys takes the second only.
"""

from __future__ import annotations

from ridgeline.ops.attention.kernel_decode import (
    fetch_tile,
    first_blocks,
    fold_tile,
    in_compute_type,
    load_tile,
    merge_shares,
    slot_of,
)
from ridgeline.ops.registry import tl, triton_kernel


@triton_kernel()
def absorbed_query(q, turned, score_scale, NARROW: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both parts of a query tile, and the factor of its scores; see kernel_decode.prepared."""
    if UPCAST:
        q = q.to(tl.float32)
        turned = turned.to(tl.float32)
    elif NARROW:
        q = q.to(tl.float32)
        turned = turned.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q), axis=1), tl.max(tl.abs(turned), axis=1))
        largest = tl.maximum(largest, 1e-30)
        q = (q / largest[:, None]).to(tl.float16)
        turned = (turned / largest[:, None]).to(tl.float16)
        score_scale = score_scale * largest
    return q, turned, score_scale


@triton_kernel()
def block_of(key, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of a key's block in its row. The compiler does not know that keys are not negative."""
    return (key.to(tl.uint32) // BLOCK_SIZE).to(tl.int32)


@triton_kernel()
def attend_latents(  # type: ignore[no-untyped-def]
    q, turned, maximum, total, accumulated, cache_ptr, table_ptr, scale_ptr, block, begin, end, last, score_scale,
    block_stride, slot_stride, scale_block_stride, scale_slot_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, NARROW: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_RANK: tl.constexpr, TILE_ROPE: tl.constexpr, UPCAST: tl.constexpr,
):
    """Walk the entries [begin, end) in tiles. Those of a last tile beyond the end read the last one again, and are hidden. The
    blocks of a tile are looked up one tile ahead, as in kernel_decode.attend_keys."""
    lane = tl.arange(0, TILE_KEYS)
    for tile in range(begin, end, TILE_KEYS):
        key = tile + lane
        slot = slot_of(tl.minimum(key, end - 1), BLOCK_SIZE)
        latent = load_tile(cache_ptr, block, slot, block_stride, slot_stride, RANK, TILE_RANK)
        rotated = load_tile(cache_ptr + RANK, block, slot, block_stride, slot_stride, ROPE, TILE_ROPE)
        latent = in_compute_type(latent, q.dtype, NARROW, UPCAST)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(in_compute_type(rotated, q.dtype, NARROW, UPCAST)), scores, input_precision="ieee")
        wide_block = block.to(tl.int64)
        block = tl.load(table_ptr + block_of(tl.minimum(key + TILE_KEYS, end - 1), BLOCK_SIZE))
        scales = scale_ptr + wide_block * scale_block_stride + slot * scale_slot_stride
        maximum, total, accumulated, _ = fold_tile(
            scores, latent, latent, maximum, total, accumulated, accumulated, key, last, scales, scales, score_scale, 0.0,
            True, 0, False, SCALED, SCALED, NARROW, False, UPCAST,
        )
    return maximum, total, accumulated


@triton_kernel()
def attend_keys_first(  # type: ignore[no-untyped-def]
    q, turned, maximum, total, accumulated, cache_ptr, table_ptr, block, begin, end, score_scale, block_stride, slot_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_RANK: tl.constexpr,
    TILE_ROPE: tl.constexpr, UPCAST: tl.constexpr,
):
    """As attend_latents, with entries as the rows of both products: scores [keys, heads], sums [rank, heads]. Sixteen heads are
    too few rows for Hopper's matrix instruction, and enough columns. Of a cache without scales."""
    lane = tl.arange(0, TILE_KEYS)
    heads = tl.trans(q)
    turned_heads = tl.trans(turned)
    for tile in range(begin, end, TILE_KEYS):
        key = tile + lane
        slot = slot_of(tl.minimum(key, end - 1), BLOCK_SIZE)
        latent = load_tile(cache_ptr, block, slot, block_stride, slot_stride, RANK, TILE_RANK)
        rotated = load_tile(cache_ptr + RANK, block, slot, block_stride, slot_stride, ROPE, TILE_ROPE)
        latent = in_compute_type(latent, q.dtype, False, UPCAST)
        scores = tl.dot(latent, heads, input_precision="ieee")
        scores = tl.dot(in_compute_type(rotated, q.dtype, False, UPCAST), turned_heads, scores, input_precision="ieee")
        block = tl.load(table_ptr + block_of(tl.minimum(key + TILE_KEYS, end - 1), BLOCK_SIZE))
        scores = tl.where((key < end)[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0) * score_scale)
        weights = tl.exp2(scores * score_scale - new_maximum[None, :])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, axis=0)
        accumulated = tl.dot(
            tl.trans(latent), weights.to(latent.dtype), accumulated * decay[None, :], input_precision="ieee"
        )
        maximum = new_maximum
    return maximum, total, accumulated


# ── decode ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel(do_not_specialize=["table_stride"])
def latent_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, turned_ptr, cache_ptr, out_ptr, table_ptr, table_rows_ptr, query_start_ptr, kv_len_ptr, item_row_ptr,
    first_item_ptr, size_ptr, scale_ptr, accumulated_ptr, statistics_ptr, arrived_ptr, score_scale, table_stride,
    q_token_stride, q_head_stride, turned_token_stride, turned_head_stride, out_token_stride, out_head_stride,
    block_stride, slot_stride, scale_block_stride, scale_slot_stride,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr, NARROW: tl.constexpr, HAS_TABLE_ROWS: tl.constexpr, TILE_HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_RANK: tl.constexpr, TILE_ROPE: tl.constexpr, TILE_SLOTS: tl.constexpr,
    KEYS_FIRST: tl.constexpr, APART: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):
    """One CTA: one item of the list (split_kv.py), for one tile of heads of one of the row's QUERIES queries: a column.

    APART: all shares leave partial results, and latent_merge_kernel merges them: more CTAs than the one that arrives last.

    The result has padded heads: those beyond HEADS mean nothing. Columns are the fastest grid index: they read the same entries
    at the same time. With several queries, a row may have fewer than QUERIES; each sees one entry more than the one before it.
    """
    column = tl.program_id(0)
    TILES: tl.constexpr = COLUMNS // QUERIES
    first_head = column % TILES * TILE_HEADS
    item = tl.program_id(1)
    row = tl.load(item_row_ptr + item)
    if row < 0:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        return
    kv_len = tl.load(kv_len_ptr + row)
    size = tl.load(size_ptr + row)
    first_item = tl.load(first_item_ptr + row)
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows_ptr + row)
    token = row.to(tl.int64)
    share = item - first_item
    if QUERIES > 1:
        query = column // TILES
        query_begin = tl.load(query_start_ptr + row)
        queries = tl.load(query_start_ptr + row + 1) - query_begin
        if query >= queries:
            share = 1 << 30                              # nothing to do, and nothing to write
        kv_len = tl.maximum(kv_len - queries + query + 1, 0)
        token = (query_begin + query).to(tl.int64)
    used = tl.cdiv(kv_len, size)
    dim = tl.arange(0, TILE_RANK)
    turn = tl.arange(0, TILE_ROPE)
    member = tl.arange(0, TILE_HEADS)
    head = first_head + member
    out_ptr += token * out_token_stride + first_head * out_head_stride
    place = member[:, None] * out_head_stride + dim[None, :]
    if share >= used:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if not APART:
            if share == 0:                               # a padding row: nothing to see
                nothing = tl.zeros([TILE_HEADS, TILE_RANK], out_ptr.dtype.element_ty)
                tl.store(out_ptr + place, nothing, mask=(dim < RANK)[None, :])
        return

    begin = share * size
    end = tl.minimum(begin + size, kv_len)
    table_ptr += table_row.to(tl.int64) * table_stride
    block = first_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE_KEYS)
    if DEPENDENT:
        slot = tl.minimum(begin + tl.arange(0, TILE_KEYS), end - 1) % BLOCK_SIZE
        fetch_tile(cache_ptr, block, slot, block_stride, slot_stride, RANK)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    there = (head < HEADS)[:, None]
    q = tl.load(
        q_ptr + token * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=there & (dim < RANK)[None, :], other=0.0,
    )
    turned = tl.load(
        turned_ptr + token * turned_token_stride + head[:, None] * turned_head_stride + turn[None, :],
        mask=there & (turn < ROPE)[None, :], other=0.0,
    )
    q, turned, score_scale = absorbed_query(q, turned, score_scale, NARROW, UPCAST)
    maximum = tl.full([TILE_HEADS], -1e30, tl.float32)
    total = tl.zeros([TILE_HEADS], tl.float32)
    if KEYS_FIRST:
        accumulated = tl.zeros([TILE_RANK, TILE_HEADS], tl.float32)
        maximum, total, accumulated = attend_keys_first(
            q, turned, maximum, total, accumulated, cache_ptr, table_ptr, block, begin, end, score_scale, block_stride,
            slot_stride, RANK, ROPE, BLOCK_SIZE, TILE_KEYS, TILE_RANK, TILE_ROPE, UPCAST,
        )
        accumulated = tl.trans(accumulated)
    else:
        accumulated = tl.zeros([TILE_HEADS, TILE_RANK], tl.float32)
        last = tl.full([TILE_HEADS], 0, tl.int32) + (end - 1)
        maximum, total, accumulated = attend_latents(
            q, turned, maximum, total, accumulated, cache_ptr, table_ptr, scale_ptr, block, begin, end, last, score_scale,
            block_stride, slot_stride, scale_block_stride, scale_slot_stride,
            RANK, ROPE, BLOCK_SIZE, SCALED, NARROW, TILE_KEYS, TILE_RANK, TILE_ROPE, UPCAST,
        )
    if not APART:
        if used == 1:
            out = accumulated / total[:, None]
            tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=(dim < RANK)[None, :])
            return
    first_slot = (first_item * COLUMNS + column).to(tl.int64)
    slot = first_slot + share * COLUMNS
    tl.store(statistics_ptr + slot * (2 * TILE_HEADS) + member, maximum)
    tl.store(statistics_ptr + slot * (2 * TILE_HEADS) + TILE_HEADS + member, total)
    tl.store(accumulated_ptr + (slot * TILE_HEADS + member)[:, None] * TILE_RANK + dim[None, :], accumulated)
    if not APART:
        tl.debug_barrier()                               # all threads have stored before one of them counts the arrival
        counter = arrived_ptr + row * COLUMNS + column
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == used - 1:
            tl.store(counter, 0)                         # ready for the next launch
            merge_shares(
                accumulated_ptr, statistics_ptr, out_ptr, first_slot, first_slot, 0, used, out_token_stride, out_head_stride,
                TILE_HEADS, COLUMNS, TILE_HEADS, 1, RANK, TILE_HEADS, TILE_RANK, TILE_SLOTS,
            )


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def tile_of_row(  # type: ignore[no-untyped-def]
    query_start_ptr, rows, first_row, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr
):
    """(row, its first query, its queries, the tile's first query of them), as kernel_prefill.prefill_kernel finds them."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    before = 0
    first_query = tl.load(query_start_ptr + first_row)
    for begin in range(0, rows, TILE_ROWS):
        candidate = begin + tl.arange(0, TILE_ROWS)
        start = tl.load(query_start_ptr + first_row + candidate, mask=candidate < rows, other=0) - first_query
        before += tl.sum(((candidate < rows) & (start // TILE_TOKENS + candidate <= tile)).to(tl.int32), axis=0)
    row = first_row + before - 1
    query_begin = tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - query_begin
    tile_token = (tile - (query_begin - first_query) // TILE_TOKENS - (before - 1)) * TILE_TOKENS
    return row, query_begin, queries, tile_token


@triton_kernel(do_not_specialize=["rows", "first_row", "base", "table_stride"])
def latent_older_kernel(  # type: ignore[no-untyped-def]
    q_ptr, turned_ptr, cache_ptr, out_ptr, weight_ptr, table_ptr, table_rows_ptr, query_start_ptr, kv_len_ptr, scale_ptr,
    rows, first_row, base, score_scale, table_stride,
    q_token_stride, q_head_stride, turned_token_stride, turned_head_stride, out_token_stride, out_head_stride,
    weight_token_stride, block_stride, slot_stride, scale_block_stride, scale_slot_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr,
    NARROW: tl.constexpr, HAS_TABLE_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_RANK: tl.constexpr,
    TILE_ROPE: tl.constexpr, UPCAST: tl.constexpr,
):
    """One CTA: TILE_TOKENS tokens of one row, one tile of heads, over the entries before the row's first query: all queries see
    all of them. The rows from `first_row` on; token `base` of the batch is the first of q and out."""
    row, query_begin, queries, tile_token = tile_of_row(query_start_ptr, rows, first_row, TILE_ROWS, TILE_TOKENS)
    older = tl.load(kv_len_ptr + row) - queries
    if (tile_token >= queries) | (older <= 0):
        return
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows_ptr + row)
    table_ptr += table_row.to(tl.int64) * table_stride
    pair = tl.arange(0, TILE_QUERIES)                                    # token-major: pair = token * TILE_HEADS + head
    query = tile_token + pair // TILE_HEADS
    head = tl.program_id(1) * TILE_HEADS + pair % TILE_HEADS
    live = (query < queries) & (head < HEADS)
    token = (query_begin - base + query).to(tl.int64)
    dim = tl.arange(0, TILE_RANK)
    turn = tl.arange(0, TILE_ROPE)
    q = tl.load(
        q_ptr + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=live[:, None] & (dim < RANK)[None, :], other=0.0,
    )
    turned = tl.load(
        turned_ptr + token[:, None] * turned_token_stride + head[:, None] * turned_head_stride + turn[None, :],
        mask=live[:, None] & (turn < ROPE)[None, :], other=0.0,
    )
    q, turned, score_scale = absorbed_query(q, turned, score_scale, NARROW, UPCAST)
    maximum = tl.full([TILE_QUERIES], -1e30, tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    accumulated = tl.zeros([TILE_QUERIES, TILE_RANK], tl.float32)
    last = tl.full([TILE_QUERIES], 0, tl.int32) + (older - 1)
    block = first_blocks(table_ptr, 0, older, BLOCK_SIZE, TILE_KEYS)
    maximum, total, accumulated = attend_latents(
        q, turned, maximum, total, accumulated, cache_ptr, table_ptr, scale_ptr, block, 0, older, last, score_scale,
        block_stride, slot_stride, scale_block_stride, scale_slot_stride,
        RANK, ROPE, BLOCK_SIZE, SCALED, NARROW, TILE_KEYS, TILE_RANK, TILE_ROPE, UPCAST,
    )
    out = accumulated / total[:, None]
    place = token[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dim < RANK)[None, :])
    tl.store(weight_ptr + token * weight_token_stride + head, maximum + tl.log2(total), mask=live)


@triton_kernel()
def load_heads_tile(  # type: ignore[no-untyped-def]
    ptr, token, token_stride, offset, live, SIZE: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr
):
    """[tokens, TILE] of one head, from its `offset` in a token on."""
    dim = tl.arange(0, TILE)
    place = token[:, None] * token_stride + offset + dim[None, :]
    tile = tl.load(ptr + place, mask=live[:, None] & (dim < SIZE)[None, :], other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton_kernel()
def attend_widened(  # type: ignore[no-untyped-def]
    q, turned, maximum, total, accumulated, wide_ptr, entry_ptr, first, begin, end, position, score_scale, head,
    wide_stride, entry_stride,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, MASKED: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_NOPE: tl.constexpr, TILE_ROPE: tl.constexpr, TILE_VALUE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Walk the row's own tokens [begin, end); token 0 of the row is `first` in the tensors."""
    lane = tl.arange(0, TILE_KEYS)
    for tile in range(begin, end, TILE_KEYS):
        key = tile + lane
        live = key < end
        token = (first + key).to(tl.int64)
        offset = head * (NOPE + VALUE)
        k = load_heads_tile(wide_ptr, token, wide_stride, offset, live, NOPE, TILE_NOPE, UPCAST)
        v = load_heads_tile(wide_ptr, token, wide_stride, offset + NOPE, live, VALUE, TILE_VALUE, UPCAST)
        rotated = load_heads_tile(entry_ptr, token, entry_stride, RANK, live, ROPE, TILE_ROPE, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(rotated), scores, input_precision="ieee")
        maximum, total, accumulated, _ = fold_tile(
            scores, v, v, maximum, total, accumulated, accumulated, key, position, entry_ptr, entry_ptr, score_scale, 0.0,
            MASKED, 0, False, False, False, False, False, UPCAST,
        )
    return maximum, total, accumulated


@triton_kernel(do_not_specialize=["rows", "first_row", "base"])
def latent_prompt_kernel(  # type: ignore[no-untyped-def]
    q_ptr, wide_ptr, entry_ptr, older_ptr, weight_ptr, out_ptr, query_start_ptr, kv_len_ptr, rows, first_row, base,
    score_scale, q_token_stride, q_head_stride, wide_stride, entry_stride, older_token_stride, older_head_stride,
    weight_token_stride, out_token_stride, out_head_stride,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, HAS_OLDER: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_NOPE: tl.constexpr,
    TILE_ROPE: tl.constexpr, TILE_VALUE: tl.constexpr, UPCAST: tl.constexpr,
):
    """One CTA: TILE_QUERIES tokens of one row, one head, over the row's own tokens of this step; then the older part is merged
    in. Token `base` of the batch is the first of all tensors."""
    row, query_begin, queries, tile_token = tile_of_row(query_start_ptr, rows, first_row, TILE_ROWS, TILE_QUERIES)
    if tile_token >= queries:
        return
    head = tl.program_id(1)
    first = query_begin - base
    query = tile_token + tl.arange(0, TILE_QUERIES)
    live = query < queries
    token = (first + query).to(tl.int64)
    q = load_heads_tile(q_ptr, token, q_token_stride, head * q_head_stride, live, NOPE, TILE_NOPE, UPCAST)
    turned = load_heads_tile(q_ptr, token, q_token_stride, head * q_head_stride + NOPE, live, ROPE, TILE_ROPE, UPCAST)
    maximum = tl.full([TILE_QUERIES], -1e30, tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    accumulated = tl.zeros([TILE_QUERIES, TILE_VALUE], tl.float32)
    inner = (tile_token + 1) // TILE_KEYS * TILE_KEYS                    # keys that every query of the tile sees
    end = tl.minimum(tile_token + TILE_QUERIES, queries)
    maximum, total, accumulated = attend_widened(
        q, turned, maximum, total, accumulated, wide_ptr, entry_ptr, first, 0, inner, query, score_scale, head,
        wide_stride, entry_stride, NOPE, ROPE, VALUE, RANK, False, TILE_KEYS, TILE_NOPE, TILE_ROPE, TILE_VALUE, UPCAST,
    )
    maximum, total, accumulated = attend_widened(
        q, turned, maximum, total, accumulated, wide_ptr, entry_ptr, first, inner, end, query, score_scale, head,
        wide_stride, entry_stride, NOPE, ROPE, VALUE, RANK, True, TILE_KEYS, TILE_NOPE, TILE_ROPE, TILE_VALUE, UPCAST,
    )
    dim = tl.arange(0, TILE_VALUE)
    there = live[:, None] & (dim < VALUE)[None, :]
    if HAS_OLDER:
        if tl.load(kv_len_ptr + row) > queries:
            weight = tl.load(weight_ptr + token * weight_token_stride + head, mask=live, other=0.0)
            place = token[:, None] * older_token_stride + head * older_head_stride + dim[None, :]
            older = tl.load(older_ptr + place, mask=there, other=0.0).to(tl.float32)
            new_maximum = tl.maximum(maximum, weight)
            decay = tl.exp2(maximum - new_maximum)
            share = tl.exp2(weight - new_maximum)
            total = total * decay + share
            accumulated = accumulated * decay[:, None] + older * share[:, None]
    out = accumulated / total[:, None]
    place = token[:, None] * out_token_stride + head * out_head_stride + dim[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=there)
