"""Fused norm of q and k, rotation and KV write, between the QKV projection and attention.

It is one pass over the output of the projection instead of four. The definition is the ops it replaces, in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import (
    is_calibrated,
    largest_code,
    quantise_kv,
    scale_argument,
    token_scales,
)
from ridgeline.ops.attention.kernel_decode import scales_of, store_scaled
from ridgeline.ops.attention.kv_write import kv_write
from ridgeline.ops.cpu import native
from ridgeline.ops.launch import dependent_launch, power_of_two
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.ops.rms_norm import rms_norm
from ridgeline.ops.rotary import rotary
from ridgeline.sizes.op_costs import ROTARY_WRITE_CASES, rotary_write_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def rotary_write_reference(
    qkv: Tensor,                     # [T, (H + 2 KH) D]
    positions: Tensor,               # [T]: row of cos_sin
    slots: Tensor,                   # [T]: block * block_size + offset; padding is in block 0
    cos_sin: Tensor,                 # [max_position, 2, rotary_dim / 2]
    k_cache: Tensor,                 # [blocks, block_size, KH, D], maybe a strided view
    v_cache: Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,    # [D]: weights of the norm on each head
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    k_scale: Tensor | None = None,   # float32 [blocks, block_size, KH] of quantised keys: written with them, unless calibrated
    v_scale: Tensor | None = None,
) -> Tensor:
    """q [T, H, D], normalised and rotated; K and V are in the cache."""
    q, k, v = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps, weight_offset=norm_offset), rms_norm(k, k_norm, eps, weight_offset=norm_offset)
    q, k = rotary(q, k, positions, cos_sin)
    k, k_cache = _stored(k, k_cache, k_scale, slots)
    v, v_cache = _stored(v, v_cache, v_scale, slots)
    kv_write(k, v, k_cache, v_cache, slots)
    return q


def _stored(values: Tensor, cache: Tensor, scale: Tensor | None, slots: Tensor) -> tuple[Tensor, Tensor]:
    """What is to be stored, and the cache; quantised ones both as bytes: torch does not copy narrow floats everywhere."""
    if scale is None:
        return values.to(cache.dtype), cache
    where = (slots // cache.shape[1], slots % cache.shape[1])
    if is_calibrated(scale):
        own = scale[where]
    else:
        own = token_scales(values, cache.dtype)
        scale[where] = own
    stored = quantise_kv(values, own, cache.dtype)
    if cache.element_size() > 1:
        return stored, cache
    return stored.view(torch.uint8), cache.view(torch.uint8)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def _turn(  # type: ignore[no-untyped-def]
    source_ptr, weight_ptr, head, pair, rest, live, live_rest, cos, sin, eps, norm_offset,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HAS_REST: tl.constexpr,
):
    """Both rotated halves of some heads, and their remaining dimensions (undefined if there are none)."""
    place = head[:, None] * HEAD_DIM + pair[None, :]
    first = tl.load(source_ptr + place, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + place + HALF, mask=live, other=0.0).to(tl.float32)
    remaining = first
    if HAS_REST:
        place = head[:, None] * HEAD_DIM + 2 * HALF + rest[None, :]
        remaining = tl.load(source_ptr + place, mask=live_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if HAS_REST:
            squares += tl.sum(remaining * remaining, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        inside = pair < HALF
        first *= scale * (tl.load(weight_ptr + pair, mask=inside, other=0.0).to(tl.float32) + norm_offset)[None, :]
        weight = tl.load(weight_ptr + HALF + pair, mask=inside, other=0.0).to(tl.float32) + norm_offset
        second *= scale * weight[None, :]
        if HAS_REST:
            weight = tl.load(weight_ptr + 2 * HALF + rest, mask=rest < HEAD_DIM - 2 * HALF, other=0.0).to(tl.float32)
            remaining *= scale * (weight + norm_offset)[None, :]
    return first * cos - second * sin, second * cos + first * sin, remaining


@triton_kernel()
def _rotary_write_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, positions_ptr, slots_ptr, cos_sin_ptr, k_ptr, v_ptr, q_out_ptr, q_norm_ptr, k_norm_ptr,
    k_scale_ptr, v_scale_ptr, eps, norm_offset, qkv_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    k_scale_block_stride, k_scale_slot_stride, k_scale_head_stride,
    v_scale_block_stride, v_scale_slot_stride, v_scale_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_ROUND: tl.constexpr, KV_HEADS_ROUND: tl.constexpr, HALF_ROUND: tl.constexpr, REST_ROUND: tl.constexpr,
    DIM_ROUND: tl.constexpr, NORM: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, K_LIMIT: tl.constexpr,
    V_LIMIT: tl.constexpr, CALIBRATED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One CTA per token."""
    token = tl.program_id(0).to(tl.int64)
    has_rest: tl.constexpr = 2 * HALF < HEAD_DIM
    pair = tl.arange(0, HALF_ROUND)
    rest = tl.arange(0, REST_ROUND)
    dim = tl.arange(0, DIM_ROUND)
    head = tl.arange(0, HEADS_ROUND)
    kv_head = tl.arange(0, KV_HEADS_ROUND)
    live = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    live_rest = (head < HEADS)[:, None] & (rest < HEAD_DIM - 2 * HALF)[None, :]
    kv_live = (kv_head < KV_HEADS)[:, None] & (pair < HALF)[None, :]
    kv_live_rest = (kv_head < KV_HEADS)[:, None] & (rest < HEAD_DIM - 2 * HALF)[None, :]
    v_live = (kv_head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source_ptr = qkv_ptr + token * qkv_stride
    position = tl.load(positions_ptr + token)
    slot = tl.maximum(tl.load(slots_ptr + token), 0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    angle_ptr = cos_sin_ptr + position * (2 * HALF) + pair
    cos = tl.load(angle_ptr, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]

    first, second, remaining = _turn(
        source_ptr, q_norm_ptr, head, pair, rest, live, live_rest, cos, sin, eps, norm_offset,
        HEAD_DIM, HALF, NORM, has_rest,
    )
    out_ptr = q_out_ptr + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM
    tl.store(out_ptr + pair[None, :], first.to(q_out_ptr.dtype.element_ty), mask=live)
    tl.store(out_ptr + pair[None, :] + HALF, second.to(q_out_ptr.dtype.element_ty), mask=live)
    if has_rest:
        out_ptr += 2 * HALF + rest[None, :]
        tl.store(out_ptr, remaining.to(q_out_ptr.dtype.element_ty), mask=live_rest)

    k_first, k_second, k_remaining = _turn(
        source_ptr + HEADS * HEAD_DIM, k_norm_ptr, kv_head, pair, rest, kv_live, kv_live_rest, cos, sin,
        eps, norm_offset, HEAD_DIM, HALF, NORM, has_rest,
    )
    place = (block * k_block_stride + offset * k_slot_stride) + kv_head[:, None] * k_head_stride
    scale_place = block * k_scale_block_stride + offset * k_scale_slot_stride
    largest = tl.maximum(tl.max(tl.abs(k_first), axis=1), tl.max(tl.abs(k_second), axis=1))
    if has_rest:
        largest = tl.maximum(largest, tl.max(tl.abs(k_remaining), axis=1))
    scale_ptr = k_scale_ptr + scale_place + kv_head * k_scale_head_stride
    scale = scales_of(scale_ptr, largest, kv_head < KV_HEADS, K_LIMIT, K_SCALED, CALIBRATED)
    store_scaled(k_ptr, place + pair[None, :], k_first, kv_live, scale, K_LIMIT, K_SCALED)
    store_scaled(k_ptr, place + HALF + pair[None, :], k_second, kv_live, scale, K_LIMIT, K_SCALED)
    if has_rest:
        store_scaled(k_ptr, place + 2 * HALF + rest[None, :], k_remaining, kv_live_rest, scale, K_LIMIT, K_SCALED)

    v_source = source_ptr + (HEADS + KV_HEADS) * HEAD_DIM + kv_head[:, None] * HEAD_DIM + dim[None, :]
    v = tl.load(v_source, mask=v_live, other=0.0).to(tl.float32)
    place = (block * v_block_stride + offset * v_slot_stride) + kv_head[:, None] * v_head_stride
    scale_place = block * v_scale_block_stride + offset * v_scale_slot_stride
    scale_ptr = v_scale_ptr + scale_place + kv_head * v_scale_head_stride
    scale = scales_of(scale_ptr, tl.max(tl.abs(v), axis=1), kv_head < KV_HEADS, V_LIMIT, V_SCALED, CALIBRATED)
    store_scaled(v_ptr, place + dim[None, :], v, v_live, scale, V_LIMIT, V_SCALED)


def rotary_write_triton(
    qkv: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    heads: int, kv_heads: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:
    tokens, width = qkv.shape
    head_dim, half = width // (heads + 2 * kv_heads), cos_sin.shape[-1]
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    (k_scales, k_strides), (v_scales, v_strides) = scale_argument(k_scale, k_cache), scale_argument(v_scale, v_cache)
    _rotary_write_kernel[(tokens,)](
        qkv, positions, slots, cos_sin, k_cache, v_cache, q, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, k_scales, v_scales, eps, norm_offset, qkv.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], *k_strides, *v_strides,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=half, BLOCK_SIZE=k_cache.shape[1],
        HEADS_ROUND=power_of_two(heads), KV_HEADS_ROUND=power_of_two(kv_heads),
        HALF_ROUND=power_of_two(half), REST_ROUND=power_of_two(max(head_dim - 2 * half, 1)),
        DIM_ROUND=power_of_two(head_dim), NORM=q_norm is not None, K_SCALED=k_scale is not None, V_SCALED=v_scale is not None,
        K_LIMIT=largest_code(k_cache.dtype), V_LIMIT=largest_code(v_cache.dtype),
        CALIBRATED=is_calibrated(k_scale) or is_calibrated(v_scale), num_warps=4, **dependent_launch(qkv.device),
    )
    return q


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def rotary_write_native(
    qkv: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    heads: int, kv_heads: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:
    packed = qkv.stride(1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous() and cos_sin.dtype == qkv.dtype
    known = k_cache.dtype == v_cache.dtype and k_cache.dtype in (torch.float32, torch.float16)
    if not (packed and known) or k_scale is not None or v_scale is not None:
        return rotary_write_reference(
            qkv, positions, slots, cos_sin, k_cache, v_cache, heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm,
            eps=eps, norm_offset=norm_offset, k_scale=k_scale, v_scale=v_scale,
        )
    tokens, head_dim = len(qkv), k_cache.shape[-1]
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype)
    native.library().rotary_write(
        qkv.data_ptr(), positions.data_ptr(), slots.data_ptr(), cos_sin.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        q.data_ptr(), None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(),
        int(k_cache.dtype == torch.float16), tokens, heads, kv_heads, head_dim, cos_sin.shape[-1], qkv.stride(0),
        eps, norm_offset,
    )
    return q


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, block_size: int, norm: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    max_position = tokens + 5
    angles = torch.rand(max_position, rotary_dim // 2, generator=generator) * 100
    table = torch.stack((angles.cos(), angles.sin()), dim=1).to(device, torch.promote_types(dtype, torch.float32))
    positions = torch.randint(max_position, (tokens,), generator=generator).to(device)
    blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens].to(device)
    cache = (blocks, block_size, kv_heads, head_dim)
    args = (random(tokens, (heads + 2 * kv_heads) * head_dim), positions, slots, table, random(*cache), random(*cache))
    kwargs: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads}
    if norm:
        kwargs |= {"q_norm": random(head_dim), "k_norm": random(head_dim), "eps": 1e-6, "norm_offset": 1.0}
    return args, kwargs


rotary_write = Op(
    "rotary_write",
    rotary_write_reference,
    kernels=[
        Implementation("triton", rotary_write_triton, _triton_supports),
        Implementation("native", rotary_write_native, native.supports),
    ],
    cases=ROTARY_WRITE_CASES,
    cost=rotary_write_cost,
    inputs=_inputs,
    # The norm and the rotation of values below 5, in the definition each rounded once to the tensor's dtype.
    tolerance={
        "float32": Tolerance(4e-6, 4e-6),
        "bfloat16": Tolerance(3 * 2**-8, 2**-6),
        "float16": Tolerance(3 * 2**-11, 2**-9),
    },
)
