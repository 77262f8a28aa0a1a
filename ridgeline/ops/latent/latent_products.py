"""Triton kernels of the products with `kv_up` around the attention of decodes, one matrix per head.

`latent_absorb_kernel` takes queries into the latent's space, and writes the step's entries into the cache if they are new.
`latent_widen_kernel` takes sums of latents to values. `latent_merge_kernel` merges the shares of split-KV before it does so: for
few rows, whose shares are many and whose products are small.

They request their weights before the PDL wait, and let the next kernel start early: cuBLAS does neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import tile_dim
from ridgeline.ops.attention.split_kv import DeviceShares
from ridgeline.ops.latent.latent_write import FreshLatents, write_arguments, write_entry
from ridgeline.ops.launch import cdiv, dependent_launch
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel

MOST_TOKENS = 128                    # more go to cuBLAS
TILE_ABSORBED, TILE_WIDENED = 64, 32 # outputs of a CTA
TILE_MERGED, MERGED_SLOTS = 16, 16   # values of a CTA that merges, and shares that it merges at once


@triton_kernel(do_not_specialize=["writers", "tokens"])
def latent_absorb_kernel(  # type: ignore[no-untyped-def]
    q_ptr, up_ptr, out_ptr, latent_ptr, norm_ptr, positions_ptr, slots_ptr, cos_sin_ptr, cache_ptr, scale_ptr, writers, tokens,
    eps, q_token_stride, q_head_stride, up_head_stride, out_token_stride, out_head_stride, latent_stride, block_stride,
    slot_stride, scale_block_stride, scale_slot_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_ROUND: tl.constexpr, HALF_ROUND: tl.constexpr, RANK_ROUND: tl.constexpr, INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr, LIMIT: tl.constexpr, FRESH: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_NOPE: tl.constexpr,
    TILE_OUT: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):
    """The first `writers` CTAs write the entry of one token each. Of the others, one multiplies TILE_TOKENS queries of a head."""
    program = tl.program_id(0)
    if FRESH:
        if program < writers:
            write_entry(
                q_ptr, latent_ptr, norm_ptr, positions_ptr, slots_ptr, cos_sin_ptr, cache_ptr, scale_ptr, eps, program,
                q_token_stride, q_head_stride, latent_stride, block_stride, slot_stride, scale_block_stride, scale_slot_stride,
                HEADS, NOPE, HALF, RANK, BLOCK_SIZE, HEADS_ROUND, HALF_ROUND, RANK_ROUND, INTERLEAVED, SCALED, LIMIT, DEPENDENT,
            )
            return
    program -= writers
    TILES: tl.constexpr = (RANK + TILE_OUT - 1) // TILE_OUT
    head = program % HEADS
    column = program // HEADS % TILES * TILE_OUT + tl.arange(0, TILE_OUT)
    token = program // (HEADS * TILES) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    dim = tl.arange(0, TILE_NOPE)
    place = head * up_head_stride + dim[:, None] * RANK + column[None, :]
    up = tl.load(up_ptr + place, mask=(dim < NOPE)[:, None] & (column < RANK)[None, :], other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    live = (token < tokens)[:, None]
    wide = token.to(tl.int64)[:, None]
    q = tl.load(
        q_ptr + wide * q_token_stride + head * q_head_stride + dim[None, :], mask=live & (dim < NOPE)[None, :], other=0.0
    )
    if UPCAST:
        q = q.to(tl.float32)
        up = up.to(tl.float32)
    out = tl.dot(q, up, input_precision="ieee")
    place = wide * out_token_stride + head * out_head_stride + column[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=live & (column < RANK)[None, :])


@triton_kernel(do_not_specialize=["tokens"])
def latent_widen_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, up_ptr, out_ptr, tokens, sums_token_stride, sums_head_stride, up_head_stride, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, TILE_TOKENS: tl.constexpr,
    TILE_RANK: tl.constexpr, TILE_OUT: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):
    """One CTA: TILE_OUT values of a head, of TILE_TOKENS queries."""
    program = tl.program_id(0)
    TILES: tl.constexpr = (VALUE + TILE_OUT - 1) // TILE_OUT
    head = program % HEADS
    column = program // HEADS % TILES * TILE_OUT + tl.arange(0, TILE_OUT)
    token = program // (HEADS * TILES) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    dim = tl.arange(0, TILE_RANK)
    place = head * up_head_stride + (NOPE + column)[:, None] * RANK + dim[None, :]
    up = tl.load(up_ptr + place, mask=(column < VALUE)[:, None] & (dim < RANK)[None, :], other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    live = (token < tokens)[:, None]
    wide = token.to(tl.int64)[:, None]
    place = wide * sums_token_stride + head * sums_head_stride + dim[None, :]
    sums = tl.load(sums_ptr + place, mask=live & (dim < RANK)[None, :], other=0.0)
    if UPCAST:
        sums = sums.to(tl.float32)
        up = up.to(tl.float32)
    out = tl.dot(sums, tl.trans(up), input_precision="ieee")
    place = wide * out_token_stride + head * out_head_stride + column[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=live & (column < VALUE)[None, :])


@triton_kernel()
def latent_merge_kernel(  # type: ignore[no-untyped-def]
    accumulated_ptr, statistics_ptr, up_ptr, out_ptr, query_start_ptr, kv_len_ptr, first_item_ptr, size_ptr, up_head_stride,
    out_token_stride, out_head_stride,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr,
    RANK: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_RANK: tl.constexpr, TILE_OUT: tl.constexpr, TILE_SLOTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One CTA: TILE_OUT values of one head, of one query of a row. Shares are merged in their order, TILE_SLOTS at a time."""
    program = tl.program_id(0)
    head = program % HEADS
    column = program // HEADS * TILE_OUT + tl.arange(0, TILE_OUT)
    query = tl.program_id(1) % QUERIES
    row = tl.program_id(1) // QUERIES
    dim = tl.arange(0, TILE_RANK)
    place = head * up_head_stride + (NOPE + column)[:, None] * RANK + dim[None, :]
    up = tl.load(up_ptr + place, mask=(column < VALUE)[:, None] & (dim < RANK)[None, :], other=0.0)
    # What the host sent for the step is older than the kernels before this one, so it may be read before the wait.
    kv_len = tl.load(kv_len_ptr + row)
    first_item = tl.load(first_item_ptr + row)
    size = tl.load(size_ptr + row)
    token = row
    if QUERIES > 1:
        query_begin = tl.load(query_start_ptr + row)
        queries = tl.load(query_start_ptr + row + 1) - query_begin
        token = query_begin + query
        kv_len = tl.maximum(kv_len - queries + query + 1, 0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if QUERIES > 1:
        if query >= queries:
            return
    used = tl.cdiv(kv_len, size)
    own = query * (COLUMNS // QUERIES) + head // TILE_HEADS
    member = head % TILE_HEADS
    maximum = -1e30
    total = 0.0
    merged = tl.zeros([TILE_RANK], tl.float32)
    for begin in range(0, used, TILE_SLOTS):
        # Shares beyond the last read that one again and weigh nothing: without masks, all loads are on their way at once.
        part = begin + tl.arange(0, TILE_SLOTS)
        slot = ((first_item + tl.minimum(part, used - 1)) * COLUMNS + own).to(tl.int64)
        parts = tl.load(accumulated_ptr + (slot * TILE_HEADS + member)[:, None] * TILE_RANK + dim[None, :])
        statistics = statistics_ptr + slot * (2 * TILE_HEADS) + member
        maxima = tl.load(statistics)
        sums = tl.load(statistics + TILE_HEADS)
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        decay = tl.exp2(maximum - new_maximum)
        shrink = tl.where(part < used, tl.exp2(maxima - new_maximum), 0.0)
        total = total * decay + tl.sum(shrink * sums, axis=0)
        merged = merged * decay + tl.sum(parts * shrink[:, None], axis=0)
        maximum = new_maximum
    merged = merged / tl.where(total == 0.0, 1.0, total)
    out = tl.sum(up.to(tl.float32) * merged[None, :], axis=1)
    out_ptr += token.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=column < VALUE)


# ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def per_head(x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, H, inputs] by one matrix [inputs, outputs] per head -> [T, H, outputs]"""
    if out is None:
        out = torch.empty((*x.shape[:2], matrices.shape[2]), dtype=x.dtype, device=x.device)
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return out


def _tokens(count: int) -> dict[str, Any]:
    tile = 16 if count <= 16 else 32 if count <= 32 else 64
    return {"TILE_TOKENS": tile, "UPCAST": TRITON_INTERPRETED, "num_warps": 4}


def absorb(q: Tensor, kv_up: Tensor, nope: int, cache: Tensor, fresh: FreshLatents | None) -> Tensor:
    """Queries [T, H, nope + rope] in the latent's space, [T, H, rank]. With `fresh`, the end of q is rotated in place, and the
    entries of these tokens are in the cache afterwards."""
    tokens, heads, _ = q.shape
    rank = kv_up.shape[2]
    out = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
    arguments, strides, constants = write_arguments(q, nope, rank, cache, fresh)
    writers = 0 if fresh is None else tokens
    sizes = _tokens(tokens)
    programs = writers + heads * cdiv(rank, TILE_ABSORBED) * cdiv(tokens, sizes["TILE_TOKENS"])
    latent_absorb_kernel[(programs,)](
        q, kv_up, out, *arguments[:-1], writers, tokens, arguments[-1], *q.stride()[:2], kv_up.stride(0), *out.stride()[:2],
        *strides, **constants, FRESH=fresh is not None, TILE_NOPE=tile_dim(nope), TILE_OUT=TILE_ABSORBED, **sizes,
        **dependent_launch(q.device),
    )
    return out


def widen(sums: Tensor, kv_up: Tensor, nope: int, out: Tensor) -> None:
    """Sums of latents [T, padded heads, rank] to values of heads [T, H, value]"""
    tokens, heads, value = out.shape
    rank = kv_up.shape[2]
    sizes = _tokens(tokens)
    programs = heads * cdiv(value, TILE_WIDENED) * cdiv(tokens, sizes["TILE_TOKENS"])
    latent_widen_kernel[(programs,)](
        sums, kv_up, out, tokens, *sums.stride()[:2], kv_up.stride(0), *out.stride()[:2], HEADS=heads, NOPE=nope, VALUE=value,
        RANK=rank, TILE_RANK=tile_dim(rank), TILE_OUT=TILE_WIDENED, **sizes, **dependent_launch(out.device),
    )


def merge(
    partials: Tensor, statistics: Tensor, kv_up: Tensor, nope: int, query_start: Tensor, kv_len: Tensor, shares: DeviceShares,
    out: Tensor, *, decodes: int, queries: int, columns: int, tile_heads: int,
) -> None:
    """The partial results that latent_decode_kernel has left, to values of heads [T, H, value]"""
    _, heads, value = out.shape
    rank = kv_up.shape[2]
    latent_merge_kernel[heads * cdiv(value, TILE_MERGED), decodes * queries](
        partials, statistics, kv_up, out, query_start, kv_len, shares.first_item, shares.size, kv_up.stride(0),
        *out.stride()[:2], HEADS=heads, COLUMNS=columns, QUERIES=queries, NOPE=nope, VALUE=value, RANK=rank,
        TILE_HEADS=tile_heads, TILE_RANK=tile_dim(rank), TILE_OUT=TILE_MERGED, TILE_SLOTS=MERGED_SLOTS, num_warps=8,
        **dependent_launch(out.device),
    )
