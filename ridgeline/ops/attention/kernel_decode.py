"""Triton kernels of decode attention: split-KV with the merge in the same launch.

A CTA walks one share of one row's keys for one KV head and all query heads of its group, so that a KV byte is read once. A row
with several shares leaves partial results (maximum, sum, accumulated values) in a workspace. The CTA that arrives last merges
them in the order of the shares, so the result does not depend on the order of arrival. Grids are host numbers. The list of
shares is read on the device, and CTAs beyond the list exit at once.

QUERIES: with drafts a row has up to that many queries, one after the other. They share one tile, and so one read of the keys;
each sees the keys up to its own position.

FRESH: the queries come straight from the projection. Every CTA normalises and rotates the queries of its group. The CTA whose
share ends with the newest position also does so for that key, and writes it and its value into the page before it reads the
page. No other CTA of the launch reads that slot, so no synchronisation is needed: a block that this token fills becomes
visible to other rows in the next step (scheduler._publish).

`attend_keys` is the inner loop of all Triton attention kernels, also of kernel_prefill.py.
"""

from __future__ import annotations

from ridgeline.ops.registry import tl, triton_kernel

# ── shared by all attention kernels ──────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def share_of(span, shares, MINIMUM: tl.constexpr, TILE_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys per share when `span` keys are cut into at most `shares`: whole tiles, and at least MINIMUM."""
    share = tl.maximum(tl.cdiv(span, shares), MINIMUM)
    return tl.cdiv(share, TILE_KEYS) * TILE_KEYS


@triton_kernel()
def load_query(  # type: ignore[no-untyped-def]
    q_ptr, offset, live, score_scale, NARROW: tl.constexpr, UPCAST: tl.constexpr
):
    q = tl.load(q_ptr + offset, mask=live, other=0.0)
    return prepared(q, score_scale, NARROW, UPCAST)


@triton_kernel()
def prepared(q, score_scale, NARROW: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The query tile, and the factor of its scores: a number, or for narrow keys one per query.

    Eight-bit keys become float16, which takes one instruction where bfloat16 takes three; the queries are brought into its
    range.
    """
    if UPCAST:
        q = q.to(tl.float32)
    elif NARROW:
        q = q.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q), axis=1), 1e-30)
        q = (q / largest[:, None]).to(tl.float16)
        score_scale = score_scale * largest
    return q, score_scale


@triton_kernel()
def oldest_key(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a query sees: of its window, or with a negative WINDOW of its chunk of that many positions."""
    oldest = position * 0
    if WINDOW > 0:
        oldest = tl.maximum(position - (WINDOW - 1), 0)
    if WINDOW < 0:
        oldest = position - position % -WINDOW
    return oldest


@triton_kernel()
def fold_tile(  # type: ignore[no-untyped-def]
    scores, v, odd_v, maximum, total, accumulated, odd, key, position, k_scale_ptr, v_scale_ptr, score_scale, softcap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    NARROW: tl.constexpr, PAIRED: tl.constexpr, UPCAST: tl.constexpr,
):
    """Online softmax: one tile of scores and values into the running maximum (base 2), sum and accumulated values."""
    if K_SCALED:
        scores *= tl.load(k_scale_ptr)[None, :]
    row_scale = score_scale
    if NARROW and not UPCAST:
        row_scale = score_scale[:, None]
    if SOFTCAP:
        # softcap * tanh(scores * scale / softcap); both factors come folded with their base-2 logarithms.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * row_scale) + 1.0))
    elif K_SCALED or V_SCALED:
        scores *= row_scale
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if WINDOW != 0:
            visible = visible & (key[None, :] >= oldest_key(position, WINDOW)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    if V_SCALED:
        # Weights are multiplied with the scales of their values, and must then be in the range of float16. So the maximum is
        # that of weight times scale. Of the scale its exponent, rounded up, is enough.
        v_scale = tl.load(v_scale_ptr)
        power = ((v_scale.to(tl.int32, bitcast=True) >> 23) - 126).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(scores + power[None, :], axis=1))
    elif SOFTCAP or K_SCALED:
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    else:
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * score_scale)
        scores *= row_scale
    weights = tl.exp2(scores - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    total = total * decay + tl.sum(weights, axis=1)
    if V_SCALED:
        weights *= v_scale[None, :]
    weights = weights.to(v.dtype)
    accumulated = tl.dot(weights, v, accumulated * decay[:, None], input_precision="ieee")
    if PAIRED:
        odd = tl.dot(weights, odd_v, odd * decay[:, None], input_precision="ieee")
    return new_maximum, total, accumulated, odd


@triton_kernel()
def load_tile(  # type: ignore[no-untyped-def]
    ptr, block, slot, block_stride, slot_stride, HEAD_DIM: tl.constexpr, TILE_DIM: tl.constexpr
):
    dim = tl.arange(0, TILE_DIM)
    offset = block.to(tl.int64) * block_stride + slot * slot_stride
    if TILE_DIM == HEAD_DIM:
        tile = tl.load(ptr + offset[:, None] + dim[None, :])
    else:
        tile = tl.load(ptr + offset[:, None] + dim[None, :], mask=dim[None, :] < HEAD_DIM, other=0.0)
    return tile


@triton_kernel()
def in_compute_type(tile, like, NARROW: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    if UPCAST:
        tile = tile.to(tl.float32)
    elif NARROW:
        tile = tile.to(tl.float16)
    else:
        tile = tile.to(like)
    return tile


@triton_kernel()
def slot_of(key, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of a key in its block. The compiler does not know that keys are not negative."""
    if BLOCK_SIZE & (BLOCK_SIZE - 1) == 0:
        slot = key & (BLOCK_SIZE - 1)
    else:
        slot = key % BLOCK_SIZE
    return slot


@triton_kernel()
def load_pairs(  # type: ignore[no-untyped-def]
    ptr, block, slot, block_stride, slot_stride, HEAD_DIM: tl.constexpr, TILE_DIM: tl.constexpr, UPCAST: tl.constexpr
):
    """A tile of eight-bit numbers as float16: its even and its odd columns.

    The MMA wants pairs of keys, and shared memory is transposed on load only in units of sixteen bits. So two values of a key are
    loaded as one 16-bit number, and are taken apart in registers, where two keys have come together.
    """
    pairs = load_tile(
        ptr.to(tl.pointer_type(tl.int16), bitcast=True), block, slot, block_stride // 2, slot_stride // 2, HEAD_DIM // 2,
        TILE_DIM // 2,
    )
    if UPCAST:
        even = (pairs & 0xFF).to(tl.uint8).to(ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    elif ptr.dtype.element_ty == tl.int8:
        # 0x6400 + u is the float16 1024 + u, and u is the integer + 128.
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 both, high, middle; xor.b32 both, $2, 0x80808080; mov.b32 high, 0x64646464; "
            "mov.b32 middle, 0x64806480; prmt.b32 $0, both, high, 0x4240; prmt.b32 $1, both, high, 0x4341; "
            "sub.rn.f16x2 $0, $0, middle; sub.rn.f16x2 $1, $1, middle; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )
    else:
        CONVERT: tl.constexpr = "cvt.rn.f16x2." + ("e5m2x2" if ptr.dtype.element_ty == tl.float8e5 else "e4m3x2")
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b16 key, next; .reg .b32 both, others; mov.b32 {key, next}, $2; "
            + CONVERT + " both, key; " + CONVERT + " others, next; "
            "prmt.b32 $0, both, others, 0x5410; prmt.b32 $1, both, others, 0x7632; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )
    return even, odd


@triton_kernel()
def attend_keys(  # type: ignore[no-untyped-def]
    q, odd_q, maximum, total, accumulated, odd, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr, block, begin, end, limit,
    position, score_scale, softcap,
    k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
    k_scale_block_stride, k_scale_slot_stride, v_scale_block_stride, v_scale_slot_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, NARROW: tl.constexpr, V_NARROW: tl.constexpr,
    PAIRED: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr, UPCAST: tl.constexpr,
):
    """Walk the keys [begin, end) in tiles; the last tile may reach beyond end. `block`: the blocks of the first tile.

    NARROW: eight-bit keys meet queries of sixteen; V_NARROW: so do the values. PAIRED: `q` and `accumulated` have the even
    dimensions, `odd_q` and `odd` the others; else those are not used.

    MASKED tiles hide what lies beyond a query's position or behind its window; others are visible to every query. No
    slot at or beyond `limit` is ever read: such keys read the last slot before it again, and are hidden.
    The blocks of a tile are looked up one tile ahead: loads of K and V then depend on no load of their own iteration,
    and the compiler can keep as many tiles in flight as there are stages.
    """
    lane = tl.arange(0, TILE_KEYS)
    for tile in range(begin, end, TILE_KEYS):
        key = tile + lane
        slot = key
        if MASKED:
            slot = tl.minimum(key, limit - 1)
        slot = slot_of(slot, BLOCK_SIZE)
        if PAIRED:
            k, odd_k = load_pairs(k_ptr, block, slot, k_block_stride, k_slot_stride, HEAD_DIM, TILE_DIM, UPCAST)
            v, odd_v = load_pairs(v_ptr, block, slot, v_block_stride, v_slot_stride, HEAD_DIM, TILE_DIM, UPCAST)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.dot(odd_q, tl.trans(odd_k), scores, input_precision="ieee")
        else:
            k = load_tile(k_ptr, block, slot, k_block_stride, k_slot_stride, HEAD_DIM, TILE_DIM)
            v = load_tile(v_ptr, block, slot, v_block_stride, v_slot_stride, HEAD_DIM, TILE_DIM)
            scores = tl.dot(q, tl.trans(in_compute_type(k, q.dtype, NARROW, UPCAST)), input_precision="ieee")
            # Beside narrow keys, wide values stay as they are: the queries are float16 then, which has a smaller range.
            v = in_compute_type(v, v.dtype if NARROW else q.dtype, V_NARROW, UPCAST)
            odd_v = v
        wide_block = block.to(tl.int64)
        block = tl.load(table_ptr + tl.minimum(key + TILE_KEYS, limit - 1) // BLOCK_SIZE)
        if MASKED and WINDOW != 0:                       # a share ends before the position of its queries
            key = tl.where(key < limit, key, 2147483647)
        maximum, total, accumulated, odd = fold_tile(
            scores, v, odd_v, maximum, total, accumulated, odd, key, position,
            k_scale_ptr + wide_block * k_scale_block_stride + slot * k_scale_slot_stride,
            v_scale_ptr + wide_block * v_scale_block_stride + slot * v_scale_slot_stride,
            score_scale, softcap, MASKED, WINDOW, SOFTCAP, K_SCALED, V_SCALED, NARROW, PAIRED, UPCAST,
        )
    return maximum, total, accumulated, odd, block


@triton_kernel()
def from_sinks(ptr, live, share, SINKS: tl.constexpr, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Maximum (base 2) and sum of queries without a key yet; in the first share with the sink of their head, if there is one."""
    maximum = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        sink = tl.load(ptr, mask=live, other=-1e30).to(tl.float32) * 1.4426950408889634
        maximum = tl.where(share == 0, sink, maximum)
        total = tl.where(share == 0, live.to(tl.float32), total)
    return maximum, total


@triton_kernel()
def first_blocks(  # type: ignore[no-untyped-def]
    table_ptr, begin, limit, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr
):
    return tl.load(table_ptr + tl.minimum(begin + tl.arange(0, TILE_KEYS), limit - 1) // BLOCK_SIZE)


@triton_kernel()
def fetch_tile(  # type: ignore[no-untyped-def]
    ptr, block, slot, block_stride, slot_stride, HEAD_DIM: tl.constexpr
):
    """Prefetch a tile of keys or values into L2."""
    LINE: tl.constexpr = 128 // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = HEAD_DIM // LINE
    ROUND: tl.constexpr = 1 if LINES <= 1 else 2 if LINES == 2 else 4 if LINES <= 4 else 8
    if LINES > 0:
        line = tl.minimum(tl.arange(0, ROUND), LINES - 1) * LINE
        offset = block.to(tl.int64) * block_stride + slot * slot_stride
        address = (ptr + offset[:, None] + line[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton_kernel()
def queries_of(query_start_ptr, row, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's first query, and how many it has."""
    token = row
    queries = 1
    if QUERIES > 1:
        token = tl.load(query_start_ptr + row)
        queries = tl.load(query_start_ptr + row + 1) - token
    return token, queries


@triton_kernel()
def member_offset(member, token_stride, head_stride, GROUP: tl.constexpr, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """From a row's first query and first head of a group to those of each member of the tile: query after query."""
    if QUERIES == 1:
        offset = member * head_stride
    else:
        offset = member // GROUP * token_stride + member % GROUP * head_stride
    return offset


@triton_kernel()
def fold_prefix(  # type: ignore[no-untyped-def]
    maximum, total, accumulated, accumulated_ptr, statistics_ptr, first_prefix, used_prefix, member, mine,
    GROUP: tl.constexpr, TILE_DIM: tl.constexpr,
):
    """The partial results of a shared prefix, into those of a row's only share."""
    dim = tl.arange(0, TILE_DIM)
    for part in range(used_prefix):
        statistics = statistics_ptr + (first_prefix + part) * (2 * GROUP) + member
        their_maximum = tl.load(statistics, mask=mine, other=-1e30, cache_modifier=".cg")
        their_total = tl.load(statistics + GROUP, mask=mine, other=0.0, cache_modifier=".cg")
        place = ((first_prefix + part) * GROUP + member)[:, None] * TILE_DIM + dim[None, :]
        theirs = tl.load(accumulated_ptr + place, mask=mine[:, None], other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, their_maximum)
        decay = tl.exp2(maximum - new_maximum)
        their_decay = tl.exp2(their_maximum - new_maximum)
        total = total * decay + their_total * their_decay
        accumulated = accumulated * decay[:, None] + theirs * their_decay[:, None]
        maximum = new_maximum
    return maximum, total, accumulated


@triton_kernel()
def merge_shares(  # type: ignore[no-untyped-def]
    accumulated_ptr, statistics_ptr, out_ptr, first_prefix, first_slot, used_prefix, used, out_token_stride, out_head_stride,
    num_members, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_DIM: tl.constexpr, TILE_SLOTS: tl.constexpr,
):
    """Merge one (row, KV head)'s partial results, those of its shared prefix first; `out_ptr` is at its first query and head.
    `num_members`: its queries times its heads.

    In their order, TILE_SLOTS at a time: few enough to be in registers, and usually all.
    """
    MEMBERS: tl.constexpr = QUERIES * GROUP
    head = tl.arange(0, TILE_GROUP)
    dim = tl.arange(0, TILE_DIM)
    maximum = tl.full([TILE_GROUP], -1e30, tl.float32)
    total = tl.zeros([TILE_GROUP], tl.float32)
    merged = tl.zeros([TILE_GROUP, TILE_DIM], tl.float32)
    for begin in range(0, used_prefix + used, TILE_SLOTS):
        part = begin + tl.arange(0, TILE_SLOTS)
        slot = tl.where(part < used_prefix, first_prefix + part, first_slot + (part - used_prefix) * KV_HEADS)
        known = (part < used_prefix + used)[:, None] & (head < num_members)[None, :]
        statistics = statistics_ptr + slot[:, None] * (2 * MEMBERS) + head[None, :]
        # Written by other CTAs a moment ago: read from L2, never from the L1 of this SM.
        maxima = tl.load(statistics, mask=known, other=-1e30, cache_modifier=".cg")
        sums = tl.load(statistics + MEMBERS, mask=known, other=0.0, cache_modifier=".cg")
        place = (slot[:, None] * MEMBERS + head[None, :])[:, :, None] * TILE_DIM + dim[None, None, :]
        parts = tl.load(accumulated_ptr + place, mask=known[:, :, None], other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        decay = tl.exp2(maximum - new_maximum)
        shrink = tl.exp2(maxima - new_maximum[None, :])
        total = total * decay + tl.sum(shrink * sums, axis=0)
        merged = merged * decay[:, None] + tl.sum(parts * shrink[:, :, None], axis=0)
        maximum = new_maximum
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    live = (head < num_members)[:, None] & (dim < HEAD_DIM)[None, :]
    place = member_offset(head, out_token_stride, out_head_stride, GROUP, QUERIES)
    tl.store(out_ptr + place[:, None] + dim[None, :], merged.to(out_ptr.dtype.element_ty), mask=live)


# ── new tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def in_runs(index, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tell the compiler that runs of eight indices are contiguous (they jump only at HALF), so that loads are vectorised."""
    if HALF % 8 == 0:
        index = tl.max_contiguous(tl.multiple_of(index, 8), 8)
    return index


@triton_kernel()
def partner_of(dim, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The dimension that each one is rotated with; beyond 2 * HALF there is none."""
    return in_runs(tl.where(dim < HALF, dim + HALF, dim - HALF), HALF)


@triton_kernel()
def angles(cos_sin_ptr, position, dim, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosine of every dimension of a head, and the sine with the sign that its partner takes; 1 and 0 beyond rotation.

    `position` is a number, or [N, 1].
    """
    place = position * (2 * HALF) + in_runs(tl.where(dim < HALF, dim, dim - HALF), HALF)[None, :]
    turns = (dim < 2 * HALF)[None, :]
    cos = tl.load(cos_sin_ptr + place, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + HALF + place, mask=turns, other=0.0).to(tl.float32)
    return cos, tl.where((dim < HALF)[None, :], -sin, sin)


@triton_kernel()
def norm_weights(  # type: ignore[no-untyped-def]
    norm_ptr, dim, norm_offset, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """What the norm multiplies every dimension and its partner by; without a norm nothing that counts."""
    own = dim.to(tl.float32)
    other = own
    if NORM:
        own = tl.load(norm_ptr + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32) + norm_offset
        other = tl.load(norm_ptr + partner_of(dim, HALF), mask=dim < 2 * HALF, other=0.0).to(tl.float32) + norm_offset
    return own, other


@triton_kernel()
def load_heads(ptr, offset, dim, live, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads that begin at `offset` [N, 1], each value with that of its rotation partner. The second load hits the cache,
    and both then have the layout that the rotation needs."""
    own = tl.load(ptr + offset + dim[None, :], mask=live, other=0.0)
    paired = live & (dim < 2 * HALF)[None, :]
    return own, tl.load(ptr + offset + partner_of(dim, HALF)[None, :], mask=paired, other=0.0)


@triton_kernel()
def turned(  # type: ignore[no-untyped-def]
    own, other, weight, other_weight, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr
):
    """The output of `load_heads`, normalised and rotated, in float32."""
    own = own.to(tl.float32)
    other = other.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
        own *= scale * weight[None, :]
        other *= scale * other_weight[None, :]
    return own * cos + other * sin


@triton_kernel()
def scales_of(  # type: ignore[no-untyped-def]
    scale_ptr, largest, live, LIMIT: tl.constexpr, SCALED: tl.constexpr, CALIBRATED: tl.constexpr
):
    """The scales of a token's heads: calibrated ones, or those that the largest value of each head gives, which are stored."""
    scale = largest
    if CALIBRATED:
        scale = tl.load(scale_ptr, mask=live, other=1.0)
    elif SCALED:
        scale = tl.where(largest > 0, largest / LIMIT, 1.0)
        tl.store(scale_ptr, scale, mask=live)
    return scale


@triton_kernel()
def store_scaled(  # type: ignore[no-untyped-def]
    cache_ptr, offset, value, live, scale, LIMIT: tl.constexpr, SCALED: tl.constexpr
):
    """A token's heads into the cache; SCALED: divided by each head's scale."""
    if SCALED:
        value = tl.clamp(value / scale[:, None], -LIMIT, LIMIT)
        if cache_ptr.dtype.element_ty == tl.int8:
            value = (value + 12582912.0) - 12582912.0    # 1.5 * 2^23: to the nearest integer, ties to even
    tl.store(cache_ptr + offset, value.to(cache_ptr.dtype.element_ty), mask=live)


@triton_kernel()
def store_newest(  # type: ignore[no-untyped-def]
    cache_ptr, value, dim, scale_ptr, HEAD_DIM: tl.constexpr, LIMIT: tl.constexpr, SCALED: tl.constexpr,
    CALIBRATED: tl.constexpr,
):
    """One head [1, dimensions] of K or V at its place in the page, and its scale."""
    one = tl.arange(0, 1)
    scale = scales_of(scale_ptr + one, tl.max(tl.abs(value), axis=1), one == 0, LIMIT, SCALED, CALIBRATED)
    store_scaled(cache_ptr, dim[None, :], value, dim[None, :] < HEAD_DIM, scale, LIMIT, SCALED)


# ── decode ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel(do_not_specialize=["table_stride", "prefix_shares", "own_slots"])
def decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, table_rows_ptr, query_start_ptr, kv_len_ptr, prefix_len_ptr,
    item_row_ptr, first_item_ptr, size_ptr, k_scale_ptr, v_scale_ptr,
    accumulated_ptr, statistics_ptr, arrived_ptr, prefix_shares, own_slots,
    positions_ptr, slots_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, eps, norm_offset,
    score_scale, softcap, table_stride, sinks_ptr,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride,
    v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, NARROW: tl.constexpr,
    V_NARROW: tl.constexpr, PAIRED: tl.constexpr, HAS_TABLE_ROWS: tl.constexpr, HAS_PREFIX: tl.constexpr, SINKS: tl.constexpr,
    MINIMUM_PREFIX: tl.constexpr, TILE_PREFIX: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr, TILE_GROUP: tl.constexpr, TILE_SLOTS: tl.constexpr, FRESH: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, K_LIMIT: tl.constexpr, V_LIMIT: tl.constexpr, CALIBRATED: tl.constexpr, DEPENDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One CTA: one item of the list, which is one share of one row's keys, for one KV head (split_kv.py).

    KV heads are the fastest grid index: CTAs that run at the same time then read neighbouring bytes of the same pages.
    Partial results of prefixes have `prefix_shares` slots for each row and KV head; from slot `own_slots` on every item has one
    for each KV head."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    # Lists, lengths and tables were written when the step began, and all keys but the newest in earlier steps: these loads
    # need not wait for the kernel before this one (PDL, launch.py).
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
    first = 0
    used_prefix = 0
    if HAS_PREFIX:
        first = tl.load(prefix_len_ptr + row)
        used_prefix = tl.cdiv(first, share_of(first, prefix_shares, MINIMUM_PREFIX, TILE_PREFIX))
    token, queries = queries_of(query_start_ptr, row, QUERIES)
    if WINDOW != 0:
        first = oldest_key(tl.maximum(kv_len - queries, 0), WINDOW)
    used = tl.cdiv(kv_len - first, size)
    share = item - first_item

    dim = tl.arange(0, TILE_DIM)
    member = tl.arange(0, TILE_QUERIES)
    mine = member < queries * GROUP
    live = mine[:, None] & (dim < HEAD_DIM)[None, :]
    out_ptr += token.to(tl.int64) * out_token_stride + kv_head * GROUP * out_head_stride
    out_offset = member_offset(member, out_token_stride, out_head_stride, GROUP, QUERIES)[:, None] + dim[None, :]
    if share >= used:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if share + used_prefix == 0:                     # a padding row: nothing to see
            nothing = tl.zeros([TILE_QUERIES, TILE_DIM], out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_offset, nothing, mask=live)
        return

    begin = first + share * size
    end = tl.minimum(begin + size, kv_len)
    table_ptr += table_row.to(tl.int64) * table_stride
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    k_scale_ptr += kv_head * k_scale_head_stride
    v_scale_ptr += kv_head * v_scale_head_stride
    block = first_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE_KEYS)
    if FRESH:
        newest = tl.load(slots_ptr + row)
        cos, sin = angles(cos_sin_ptr, tl.load(positions_ptr + row), dim, HALF)
        q_weight, q_partner = norm_weights(q_norm_ptr, dim, norm_offset, HEAD_DIM, HALF, NORM)
        k_weight, k_partner = norm_weights(k_norm_ptr, dim, norm_offset, HEAD_DIM, HALF, NORM)
    if DEPENDENT:
        slot = tl.minimum(begin + tl.arange(0, TILE_KEYS), end - 1) % BLOCK_SIZE
        fetch_tile(k_ptr, block, slot, k_block_stride, k_slot_stride, HEAD_DIM)
        fetch_tile(v_ptr, block, slot, v_block_stride, v_slot_stride, HEAD_DIM)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_ptr += token.to(tl.int64) * q_token_stride
    q_offset = (kv_head * GROUP * q_head_stride + member_offset(member, q_token_stride, q_head_stride, GROUP, QUERIES))[:, None]
    if FRESH:
        # All loads first: those of the newest position are in flight while the queries are rotated.
        own, other = load_heads(q_ptr, q_offset, dim, live, HALF)
        new_head = (KV_HEADS * GROUP + kv_head + tl.arange(0, 1))[:, None] * q_head_stride
        is_mine = (dim < tl.where(end == kv_len, HEAD_DIM, 0))[None, :]
        own_k, other_k = load_heads(q_ptr, new_head, dim, is_mine, HALF)
        v = tl.load(q_ptr + new_head + KV_HEADS * q_head_stride + dim[None, :], mask=is_mine, other=0.0).to(tl.float32)
        turned_q = turned(own, other, q_weight, q_partner, cos, sin, eps, HEAD_DIM, NORM).to(q_ptr.dtype.element_ty)
        if end == kv_len:
            new_block = newest // BLOCK_SIZE
            new_slot = newest % BLOCK_SIZE
            k = turned(own_k, other_k, k_weight, k_partner, cos, sin, eps, HEAD_DIM, NORM)
            store_newest(
                k_ptr + new_block * k_block_stride + new_slot * k_slot_stride, k, dim,
                k_scale_ptr + new_block * k_scale_block_stride + new_slot * k_scale_slot_stride,
                HEAD_DIM, K_LIMIT, K_SCALED, CALIBRATED,
            )
            store_newest(
                v_ptr + new_block * v_block_stride + new_slot * v_slot_stride, v, dim,
                v_scale_ptr + new_block * v_scale_block_stride + new_slot * v_scale_slot_stride,
                HEAD_DIM, V_LIMIT, V_SCALED, CALIBRATED,
            )
            tl.debug_barrier()                           # all threads see it when they read the page
        q, score_scale = prepared(turned_q, score_scale, NARROW, UPCAST)
    else:
        q, score_scale = load_query(q_ptr, q_offset + dim[None, :], live, score_scale, NARROW, UPCAST)

    maximum, total = from_sinks(sinks_ptr + kv_head * GROUP + member % GROUP, mine, share, SINKS, TILE_QUERIES)
    accumulated = tl.zeros([TILE_QUERIES, TILE_DIM // 2 if PAIRED else TILE_DIM], tl.float32)
    odd_q = q
    if PAIRED:
        q, odd_q = tl.split(q.reshape(TILE_QUERIES, TILE_DIM // 2, 2))
    last = tl.full([TILE_QUERIES], 0, tl.int32) + (end - 1)
    if QUERIES > 1:                                      # each sees up to its own position; with a window that is the true one
        last = kv_len - queries + tl.minimum(member // GROUP, queries - 1)
        if WINDOW == 0:
            last = tl.minimum(last, end - 1)
    maximum, total, accumulated, odd, block = attend_keys(
        q, odd_q, maximum, total, accumulated, accumulated, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr, block, begin, end,
        end, last, score_scale, softcap, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, k_scale_block_stride,
        k_scale_slot_stride, v_scale_block_stride, v_scale_slot_stride, BLOCK_SIZE, HEAD_DIM, WINDOW if QUERIES > 1 else 0,
        SOFTCAP, True, K_SCALED, V_SCALED, NARROW, V_NARROW, PAIRED, TILE_KEYS, TILE_DIM, UPCAST,
    )
    if PAIRED:
        accumulated = tl.interleave(accumulated, odd)

    pair = row * KV_HEADS + kv_head
    first_prefix = pair.to(tl.int64) * prefix_shares
    if HAS_PREFIX:
        if used == 1:                                    # the only share of the row: the prefix partials are complete
            maximum, total, accumulated = fold_prefix(maximum, total, accumulated, accumulated_ptr, statistics_ptr, first_prefix,
                                                      used_prefix, member, mine, GROUP, TILE_DIM)
    if used == 1:
        out = accumulated / total[:, None]
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=live)
        return
    first_slot = (own_slots + first_item * KV_HEADS + kv_head).to(tl.int64)
    slot = first_slot + share * KV_HEADS
    MEMBERS: tl.constexpr = QUERIES * GROUP
    tl.store(statistics_ptr + slot * (2 * MEMBERS) + member, maximum, mask=mine)
    tl.store(statistics_ptr + slot * (2 * MEMBERS) + MEMBERS + member, total, mask=mine)
    place = (slot * MEMBERS + member)[:, None] * TILE_DIM + dim[None, :]
    tl.store(accumulated_ptr + place, accumulated, mask=mine[:, None])
    tl.debug_barrier()                                   # all threads have stored before one of them counts the arrival
    arrived = tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel")
    if arrived == used - 1:
        tl.store(arrived_ptr + pair, 0)                  # ready for the next launch
        merge_shares(
            accumulated_ptr, statistics_ptr, out_ptr, first_prefix, first_slot, used_prefix, used, out_token_stride,
            out_head_stride, queries * GROUP, KV_HEADS, GROUP, QUERIES, HEAD_DIM, TILE_GROUP, TILE_DIM, TILE_SLOTS,
        )
