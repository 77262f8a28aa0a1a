"""Writing this step's keys and values into their slots of the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.registry import Op, Tolerance
from ridgeline.sizes.op_costs import KV_WRITE_CASES, kv_write_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def kv_write_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, KH, D]; caches [blocks, block_size, KH, D], maybe strided views; slots [T] are block * size + offset."""
    block_size = k_cache.shape[1]
    for cache, new in ((k_cache, k), (v_cache, v)):
        if cache.is_contiguous():
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)
        else:
            cache[slots // block_size, slots % block_size] = new


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, kv_heads: int, head_dim: int, block_size: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens].to(device)
    cache = (blocks, block_size, kv_heads, head_dim)
    new = (tokens, kv_heads, head_dim)
    return (random(*new), random(*new), random(*cache), random(*cache), slots), {}


kv_write = Op(
    "kv_write",
    kv_write_reference,
    cases=KV_WRITE_CASES,
    cost=kv_write_cost,
    inputs=_inputs,
    tolerance={dtype: Tolerance(0.0, 0.0) for dtype in ("float64", "float32", "bfloat16", "float16")},   # a copy
)
