"""Paged attention: causal attention of a ragged batch over the paged KV cache, for prefill, chunked prefill, decode and drafts.

Query j of row r sits at KV position kv_len[r] - query_len[r] + j and sees the positions up to its own; with a window W
only the W last of them, with a negative one those of its own chunk of -W positions. Slots that no query of the row sees are never
read: they may hold anything, NaN included.
The definition is attention_reference.py, the launches of the Triton kernels are attention_launch.py. Callers compute
positions, apply rope and decide which blocks are shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import (
    AttentionWork,
    OwnKernel,
    device_shares,
    leading_decodes,
    quantise_kv,
    shared_prefix,
)
from ridgeline.ops.attention.attention_launch import paged_attention_triton
from ridgeline.ops.attention.attention_reference import oldest_position, paged_attention_reference
from ridgeline.ops.attention.prefill_tiles import cut_queries
from ridgeline.ops.cpu import native
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.sizes.op_costs import PAGED_ATTENTION_CASES, KVDtype, dtypes_of, paged_attention_cost

# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES and site.width <= 256


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def paged_attention_native(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start: Tensor, kv_len: Tensor,
    *, scale: float, window: int | None = None, softcap: float | None = None, work: AttentionWork | None = None,
    query_start_host: list[int] | None = None, kv_len_host: list[int] | None = None, table_rows: Tensor | None = None,
    own_kernel: Sequence[OwnKernel] = (), into: Tensor | None = None, **options: Any,
) -> Tensor:
    """The cache is read where it lies: by one kernel for the leading decodes, by another for the rows after them; then, for
    `own_kernel`, by the other one."""
    (tokens, heads, head_dim), rows, (block_size, kv_heads) = q.shape, len(kv_len), k_cache.shape[1:3]
    if not _is_readable(q, k_cache, v_cache, block_table) or any(options.get(name) is not None for name in NOT_NATIVE):
        return paged_attention_reference(
            q, k_cache, v_cache, block_table, query_start, kv_len, query_start_host=query_start_host,
            kv_len_host=kv_len_host, scale=scale, window=window, softcap=softcap, table_rows=table_rows, **options,
        )
    decodes = _leading_decodes(tokens, rows, work, query_start_host, query_start)
    out = torch.empty(q.shape, dtype=q.dtype) if into is None else into
    half = int(k_cache.dtype == torch.float16)
    shape = (kv_heads, heads // kv_heads, head_dim, block_size, block_table.stride(0), q.stride(0))
    how = (window or 0, scale, softcap or 0.0)
    caches = (q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr())
    lines = 0 if table_rows is None else table_rows.data_ptr()
    if decodes:
        # A recorded program serves any length: there the host lists are not given.
        longest = block_table.shape[1] * block_size if kv_len_host is None else max(kv_len_host[:decodes])
        splits = -(-longest // native.SPLIT)
        partial = torch.empty(decodes * splits * heads * (head_dim + 2), dtype=q.dtype)
        native.library().decode_attention(
            *caches, block_table.data_ptr(), lines, kv_len.data_ptr(), out.data_ptr(), partial.data_ptr(), half, decodes, *shape,
            splits, *how,
        )
    if decodes < rows:
        table = block_table if lines else block_table[decodes:]
        native.library().prefill_attention(
            *caches, table.data_ptr(), lines and lines + decodes * 4, query_start[decodes:].data_ptr(),
            kv_len[decodes:].data_ptr(), out.data_ptr(), half, rows - decodes, *shape, *how,
        )
    for each in own_kernel:
        _by_own_kernel(each, q, k_cache, v_cache, block_table, out, scale=scale, window=window, softcap=softcap)
    return out


def _leading_decodes(
    tokens: int, rows: int, work: AttentionWork | None, query_start_host: list[int] | None, query_start: Tensor
) -> int:
    if work is not None:
        return work.num_decodes
    return rows if tokens == rows else leading_decodes(query_start_host or query_start.tolist())


def _by_own_kernel(
    each: OwnKernel, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, out: Tensor, **how: Any
) -> None:
    end = each.first + each.count
    lengths = torch.arange(each.position + 1, each.position + each.count + 1, dtype=torch.int32)
    paged_attention_native(
        q[each.first : end], k_cache, v_cache, block_table, torch.arange(each.count + 1, dtype=torch.int32), lengths,
        work=AttentionWork(0 if each.of_prompt else each.count, 1), kv_len_host=lengths.tolist(),
        table_rows=torch.full((each.count,), each.line, dtype=torch.int32), into=out[each.first : end], **how,
    )


def _is_readable(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> bool:
    """Are the tensors laid out as the native kernels read them?"""
    packed = q.stride()[1:] == (q.shape[2], 1) and k_cache.is_contiguous() and v_cache.is_contiguous()
    known = k_cache.dtype == v_cache.dtype and k_cache.dtype in (torch.float32, torch.float16)
    return packed and known and block_table.stride(1) == 1


# Options that the native kernels do not read; the others do not change the result.
NOT_NATIVE = ("k_scale", "v_scale", "out", "sinks")


def _native_supports(site: Site) -> bool:
    # A head is a whole number of vectors of 16, and its sums are kept on the stack.
    return native.supports(site) and site.width % 16 == 0 and site.width <= 256


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, rows: tuple[tuple[int, int], ...], heads: int, kv_heads: int, head_dim: int, block_size: int,
    window: int | None, softcap: float | None, scattered: bool = False,
    shared: tuple[tuple[tuple[int, ...], int], ...] = (), kv_dtype: KVDtype = None, sinks: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Scattered blocks, NaN in every slot that no query may read, and block 0 (NaN too) where a table has no block."""
    k_cache, v_cache, table = _filled_pages(generator, rows, kv_heads, head_dim, block_size, window, shared)
    query_start = list(itertools.accumulate((query_len for query_len, _ in rows), initial=0))
    kv_len = [length for _, length in rows]
    kwargs: dict[str, Any] = {
        "query_start_host": query_start, "kv_len_host": kv_len,
        "scale": head_dim**-0.5, "window": window, "softcap": softcap,
    }
    place = None
    decodes = leading_decodes(query_start)
    if scattered:
        place = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]
        spread = torch.zeros(len(rows) + 2, table.shape[1], dtype=torch.int32)
        spread[place] = table
        table = spread
        kwargs["table_rows"] = place.to(device, torch.int32)
    if shared:
        groups = [(list(members), length) for members, length in shared]
        kwargs["prefix"] = shared_prefix(
            groups, len(rows), heads // kv_heads, table_rows=None if place is None else place.tolist(),
            tiles=len(rows) + 1, device=device,
        )
    k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
    if decodes:
        kwargs["shares"] = device_shares(
            kv_len[:decodes], kv_heads, window, None if window is not None else kwargs.get("prefix"), False,
            torch.device(device),
        )
    if decodes < len(rows):
        table_rows = torch.arange(len(rows)) if place is None else place
        cut = cut_queries(
            np.array(query_start[decodes:]), np.array(kv_len[decodes:]), table_rows[decodes:].numpy(), heads // kv_heads
        )
        kwargs["query_tiles"] = torch.from_numpy(cut).to(device)
    k_dtype, v_dtype = dtypes_of(kv_dtype)
    if k_dtype is not None:
        k_cache, kwargs["k_scale"] = _stored(k_cache, getattr(torch, k_dtype), generator, device)
    if v_dtype is not None:
        v_cache, kwargs["v_scale"] = _stored(v_cache, getattr(torch, v_dtype), generator, device)
    if sinks:
        kwargs["sinks"] = torch.randn(heads, generator=generator).to(device, torch.promote_types(dtype, torch.float32))
    args = (
        torch.randn((query_start[-1], heads, head_dim), generator=generator).to(device, dtype),
        k_cache.to(device),
        v_cache.to(device),
        table.to(device),
        torch.tensor(query_start, dtype=torch.int32, device=device),
        torch.tensor(kv_len, dtype=torch.int32, device=device),
    )
    return args, kwargs


def _filled_pages(
    generator: torch.Generator, rows: tuple[tuple[int, int], ...], kv_heads: int, head_dim: int, block_size: int,
    window: int | None, shared: tuple[tuple[tuple[int, ...], int], ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and the block table [rows, blocks]. Rows that share a prefix have the blocks of the first of them."""
    needed = [-(-kv_len // block_size) for _, kv_len in rows]
    blocks = torch.randperm(sum(needed) + 2, generator=generator) + 1
    cache_shape = (sum(needed) + 3, block_size, kv_heads, head_dim)
    caches = torch.full(cache_shape, float("nan")), torch.full(cache_shape, float("nan"))
    table = torch.zeros(len(rows), max(*needed, 1), dtype=torch.int32)
    first_of = {row: (members[0], length) for members, length in shared for row in members[1:]}
    used = 0
    for row, (query_len, length) in enumerate(rows):
        own = blocks[used : used + needed[row]]
        used += needed[row]
        oldest = oldest_position(length - query_len, window)
        if row in first_of:
            owner, oldest = first_of[row]
            table[row, : oldest // block_size] = table[owner, : oldest // block_size]
        for position in range(oldest, length):
            block, offset = int(own[position // block_size]), position % block_size
            for cache in caches:
                cache[block, offset] = torch.randn((kv_heads, head_dim), generator=generator)
            table[row, position // block_size] = block
    return (*caches, table)


def _stored(
    cache: Tensor, dtype: torch.dtype, generator: torch.Generator, device: str
) -> tuple[Tensor, Tensor]:
    """A cache in its quantised form, and scales that it could have."""
    scale = 0.01 + 0.02 * torch.rand(cache.shape[:3], generator=generator)
    if dtype == torch.int8:                              # what has no NaN gets its largest number instead
        cache = cache.nan_to_num(1e9)
    return quantise_kv(cache.flatten(0, 1), scale.flatten(0, 1), dtype).view(cache.shape), scale.to(device)


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
