"""Attention over a part of a context, and the sum of such parts.

Ranks that divide a context have every `ranks`-th position of it: position p is on rank p % ranks, as number p // ranks of those
that it has. Each computes what its own positions add to a query, with the logarithm of the sum that its softmax divides by.
Results over all positions follow from these two.

In plain torch, row by row: the host reads lengths, so that no CUDA graph can hold it. There is no kernel for it yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_reference import oldest_position


def slots_here(slots: Tensor, block_size: int, rank: int, ranks: int) -> Tensor:
    """Where this rank writes a token: `slots` count positions of whole blocks, of which every rank has `block_size`. Tokens of
    other ranks go to the first slot of block 0, which no sequence owns."""
    block, offset = slots // (block_size * ranks), slots % (block_size * ranks)
    return torch.where(offset % ranks == rank, block * block_size + offset // ranks, 0)


def partial_attention(
    q: Tensor,                       # [T, H, D]
    k_pages: Tensor,                 # [blocks, block_size, KH, D]: of this rank
    v_pages: Tensor,                 # [blocks, block_size, KH, DV]
    block_table: Tensor,             # int32 [*, B]
    query_start: list[int],          # [R + 1]
    kv_len: list[int],               # [R]: positions on all ranks together
    *,
    rank: int, ranks: int, scale: float, window: int | None = None, softcap: float | None = None,
    table_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """([T, H, DV], [T, H]): results over the positions that are here, and the logarithms of their sums: -inf where there are
    none. In float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((*q.shape[:2], v_pages.shape[-1]), dtype=wide, device=q.device)
    total = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    size, kv_heads = k_pages.shape[1:3]
    lines = range(len(kv_len)) if table_rows is None else table_rows.tolist()
    for row, (line, length) in enumerate(zip(lines, kv_len, strict=True)):
        queries = slice(query_start[row], query_start[row + 1])
        count = query_start[row + 1] - query_start[row]
        seen = length - count + torch.arange(count, device=q.device)         # position of each query
        first = max(0, -(-(oldest_position(length - count, window) - rank) // ranks))
        here = torch.arange(first, max(first, -(-(length - rank) // ranks)), device=q.device)
        if not count or not len(here):
            continue
        blocks = block_table[line, first // size : (int(here[-1]) // size) + 1].long()
        places = here - first // size * size
        keys, values = (pages[blocks].flatten(0, 1)[places].to(wide) for pages in (k_pages, v_pages))
        grouped = q[queries].to(wide).unflatten(1, (kv_heads, -1))           # [n, KH, G, D]
        scores = torch.einsum("nkgd,skd->nkgs", grouped, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = here * ranks + rank
        hidden = position[None, :] > seen[:, None]
        if window is not None:
            oldest = seen - window + 1 if window > 0 else seen - seen % -window
            hidden |= position[None, :] < oldest[:, None]
        scores.masked_fill_(hidden[:, None, None, :], -torch.inf)
        sums = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - sums.masked_fill(sums == -torch.inf, 0.0).unsqueeze(-1))
        out[queries] = torch.einsum("nkgs,skd->nkgd", weights, values).flatten(1, 2)
        total[queries] = sums.flatten(1)
    return out, total


def merged(parts: Tensor, totals: Tensor, sinks: Tensor | None = None) -> Tensor:
    """[P, T, H, DV] and [P, T, H] of P parts → [T, H, DV]; zero where no part has anything. `sinks` [H]: scores without a
    value."""
    all_totals = totals if sinks is None else torch.cat((totals, sinks.to(totals.dtype).expand(1, *totals.shape[1:])))
    total = torch.logsumexp(all_totals, dim=0)
    weights = torch.exp(totals - total.masked_fill(total == -torch.inf, 0.0))
    return (weights.unsqueeze(-1) * parts).sum(0)
