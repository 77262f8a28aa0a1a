"""Fused latent attention of decodes after the projections: norm of the latent, rotation, write, and attention.

The definition is the two ops it replaces (latent_write.py, latent_attention.py), in their order, for any batch. If every row
decodes, the entries are written by the kernel that absorbs the queries; otherwise the two ops run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import AttentionWork, AttentionWorkspace, latent_shares
from ridgeline.ops.attention.split_kv import DeviceShares
from ridgeline.ops.latent.latent_attention import latent_attention
from ridgeline.ops.latent.latent_launch import LatentCall, attend_decodes
from ridgeline.ops.latent.latent_products import MOST_TOKENS
from ridgeline.ops.latent.latent_write import FreshLatents, latent_write
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.sizes.latent_costs import LATENT_DECODE_CASES, latent_decode_cost


def latent_decode_reference(
    q: Tensor,                       # [T, H, nope + rope], not rotated yet
    latent: Tensor,                  # [T, rank + rope]: the latent before its norm, and the key that all heads share
    norm: Tensor,                    # [rank]
    positions: Tensor,               # [T]: row of cos_sin
    slots: Tensor,                   # [T]: block * block_size + offset; padding is in block 0
    cos_sin: Tensor,                 # [max_position, 2, rope / 2]
    cache: Tensor,                   # [blocks, block_size, 1, rank + rope], maybe a strided view
    kv_up: Tensor,                   # [H, nope + value, rank]
    block_table: Tensor,             # int32 [R, B]
    query_start: Tensor,             # int32 [R + 1]: prefix sums of queries per row
    kv_len: Tensor,                  # int32 [R]: positions per row, this step's included
    *,
    eps: float,
    interleaved: bool,
    scale: float,
    nope: int,
    cache_scale: Tensor | None = None,
    **others: Any,                   # of latent_attention
) -> Tensor:
    """Attention of every head [T, H, value]. The step's entries are in the cache afterwards."""
    q = latent_write(
        q, latent, norm, positions, slots, cos_sin, cache, eps=eps, interleaved=interleaved, cache_scale=cache_scale
    )
    return latent_attention(
        q, cache, kv_up, block_table, query_start, kv_len, scale=scale, nope=nope, slots=slots, cache_scale=cache_scale,
        **others,
    )


def latent_decode_triton(
    q: Tensor, latent: Tensor, norm: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, cache: Tensor, kv_up: Tensor,
    block_table: Tensor, query_start: Tensor, kv_len: Tensor, *, eps: float, interleaved: bool, scale: float, nope: int,
    cache_scale: Tensor | None = None, query_start_host: list[int] | None = None, kv_len_host: list[int] | None = None,
    table_rows: Tensor | None = None, work: AttentionWork | None = None, shares: DeviceShares | None = None,
    workspace: AttentionWorkspace | None = None,
) -> Tensor:
    tokens, rows = len(q), len(kv_len)
    if work is None and tokens == rows:
        work = AttentionWork(rows, 0)                    # callers give `work` for steps with longer rows
    if work is None or not joined(work, rows, tokens):
        return latent_decode_reference(
            q, latent, norm, positions, slots, cos_sin, cache, kv_up, block_table, query_start, kv_len, eps=eps,
            interleaved=interleaved, scale=scale, nope=nope, cache_scale=cache_scale, query_start_host=query_start_host,
            kv_len_host=kv_len_host, table_rows=table_rows, work=work, shares=shares, workspace=workspace,
        )
    if shares is None:
        shares = latent_shares(kv_len.tolist() if kv_len_host is None else kv_len_host, q.shape[1], q.device)
    call = LatentCall(q, cache, kv_up, block_table, table_rows, query_start, kv_len, cache_scale, scale, nope)
    out = torch.empty((*q.shape[:2], kv_up.shape[1] - nope), dtype=q.dtype, device=q.device)
    fresh = FreshLatents(latent, norm, positions, slots, cos_sin, eps, interleaved, cache_scale)
    attend_decodes(call, tokens, work, shares, workspace, out, fresh)
    return out


def joined(work: AttentionWork, rows: int, tokens: int) -> bool:
    """Whether the fused kernel is possible, and pays: every row decodes, maybe with drafts, and the tokens are not too many."""
    return work.num_decodes == rows and 0 < tokens <= MOST_TOKENS


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, interleaved: bool, **sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of latent_attention with the newest entries not yet written: their slots hold NaN."""
    (q, cache, kv_up, *tables), kwargs = latent_attention.inputs(generator, dtype, device, **sizes)
    tokens, rank = len(q), kv_up.shape[2]
    half = (q.shape[2] - kwargs["nope"]) // 2

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    positions = torch.tensor([
        max(length - queries + place, 0) for queries, length in sizes["rows"] for place in range(queries)
    ])
    angles = torch.rand(int(positions.max()) + 1, half, generator=generator) * 100
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(device, torch.promote_types(dtype, torch.float32))
    slots = kwargs.pop("slots")
    if kwargs.get("cache_scale") is None:
        cache.view(-1, cache.shape[-1])[slots] = torch.nan
    args = (q, random(tokens, rank + 2 * half), random(rank), positions.to(device), slots, cos_sin, cache, kv_up, *tables)
    return args, kwargs | {"eps": 1e-6, "interleaved": interleaved}


latent_decode = Op(
    "latent_decode",
    latent_decode_reference,
    kernels=[Implementation("triton", latent_decode_triton, _triton_supports)],
    cases=LATENT_DECODE_CASES,
    cost=latent_decode_cost,
    inputs=_inputs,
    # Attention's own, four times over in absolute terms: queries and entries are rounded once more, after norm and rotation.
    tolerance={
        name: Tolerance(each.relative, 4 * each.absolute) for name, each in latent_attention.tolerance.items()
    },
)
