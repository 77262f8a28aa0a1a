"""Writing this step's keys and values into their slots of the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.registry import Implementation, Op, Tolerance
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


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def kv_write_native(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    tokens, heads, head_dim = k.shape
    packed = (head_dim, 1)
    if k.stride()[1:] != packed or v.stride()[1:] != packed or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        kv_write_reference(k, v, k_cache, v_cache, slots)
        return
    native.library().kv_write(
        k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(), tokens, heads * head_dim,
        k.stride(0), v.stride(0),
    )


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
    kernels=[Implementation("native", kv_write_native, native.supports)],
    cases=KV_WRITE_CASES,
    cost=kv_write_cost,
    inputs=_inputs,
    tolerance={dtype: Tolerance(0.0, 0.0) for dtype in ("float64", "float32", "bfloat16", "float16")},   # a copy
)
