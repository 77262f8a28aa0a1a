"""Fused decode attention after the QKV projection: norm of q and k, rotation, KV write and attention in one kernel.

The definition is the two ops it replaces (qkv_write.py, paged_attention.py), in their order, for any batch. The decode kernel
(kernel_decode.py) does all of it if every row has one query, and that of kernel_one_row.py if there is one row. Otherwise, and
for one row over 8-bit pages, the two ops run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import (
    AttentionWork,
    AttentionWorkspace,
    FreshTokens,
    SharedPrefix,
    device_shares,
    make_workspace,
    workspace_floats,
)
from ridgeline.ops.attention.attention_launch import paged_attention_triton
from ridgeline.ops.attention.kernel_one_row import one_row_attention, suits_one_row
from ridgeline.ops.attention.paged_attention import paged_attention
from ridgeline.ops.attention.qkv_write import rotary_write
from ridgeline.ops.attention.split_kv import DeviceShares
from ridgeline.ops.launch import multiprocessors
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.sizes.op_costs import DECODE_ATTENTION_CASES, decode_attention_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_attention_reference(
    qkv: Tensor,                     # [T, (H + 2 KH) D]
    positions: Tensor,               # [T]: row of cos_sin
    slots: Tensor,                   # [T]: block * block_size + offset; padding is in block 0
    cos_sin: Tensor,                 # [max_position, 2, rotary_dim / 2]
    k_cache: Tensor,                 # [blocks, block_size, KH, D], maybe a strided view
    v_cache: Tensor,
    block_table: Tensor,             # int32 [R, B]
    query_start: Tensor,             # int32 [R + 1]: prefix sums of queries per row
    kv_len: Tensor,                  # int32 [R]: positions per row, this step's included
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    q_norm: Tensor | None = None,    # [D]: weights of the norm on each head
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    query_start_host: list[int] | None = None,
    kv_len_host: list[int] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    table_rows: Tensor | None = None,
    work: AttentionWork | None = None,
    prefix: SharedPrefix | None = None,
    shares: DeviceShares | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: AttentionWorkspace | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The result of attention [T, H, D]. K and V are in the cache afterwards; those of padding need not be."""
    q = rotary_write(
        qkv, positions, slots, cos_sin, k_cache, v_cache, heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm,
        eps=eps, norm_offset=norm_offset, k_scale=k_scale, v_scale=v_scale,
    )
    return paged_attention(
        q, k_cache, v_cache, block_table, query_start, kv_len, query_start_host=query_start_host,
        kv_len_host=kv_len_host, scale=scale, window=window, softcap=softcap, table_rows=table_rows, work=work,
        prefix=prefix, shares=shares, k_scale=k_scale, v_scale=v_scale, workspace=workspace,
        sinks=sinks,
    )


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────

WIDEST_HEAD = 256                    # of the attention kernels
FEWEST_ROWS = 4                      # of several, fewest that are faster fused, measured between the linears of a layer


def decode_attention_triton(
    qkv: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_table: Tensor, query_start: Tensor, kv_len: Tensor, *, heads: int, kv_heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0, norm_offset: float = 0.0,
    work: AttentionWork | None = None, prefix: SharedPrefix | None = None, **attention: Any,
) -> Tensor:
    tokens, rows = qkv.shape[0], kv_len.shape[0]
    if work is None and tokens == rows:
        work = AttentionWork(rows, 0)                    # callers give `work` for steps with longer rows
    possible = work is not None and _one_query_each(work, tokens, prefix) and k_cache.shape[-1] <= WIDEST_HEAD
    if not possible or (tokens == 1 and not suits_one_row(k_cache, v_cache, qkv.dtype)):
        return decode_attention_reference(
            qkv, positions, slots, cos_sin, k_cache, v_cache, block_table, query_start, kv_len, heads=heads,
            kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm, eps=eps, norm_offset=norm_offset, work=work, prefix=prefix,
            **attention,
        )
    fresh = FreshTokens(positions, slots, cos_sin, q_norm, k_norm, eps, norm_offset)
    heads_of = qkv.view(tokens, heads + 2 * kv_heads, -1)
    if tokens == 1:
        return _one_row(heads_of, k_cache, v_cache, block_table, kv_len, fresh, **attention)
    return paged_attention_triton(
        heads_of, k_cache, v_cache, block_table, query_start, kv_len, work=work, fresh=fresh, **attention,
    )


def _one_row(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_len: Tensor, fresh: FreshTokens, *, scale: float,
    query_start_host: list[int] | None = None, kv_len_host: list[int] | None = None, window: int | None = None,
    softcap: float | None = None, table_rows: Tensor | None = None, shares: DeviceShares | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, workspace: AttentionWorkspace | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    if shares is None:
        lengths = kv_len.tolist() if kv_len_host is None else kv_len_host
        shares = device_shares(lengths, k_cache.shape[2], window, None, False, kv_len.device)
    return one_row_attention(
        qkv, k_cache, v_cache, block_table, kv_len, fresh, shares, scale=scale, window=window, softcap=softcap,
        table_rows=table_rows, sinks=sinks, workspace=workspace,
    )


def joined(work: AttentionWork, tokens: int, prefix: SharedPrefix | None) -> bool:
    """Whether one fused kernel is possible, and pays: every row has one query.

    One row has a kernel of its own. Not for two or three rows: launched while the projection still runs, the few CTAs of the
    kernel for any number of rows would crowd on the SMs that are free first. Not with a shared prefix: each CTA of its kernel
    would have to rotate the queries again. Not in deterministic mode: a result may not depend on the rest of the batch, and with
    a prompt in the step the two ops run, whose norm sums in another order.
    """
    return (tokens == 1 or tokens >= FEWEST_ROWS) and _one_query_each(work, tokens, prefix)


def _one_query_each(work: AttentionWork, tokens: int, prefix: SharedPrefix | None) -> bool:
    return work.num_decodes == tokens and work.queries == 1 and prefix is None and not work.deterministic


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, rows: tuple[tuple[int, int], ...], rotary_dim: int, norm: bool, **sizes: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of paged_attention with the newest position of every row not yet written: its slot holds NaN."""
    (q, k_cache, v_cache, table, *lengths), kwargs = paged_attention.inputs(generator, dtype, device, rows=rows, **sizes)
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    longest = max(length for _, length in rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    angles = torch.rand(longest + 1, rotary_dim // 2, generator=generator) * 100
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(device, torch.promote_types(dtype, torch.float32))
    positions = torch.tensor([max(length - 1, 0) for _, length in rows])
    place = torch.arange(len(rows)) if "table_rows" not in kwargs else kwargs["table_rows"].cpu().long()
    live = torch.tensor([length > 0 for _, length in rows])
    blocks = torch.where(live, table.cpu().long()[place, positions // block_size], 0)
    slots = blocks * block_size + positions % block_size
    for cache in (k_cache, v_cache):
        cache[blocks.to(device), (positions % block_size).to(device)] = torch.nan
    qkv = random(len(rows), (heads + 2 * kv_heads) * head_dim)
    floats = workspace_floats(
        len(rows), heads, kv_heads, head_dim, multiprocessors=multiprocessors(qkv.device), prefix_tiles=len(rows)
    )
    workspace = make_workspace(floats, len(rows), kv_heads, qkv.device)
    kwargs |= {"heads": heads, "kv_heads": kv_heads, "workspace": workspace}
    if norm:
        kwargs |= {"q_norm": random(head_dim), "k_norm": random(head_dim), "eps": 1e-6, "norm_offset": 1.0}
    return (qkv, positions.to(device), slots.to(device), cos_sin, k_cache, v_cache, table, *lengths), kwargs


decode_attention = Op(
    "decode_attention",
    decode_attention_reference,
    kernels=[Implementation("triton", decode_attention_triton, _triton_supports)],
    cases=DECODE_ATTENTION_CASES,
    cost=decode_attention_cost,
    inputs=_inputs,
    # Attention's own, four times over in absolute terms: the definition rounds queries and keys after the norm and again
    # after the rotation, each time by half a unit, and a score below 10 carries that into the exponent.
    tolerance={
        name: Tolerance(each.relative, 4 * each.absolute) for name, each in paged_attention.tolerance.items()
    },
)
