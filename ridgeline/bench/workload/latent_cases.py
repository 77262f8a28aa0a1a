"""The cases of latent attention for `bench ops` on a GPU: sizes of DeepSeek-V2-Lite, or of one of V3's eight ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import AttentionWork, latent_shares
from ridgeline.sizes.op_costs import E4M3

_SIZES = {"heads": 16, "nope": 128, "rope": 64, "rank": 512, "block_size": 16}


def _rows(*rows: tuple[int, int]) -> dict[str, Any]:
    return {"rows": rows, "value": 128, **_SIZES}


_ATTENTION = {
    "decode-1x8192": _rows((1, 8192)),
    "decode-64x8192": _rows(*[(1, 8192)] * 64),
    "decode-128x640": _rows(*[(1, 640)] * 128),
    "prefill-16x512": _rows(*[(512, 512)] * 16),
    "prefill-1x8192": _rows((8192, 8192)),
    "chunk-2048-of-16384": _rows((2048, 16384)),
}
LATENT_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "latent_attention": _ATTENTION | {f"fp8-{name}": sizes | {"kv_dtype": E4M3} for name, sizes in _ATTENTION.items()},
    "latent_write": {f"tokens-{n}": {"tokens": n, "interleaved": True, **_SIZES} for n in (1, 128, 8192)},
}


def latent_inputs(
    dtype: torch.dtype, device: str, seed: int, *, rows: tuple[tuple[int, int], ...], heads: int, nope: int, rope: int,
    value: int, rank: int, block_size: int, kv_dtype: str | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Made on the device; blocks lie scattered, as in a cache that has been used."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    lengths = [length for _, length in rows]
    starts = list(itertools.accumulate((queries for queries, _ in rows), initial=0))
    decodes = next((row for row, (queries, _) in enumerate(rows) if queries != 1), len(rows))
    needed = [-(-length // block_size) for length in lengths]
    blocks = 1 + np.random.default_rng(seed).permutation(sum(needed)).astype(np.int32)
    table = np.zeros((len(rows), max(needed)), np.int32)
    for row, (own, count) in enumerate(zip(np.split(blocks, np.cumsum(needed)[:-1]), needed, strict=True)):
        table[row, :count] = own
    slots = np.concatenate([
        table[row, position // block_size].astype(np.int64) * block_size + position % block_size
        for row, (queries, length) in enumerate(rows) for position in [np.arange(length - queries, length)]
    ])
    cache, kwargs = random(len(blocks) + 1, block_size, 1, rank + rope), {}
    if kv_dtype is not None:
        cache = cache.mul_(64).to(getattr(torch, kv_dtype))
        kwargs["cache_scale"] = torch.rand(cache.shape[:3], generator=generator, device=device) / 64
    if decodes:
        kwargs["shares"] = latent_shares(lengths[:decodes], heads, torch.device(device))
    place = torch.device(device)
    kwargs |= {
        "query_start_host": starts, "kv_len_host": lengths, "scale": (nope + rope) ** -0.5, "nope": nope,
        "slots": torch.from_numpy(slots).to(place),
        "work": AttentionWork(
            decodes, max((queries for queries, _ in rows[decodes:]), default=0), older=any(a < b for a, b in rows[decodes:])
        ),
    }
    borders = torch.tensor(starts, dtype=torch.int32, device=place), torch.tensor(lengths, dtype=torch.int32, device=place)
    args = (random(starts[-1], heads, nope + rope), cache, random(heads, nope + value, rank).mul_(rank**-0.5))
    return (*args, torch.from_numpy(table).to(place), *borders), kwargs
