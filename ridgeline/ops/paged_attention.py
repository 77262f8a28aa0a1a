"""Causal attention of a ragged batch over the paged KV cache: prompts, prompt chunks, decode and draft verification.

Query j of row r sits at KV position kv_len[r] - query_len[r] + j and sees the positions up to its own; with a window W
only the W last of them. Slots that no query of the row sees are never read: they may hold anything, NaN included.
Where positions come from, how blocks are shared and what rope did to the queries is not known here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.costs import PAGED_ATTENTION_CASES, paged_attention_cost
from ridgeline.ops import native
from ridgeline.ops.registry import (
    TRITON_DTYPES,
    TRITON_INTERPRETED,
    Implementation,
    Op,
    Site,
    Tolerance,
    tl,
    triton,
    triton_kernel,
)

# Decode rows are gathered together, padded to the longest of them. Rows of different length are split into groups in
# which padding stays below a third, and which gather at most this many tokens at once.
GATHER_TOKENS = 1 << 16
PADDING = 1.5
MASK_ELEMENTS = 1 << 22              # of one explicit mask; longer chunks are cut into pieces

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def paged_attention_reference(
    q: Tensor,                       # [T, H, D]
    k_cache: Tensor,                 # [blocks, block_size, KH, D], maybe a strided view; H is a multiple of KH
    v_cache: Tensor,
    block_table: Tensor,             # int32 [R, B]: the block of each row's positions 0.., block_size..
    query_start: Tensor,             # int32 [R + 1]: prefix sums of queries per row
    kv_len: Tensor,                  # int32 [R]: positions per row, this step's included
    *,
    query_start_host: list[int],
    kv_len_host: list[int],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(softcap(scale * q k^T) + mask) v -> [T, H, D]"""
    rows = len(kv_len_host)
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


@triton_kernel(do_not_specialize=["table_stride"])
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, query_start_ptr, kv_len_ptr,
    scale, softcap, table_stride,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: one row, one KV head, one tile of (query, head of the group) pairs; a KV byte is read once by it.

    Keys are walked in tiles from the oldest visible one on, with a running maximum and sum (online softmax).
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    query_begin = tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - query_begin
    tile_begin = tl.program_id(2) * TILE_QUERIES
    if tile_begin >= queries * GROUP:
        return
    kv_len = tl.load(kv_len_ptr + row)

    pair = tile_begin + tl.arange(0, TILE_QUERIES)                       # query-major: pair = query * GROUP + head
    query = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    position = kv_len - queries + query
    dim = tl.arange(0, TILE_DIM)
    live = (query < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    token = (query_begin + query).to(tl.int64)
    q_offset = token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=live, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    maximum = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    accumulated = tl.zeros([TILE_QUERIES, TILE_DIM], tl.float32)

    first_position = kv_len - queries + tile_begin // GROUP
    last_position = tl.minimum(kv_len - queries + (tile_begin + TILE_QUERIES - 1) // GROUP, kv_len - 1)
    table_ptr += row.to(tl.int64) * table_stride
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    for tile in range(begin, last_position + 1, TILE_KEYS):
        key = tile + tl.arange(0, TILE_KEYS)
        inside = key <= last_position                                    # beyond it lie slots nobody wrote
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        readable = inside[:, None] & (dim < HEAD_DIM)[None, :]
        k_offset = block * k_block_stride + slot * k_slot_stride + kv_head * k_head_stride
        v_offset = block * v_block_stride + slot * v_slot_stride + kv_head * v_head_stride
        k = tl.load(k_ptr + k_offset[:, None] + dim[None, :], mask=readable, other=0.0)
        v = tl.load(v_ptr + v_offset[:, None] + dim[None, :], mask=readable, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)    # tanh
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A tile may lie wholly behind a query's window: -inf minus -inf must not become NaN.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp(scores - reference[:, None])
        decay = tl.exp(maximum - reference)
        total = total * decay + tl.sum(weights, axis=1)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")
        maximum = new_maximum

    out = accumulated / tl.where(total > 0, total, 1.0)[:, None]         # a query that sees nothing (padding) gives zeros
    out_offset = token[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=live)


def paged_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start: Tensor, kv_len: Tensor, *,
    query_start_host: list[int], kv_len_host: list[int], scale: float,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    tokens, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    rows = len(kv_len_host)
    longest = max((query_start_host[row + 1] - query_start_host[row] for row in range(rows)), default=0)
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if longest == 0:
        return out
    # Two shapes of program, so that serving compiles two: decode and short drafts, and prompt chunks.
    # float32 has no tensor cores to feed: its dot products are unrolled, and large tiles take seconds to compile.
    wide = q.dtype == torch.float32
    tile_queries = max(16, triton.next_power_of_2(group)) if longest * group <= 64 else 32 if wide else 64
    tile_keys = 32 if wide or head_dim > 128 else 64
    grid = (rows, kv_heads, triton.cdiv(longest * group, tile_queries))
    _paged_attention_kernel[grid](
        q, k_cache, v_cache, out, block_table, query_start, kv_len,
        scale, softcap or 0.0, block_table.stride(0),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window or 0, SOFTCAP=softcap is not None,
        TILE_QUERIES=tile_queries, TILE_KEYS=tile_keys, TILE_DIM=max(16, triton.next_power_of_2(head_dim)),
        UPCAST=TRITON_INTERPRETED,       # the interpreter's narrow dot products are wrong
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES and site.width <= 256


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def paged_attention_native(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start: Tensor, kv_len: Tensor,
    *, query_start_host: list[int], kv_len_host: list[int], scale: float, window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Decodes read the cache where it lies; the rows from the first longer one on go through torch's own attention."""
    (tokens, heads, head_dim), rows, kv_heads = q.shape, len(kv_len_host), k_cache.shape[2]
    decodes = rows if tokens == rows else _leading_decodes(query_start_host)
    packed = q.stride()[1:] == (head_dim, 1) and k_cache.is_contiguous() and v_cache.is_contiguous()
    if decodes == 0 or not packed or block_table.stride(1) != 1:
        return paged_attention_reference(
            q, k_cache, v_cache, block_table, query_start, kv_len, query_start_host=query_start_host,
            kv_len_host=kv_len_host, scale=scale, window=window, softcap=softcap,
        )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype)
    lengths = kv_len_host[:decodes]
    splits = -(-max(lengths) // native.SPLIT)
    partial = torch.empty(decodes * splits * heads * (head_dim + 2), dtype=q.dtype)
    native.library().ridgeline_decode_attention(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table.data_ptr(), kv_len.data_ptr(), out.data_ptr(),
        partial.data_ptr(), decodes, kv_heads, heads // kv_heads, head_dim, k_cache.shape[1], block_table.stride(0),
        q.stride(0), splits, window or 0, sum(lengths), scale, softcap or 0.0,
    )  # fmt: skip
    if decodes < rows:
        out[decodes:] = paged_attention_reference(
            q[decodes:], k_cache, v_cache, block_table[decodes:], query_start[decodes:] - decodes, kv_len[decodes:],
            query_start_host=[start - decodes for start in query_start_host[decodes:]],
            kv_len_host=kv_len_host[decodes:], scale=scale, window=window, softcap=softcap,
        )  # fmt: skip
    return out


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
    window: int | None, softcap: float | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Scattered blocks, NaN in every slot that nobody may read, and block 0 (NaN too) where a table has no block."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    needed = [-(-kv_len // block_size) for _, kv_len in rows]
    blocks = torch.randperm(sum(needed) + 2, generator=generator) + 1
    cache_shape = (sum(needed) + 3, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full(cache_shape, float("nan")), torch.full(cache_shape, float("nan"))
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    used = 0
    for row, (query_len, length) in enumerate(rows):
        own = blocks[used : used + needed[row]]
        used += needed[row]
        oldest = 0 if window is None else max(0, length - query_len - window + 1)
        for position in range(oldest, length):
            block, offset = int(own[position // block_size]), position % block_size
            k_cache[block, offset], v_cache[block, offset] = random(kv_heads, head_dim), random(kv_heads, head_dim)
            table[row, position // block_size] = block
    query_start = [0]
    for query_len, _ in rows:
        query_start.append(query_start[-1] + query_len)
    kv_len = [length for _, length in rows]
    args = (
        random(query_start[-1], heads, head_dim).to(device, dtype),
        k_cache.to(device, dtype),
        v_cache.to(device, dtype),
        table.to(device),
        torch.tensor(query_start, dtype=torch.int32, device=device),
        torch.tensor(kv_len, dtype=torch.int32, device=device),
    )
    kwargs = {
        "query_start_host": query_start, "kv_len_host": kv_len,
        "scale": head_dim**-0.5, "window": window, "softcap": softcap,
    }
    return args, kwargs


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
