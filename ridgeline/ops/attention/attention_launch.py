"""Launches of the Triton kernels of paged attention: tile sizes, arguments, and which kernel reads which rows.

Decodes go to kernel_decode.py, with prefix_kernel before it for a shared prefix. Rows with several queries go to
kernel_prefill_hopper.py where it can read them, and otherwise to kernel_prefill.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.attention import kernel_decode, kernel_prefill, kernel_prefill_hopper
from ridgeline.ops.attention.attention_arguments import (
    PREFIX_QUERIES,
    AttentionWork,
    AttentionWorkspace,
    FreshTokens,
    SharedPrefix,
    device_shares,
    is_calibrated,
    largest_code,
    make_workspace,
    partial_floats,
    prefix_shares,
    scale_argument,
    sm_count,
    tile_dim,
    work_of,
)
from ridgeline.ops.attention.split_kv import DeviceShares
from ridgeline.ops.launch import dependent_launch
from ridgeline.ops.registry import TRITON_INTERPRETED

Launch = dict[str, int]              # Triton's options of a launch
LOG2E = math.log2(math.e)
PREFIX_MINIMUM = 256                 # keys of a prefix that are worth a CTA

# ── tile sizes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_tiles(
    dtype: torch.dtype, head_dim: int, narrow: bool, pairs: int, processors: int, members: int = 0
) -> tuple[int, int, Launch]:
    """(keys per tile, partial values that a merge takes at once, launch options), as measured on an H200. `pairs`: rows times
    KV heads, or 0 in deterministic mode, where the number of rows may not matter. `processors`: SMs. `members`: with
    drafts, queries times heads of a group; those options are not measured yet."""
    if dtype == torch.float32:
        # No tensor cores: dot products are unrolled, and large tiles take seconds to compile.
        return 32, 4096, {"num_warps": 4, "num_stages": 2}
    if members:
        return _draft_tiles(head_dim, narrow, members)
    if narrow:                                           # as many bytes as tiles of 32 wide keys, for any number of rows
        return 64, 8192, {"num_warps": 2, "num_stages": 4 if head_dim <= 128 else 3}
    if pairs > 40 * processors and 64 < head_dim <= 128:
        return 64, 4096, {"num_warps": 4, "num_stages": 3}
    if pairs > 6 * processors and head_dim <= 128:
        # Small enough for eight CTAs per SM: rows of equal length then all run at once. Two waves would each begin and end
        # without loads in flight.
        return 64 if head_dim <= 64 else 32, 2048, {"num_warps": 2, "num_stages": 2, "maxnreg": 128}
    if pairs > 6 * processors:                           # shared memory and registers for five CTAs per SM
        return 32, 2048, {"num_warps": 2, "num_stages": 2}
    return 32, 8192, {"num_warps": 2, "num_stages": 4 if head_dim <= 128 else 3}


def _draft_tiles(head_dim: int, narrow: bool, members: int) -> tuple[int, int, Launch]:
    """Sums of many queries need registers, and no warp has fewer than 16 of them."""
    warps = 2 if members <= 16 else 4 if members * head_dim <= 64 * 128 and not narrow else 8
    return 64 if narrow else 32, 4096, {"num_warps": warps, "num_stages": 3 if head_dim <= 128 else 2}


def prefill_tiles(dtype: torch.dtype, head_dim: int, pairs: int) -> tuple[int, int, Launch]:
    """(query pairs per tile, keys per tile, launch options) for rows of up to `pairs` pairs of a token and a head."""
    if dtype == torch.float32:
        return 32, 32, {"num_warps": 4, "num_stages": 2}
    queries = max(16, min(128, 1 << (pairs - 1).bit_length()))
    if head_dim > 128:
        return min(queries, 64), 32, {"num_warps": 4, "num_stages": 2}
    if queries < 128:
        return queries, 64, {"num_warps": 4, "num_stages": 2}
    return 128, 128, {"num_warps": 8, "num_stages": 2, "maxnreg": 232}


# ── the call ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What all launches of one call have in common."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    out: Tensor
    query_start: Tensor
    kv_len: Tensor
    table_rows: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    work: AttentionWork
    heads: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> Tensor:
        """The row of the block table of each row, or any tensor if that is its own number."""
        return self.kv_len if self.table_rows is None else self.table_rows

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return scale_argument(self.k_scale, self.q)[0], scale_argument(self.v_scale, self.q)[0]

    @property
    def scoring(self) -> tuple[float, float, int]:
        """Factor of the scores, softcap, stride of the block table. Exponentials have base 2: log2(e) is folded into the scale,
        or with a softcap into the factors around the tanh."""
        if self.softcap is None:
            return self.scale * LOG2E, 0.0, self.table.stride(0)
        return 2 * LOG2E * self.scale / self.softcap, self.softcap * LOG2E, self.table.stride(0)

    @property
    def sink_argument(self) -> Tensor:
        """The sinks, or any tensor if there are none."""
        return self.kv_len if self.sinks is None else self.sinks

    @property
    def strides(self) -> tuple[int, ...]:
        """Of K and V over blocks, slots and heads, and of their scales."""
        k_scale, v_scale = scale_argument(self.k_scale, self.q)[1], scale_argument(self.v_scale, self.q)[1]
        return (*self.k_cache.stride()[:3], *self.v_cache.stride()[:3], *k_scale, *v_scale)

    @property
    def constants(self) -> dict[str, Any]:
        """Of all kernels."""
        head_dim = self.q.shape[2]
        return {
            "GROUP": self.group, "HEAD_DIM": head_dim, "BLOCK_SIZE": self.k_cache.shape[1], "TILE_DIM": tile_dim(head_dim),
            "SOFTCAP": self.softcap is not None, "K_SCALED": self.k_scale is not None, "V_SCALED": self.v_scale is not None,
            "NARROW": self.narrow, "V_NARROW": self.v_cache.element_size() == 1 and self.q.element_size() == 2,
            "UPCAST": TRITON_INTERPRETED,                # the interpreter's narrow dot products are wrong
        }

    @property
    def narrow(self) -> bool:
        """Whether keys of eight bits meet queries of sixteen: they are then computed with in float16."""
        return self.k_cache.element_size() == 1 and self.q.element_size() == 2

    @property
    def paired(self) -> bool:
        """Whether two numbers of eight bits can be read as one of sixteen, and half of a head is enough for a tensor core."""
        both = self.narrow and self.v_cache.element_size() == 1
        return both and tile_dim(self.q.shape[2]) >= 32 and _is_even(self.k_cache) and _is_even(self.v_cache)


def _is_even(cache: Tensor) -> bool:
    return all(stride % 2 == 0 for stride in cache.stride()[:3]) and cache.stride(3) == 1 and cache.data_ptr() % 2 == 0


def paged_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start: Tensor, kv_len: Tensor, *,
    query_start_host: list[int] | None = None, kv_len_host: list[int] | None = None, scale: float,
    window: int | None = None, softcap: float | None = None, table_rows: Tensor | None = None,
    work: AttentionWork | None = None, prefix: SharedPrefix | None = None, query_tiles: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, workspace: AttentionWorkspace | None = None,
    out: Tensor | None = None, shares: DeviceShares | None = None, fresh: FreshTokens | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`fresh`, for decodes alone: q is the projection [R, H + 2 KH, D], and its keys and values go into the cache here."""
    if work is None:
        work = work_of(query_start_host if query_start_host is not None else query_start.tolist())
    tokens, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    if fresh is not None:
        heads -= 2 * kv_heads
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    call = _Call(
        q, k_cache, v_cache, block_table, out, query_start, kv_len, table_rows, k_scale, v_scale, work, heads, scale, window,
        softcap, sinks,
    )
    if work.num_decodes:
        if window is not None or work.deterministic or work.queries > 1:
            prefix = None
        if shares is None:
            lengths = (kv_len.tolist() if kv_len_host is None else kv_len_host)[: work.num_decodes]
            shares = device_shares(lengths, kv_heads, window, prefix, work.deterministic, kv_len.device, work.queries)
        _attend_decodes(call, shares, prefix, workspace, fresh)
    if work.num_decodes < kv_len.shape[0]:
        _attend_prompts(call, query_tiles)
    return out


# ── decodes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _attend_decodes(
    call: _Call, shares: DeviceShares, prefix: SharedPrefix | None, workspace: AttentionWorkspace | None,
    fresh: FreshTokens | None,
) -> None:
    """The rows that decode, with one query each or with drafts. Another kernel reads a shared prefix, and leaves partial results
    for this one to merge."""
    q, out, heads, kv_heads, group = call.q, call.out, call.heads, call.kv_heads, call.group
    head_dim, decodes = q.shape[2], call.work.num_decodes
    items = shares.item_row.shape[0]
    sms = sm_count(q.device)
    tiles = 0 if prefix is None else prefix.tile_row.shape[0]
    cut = prefix_shares(decodes, group, kv_heads, sms) if tiles else 0
    queries = 1 << (call.work.queries - 1).bit_length()
    slots = decodes * cut + items * queries
    if workspace is None:
        workspace = make_workspace(partial_floats(slots, heads, head_dim), decodes, kv_heads, q.device)
    elif workspace.partials.shape[0] < partial_floats(slots, heads, head_dim):
        raise ValueError(f"the attention workspace was made for fewer than {decodes} decodes, or without prefixes")
    parts = workspace.partials, workspace.partials[slots * heads * tile_dim(head_dim) :]
    prefix_keys = 0
    if prefix is not None and tiles:
        prefix_keys = _attend_prefix(call, prefix, cut, parts)
    new_tensors, new_constants = _fresh_arguments(fresh, call)
    pairs = 0 if call.work.deterministic else decodes * kv_heads
    tile_group = 1 << (queries * group - 1).bit_length()
    tile_keys, tile_values, launch = decode_tiles(
        q.dtype, head_dim, call.narrow, pairs, sms, queries * group if queries > 1 else 0
    )
    kernel_decode.decode_kernel[kv_heads, items](
        q, call.k_cache, call.v_cache, out, call.table, call.rows, call.query_start, call.kv_len,
        call.kv_len if prefix is None else prefix.prefix_len, shares.item_row, shares.first_item, shares.size, *call.scales,
        *parts, workspace.arrived, cut, decodes * kv_heads * cut, *new_tensors, *call.scoring, call.sink_argument, q.stride(0),
        q.stride(1), out.stride(0), out.stride(1), *call.strides, **call.constants, **new_constants,
        KV_HEADS=kv_heads, QUERIES=queries, WINDOW=call.window or 0, HAS_TABLE_ROWS=call.table_rows is not None,
        SINKS=call.sinks is not None,
        HAS_PREFIX=tiles > 0, PAIRED=call.paired, MINIMUM_PREFIX=PREFIX_MINIMUM, TILE_PREFIX=prefix_keys,
        TILE_QUERIES=max(16, tile_group), TILE_KEYS=tile_keys, TILE_GROUP=tile_group,
        TILE_SLOTS=max(1, tile_values // (tile_group * tile_dim(head_dim))), **launch, **dependent_launch(q.device),
    )


def _attend_prefix(call: _Call, prefix: SharedPrefix, cut: int, parts: tuple[Tensor, Tensor]) -> int:
    """Partial results of the decodes over their shared prefixes, in up to `cut` shares; returns the keys per tile."""
    q, tiles, group = call.q, prefix.tile_row.shape[0], call.group
    # As many queries as the rows can have together: a tile of few is faster.
    tile_queries = max(16, min(PREFIX_QUERIES, 1 << (call.work.num_decodes * group - 1).bit_length()))
    queries, tile_keys, launch = prefill_tiles(q.dtype, q.shape[2], tile_queries)
    if tile_queries > queries:                           # more than a tile of a prompt would have: their sums need registers
        launch = launch | {"num_warps": 8}
    kernel_prefill.prefix_kernel[tiles, call.kv_heads, cut](
        q, call.k_cache, call.v_cache, call.table, prefix.tile_row, prefix.tile_len, prefix.tile_first, prefix.tile_count,
        prefix.members, *call.scales, *parts, cut, *call.scoring, q.stride(0), q.stride(1), *call.strides,
        **call.constants, KV_HEADS=call.kv_heads, MINIMUM_PREFIX=PREFIX_MINIMUM, TILE_QUERIES=tile_queries,
        TILE_KEYS=tile_keys, **launch, **dependent_launch(q.device),
    )
    return tile_keys


def _fresh_arguments(fresh: FreshTokens | None, call: _Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(tensors and numbers, constants) for a decode kernel that reads new tokens, or does not."""
    unused = call.q
    if fresh is None:
        constants = {"FRESH": False, "HALF": 1, "NORM": False, "K_LIMIT": 0.0, "V_LIMIT": 0.0, "CALIBRATED": False}
        return (unused,) * 5 + (0.0, 0.0), constants
    tensors = (
        fresh.positions, fresh.slots, fresh.cos_sin, unused if fresh.q_norm is None else fresh.q_norm,
        unused if fresh.k_norm is None else fresh.k_norm, fresh.eps, fresh.norm_offset,
    )
    return tensors, {
        "FRESH": True, "HALF": fresh.cos_sin.shape[-1], "NORM": fresh.q_norm is not None,
        "K_LIMIT": largest_code(call.k_cache.dtype), "V_LIMIT": largest_code(call.v_cache.dtype),
        "CALIBRATED": is_calibrated(call.k_scale),
    }


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _attend_prompts(call: _Call, tiles: Tensor | None) -> None:
    """The rows after the decodes."""
    q, out, work = call.q, call.out, call.work
    tokens, _, head_dim = q.shape
    decodes, rows = work.num_decodes, call.kv_len.shape[0] - work.num_decodes
    # Eight bits have scales, others none, and K and V are alike: `suits` asks which.
    stored = all((cache.element_size() == 1) == (scale is not None)
                 for cache, scale in ((call.k_cache, call.k_scale), (call.v_cache, call.v_scale)))
    plain = stored and call.window is None and call.softcap is None and call.sinks is None and not work.deterministic
    if tiles is not None and plain and kernel_prefill_hopper.suits(q, call.k_cache, call.v_cache, out):
        kernel_prefill_hopper.prompt_attention(
            q, call.k_cache, call.v_cache, call.table, tiles, out, call.scale, call.k_scale, call.v_scale
        )
    elif work.longest_query:
        pairs = PREFIX_QUERIES if work.deterministic else work.longest_query * call.group
        tile_queries, tile_keys, launch = prefill_tiles(q.dtype, head_dim, pairs)
        tile_queries = max(tile_queries, 1 << (call.group - 1).bit_length())
        tile_tokens = tile_queries // call.group
        kernel_prefill.prefill_kernel[(tokens - decodes) // tile_tokens + rows, call.kv_heads](
            q, call.k_cache, call.v_cache, out, call.table, call.rows, call.query_start, call.kv_len, *call.scales, rows,
            decodes, *call.scoring, call.sink_argument, q.stride(0), q.stride(1), out.stride(0), out.stride(1), *call.strides,
            **call.constants, WINDOW=call.window or 0, HAS_TABLE_ROWS=call.table_rows is not None, TILE_ROWS=256,
            SINKS=call.sinks is not None,
            TILE_TOKENS=tile_tokens, TILE_QUERIES=tile_queries, TILE_KEYS=tile_keys, **launch,
        )
