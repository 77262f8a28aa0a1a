"""The definition of latent attention in plain torch (latent_attention.py): absorbed for few queries, widened for many.

A token's entry in the cache is the latent c and a rotated key r. `kv_up` widens c to every head's key k and value v:

    widened    scores = q_nope · k + q_rope · r          out = Σ p v           FLOPs per pair and head: 2 (nope + rope + value)
    absorbed   scores = (q_nope up_k) · c + q_rope · r   out = (Σ p c) up_v    2 (2 rank + rope)

Both are the same numbers. Absorbed, all heads read one entry of the cache and nothing else. Widened, an entry is multiplied by
`kv_up` once, and every pair costs about a third: that pays where an entry has many queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_reference import MASK_ELEMENTS, paged_attention_reference
from ridgeline.sizes.latent_costs import FEW_QUERIES


def latent_attention_reference(
    q: Tensor,                       # [T, H, nope + rope], rotated
    cache: Tensor,                   # [blocks, block_size, 1, rank + rope], maybe a strided view
    kv_up: Tensor,                   # [H, nope + value, rank]
    block_table: Tensor,             # int32 [R, B]
    query_start: Tensor,             # int32 [R + 1]: prefix sums of queries per row
    kv_len: Tensor,                  # int32 [R]: positions per row, this step's included
    *,
    scale: float,
    nope: int,
    query_start_host: list[int] | None = None,
    kv_len_host: list[int] | None = None,
    table_rows: Tensor | None = None,    # int32 [R]: the row of block_table that is each row's; None: its own number
    cache_scale: Tensor | None = None,   # float32 [blocks, block_size, 1] of a quantised cache
    **for_kernels: Any,                  # slots, work, shares, workspace: they do not change the result
) -> Tensor:
    """Attention of every head over its row's entries -> [T, H, value]. A row without keys (padding) gives zeros."""
    starts = query_start.tolist() if query_start_host is None else query_start_host
    lengths = kv_len.tolist() if kv_len_host is None else kv_len_host
    if table_rows is not None:
        block_table = block_table.index_select(0, table_rows)
    rows = len(lengths)
    few = next((row for row in range(rows) if starts[row + 1] - starts[row] > FEW_QUERIES), rows)
    value, scaled = kv_up.shape[1] - nope, {"k_scale": cache_scale, "v_scale": cache_scale}
    out = torch.empty((len(q), q.shape[1], value), dtype=q.dtype, device=q.device)

    def absorbed(first: int, last: int) -> None:
        here = slice(starts[first], starts[last])
        own = [start - starts[first] for start in starts[first : last + 1]]
        wide = torch.cat((per_head(q[here, :, :nope], kv_up[:, :nope]), q[here, :, nope:]), dim=-1)
        summed = paged_attention_reference(
            wide, cache, cache, block_table[first:last], query_start[first : last + 1] - starts[first], kv_len[first:last],
            query_start_host=own, kv_len_host=lengths[first:last], scale=scale, **scaled,
        )
        out[here] = per_head(summed[..., : kv_up.shape[2]], kv_up[:, nope:].transpose(1, 2))

    if few:
        absorbed(0, few)
    for row in range(few, rows):
        here = slice(starts[row], starts[row + 1])
        if here.stop - here.start <= FEW_QUERIES or not lengths[row]:
            absorbed(row, row + 1)
        else:
            entries = gathered(cache, cache_scale, block_table[row], lengths[row], q.dtype)
            out[here] = _widened(q[here], entries, kv_up, nope, scale)
    return out


def per_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [T, H, inputs] by one matrix [inputs, outputs] per head -> [T, H, outputs]"""
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)


def gathered(cache: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` entries of a row, [length, rank + rope]"""
    blocks = blocks[: -(-length // cache.shape[1])]
    entries = cache[blocks].flatten(0, 2)[:length]
    if scale is None:
        return entries.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (entries.to(wide) * scale[blocks].flatten()[:length, None]).to(dtype)


def _widened(q: Tensor, entries: Tensor, kv_up: Tensor, nope: int, scale: float) -> Tensor:
    """One row with many queries, the last of which sits at the last entry."""
    queries, heads, _ = q.shape
    rank = kv_up.shape[2]
    wide = torch.matmul(entries[:, :rank], kv_up.transpose(1, 2))            # [H, L, nope + value]
    k = torch.cat((wide[..., :nope], entries[:, rank:].expand(heads, -1, -1)), dim=-1)
    v = wide[..., nope:].unsqueeze(0)
    start, pieces = len(entries) - queries, []
    piece = max(16, MASK_ELEMENTS // len(entries))
    for begin in range(0, queries, piece):
        end = min(begin + piece, queries)
        seen = start + end
        mask = torch.arange(seen, device=q.device) <= torch.arange(start + begin, seen, device=q.device).unsqueeze(1)
        some = q[begin:end].transpose(0, 1).unsqueeze(0)
        attended = torch.nn.functional.scaled_dot_product_attention(
            some, k[None, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale
        )
        pieces.append(attended[0].transpose(0, 1))
    return torch.cat(pieces)
