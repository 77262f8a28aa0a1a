"""Latent attention: causal attention of a ragged batch over a paged cache of latents, one entry per token for all heads.

The definition is latent_reference.py, the launches of the Triton kernels are latent_launch.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ridgeline.ops.attention.attention_arguments import AttentionWork, latent_shares, leading_decodes
from ridgeline.ops.latent.latent_launch import latent_attention_triton
from ridgeline.ops.latent.latent_reference import latent_attention_reference
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.sizes.latent_costs import LATENT_ATTENTION_CASES, latent_attention_cost


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, rows: tuple[tuple[int, int], ...], heads: int, nope: int, rope: int, value: int, rank: int, block_size: int,
    scattered: bool = False, kv_dtype: str | None = None, drafted: int = 0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Scattered blocks, NaN in every slot that no query may read, and block 0 (NaN too) where a table has no block."""
    needed = [-(-length // block_size) for _, length in rows]
    blocks = torch.randperm(sum(needed) + 2, generator=generator) + 1
    cache = torch.full((sum(needed) + 3, block_size, 1, rank + rope), float("nan"))
    table = torch.zeros(len(rows), max(*needed, 1), dtype=torch.int32)
    slots, used = [], 0
    for row, (queries, length) in enumerate(rows):
        own = blocks[used : used + needed[row]]
        table[row, : needed[row]] = own
        used += needed[row]
        places = [int(own[position // block_size]) * block_size + position % block_size for position in range(length)]
        cache.view(-1, rank + rope)[places] = torch.randn((length, rank + rope), generator=generator)
        slots += places[length - queries :] if length else [0] * queries
    query_start = list(itertools.accumulate((queries for queries, _ in rows), initial=0))
    kv_len = [length for _, length in rows]
    kwargs: dict[str, Any] = {
        "query_start_host": query_start, "kv_len_host": kv_len, "scale": (nope + rope) ** -0.5, "nope": nope,
        "slots": torch.tensor(slots, device=device),
    }
    decodes = drafted or leading_decodes(query_start)
    if drafted:
        longest = max((queries for queries, _ in rows[drafted:]), default=0)
        kwargs["work"] = AttentionWork(drafted, longest, queries=max(queries for queries, _ in rows[:drafted]))
    if scattered:
        place = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]
        spread = torch.zeros(len(rows) + 2, table.shape[1], dtype=torch.int32)
        spread[place] = table
        table, kwargs["table_rows"] = spread, place.to(device, torch.int32)
    if decodes:
        kwargs["shares"] = latent_shares(kv_len[:decodes], heads, torch.device(device))
    cache = cache.to(dtype)
    if kv_dtype is not None:
        scale, limit = 0.01 + 0.02 * torch.rand(cache.shape[:3], generator=generator), torch.finfo(torch.float8_e4m3fn).max
        kwargs["cache_scale"] = scale.to(device)
        cache = (cache.float() / scale.unsqueeze(-1)).clamp(-limit, limit).to(getattr(torch, kv_dtype))
    args = (
        torch.randn((query_start[-1], heads, nope + rope), generator=generator).to(device, dtype),
        cache.to(device),
        (torch.randn((heads, nope + value, rank), generator=generator) * rank**-0.5).to(device, dtype),
        table.to(device),
        torch.tensor(query_start, dtype=torch.int32, device=device),
        torch.tensor(kv_len, dtype=torch.int32, device=device),
    )
    return args, kwargs


latent_attention = Op(
    "latent_attention",
    latent_attention_reference,
    kernels=[Implementation("triton", latent_attention_triton, _triton_supports)],
    cases=LATENT_ATTENTION_CASES,
    cost=latent_attention_cost,
    inputs=_inputs,
    # As paged attention's, four times over in absolute terms: queries are rounded once more when they are absorbed, the sums
    # of latents before they are widened, or keys and values when they are widened.
    tolerance={
        "float32": Tolerance(2**-16, 2**-16),
        "bfloat16": Tolerance(2**-7, 2**-5),
        "float16": Tolerance(2**-10, 2**-8),
    },
)
