"""Launches of the Triton kernels of latent attention (kernel_latent.py), and the products per head around them.

Queries are absorbed and sums of latents widened by one matrix per head: those of decodes by latent_products.py, those of prompts
by cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import (
    AttentionWork,
    AttentionWorkspace,
    latent_shares,
    latent_tile_heads,
    make_workspace,
    partial_floats,
    scale_argument,
    tile_dim,
    work_of,
)
from ridgeline.ops.attention.attention_launch import LOG2E
from ridgeline.ops.attention.split_kv import DeviceShares
from ridgeline.ops.latent import kernel_latent, latent_products
from ridgeline.ops.latent.latent_products import per_head
from ridgeline.ops.latent.latent_write import FreshLatents
from ridgeline.ops.launch import dependent_launch
from ridgeline.ops.registry import TRITON_INTERPRETED

Launch = dict[str, int]
FEW_MERGED = 8                       # queries of decodes whose shares are merged where their sums are widened


def decode_tiles(dtype: torch.dtype, heads: int, scaled: bool, few: bool) -> tuple[int, bool, Launch]:
    """(entries per tile, whether they are the rows of the products, launch options) of decodes with that many heads a CTA. Narrow
    entries are widened in registers, which takes twice the warps.

    Few rows have one tile a share, and larger tiles with Hopper's matrix instruction end sooner. Many rows need loads in flight
    while they compute: 128 rows of 640 entries took 39.4 us with three stages of 32 entries, 41.7 with two of 64."""
    if dtype == torch.float32:
        return 16, few and not scaled, {"num_warps": 4, "num_stages": 2}
    if few and not scaled:
        return 64, True, {"num_warps": 4 if heads == 16 else 8, "num_stages": 2}
    return 32, False, {"num_warps": 4 if heads == 16 and not scaled else 8, "num_stages": 3}


def older_tiles(dtype: torch.dtype) -> tuple[int, Launch]:
    """(entries per tile, launch options) of prompts over what was in the cache before."""
    if dtype == torch.float32:
        return 16, {"num_warps": 4, "num_stages": 2}
    return 32, {"num_warps": 8, "num_stages": 3}


def prompt_tiles(dtype: torch.dtype) -> tuple[int, int, Launch]:
    """(queries per tile, keys per tile, launch options) over widened heads."""
    if dtype == torch.float32:
        return 32, 32, {"num_warps": 4, "num_stages": 2}
    return 128, 64, {"num_warps": 8, "num_stages": 2}


@dataclass(frozen=True, slots=True, eq=False)
class LatentCall:
    """What all launches of one call have in common."""

    q: Tensor
    cache: Tensor
    kv_up: Tensor
    table: Tensor
    table_rows: Tensor | None
    query_start: Tensor
    kv_len: Tensor
    cache_scale: Tensor | None
    scale: float
    nope: int

    @property
    def rank(self) -> int:
        return self.kv_up.shape[2]

    @property
    def rows(self) -> Tensor:
        """The row of the block table of each row, or any tensor if that is its own number."""
        return self.kv_len if self.table_rows is None else self.table_rows

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.cache.stride()[:2], *scale_argument(self.cache_scale, self.q)[1][:2])

    @property
    def narrow(self) -> bool:
        """Whether entries of eight bits meet queries of sixteen: they are then computed with in float16."""
        return self.cache.element_size() == 1 and self.q.element_size() == 2

    @property
    def constants(self) -> dict[str, Any]:
        rope = self.q.shape[2] - self.nope
        return {
            "HEADS": self.q.shape[1], "RANK": self.rank, "ROPE": rope, "BLOCK_SIZE": self.cache.shape[1],
            "SCALED": self.cache_scale is not None, "NARROW": self.narrow,
            "HAS_TABLE_ROWS": self.table_rows is not None, "TILE_RANK": tile_dim(self.rank), "TILE_ROPE": tile_dim(rope),
            "UPCAST": TRITON_INTERPRETED,                # the interpreter's narrow dot products are wrong
        }

    def absorbed(self, first: int, last: int | None = None) -> Tensor:
        """Queries of these tokens in the latent's space, [T, H, rank]"""
        return per_head(self.q[first:last, :, : self.nope], self.kv_up[:, : self.nope])

    def widened(self, sums: Tensor, out: Tensor) -> None:
        """Sums of latents [T, *, rank] to values of heads [T, H, value]"""
        per_head(sums[:, : self.q.shape[1]], self.kv_up[:, self.nope :].transpose(1, 2), out)


def latent_attention_triton(
    q: Tensor, cache: Tensor, kv_up: Tensor, block_table: Tensor, query_start: Tensor, kv_len: Tensor, *,
    scale: float, nope: int, slots: Tensor, query_start_host: list[int] | None = None, kv_len_host: list[int] | None = None,
    table_rows: Tensor | None = None, work: AttentionWork | None = None, shares: DeviceShares | None = None,
    workspace: AttentionWorkspace | None = None, cache_scale: Tensor | None = None,
) -> Tensor:
    if work is None:
        work = work_of(query_start_host if query_start_host is not None else query_start.tolist())
    call = LatentCall(q, cache, kv_up, block_table, table_rows, query_start, kv_len, cache_scale, scale, nope)
    out = torch.empty((*q.shape[:2], kv_up.shape[1] - nope), dtype=q.dtype, device=q.device)
    decodes = work.num_decodes
    # The host knows how many tokens the decodes have where each has one. With drafts all tokens are gone through: those of
    # prompts get numbers that mean nothing, until they are written below.
    tokens = decodes if work.queries == 1 else len(q)
    if decodes:
        if shares is None:
            lengths = (kv_len.tolist() if kv_len_host is None else kv_len_host)[:decodes]
            shares = latent_shares(lengths, q.shape[1], q.device)
        attend_decodes(call, tokens, work, shares, workspace, out[:tokens])
    if decodes < kv_len.shape[0] and work.longest_query:
        _attend_prompts(call, tokens if work.queries == 1 else 0, work, slots, out)
    return out


def attend_decodes(
    call: LatentCall, tokens: int, work: AttentionWork, shares: DeviceShares, workspace: AttentionWorkspace | None, out: Tensor,
    fresh: FreshLatents | None = None,
) -> None:
    """Values of heads [tokens, H, value] of the rows with one query each, or with drafts. `fresh`: their entries are not in the
    cache yet."""
    q, rank, heads = call.q[:tokens], call.rank, call.q.shape[1]
    tile_heads = latent_tile_heads(heads)
    padded = -(-heads // tile_heads) * tile_heads
    columns, items = work.queries * padded // tile_heads, shares.item_row.shape[0]
    parts = items * work.queries
    if workspace is None:
        workspace = make_workspace(partial_floats(parts, padded, rank), work.num_decodes, columns, q.device)
    elif workspace.partials.shape[0] < partial_floats(parts, padded, rank):
        raise ValueError(f"the attention workspace was made for fewer than {work.num_decodes} decodes")
    statistics = workspace.partials[parts * padded * tile_dim(rank) :]
    few = tokens <= latent_products.MOST_TOKENS
    if few or fresh is not None:
        absorbed = latent_products.absorb(q, call.kv_up, call.nope, call.cache, fresh)
    else:
        absorbed = call.absorbed(0, tokens)
    turned, apart = q[:, :, call.nope :], work.num_decodes * work.queries <= FEW_MERGED
    sums = absorbed if apart else torch.empty((tokens, padded, rank), dtype=q.dtype, device=q.device)
    tile_keys, keys_first, launch = decode_tiles(q.dtype, tile_heads, call.cache_scale is not None, apart)
    kernel_latent.latent_decode_kernel[columns, items](
        absorbed, turned, call.cache, sums, call.table, call.rows, call.query_start, call.kv_len, shares.item_row,
        shares.first_item, shares.size, scale_argument(call.cache_scale, q)[0], workspace.partials, statistics, workspace.arrived,
        call.scale * LOG2E, call.table.stride(0), *absorbed.stride()[:2], *turned.stride()[:2], *sums.stride()[:2],
        *call.strides, **call.constants, COLUMNS=columns, QUERIES=work.queries, TILE_HEADS=tile_heads, TILE_KEYS=tile_keys,
        TILE_SLOTS=1, KEYS_FIRST=keys_first, APART=apart, **launch, **dependent_launch(q.device),
    )
    if apart:
        latent_products.merge(
            workspace.partials, statistics, call.kv_up, call.nope, call.query_start, call.kv_len, shares, out,
            decodes=work.num_decodes, queries=work.queries, columns=columns, tile_heads=tile_heads,
        )
    elif few:
        latent_products.widen(sums, call.kv_up, call.nope, out)
    else:
        call.widened(sums, out)


def _attend_prompts(call: LatentCall, base: int, work: AttentionWork, slots: Tensor, out: Tensor) -> None:
    """The rows after the decodes, among the tokens from `base` on. Their own entries are read back from the cache: a quantised
    one then gives the same numbers in whatever chunks a prompt is computed."""
    heads, decodes = call.q.shape[1], work.num_decodes
    tokens, rows = len(call.q) - decodes, call.kv_len.shape[0] - decodes
    entries = _entries(call, slots[base:])
    wide = torch.mm(entries[:, : call.rank], call.kv_up.flatten(0, 1).t())   # [T, heads * (nope + value)]
    older, weights = (_attend_older(call, base, decodes, rows) if work.older else (out, out))
    tile_queries, tile_keys, launch = prompt_tiles(call.q.dtype)
    q, out, value = call.q[base:], out[base:], out.shape[2]
    sizes = {name: call.constants[name] for name in ("RANK", "ROPE", "TILE_ROPE", "UPCAST")}
    kernel_latent.latent_prompt_kernel[tokens // tile_queries + rows, heads](
        q, wide, entries, older, weights, out, call.query_start, call.kv_len, rows, decodes, base, call.scale * LOG2E,
        *q.stride()[:2], wide.stride(0), entries.stride(0), *older.stride()[:2], weights.stride(0), *out.stride()[:2],
        NOPE=call.nope, VALUE=value, HAS_OLDER=work.older, TILE_ROWS=256, TILE_QUERIES=tile_queries, TILE_KEYS=tile_keys,
        TILE_NOPE=tile_dim(call.nope), TILE_VALUE=tile_dim(value), **sizes, **launch,
    )


def _entries(call: LatentCall, slots: Tensor) -> Tensor:
    """The cache at these slots, [T, rank + rope]"""
    cache, size = call.cache, call.cache.shape[1]
    where = (slots // size, slots % size, 0)
    if call.cache_scale is None:
        return cache[where].to(call.q.dtype)
    codes = cache.view(torch.uint8)[where].view(cache.dtype)
    return (codes.to(torch.float32) * call.cache_scale[where].unsqueeze(-1)).to(call.q.dtype)


def _attend_older(call: LatentCall, base: int, decodes: int, rows: int) -> tuple[Tensor, Tensor]:
    """(values of heads [T, H, value], logarithms of their weights [T, H]) over what was in the cache before this step; rows that
    had nothing there get anything."""
    q = call.q[base:]
    tokens, heads, _ = q.shape
    tile_heads = latent_tile_heads(heads)
    tile_queries = 64 if q.element_size() == 2 else max(16, tile_heads)
    tile_tokens = tile_queries // tile_heads
    absorbed, turned = call.absorbed(base), q[:, :, call.nope :]
    sums = torch.empty_like(absorbed)
    weights = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    tile_keys, launch = older_tiles(q.dtype)
    kernel_latent.latent_older_kernel[tokens // tile_tokens + rows, -(-heads // tile_heads)](
        absorbed, turned, call.cache, sums, weights, call.table, call.rows, call.query_start, call.kv_len,
        scale_argument(call.cache_scale, q)[0], rows, decodes, base, call.scale * LOG2E, call.table.stride(0),
        *absorbed.stride()[:2], *turned.stride()[:2], *sums.stride()[:2], weights.stride(0), *call.strides,
        **call.constants, TILE_ROWS=256, TILE_TOKENS=tile_tokens, TILE_HEADS=tile_heads, TILE_QUERIES=tile_queries,
        TILE_KEYS=tile_keys, **launch,
    )
    out = torch.empty((tokens, heads, call.kv_up.shape[1] - call.nope), dtype=q.dtype, device=q.device)
    call.widened(sums, out)
    return out, weights
