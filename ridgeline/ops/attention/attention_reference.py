"""The definition of paged attention in plain torch (paged_attention.py).

Decodes of similar length are gathered and computed together; other rows one at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import AttentionWork, AttentionWorkspace, OwnKernel, SharedPrefix
from ridgeline.ops.attention.split_kv import DeviceShares

# Decode rows are gathered together, padded to the longest of them. Rows of different length are split into groups in
# which padding stays below a third, and which gather at most this many tokens at once.
GATHER_TOKENS = 1 << 16
PADDING = 1.5
MASK_ELEMENTS = 1 << 22              # of one explicit mask; longer chunks are cut into pieces


def paged_attention_reference(
    q: Tensor,                       # [T, H, D]
    k_cache: Tensor,                 # [blocks, block_size, KH, D], maybe a strided view; H is a multiple of KH
    v_cache: Tensor,
    block_table: Tensor,             # int32 [R, B]: the block of each row's positions 0.., block_size..
    query_start: Tensor,             # int32 [R + 1]: prefix sums of queries per row
    kv_len: Tensor,                  # int32 [R]: positions per row, this step's included
    *,
    query_start_host: list[int] | None = None,
    kv_len_host: list[int] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    table_rows: Tensor | None = None,    # int32 [R]: the row of block_table that is each row's; None: its own number
    work: AttentionWork | None = None,
    prefix: SharedPrefix | None = None,
    shares: DeviceShares | None = None,  # split-KV shares of the decodes; None: computed here
    query_tiles: Tensor | None = None,   # int32 [N, 4]: the rows after the decodes, cut up by prefill_tiles.py
    k_scale: Tensor | None = None,       # float32 [blocks, block_size, KH] of quantised caches
    v_scale: Tensor | None = None,
    workspace: AttentionWorkspace | None = None,
    own_kernel: Sequence[OwnKernel] | None = None,
    sinks: Tensor | None = None,         # [H]: of every head a score without a value, beside those of the keys
    out: Tensor | None = None,           # where the result goes; None: into a new tensor
) -> Tensor:
    """softmax(softcap(scale * q k^T) + mask) v -> [T, H, D]. A row without keys (padding) gives zeros, and queries behind those
    of all rows (padding, too) give anything.

    `work`, `prefix`, `shares`, `query_tiles`, `workspace` and `own_kernel` serve the kernels; they do not change the result.
    """
    kv_len_host = kv_len.tolist() if kv_len_host is None else kv_len_host
    query_start_host = query_start.tolist() if query_start_host is None else query_start_host
    if table_rows is not None:
        block_table = block_table.index_select(0, table_rows)
    if not (k_scale is v_scale is None and k_cache.dtype == v_cache.dtype == q.dtype):
        k_cache, v_cache, block_table = _widened(q.dtype, k_cache, v_cache, block_table, k_scale, v_scale)
    how = (scale, window, softcap, sinks)
    if out is None and 0 not in kv_len_host and query_start_host[-1] == len(q):
        return _attend_rows(q, k_cache, v_cache, block_table, query_start, kv_len, query_start_host, kv_len_host, *how)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    kept = [row for row, length in enumerate(kv_len_host) if length]
    if kept:
        queries = [range(query_start_host[row], query_start_host[row + 1]) for row in kept]
        tokens = torch.tensor(list(itertools.chain(*queries)), device=q.device)
        starts = list(itertools.accumulate(map(len, queries), initial=0))
        chosen = torch.tensor(kept, device=q.device)
        out[tokens] = _attend_rows(
            q[tokens], k_cache, v_cache, block_table[chosen], torch.tensor(starts, device=q.device), kv_len[chosen],
            starts, [kv_len_host[row] for row in kept], *how,
        )
    return out


def _attend_rows(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start: Tensor, kv_len: Tensor,
    query_start_host: list[int], kv_len_host: list[int], scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Rows that all have keys."""
    rows = len(kv_len_host)
    if rows == 1:
        return _attend_row(q, k_cache, v_cache, block_table[0], kv_len_host[0], scale, window, softcap, sinks)
    if q.shape[0] == rows and _is_similar(kv_len_host):  # plain decode: the rows are the queries
        return _attend_decode(q, k_cache, v_cache, block_table, kv_len, kv_len_host, scale, window, softcap, sinks)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode = [row for row in range(rows) if query_start_host[row + 1] - query_start_host[row] == 1]
    groups = [group for group in _length_groups(decode, kv_len_host) if len(group) > 1]
    for group in groups:
        chosen = torch.tensor(group, device=q.device)
        queries = query_start[chosen].long()
        out[queries] = _attend_decode(
            q[queries], k_cache, v_cache, block_table[chosen], kv_len[chosen],
            [kv_len_host[row] for row in group], scale, window, softcap, sinks,
        )
    for row in set(range(rows)).difference(*groups):
        start, end = query_start_host[row], query_start_host[row + 1]
        if start < end:
            out[start:end] = _attend_row(
                q[start:end], k_cache, v_cache, block_table[row], kv_len_host[row], scale, window, softcap, sinks
            )
    return out


def _widened(
    dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Caches of the queries' dtype that hold only the blocks of these rows, and the block table of them."""
    blocks, table = torch.unique(block_table, return_inverse=True)
    wide = torch.promote_types(dtype, torch.float32)
    k, v = (cache[blocks].to(wide) for cache in (k_cache, v_cache))
    k, v = (
        values if scale is None else values * scale[blocks].unsqueeze(-1) for values, scale in ((k, k_scale), (v, v_scale))
    )
    return k.to(dtype), v.to(dtype), table.to(torch.int32)


def _is_similar(lengths: list[int]) -> bool:
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
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:
    """One query per row, all rows at once. The heads that share a KV head stand where queries usually do."""
    rows, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    longest, shortest = max(kv_len_host), min(kv_len_host)
    span = longest if window is None else min(longest, abs(window))
    positions = torch.arange(span, device=q.device)                          # [span], the same for all rows …
    if longest > span:
        positions = positions + (kv_len.unsqueeze(1) - span).clamp_(min=0)   # … or [R, span]: each row's window
    blocks = block_table.gather(1, (positions // block_size).expand(rows, span))
    slots = blocks * block_size + positions % block_size
    mask = None
    if shortest < span or (window or 0) < 0:
        # What is hidden reads the row's newest slot again, which holds real numbers.
        last = (kv_len.unsqueeze(1) - 1).clamp_(min=0)   # of padding, nothing is used
        mask = positions < kv_len.unsqueeze(1)
        if window is not None and window < 0:
            mask = mask & (positions >= last - last % -window)
        newest = block_table.gather(1, last // block_size) * block_size + last % block_size
        slots = torch.where(mask, slots, newest)
        mask = mask.view(rows, 1, 1, span)
    slots = slots.view(-1)
    k = _gather_slots(k_cache, slots).view(rows, span, kv_heads, head_dim)
    v = _gather_slots(v_cache, slots).view(rows, span, kv_heads, head_dim)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    sinks = None if sinks is None else sinks.view(1, kv_heads, -1, 1)
    out = _attend(grouped, k.transpose(1, 2), v.transpose(1, 2), mask, False, scale, softcap, sinks)
    return out.reshape(rows, heads, head_dim)


def oldest_position(position: int, window: int | None) -> int:
    """That the query at this position sees: the first of its window or, with a negative one, of its chunk."""
    if window is None:
        return 0
    return max(0, position - window + 1) if window > 0 else position - position % -window


def _attend_row(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, kv_len: int,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:
    """One row with any number of queries."""
    queries, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    start = kv_len - queries                                                 # position of the first query
    first = oldest_position(start, window)                                   # … and the oldest that any query sees
    blocks = blocks[first // block_size : -(-kv_len // block_size)]
    skipped = first - first % block_size
    k = k_cache.index_select(0, blocks).view(-1, kv_heads, head_dim)[first - skipped : kv_len - skipped]
    v = v_cache.index_select(0, blocks).view(-1, kv_heads, head_dim)[first - skipped : kv_len - skipped]
    k, v = k.transpose(0, 1), v.transpose(0, 1)                              # [KH, L, D]
    if queries == 1:
        grouped = q.view(1, kv_heads, group, head_dim)
        own = None if sinks is None else sinks.view(1, kv_heads, group, 1)
        return _attend(grouped, k[None], v[None], None, False, scale, softcap, own).reshape(q.shape)
    own = None if sinks is None else sinks.view(kv_heads, group, 1, 1)
    # KV heads stand where the batch does, and each is repeated over its group without a copy.
    q = q.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = k[:, None].expand(-1, group, -1, -1), v[:, None].expand(-1, group, -1, -1)
    if start == 0 and (window is None or abs(window) >= kv_len) and softcap is None and sinks is None:
        out = _attend(q, k, v, None, True, scale, None)
        return out.permute(2, 0, 1, 3).reshape(queries, heads, head_dim)
    pieces = []
    piece = max(16, MASK_ELEMENTS // k.shape[2])
    if window is not None:
        piece = min(piece, max(abs(window), 128))        # or most of the scores would lie behind the window
    for begin in range(0, queries, piece):
        end = min(begin + piece, queries)
        low = oldest_position(start + begin, window)
        high = start + end
        position = torch.arange(start + begin, start + end, device=q.device).unsqueeze(1)
        key = torch.arange(low, high, device=q.device)
        mask = key <= position
        if window is not None:
            mask &= key > position - window if window > 0 else key >= position - position % -window
        seen = slice(low - first, high - first)
        out = _attend(q[:, :, begin:end], k[:, :, seen], v[:, :, seen], mask, False, scale, softcap, own)
        pieces.append(out.permute(2, 0, 1, 3).reshape(end - begin, heads, head_dim))
    return torch.cat(pieces)


def _gather_slots(cache: Tensor, slots: Tensor) -> Tensor:
    if cache.is_contiguous():                                                # one memcpy per slot
        return cache.view(-1, cache.shape[2] * cache.shape[3]).index_select(0, slots)
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Dense attention of q [A, B, n, D] over k, v [A, B, L, D]; mask is true where a query may look, sinks are like scores [A, B,
    n, 1]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(2, 3))
    scores = scores.mul_(scale) if softcap is None else scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(wide).expand(*scores.shape[:3], 1)), dim=-1)
        return torch.matmul(scores.softmax(dim=-1)[..., :-1], v.to(wide)).to(q.dtype)
    return torch.matmul(scores.softmax(dim=-1), v.to(wide)).to(q.dtype)
